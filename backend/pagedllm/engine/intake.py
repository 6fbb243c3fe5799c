"""From what a caller passes to a :class:`~pagedllm.types.Request`, or an error at once.

Owner: the facade; runs in the caller's thread. Invariant: a request that leaves here fits
the model and an empty cache, so the engine never meets one that cannot be served.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from numbers import Number
from typing import TYPE_CHECKING, Any

from pagedllm._named import with_processors
from pagedllm.engine.tokenizer import bad_words_to_ids, encode_prompt, render_chat
from pagedllm.errors import RequestTooLongError, ValidationError
from pagedllm.sampling_params import SamplingParams
from pagedllm.structured.grammar import GrammarCompiler
from pagedllm.types import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from pagedllm.config import Config
    from pagedllm.types import ModelInfo, Pooling

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from many: numbers in a row are one prompt's token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or tensor of one or two dimensions
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        return [prompts]  # the intake says what is wrong with it
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, Number) or getattr(item, "ndim", 1) == 0 for item in many):
        return [many]
    return many


class Intake:
    """Checks and tokenises requests for one model."""

    def __init__(
        self, config: Config, info: ModelInfo, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._numbers = count()
        # A fast tokenizer cannot be used by two threads while it changes its settings.
        self._lock = threading.Lock()
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos = info.eos_token_ids | (frozenset() if own is None else frozenset({own}))
        self._grammars: GrammarCompiler | None = None

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttft_target: float | None = None,
        e2e_target: float | None = None,
        pooling: Pooling | None = None,
    ) -> Request:
        """Check a prompt and its parameters; with ``pooling`` it is to become a vector.

        Raises:
            ValidationError: they cannot be served as they stand; RequestTooLongError when
                it is their length.
        """
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}",
                "sampling_params",
            )
        if priority != 0 and self._config.scheduling_policy == "fcfs":
            raise ValidationError(
                "priority is given, but scheduling_policy is 'fcfs'; start the engine with "
                "scheduling_policy='priority'",
                "priority",
            )
        for name, target in (("ttft_target", ttft_target), ("e2e_target", e2e_target)):
            if target is not None and self._config.scheduling_policy != "deadline":
                raise ValidationError(
                    f"{name} is given, but scheduling_policy is not 'deadline'; start the engine "
                    f"with scheduling_policy='deadline'",
                    name,
                )
        words, token_ids = self._tokenise(prompt)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        self._check_params(params)
        if pooling not in (None, "mean", "last"):
            raise ValidationError(f"pooling must be 'mean' or 'last', not {pooling!r}", "pooling")
        self._check_length(len(token_ids), params, answers=pooling is None)
        params = self._with_grammar(with_processors(params, self._config))
        number = next(self._numbers)
        return Request(
            request_id=request_id if request_id is not None else f"request-{number}",
            prompt_token_ids=token_ids,
            params=params,
            prompt=words,
            eos_token_ids=self._eos,
            bad_words_ids=self._bad_words(params),
            priority=priority,
            arrival_time=time.monotonic(),
            cache_salt=cache_salt,
            ttft_target=ttft_target,
            e2e_target=e2e_target,
            driven=pooling is not None,
            pooling=pooling,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        **options: Any,
    ) -> list[int]:
        """Render a conversation to token ids. Raises ValidationError."""
        if self._tokenizer is None:
            raise ValidationError(NO_TOKENIZER.format("a chat"))
        with self._lock:
            return render_chat(
                self._tokenizer,
                messages,
                tools=tools,
                chat_template=chat_template or self._config.chat_template,
                **options,
            )

    def tokenize(self, prompt: str) -> list[int]:
        """Return a text's token ids. Raises ValidationError."""
        if self._tokenizer is None:
            raise ValidationError(NO_TOKENIZER.format("a text prompt"), "prompt")
        with self._lock:
            return encode_prompt(self._tokenizer, prompt)

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the tokens that a request may generate."""
        limits = [self._info.max_model_len - num_prompt_tokens]
        limits += [
            limit
            for limit in (params.max_tokens, self._config.force_max_tokens)
            if limit is not None
        ]
        return max(1, min(limits))  # a prompt to embed may leave no room for an answer

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValidationError(
                    f"a prompt given as a dict has the one key 'prompt' or 'prompt_token_ids', "
                    f"not {sorted(map(str, keys))}",
                    "prompt",
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenize(prompt))
        return None, self._token_ids(prompt)

    def _token_ids(self, prompt: object) -> tuple[int, ...]:
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
            raise ValidationError(
                f"a prompt is text or a list of token ids, not {type(prompt).__name__}", "prompt"
            )
        if not prompt:
            raise ValidationError("the prompt is empty; give at least one token", "prompt")
        try:
            token_ids = tuple(map(operator.index, prompt))
        except TypeError:
            wrong = next(t for t in prompt if not hasattr(t, "__index__"))
            raise ValidationError(
                f"token ids must be integers, not {wrong!r} ({type(wrong).__name__})", "prompt"
            ) from None
        if any(isinstance(token, bool) for token in prompt):
            raise ValidationError("token ids must be integers, not booleans", "prompt")
        self._check_ids("the prompt's token ids", token_ids)
        return token_ids

    def _check_ids(self, what: str, token_ids: Iterable[int], parameter: str = "prompt") -> None:
        size = self._info.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < size), None)
        if wrong is not None:
            raise ValidationError(
                f"{what} must be from 0 to {size - 1}, the model's vocabulary; {wrong} is not",
                parameter,
            )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or (), name)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._info.vocab_size:
                raise ValidationError(
                    f"{name}={value} is more than the vocabulary of {self._info.vocab_size}", name
                )
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValidationError(NO_TOKENIZER.format(name), name)

    def _check_length(self, length: int, params: SamplingParams, *, answers: bool) -> None:
        limit = self._info.max_model_len
        if length >= limit + (not answers):
            raise RequestTooLongError(
                f"the prompt has {length} tokens and max_model_len is {limit}"
                f"{', which leaves no room for an answer' * answers}; shorten it"
                f"{', set truncate_prompt_tokens' * answers}, or start the engine with a larger "
                f"max_model_len",
                "prompt",
            )
        if params.max_tokens is not None and length + params.max_tokens > limit:
            force = self._config.force_max_tokens
            if force is not None and length + min(params.max_tokens, force) <= limit:
                return
            raise RequestTooLongError(
                f"the prompt's {length} tokens and max_tokens={params.max_tokens} are more than "
                f"max_model_len={limit}; set max_tokens to at most {limit - length}, or to None "
                f"for as many as fit",
                "max_tokens",
            )

    def _with_grammar(self, params: SamplingParams) -> SamplingParams:
        """Add the structured output's grammar, compiled, to the logits processors."""
        spec = params.structured_output
        if spec is None:
            return params
        if self._tokenizer is None:
            raise ValidationError(NO_TOKENIZER.format("structured_output"), "structured_output")
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._info.vocab_size, self._eos)
        grammar = self._grammars.grammar(spec)
        return params.replace(logits_processors=(*params.logits_processors, grammar))

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words or self._tokenizer is None:
            return ()
        with self._lock:
            words = bad_words_to_ids(self._tokenizer, params.bad_words)
        return tuple(tuple(word) for word in words)


NO_TOKENIZER = (
    "{} needs a tokenizer and the engine has none; start it without skip_tokenizer_init, or "
    "pass token ids"
)
