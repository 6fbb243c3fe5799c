"""What the LLM and the chat model have in common: fields, checks, the engine.

Owner: the LangChain integration. Invariants: whatever a caller gives is used or refused, never
dropped; every field that can change an answer is part of the identifying parameters, by which
caches tell models apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from langchain_core.load.serializable import Serializable
from langchain_core.utils import secret_from_env
from pydantic import AliasChoices, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

from langchain_pagedllm.engines import Handle
from pagedllm import Config, SamplingParams, ValidationError
from pagedllm.structured import StructuredOutput

if TYPE_CHECKING:
    from types import TracebackType

    from pagedllm import LLM, AsyncLLM, RequestOutput

    class OutputStream(Protocol):
        """What ``LLM.stream`` returns, as far as it is used here."""

        @property
        def request_id(self) -> str: ...  # noqa: D102
        def __iter__(self) -> Iterator[RequestOutput]: ...
        def close(self) -> None: ...  # noqa: D102


SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
"""Fields and per-call keywords that say how to sample."""
ENGINE = ("revision", "dtype", "device", "max_model_len", "trust_remote_code", "model_impl")
"""Fields that are the engine's settings of the same name."""


class PagedModel(Serializable):
    """Fields of both classes. The weights load at the first use.

    Instances with equal settings of the engine share one, so any number of them may differ in
    how they sample.
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, protected_namespaces=(), arbitrary_types_allowed=True
    )

    model_id: str = Field(default="smollm2", validation_alias=AliasChoices("model_id", "model"))
    """A short name of a plugin, a folder, or a repository on the Hugging Face Hub."""
    revision: str | None = None
    """Branch, tag or commit of a repository."""
    dtype: str = "auto"
    """Of weights and arithmetic."""
    device: str = "auto"
    """Where to run."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    model_impl: str = "auto"
    """``native``, ``generic``, or whichever fits."""
    token: SecretStr | None = Field(
        default_factory=secret_from_env("HF_TOKEN", default=None),
        validation_alias=AliasChoices("token", "api_key"),
    )
    """For gated repositories; by default the environment's ``HF_TOKEN``."""
    engine_config: dict[str, Any] = Field(default_factory=dict)
    """Any other setting of :class:`pagedllm.Config`, such as ``{"max_batch_size": 32}``."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] | None = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    """Ends an answer before one of these texts. A call's own ``stop`` takes its place."""
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 256
    """Most tokens of an answer; None for as many as the model's length allows."""
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_output: dict[str, Any] | None = None
    """Such as ``{"json_schema": {...}}``: see :class:`pagedllm.structured.StructuredOutput`."""
    logits_processors: list[Callable[..., Any] | str | dict[str, Any]] = Field(
        default_factory=list, exclude=True
    )
    """Callables, or names that plugins register: see ``SamplingParams``."""

    streaming: bool = False
    """Whether ``invoke`` streams to callbacks, too."""
    timeout: float | None = None
    """Seconds that a call may take; then its requests are aborted and TimeoutError is raised."""
    max_retries: int | None = None
    """One of LangChain's standard parameters. There is no connection that could fail, so
    nothing is ever retried."""

    _handle: Handle | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            values = dict(values)
            if isinstance(values.get("stop"), str):
                values["stop"] = [values["stop"]]
            spec = values.get("structured_output")
            if spec is not None:
                values["structured_output"] = plain_spec(spec)
            for name in values:
                _check_known(cls, name)
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check what can be checked without the model."""
        self.sampling_params()
        self._handle = Handle(self._engine_config())
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether LangChain may write it down; logits processors are left out."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Fields that stand in the environment instead of in what is written down."""
        return {"token": "HF_TOKEN"}

    def close(self) -> None:
        """Give up the engine; the last of those that share it frees all its memory."""
        self.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def handle(self) -> Handle:
        """What this object holds of its engine."""
        if self._handle is None:  # made by model_construct, without checks
            self._handle = Handle(self._engine_config())
        return self._handle

    @property
    def engine(self) -> LLM:
        """The engine itself, loaded if need be: ``stats()``, ``tokenizer``, ``model_info``."""
        return self.handle.llm

    async def aengine(self) -> AsyncLLM:
        """The engine for asyncio, loaded in a thread."""
        import asyncio

        return await asyncio.to_thread(lambda: self.handle.async_llm)

    def _engine_config(self) -> Config:
        settings = {name: getattr(self, name) for name in ENGINE}
        given = set(self.engine_config) & {*settings, "token", "model"}
        if given:
            raise ValueError(
                f"engine_config: give {', '.join(sorted(given))} as a field of its own"
            )
        token = self.token.get_secret_value() if self.token else None
        return Config(self.model_id, token=token, **settings, **self.engine_config)

    def sampling_params(self, stop: Sequence[str] | None = None, **changes: Any) -> SamplingParams:
        """The fields as :class:`pagedllm.SamplingParams`, some of them changed.

        Raises:
            ValidationError: a name is unknown or a value wrong.
        """
        values = {name: getattr(self, name) for name in SAMPLING} | changes
        if stop is not None:
            values["stop"] = stop
        return SamplingParams(**values)

    def call_params(self, stop: Sequence[str] | None, options: dict[str, Any]) -> SamplingParams:
        """Sampling parameters for one call; takes what it uses out of ``options``.

        Raises:
            ValidationError: ``options`` asks for another model, or a value is wrong.
        """
        options.pop("stream", None)  # LangChain's own: it has chosen the method by now
        model = options.pop("model", None)
        if model not in (None, self.model_id):
            raise ValidationError(
                f"model: this object runs {self.model_id!r}; make another for {model!r}", "model"
            )
        changes = {name: options.pop(name) for name in SAMPLING if name in options}
        given = changes.pop("stop", None)
        return self.sampling_params(stop if stop is not None else given, **changes)

    def refuse(self, options: Mapping[str, Any], also: Sequence[str] = ()) -> None:
        """Raise ValidationError for keywords of a call that nothing has used."""
        for name in options:
            raise ValidationError(
                f"{name!r} is no parameter{_nearest(name, [*SAMPLING, *also])}", name
            )

    @property
    def identifying(self) -> dict[str, Any]:
        """All that can change an answer, for caches and traces."""
        values: dict[str, Any] = {"model_id": self.model_id}
        values |= {name: getattr(self, name) for name in (*ENGINE, "engine_config", *SAMPLING)}
        values["logits_processors"] = [repr(each) for each in self.logits_processors]
        return values

    def tracing(self, stop: Sequence[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """What LangSmith wants to know, beyond what core finds out."""
        stop = stop if stop is not None else self.stop
        found: dict[str, Any] = {
            "ls_provider": "pagedllm",
            "ls_model_name": options.get("model") or self.model_id,
        }
        return found | ({"ls_stop": list(stop)} if stop else {})

    @contextlib.contextmanager
    def deadline(self, llm: LLM, streams: Sequence[OutputStream]) -> Iterator[None]:
        """Abort streams that are read within when that takes longer than ``timeout``.

        Raises:
            TimeoutError: it did.
        """
        if self.timeout is None:
            yield
            return
        late = threading.Event()

        def end() -> None:
            late.set()
            for stream in streams:
                llm.abort(stream.request_id)

        timer = threading.Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError(f"the answer took longer than timeout={self.timeout} seconds")


def plain_spec(spec: Any) -> dict[str, Any]:
    """A structured output as plain data, which LangChain can write down."""
    checked = StructuredOutput.of(spec)
    value = getattr(checked, checked.kind)
    return {checked.kind: list(value) if isinstance(value, tuple) else value}


def _check_known(cls: type[PagedModel], name: str) -> None:
    known = {"model", "stop_sequences", "api_key", *cls.model_fields}
    if name not in known:
        raise ValueError(f"{name!r} is no parameter of {cls.__name__}{_nearest(name, known)}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
