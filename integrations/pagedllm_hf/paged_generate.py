"""Runs transformers' ``generate`` on the engine: its own preparation and loops, our steps.

Owner: the generate drop-in. What a call means (priorities, warnings, errors, processors and
their order, stopping, streaming, beams, what is returned) is transformers' own code, run on a
twin of the model: an object of a subclass that shares the model's modules and overrides no
more than the forward step and the cache. Its forward asks the engine for the next logits, its
cache turns a reordering of beams into forks. A batch that needs nothing of that goes to the
engine whole (:mod:`simple_batches`).

Invariants: nothing is computed before everything that could be refused has been checked, so a
:class:`CannotRun` leaves no trace but the prompt that a streamer may have been given; the
model itself is never written to.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedllm_hf import simple_batches
from pagedllm_hf.late_cache import Recipe, late_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from pagedllm import LLM

_RUN = "_pagedllm_run"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_PLAIN_CACHES = (None, "dynamic", "dynamic_full")
"""Caches that an answer can have; others do not matter while nobody sees them."""
_HANDLED = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""Arguments of a model's forward that a run on the engine understands."""


class CannotRun(Exception):
    """The engine cannot do what a call asks; the message says what that is."""


@dataclass(slots=True, eq=False)
class Run:
    """One call of ``generate``."""

    model: PreTrainedModel
    llm: LLM
    mark: tuple[Any, ...]
    """The model's fingerprint, which is the engine's."""
    begun: bool = False
    mask: torch.Tensor | None = None
    """int64 or bool [B, L]; None when there is no padding."""
    limit: int = 0
    """Longest row, in tokens with padding."""
    rows: Any = None
    """The engine's driven sequences, once they have begun."""
    parents: list[int] | None = None
    """How the beams were reordered since the last step."""
    prompts: list[list[int]] = field(default_factory=list)
    empty_cache: Any = None
    """What transformers would have filled; None when the answer shall have no cache."""
    computed: torch.Tensor | None = None
    """int64 [B, N]: the rows' tokens after the last step, when the answer shall have a cache."""

    def check(self, config: GenerationConfig, arguments: Mapping[str, Any]) -> None:
        """Refuse what the engine cannot do; take the mask.

        Args:
            config: of the call, complete.
            arguments: for the model's forward.

        Raises:
            CannotRun: with the reason.
        """
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, False):
                raise CannotRun(f"{name} is asked for, and the engine keeps none")
        implementation = config.cache_implementation
        if implementation not in (None, "dynamic", "dynamic_full", "static", "hybrid", "offloaded"):
            raise CannotRun(f"cache_implementation is {implementation!r}")
        if config.return_dict_in_generate and implementation not in _PLAIN_CACHES:
            raise CannotRun(f"the answer shall have a cache, and it is a {implementation!r} one")
        for name, value in arguments.items():
            if value is not None and value is not False and name not in _HANDLED:
                raise CannotRun(f"the argument {name!r} is passed to the model")
        self.mask = _left_padding(arguments.get("attention_mask"))
        _check_positions(arguments.get("position_ids"), self.mask)

    def take_prompts(self, input_ids: torch.Tensor, limit: int | None) -> None:
        """Take each row's tokens, without padding. Raises CannotRun when they cannot run."""
        if self.mask is not None and self.mask.shape != input_ids.shape:
            raise CannotRun("attention_mask and input_ids are of different lengths")
        length = input_ids.shape[1]
        if length == 0:
            raise CannotRun("the prompt is empty")
        self.prompts = input_ids.tolist()
        if self.mask is not None:
            starts = (self.mask == 0).sum(dim=1).tolist()
            self.prompts = [row[start:] for row, start in zip(self.prompts, starts, strict=True)]
        if limit is None:
            raise CannotRun("nothing limits the length")
        self.limit = limit
        most = self.llm.model_info.max_model_len
        longest = max(map(len, self.prompts)) + limit - length
        if longest > most:
            raise CannotRun(
                f"it may grow to {longest} tokens and max_model_len is {most}; lower "
                "max_new_tokens, or give accelerate() a larger max_model_len or kv_cache_memory"
            )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [B, vocab]: what follows the rows of ``input_ids``, int64 [B, L]."""
        if self.rows is None:
            from pagedllm import ValidationError

            try:
                self.rows = self.llm.drive(self.prompts, self.limit - input_ids.shape[1])
            except ValidationError as error:
                raise CannotRun(str(error)) from error
            logits: torch.Tensor = self.rows.logits
        else:
            parents, self.parents = self.parents, None
            logits = self.rows.advance(input_ids[:, -1].tolist(), parents)
        if self.empty_cache is not None:
            self.computed = input_ids.clone()
        return logits

    def cache_of(self, tokens: torch.Tensor | None) -> Any:
        """Return the cache for an answer whose rows have these tokens in it, int64 [B, N]."""
        if self.empty_cache is None or tokens is None:
            return None
        tokens = tokens if self.parents is None else tokens[self.parents]
        model = weakref.ref(self.model)
        recipe = Recipe(self.empty_cache, model, self.mark, tokens, self.mask, cache_name())
        return late_cache(recipe)

    def close(self) -> None:
        """Free the rows' pages."""
        if self.rows is not None:
            self.rows.close()


class PagedCache:
    """Stands where transformers expects a cache; the engine's pages are the real one."""

    is_compileable = False

    def __init__(self, run: Run) -> None:
        self._run = run

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was."""
        self._run.parents = beam_idx.tolist()


def _left_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask that is zeros, then ones, in each row; None when it hides nothing."""
    if mask is None or bool((mask != 0).all()):
        return None
    shown = (mask != 0).int()
    if mask.dim() != 2 or not bool((shown.diff(dim=1) >= 0).all() and shown[:, -1].all()):
        raise CannotRun("attention_mask hides more than padding on the left")
    return shown


def _check_positions(positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Refuse positions that do not count up from each row's first token."""
    import torch

    if positions is None:
        return
    if mask is None:
        same = positions == torch.arange(positions.shape[-1], device=positions.device)
    else:
        same = (positions == mask.cumsum(dim=1) - 1) | (mask == 0)
    if not bool(same.all()):
        raise CannotRun("position_ids do not count up from each row's first token")


class _Twin:
    """What a twin's class puts before the model's own methods."""

    def _pagedllm(self) -> Run:
        run: Run = vars(self)[_RUN]
        return run

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self._pagedllm().model._validate_model_kwargs(model_kwargs)

    def _validate_generation_mode(self, generation_mode: Any, *rest: Any) -> None:
        super()._validate_generation_mode(generation_mode, *rest)  # type: ignore[misc]
        if generation_mode.value not in _MODES:
            raise CannotRun(f"the generation mode is {generation_mode.value}")

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        # Classifier-free guidance keeps the model it is given and calls it: the real one.
        return self._pagedllm().model._get_logits_processor(*args, **kwargs)

    def heal_tokens(self, *args: Any, **kwargs: Any) -> Any:
        # It generates, too: a call of its own, which this one's rows must not take part in.
        return self._pagedllm().model.heal_tokens(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        run = self._pagedllm()
        if run.begun:
            raise CannotRun("its model class calls generate within generate")
        run.begun = True
        run.check(generation_config, model_kwargs)
        model_kwargs.pop("position_ids", None)
        if generation_config.return_dict_in_generate:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *rest
            )
            run.empty_cache = model_kwargs.get(cache_name())
        model_kwargs[cache_name()] = PagedCache(run)

    def _prefill(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        return self.forward(input_ids=input_ids)  # type: ignore[attr-defined]

    def _valid_auto_compile_criteria(self, *_: Any) -> bool:
        return False

    def _reorder_cache(self, cache: PagedCache, beam_idx: torch.Tensor) -> PagedCache:
        cache.reorder_cache(beam_idx)
        return cache

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if synced_gpus:
            raise CannotRun("synced_gpus is set")
        run = self._pagedllm()
        run.take_prompts(input_ids, stopping_criteria.max_length)
        wants_scores = generation_config.return_dict_in_generate and (
            generation_config.output_scores or generation_config.output_logits
        )
        if streamer is None and not wants_scores:
            found = simple_batches.plan(
                run.llm,
                logits_processor,
                stopping_criteria,
                do_sample=bool(generation_config.do_sample),
                prompt_length=input_ids.shape[1],
            )
            if found is not None:
                return _answer(run, found, input_ids, generation_config)
        result = super()._sample(  # type: ignore[misc]
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer=streamer,
            **model_kwargs,
        )
        return _with_cache(self._pagedllm(), result)

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if synced_gpus:
            raise CannotRun("synced_gpus is set")
        self._pagedllm().take_prompts(input_ids, generation_config.max_length)
        result = super()._beam_search(  # type: ignore[misc]
            input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        return _with_cache(self._pagedllm(), result)


def twin_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make the class of a model class's twins."""

    # generate() looks at these two signatures to learn what the model takes.
    @functools.wraps(cls.prepare_inputs_for_generation)
    def prepare(self: Any, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    @functools.wraps(cls.forward)
    def forward(self: Any, input_ids: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        logits = self._pagedllm().forward(input_ids)
        return CausalLMOutputWithPast(logits=logits[:, None])

    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "forward": forward,
        "prepare_inputs_for_generation": prepare,
    }
    return type(cls.__name__, (_Twin, cls), names)


def decode(twin: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
    """Run a call that ``generate`` has prepared already, as it hands it to ``custom_generate``.

    Args:
        twin: from :func:`make_twin`.
        input_ids: int64 [B, L].
        prepared: ``logits_processor``, ``stopping_criteria``, ``generation_config`` and the
            arguments of the model's forward.

    Raises:
        CannotRun: the engine cannot do it.
    """
    from transformers.generation import utils

    handed = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus")
    call = {name: prepared.pop(name) for name in handed if name in prepared}
    config = call["generation_config"]
    mode = config.get_generation_mode()
    if mode.value not in _MODES:
        raise CannotRun(f"the generation mode is {mode.value}")
    for name in utils.ALL_CACHE_NAMES:
        cache = prepared.pop(name, None)
        if cache is not None and cache.get_seq_length() > 0:
            raise CannotRun(f"{name} holds tokens already")
    twin._prepare_cache_for_generation(config, prepared, mode, len(input_ids), 0)
    method = getattr(type(twin), utils.GENERATION_MODES_MAPPING[mode])
    return method(twin, input_ids, **call, **prepared)


def make_twin(cls: type[PreTrainedModel], run: Run) -> PreTrainedModel:
    """Make the twin of a model for one call: its modules and settings are the model's own."""
    twin: PreTrainedModel = object.__new__(cls)
    held = vars(twin)
    held.update(vars(run.model))
    held.pop("generate", None)
    held[_RUN] = run
    return twin


def cache_name() -> str:
    """What transformers calls the cache among a model's arguments; 5.24 renamed it."""
    from transformers.generation import utils

    return "cache" if "cache" in utils.ALL_CACHE_NAMES else "past_key_values"


def _answer(
    run: Run, found: simple_batches.Plan, input_ids: torch.Tensor, config: GenerationConfig
) -> Any:
    pad = config._pad_token_tensor
    sequences = simple_batches.run(
        run.llm, found, run.prompts, input_ids, None if pad is None else int(pad)
    )
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    # The last token is in the answer only.
    cache = {cache_name(): run.cache_of(sequences[:, :-1])}
    return GenerateDecoderOnlyOutput(sequences=sequences, **cache)


def _with_cache(run: Run, result: Any) -> Any:
    """Put a cache that outlives the call into a result: the engine's pages are free already."""
    if not hasattr(result, "items"):
        return result
    kept = {key: value for key, value in result.items() if not isinstance(value, PagedCache)}
    return type(result)(**kept, **{cache_name(): run.cache_of(run.computed)})
