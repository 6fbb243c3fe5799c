"""The facade: a model that one calls from plain code.

Owner: the public API. Invariants: :class:`LLM` is a thin client of one
:class:`~pagedllm.engine.loop.EngineLoop`, so any thread may call it and all their requests
share batches; ``close()``, leaving a ``with`` block, garbage collection and the interpreter's
exit each give all memory back.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedllm.async_llm import AsyncLLM
from pagedllm.client import Client, Messages
from pagedllm.engine.driven import DrivenSequences
from pagedllm.engine.intake import as_list
from pagedllm.engine.loop import EngineLoop
from pagedllm.engine.streams import OutputStream
from pagedllm.errors import ConfigError, EngineError, RequestAbortedError, ValidationError
from pagedllm.outputs import EmbeddingOutput
from pagedllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from pagedllm.engine.intake import Prompt
    from pagedllm.engine.requests import RequestState
    from pagedllm.outputs import RequestOutput
    from pagedllm.types import Pooling, Request


class LLM(Client):
    """A model behind an engine, for plain synchronous code.

    Any thread may call any method; requests of all threads share batches. Works in a
    script without a ``__main__`` guard and in a notebook: nothing is forked or spawned.

    Example::

        with LLM("smollm2") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, as one batch.

        Args:
            prompts: text or token ids, or a list of either.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar, when standard error is a terminal.
            priority: one for all or one each; lower runs first under
                ``scheduling_policy='priority'``.
            cache_salt: prompts share cached prefixes only with prompts of the same salt.

        Returns:
            one output for each prompt, in their order.

        Raises:
            ValidationError: a request cannot be served; then none of them was started.
            EngineError: a request failed; its ``outputs`` attribute has all that there is.
        """
        many = as_list(prompts)
        params = _each(sampling_params, len(many), "sampling_params")
        priorities = _each(priority, len(many), "priority")
        requests = []
        for index, prompt in enumerate(many):
            try:
                requests.append(
                    self._intake.request(
                        prompt, params[index], priority=priorities[index], cache_salt=cache_salt
                    )
                )
            except ValidationError as error:
                if len(many) == 1:
                    raise
                raise type(error)(f"prompt {index}: {error}", error.parameter) from error
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several as one batch.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a list of such lists.
            sampling_params: one for all, or one for each conversation.
            use_tqdm: show a progress bar, when standard error is a terminal.
            options: ``tools``, ``tool_choice``, ``parallel_tool_calls``, ``chat_template``
                (see :meth:`prepare_chat`), ``add_generation_prompt``,
                ``continue_final_message`` and whatever else the template knows.

        Returns, Raises: as :meth:`generate`. The text is as the model wrote it, tool calls
        and all; :mod:`pagedllm.structured` reads it.
        """
        many = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        params = _each(sampling_params, len(many), "sampling_params")
        chats = [
            self.prepare_chat(
                conversation,  # type: ignore[arg-type]  # told apart by their first element
                each,
                **options,
            )
            for conversation, each in zip(many, params, strict=True)
        ]
        return self.generate(
            [chat.prompt_token_ids for chat in chats],
            [chat.params for chat in chats],
            use_tqdm=use_tqdm,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> OutputStream:
        """Start a request and return an iterator over its growing output.

        Each item is a snapshot; ``outputs[0].text_delta`` is what it adds. Closing the
        iterator, or dropping it, aborts the request.

        Raises:
            ValidationError: at once, when the request cannot be served.
        """
        request = self._intake.request(
            prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        return OutputStream(self._entry, partial(self._submit, request))

    def chat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> OutputStream:
        """Answer a conversation as :meth:`stream` does, with the options of :meth:`chat`."""
        chat = self.prepare_chat(messages, sampling_params, **options)
        return self.stream(chat.prompt_token_ids, chat.params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling,
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Turn each prompt into a vector of the model's hidden size, all as one batch.

        A model that was not trained for embeddings gives vectors that tell topics apart at
        best.

        Args:
            prompts: text or token ids, or a list of either.
            pooling: ``'mean'`` over all tokens' final states, or the ``'last'`` one's: what
                the model was trained with.
            normalize: scale each vector to a length of 1.
            dimensions: keep only this many of its first entries, for models trained for that.
            use_tqdm: show a progress bar, when standard error is a terminal.

        Returns:
            one output for each prompt, in their order.

        Raises:
            ValidationError, EngineError: as :meth:`generate`.
        """
        requests = [self.prepare_embedding(p, pooling=pooling) for p in as_list(prompts)]
        outputs = self._run(requests, use_tqdm=use_tqdm)
        return [EmbeddingOutput.of(each, normalize, dimensions) for each in outputs]

    def drive(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> DrivenSequences:
        """Start sequences whose tokens the caller chooses: beam search, guided decoding.

        Example::

            with llm.drive([[1, 2, 3]], max_tokens=20) as rows:
                while not done:
                    rows.advance([int(rows.logits[0].argmax())])

        Args:
            prompts: token ids of each row; equal ones share their pages.
            max_tokens: most tokens that any row will be given.

        Returns:
            the rows, with the logits that follow their prompts; close them, or use ``with``.

        Raises:
            ValidationError: they do not fit the model or the cache.
            ConfigError: the engine is in another process, which logits do not leave.
        """
        if not isinstance(self._loop, EngineLoop):
            raise ConfigError("engine: drive() needs the engine in this process", "engine")
        params = SamplingParams(max_tokens=max_tokens)
        requests = [
            dataclasses.replace(self._intake.request(list(prompt), params), driven=True)
            for prompt in prompts
        ]
        length = max(len(request.prompt_token_ids) for request in requests) + max_tokens
        return DrivenSequences(self._loop, requests, self._room.claim(len(requests), length))

    def abort(self, request_id: str) -> None:
        """End a request of another thread; what it has so far is its result."""
        self._entry.abort(request_id)

    def as_async(self) -> AsyncLLM:
        """Return the same engine for asyncio: requests of both share batches.

        It lives until either is closed; this object stays referenced by the other.
        """
        view = AsyncLLM.__new__(AsyncLLM)
        vars(view).update(vars(self), _owner=self)
        return view

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        finished: queue.SimpleQueue[RequestState] = queue.SimpleQueue()

        def listener(state: RequestState) -> None:
            if state.finished:
                finished.put(state)

        states: list[RequestState] = []
        try:
            for request in requests:
                states.append(self._submit(request, listener))
            _await_all(finished, len(states), use_tqdm=use_tqdm)
        except BaseException:  # Ctrl-C, mostly: nobody waits for these any more
            for state in states:
                self._entry.abort(state.request.request_id)
            raise
        outputs = [state.snapshot() for state in states]
        for output in outputs:
            if output.error is None or isinstance(output.error, RequestAbortedError):
                continue
            if isinstance(output.error, EngineError):
                output.error.outputs = outputs
            raise output.error
        return outputs

    def close(self) -> None:
        """Free the model, its cache and its thread; unfinished requests fail. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _each(value: Any, number: int, name: str) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise ValidationError(
            f"{name} has {len(value)} entries for {number} prompts; give one for all or one each",
            name,
        )
    return value


def _await_all(finished: queue.SimpleQueue[RequestState], number: int, *, use_tqdm: bool) -> None:
    bar: Any = None
    if use_tqdm and number and sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=number, desc="Generating", unit="prompt", dynamic_ncols=True)
    try:
        tokens = 0
        for _ in range(number):
            state = finished.get()
            if bar is not None:
                tokens += sum(len(output.token_ids) for output in state.outputs)
                elapsed = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{tokens / elapsed:.1f} tok/s", refresh=False)
                bar.update()
    finally:
        if bar is not None:
            bar.close()
