"""``pagedllm.accelerate``: a transformers model whose ``generate`` runs on the engine.

Owner: the generate drop-in. Invariants: the model stays whole: only ``model.generate`` is
another one until :meth:`Accelerated.close`; no answer comes from other weights than the model
has when it is called; what the engine cannot do, the model's own ``generate`` does, and one
line of the log says why.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pagedllm_hf.fingerprint import fingerprint
from pagedllm_hf.paged_generate import CannotRun, Run, decode, make_twin, twin_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    import torch
    from transformers import PreTrainedModel

    from pagedllm import LLM

logger = logging.getLogger(__name__)

_HANDLE = "_pagedllm_handle"


def accelerate(
    model: PreTrainedModel, *, strict: bool = False, check_weights: bool = True, **config: Any
) -> Accelerated:
    """Make ``model.generate`` run on the engine, with the model's own weights.

    Args:
        model: a decoder-only transformers model; its dtype and device are used.
        strict: raise where the engine cannot do what a call asks, instead of falling back.
        check_weights: read all weights before each call, to notice changes that torch does
            not count, such as writes through ``.data``. Without, a call starts one or two
            decoding steps earlier, and after such a write :meth:`Accelerated.refresh` must
            be called.
        config: fields of :class:`pagedllm.Config`, such as ``kv_cache_memory``.

    Returns:
        A handle; close it, or use it as a context manager, to have the old ``generate`` back.

    Raises:
        UnsupportedModelError: with ``strict``, when the engine cannot run this model.
        ConfigError: a setting is wrong; the model is accelerated already, or is none.
    """
    from pagedllm import ConfigError

    _check_model(model)
    held = vars(model).get(_HANDLE)
    if held is not None and held.model is model and not held.closed:
        raise ConfigError(
            "this model is accelerated already, or used with custom_generate=pagedllm.generate; "
            "close the handle first: pagedllm_hf.accelerate.handle_of(model).close()"
        )
    handle = Accelerated(model, strict=strict, check_weights=check_weights, config=config)
    handle.bind()
    return handle


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """Generate on the engine: ``model.generate(..., custom_generate=pagedllm.generate)``.

    The engine is made at first use and lives as long as the model; see :func:`handle_of`.
    transformers hands over neither streamer nor tokenizer here: for a streamer, use
    :func:`accelerate`.
    """
    return handle_of(model).decode(
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **model_kwargs,
    )


def handle_of(model: PreTrainedModel) -> Accelerated:
    """Return a model's handle, made now if there is none; ``generate`` is not rebound."""
    _check_model(model)
    held = vars(model).get(_HANDLE)
    if isinstance(held, Accelerated) and held.model is model and not held.closed:
        return held
    handle = Accelerated(model, strict=False, check_weights=True, config={})
    vars(model)[_HANDLE] = handle
    return handle


def _check_model(model: object) -> None:
    from transformers import PreTrainedModel
    from transformers.generation import GenerationMixin

    from pagedllm import ConfigError

    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ConfigError(
            f"a transformers model that has generate() is needed, not {type(model).__name__}; of "
            "a wrapper, such as a compiled model or one with adapters, give the model inside"
        )


class Accelerated:
    """A model on the engine; see :func:`accelerate`. Any thread may use it."""

    def __init__(
        self, model: PreTrainedModel, *, strict: bool, check_weights: bool, config: dict[str, Any]
    ) -> None:
        self.model = model
        self.closed = False
        self.fallback_reason: str | None = None
        """Why the model as a whole cannot run on the engine; None when it can."""
        self._strict = strict
        self._check_weights = check_weights
        self._config = config
        self._own_generate = vars(model).get("generate")
        self._rebound: _Rebound | None = None
        self._twin_class = twin_class(type(model))
        self._signature = inspect.signature(_own_generate(model))
        self._changed = threading.Condition()
        self._users: list[int] = []  # a thread's identity for each call that runs
        self._llm: LLM | None = None
        self._mark: Any = None
        self._process = os.getpid()
        self._lost: list[LLM | None] = []
        with self._changed:
            self._rebuild()
        if self.fallback_reason is not None:
            if strict:
                from pagedllm import UnsupportedModelError

                raise UnsupportedModelError(self.fallback_reason)
            logger.warning("generate will be transformers' own: %s", self.fallback_reason)

    @property
    def llm(self) -> LLM | None:
        """The engine, for its statistics; a new one after each change of the weights."""
        return self._llm

    def bind(self) -> None:
        """Put our ``generate`` in the place of the model's."""
        self._rebound = _Rebound(self)
        vars(self.model)["generate"] = self._rebound
        vars(self.model)[_HANDLE] = self

    def refresh(self) -> None:
        """Make the engine anew for the next call, whatever it can see of the model."""
        with self._changed:
            self._mark = None

    def close(self) -> None:
        """Give the model its ``generate`` back, and all memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        held = vars(self.model)
        if self._rebound is not None and held.get("generate") is self._rebound:
            del held["generate"]
            if self._own_generate is not None:
                held["generate"] = self._own_generate
        if held.get(_HANDLE) is self:
            del held[_HANDLE]
        with self._changed:
            llm, self._llm = self._llm, None
        if llm is not None:
            llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    # A copy of the model is another model: it begins without a handle.
    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    # -- a call --------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Do what ``model.generate`` does.

        Raises:
            ValidationError: with ``strict``, when the engine cannot do it; else whatever
                ``model.generate`` raises.
        """
        if self.closed:
            return self._original(*args, **kwargs)
        call = self._signature.bind(*args, **kwargs).arguments
        call |= call.pop("kwargs", {})
        if call.get("custom_generate") is generate:
            del call["custom_generate"]
        streamer = None
        if call.get("streamer") is not None:
            streamer = call["streamer"] = _Streamer(call["streamer"])
        try:
            self._check_call(call)
            with self._twin() as twin:
                return type(self.model).generate(twin, **call)
        except CannotRun as error:
            self._say(str(error))
        if streamer is not None:
            streamer.begin_again()
        return self._original(**call)

    def decode(self, input_ids: torch.Tensor, **prepared: Any) -> Any:
        """Do what a decoding method of transformers does with a prepared call."""
        try:
            self._check_call(prepared)
            with self._twin() as twin:
                return decode(twin, input_ids, **prepared)
        except CannotRun as error:
            self._say(str(error))
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        mode = prepared["generation_config"].get_generation_mode()
        return getattr(type(self.model), GENERATION_MODES_MAPPING[mode])(
            self.model, input_ids, **prepared
        )

    @property
    def _original(self) -> Callable[..., Any]:
        if self._own_generate is not None:
            own: Callable[..., Any] = self._own_generate
            return own
        return _own_generate(self.model)

    def _check_call(self, call: dict[str, Any]) -> None:
        """Refuse what can be seen before transformers prepares the call."""
        if self.model.training:
            raise CannotRun("the model is in training mode; call model.eval()")
        if call.get("custom_generate") is not None:
            raise CannotRun("custom_generate is another one")
        for name in ("assistant_model", "synced_gpus"):
            if call.get(name):
                raise CannotRun(f"{name} is given")
        if call.get("cache_implementation") == "paged":
            raise CannotRun("cache_implementation='paged' is transformers' continuous batching")

    def _say(self, reason: str) -> None:
        if self._strict:
            from pagedllm import ValidationError

            raise ValidationError(f"the engine cannot run this call of generate: {reason}")
        logger.warning("generate falls back to transformers' own: %s", reason)

    @contextmanager
    def _twin(self) -> Iterator[PreTrainedModel]:
        """A twin for one call, on an engine that has the model's present weights."""
        if os.getpid() != self._process:
            self._begin_in_fork()
        with self._changed:
            if self._mark is None or self._look() != self._mark:
                if threading.get_ident() in self._users:
                    raise CannotRun("the weights changed while a call around this one runs")
                self._changed.wait_for(lambda: not self._users)
                self._rebuild()
            llm, mark = self._llm, self._mark
            if llm is None:
                raise CannotRun(self.fallback_reason or "the handle is closed")
            self._users.append(threading.get_ident())
        run = Run(self.model, llm, mark)
        try:
            yield make_twin(self._twin_class, run)
        finally:
            run.close()
            with self._changed:
                self._users.remove(threading.get_ident())
                self._changed.notify_all()

    # -- the engine ----------------------------------------------------------------

    def _begin_in_fork(self) -> None:
        """A forked process has our memory and none of our threads: it needs an engine anew."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._users = []
        # Kept, since closing it might wait for a lock that nobody holds any more.
        self._lost.append(self._llm)
        self._llm = self._mark = None

    def _look(self) -> Any:
        return fingerprint(self.model, contents=self._check_weights)

    def _rebuild(self) -> None:
        """Make an engine of the model as it is now. Cached pages of the old one are gone."""
        import torch

        from pagedllm import LLM, UnsupportedModelError

        if self._llm is not None:
            self._llm.close()
            self._llm = None
        self.fallback_reason = None
        # The engine's thread must not hold the model that holds us, or nothing would ever be
        # freed without close(): it gets an object of its own around the same modules.
        bare: PreTrainedModel = object.__new__(type(self.model))
        vars(bare).update(vars(self.model))
        vars(bare).pop("generate", None)
        vars(bare).pop(_HANDLE, None)
        # The caller's number of threads stays what it is.
        defaults = {"threads": torch.get_num_threads(), "disable_log_stats": True}
        try:
            self._llm = LLM.from_model(bare, **{**defaults, **self._config})
        except UnsupportedModelError as error:
            self.fallback_reason = str(error)
        # Building merges projections: the weights' place in memory is known only now.
        self._mark = self._look()


class _Rebound:
    """What stands in for ``model.generate``; a copied or unpickled model gets its own back."""

    def __init__(self, handle: Accelerated) -> None:
        self._handle = handle
        own = type(handle.model).generate
        self.__name__, self.__doc__ = own.__name__, own.__doc__
        self.__signature__ = handle._signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handle.generate(*args, **kwargs)

    @property
    def __self__(self) -> PreTrainedModel:
        return self._handle.model

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._handle.model))
        return self if copied is None else _own_generate(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_generate, (self._handle.model,)


def _own_generate(model: PreTrainedModel) -> Callable[..., Any]:
    return types.MethodType(type(model).generate, model)


class _Streamer:
    """Passes on to the caller's streamer, the prompt only once should a call begin again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = False
        self._skips = False

    def begin_again(self) -> None:
        """Expect the prompt once more, if it has come."""
        self._skips = self._has_prompt

    def put(self, value: Any) -> None:
        """Take the prompt, or the tokens of a step."""
        skips, self._skips, self._has_prompt = self._skips, False, True
        if not skips:
            self._streamer.put(value)

    def end(self) -> None:
        """Note that nothing more comes."""
        self._streamer.end()
