"""What the two facades share: an engine, its tokenizer, and the checks before a request.

Owner: :mod:`pagedllm.llm` and :mod:`pagedllm.async_llm`. Invariants: the engine lives in a
thread (or process) that holds no reference to its client, so dropping the last reference to
a client closes its engine; so do ``close()`` and the interpreter's exit.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pagedllm._named import find, make
from pagedllm._recall import recalled_tokenizer, whole_tokenizer
from pagedllm._sinks import close_after, make_reporters
from pagedllm.config import Config
from pagedllm.engine.driven import Room
from pagedllm.engine.engine import Engine
from pagedllm.engine.intake import NO_TOKENIZER, Intake
from pagedllm.engine.loop import EngineLoop
from pagedllm.engine.remote import RemoteLoop
from pagedllm.engine.requests import RequestState
from pagedllm.engine.text import TokenDecoder
from pagedllm.engine.tokenizer import load_tokenizer
from pagedllm.errors import ConfigError, ValidationError
from pagedllm.kv_store.loop import StoringLoop
from pagedllm.kv_store.store import make_kv_store
from pagedllm.response_cache.entry import ResponseCaching, make_response_cache
from pagedllm.response_cache.keys import engine_identity
from pagedllm.sampling_params import SamplingParams
from pagedllm.structured.chat import ChatFormat, PreparedChat, ToolRequest

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable
    from typing import Self

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pagedllm._sinks import Reporter
    from pagedllm.engine.intake import Prompt
    from pagedllm.engine.streams import Waker
    from pagedllm.executors.base import Executor
    from pagedllm.hookspecs import ResolvedModel
    from pagedllm.metrics import EngineStats
    from pagedllm.models.base import PagedModel
    from pagedllm.models.quantizing import Quantizer
    from pagedllm.types import ModelInfo, Pooling, Request
    from pagedllm_kernels.types import AttentionBackend

    Entry = EngineLoop | RemoteLoop | ResponseCaching

Messages = Sequence[Mapping[str, Any]]
MOST_TEMPLATES = 32
"""Chat templates that are kept taken apart; a caller may give a new one with every call."""


class Client:
    """What :class:`LLM` and :class:`AsyncLLM` share: an engine, its tokenizer, its intake."""

    revision: str | None = None
    """What identifies the loaded weights, such as a commit's hash; None when nothing does."""

    def __init__(self, model: str | Config | None = None, **settings: Any) -> None:
        """Load a model and start its engine.

        Args:
            model: a name, a folder, or a whole :class:`Config`.
            settings: fields of :class:`Config`, which win over those of a given one.

        Raises:
            ConfigError: a setting is unknown, wrong, or cannot be had here.
            ModelNotFoundError: there is no such model.
            UnsupportedModelError: it cannot be run correctly.
        """
        config = _config(model, settings)
        from pagedllm.plugins import get_manager

        manager = get_manager(config.plugins_allow, config.plugins_block)
        resolved = manager.resolve_model(config.model, config.revision, config=config)
        store, reporters = make_response_cache(config), make_reporters(config)
        loop: EngineLoop | RemoteLoop
        if config.engine == "process":
            loop = RemoteLoop(config, partial(_make_there, resolved=resolved))
        else:
            loop = _make_loop(config, resolved)
        entry: Entry = loop
        try:
            tokenizer = _tokenizer(config, str(resolved.path))
            if store is not None:
                tokenizer = whole_tokenizer(tokenizer)
                identity = engine_identity(config, resolved, loop.info, tokenizer)
                entry = ResponseCaching(loop, store, identity)
            self._start(config, loop, tokenizer, entry, reporters)
        except BaseException:
            entry.close()
            raise
        self.revision = resolved.revision

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> Self:
        """Serve a transformers model that is loaded already; its weights are shared.

        Args:
            model: a decoder-only model; its dtype and device are used.
            tokenizer: without one, token ids go in and out.
            settings: fields of :class:`Config`; ``model``, ``dtype`` and ``device`` are the
                model's own.

        Raises:
            ConfigError, UnsupportedModelError: as the constructor does.
        """
        for name in ("model", "dtype", "device", "tokenizer", "revision"):
            if name in settings:
                raise ConfigError(f"{name}: the given model decides it; leave it out", name)
        config = Config(
            model=model.config.name_or_path or type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            skip_tokenizer_init=tokenizer is None,
            **settings,
        ).resolve()
        for name in ("response_cache", "kv_store"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name}: nothing tells a loaded model's weights from others; load it by name",
                    name,
                )
        if config.engine == "process":
            raise ConfigError(
                "engine: a model that is loaded already stays in its process", "engine"
            )
        self = cls.__new__(cls)
        reporters = make_reporters(config)
        loop = EngineLoop(config, _make_executor(config, partial(_wrap, config, model)))
        self._start(config, loop, tokenizer, loop, reporters)
        _return_heap()  # the native tier merged projections and freed the separate ones
        return self

    def _start(
        self,
        config: Config,
        loop: EngineLoop | RemoteLoop,
        tokenizer: PreTrainedTokenizerBase | None,
        entry: Entry,
        reporters: Sequence[Reporter],
    ) -> None:
        self.config = config
        self._loop = loop
        # Where requests go, and aborts after them.
        self._entry: Entry = entry
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._intake = Intake(config, self._loop.info, tokenizer)
        self._chat_formats: dict[str | None, ChatFormat] = {}
        self._room = Room(config.max_batch_size, self._loop.info.num_pages, config.page_size)
        self._wakers: weakref.WeakKeyDictionary[AbstractEventLoop, Waker] = (
            weakref.WeakKeyDictionary()
        )
        # Runs when the last reference goes, and at exit.
        self._finalizer = weakref.finalize(self, close_after, reporters, entry.close)
        for reporter in reporters:
            reporter.start(partial(entry.call, Engine.stats))

    @property
    def model_info(self) -> ModelInfo:
        """Sizes and names of the loaded model and its cache."""
        return self._loop.info

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer. Raises ConfigError with ``skip_tokenizer_init``."""
        if self._tokenizer is None:
            raise ConfigError(
                "the engine has no tokenizer; start it without skip_tokenizer_init",
                "skip_tokenizer_init",
            )
        return whole_tokenizer(self._tokenizer)

    def tokenize(self, text: str) -> list[int]:
        """Return a prompt's token ids, special tokens included; any thread may call it.

        Raises:
            ValidationError: it is empty or no valid Unicode, or there is no tokenizer.
        """
        return self._intake.tokenize(text)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Return the token ids that :meth:`chat` would continue; any thread may call it.

        Raises:
            ValidationError: there is no chat template, or it cannot format the messages.
        """
        return self._intake.chat(
            messages, tools=tools, chat_template=chat_template, **template_options
        )

    def prepare_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> PreparedChat:
        """Do what a chat does before it generates; any thread may call it.

        Generate from the result's ``prompt_token_ids`` with its ``params``, and read the
        answer with its ``parser()``: :mod:`pagedllm.structured` shows how.

        Args:
            messages: one conversation.
            sampling_params: what the tools' grammar is added to.
            tools: functions that the model may call, as OpenAI's API describes them.
            tool_choice: ``'auto'``, ``'none'``, ``'required'`` or a tool's name.
            parallel_tool_calls: whether one answer may call several times.
            chat_template: Jinja text in place of the model's own.
            template_options: whatever else the template knows.

        Raises:
            ValidationError: the tools or messages are malformed, or the template refuses them.
        """
        if self._tokenizer is None:
            raise ValidationError(NO_TOKENIZER.format("a chat"))
        request = ToolRequest.of(tools, tool_choice, parallel=parallel_tool_calls)
        template = chat_template or self.config.chat_template
        if template not in self._chat_formats:
            if len(self._chat_formats) >= MOST_TEMPLATES:
                self._chat_formats.clear()
            self._chat_formats[template] = ChatFormat.of(self._tokenizer, template)
        form = self._chat_formats[template]
        prompt = self._intake.chat(
            form.conversation(messages, request),
            tools=form.template_tools(request),
            chat_template=chat_template,
            **template_options,
        )
        tail = "" if self._decoder is None else self._decoder.decode(prompt[-8:])
        params = form.constrain(sampling_params or SamplingParams(), request, tail)
        return PreparedChat(tuple(prompt), params, request, form, tail)

    def prepare_embedding(self, prompt: Prompt, *, pooling: Pooling, **options: Any) -> Request:
        """Check and tokenise a prompt to embed, for :meth:`AsyncLLM.submit`; any thread may.

        Args:
            prompt: text or token ids.
            pooling: ``'mean'`` or ``'last'``, see :meth:`LLM.embed`.
            options: ``request_id``, ``priority`` and ``cache_salt`` of :meth:`AsyncLLM.prepare`.

        Raises:
            ValidationError: it cannot be served.
        """
        none = SamplingParams(max_tokens=None)
        return self._intake.request(prompt, none, pooling=pooling, **options)

    def stats(self) -> EngineStats:
        """Counters, and the batch and cache at this moment. Raises EngineClosedError."""
        return self._entry.call(Engine.stats)

    def page_states(self) -> bytes:
        """Per page of the cache: 0 free, 1 cached, 2 used by one sequence, 3 by several."""
        return self._loop.call(Engine.page_states)

    def health(self) -> str | None:
        """None when requests can be served, else one line that says why not."""
        if self._loop.closed:
            return "the engine is closed"
        return self._loop.call(Engine.health)

    def _submit(self, request: Request, listener: Callable[[RequestState], None]) -> RequestState:
        state = RequestState(request, self._decoder, listener)
        limit = self._intake.max_tokens(len(request.prompt_token_ids), request.params)
        self._entry.add(state, limit)
        return state

    def _close(self) -> None:
        self._finalizer()
        gc.collect()
        _return_heap()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._loop.closed


def _config(model: str | Config | None, settings: Mapping[str, Any]) -> Config:
    if isinstance(model, Config):
        config = model.replace(**settings) if settings else model
    elif model is None:
        config = Config(**settings)
    elif isinstance(model, (str, Path)):
        config = Config(model=str(model), **settings)
    else:
        raise ConfigError(
            f"model must be a name, a folder or a Config, not {type(model).__name__}; for a "
            f"loaded transformers model use from_model()",
            "model",
        )
    return config.resolve()


def _make_executor(config: Config, load: Callable[[], PagedModel]) -> Executor:
    if config.executor in ("auto", "inline"):
        from pagedllm.executors.inline import InlineExecutor

        return InlineExecutor(config, load)
    from pagedllm.plugins import get_manager

    manager = get_manager(config.plugins_allow, config.plugins_block)
    executor: Executor | None = manager.create_executor(config.executor, config, load)
    if executor is None:
        faults = [r.error for r in manager.list_plugins() if r.error and "_executor" in r.error]
        raise ConfigError(
            f"executor: no plugin has one named '{config.executor}'; use 'auto', or install "
            f"the plugin that provides it{''.join(f' ({fault})' for fault in faults)}",
            "executor",
        )
    return executor


def _make_loop(config: Config, resolved: ResolvedModel) -> EngineLoop:
    executor = _make_executor(config, partial(_load_model, config, str(resolved.path)))
    store = make_kv_store(config)
    if store is None:
        return EngineLoop(config, executor)
    return StoringLoop(config, executor, store, resolved)


def _make_there(config: Config, resolved: ResolvedModel) -> tuple[EngineLoop, TokenDecoder | None]:
    """What a process of the engine's own needs, made in that process."""
    tokenizer = _tokenizer(config, str(resolved.path))
    return _make_loop(config, resolved), None if tokenizer is None else TokenDecoder(tokenizer)


def _tokenizer(config: Config, path: str) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    source = config.tokenizer or path
    load = partial(
        load_tokenizer,
        source,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision if config.tokenizer is None else None,
    )
    return recalled_tokenizer(source, load, fresh=config.trust_remote_code)


def _load_model(config: Config, path: str) -> PagedModel:
    """Load a model from its folder as a resolved config says."""
    from pagedllm.models.registry import load_model

    return load_model(
        path,
        dtype=config.dtype,
        device=config.device,
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
        attention=_attention(config),
        quantizer=quantizer_for(config),
        int8_pages=config.kv_cache_dtype == "int8",
        progress=sys.stderr.isatty(),
    )


def _wrap(config: Config, model: PreTrainedModel) -> PagedModel:
    from pagedllm.models.registry import wrap_model

    if config.quantization is not None:
        raise ConfigError(
            "quantization: the weights of a model that you hold are shared, not copied; save it "
            "and load it from its folder",
            "quantization",
        )
    return wrap_model(model, model_impl=config.model_impl, attention=_attention(config))


def quantizer_for(config: Config) -> Quantizer | None:
    """Our own, or what a plugin registers under another name."""
    if config.quantization is None:
        return None
    from pagedllm.models.quantizing import METHODS, Quantizer

    custom = None
    if config.quantization not in METHODS:
        # Found now rather than when the first weight is read.
        setting = "quantization"
        find("pagedllm_quantizers", setting, config.quantization, config, also=METHODS)
        custom = partial(make, "pagedllm_quantizers", setting, config.quantization, config)
    return Quantizer(config.quantization, config.quantization_skip, custom)


def _attention(config: Config) -> str | AttentionBackend:
    """The kernels' own name, or what a plugin registers under another one."""
    from pagedllm_kernels import attention_backends

    name, builtin = config.attention_backend, ("auto", *attention_backends())
    if name in builtin:
        return name
    setting = "attention_backend"
    return cast(
        "AttentionBackend", make("pagedllm_attention_backends", setting, name, config, also=builtin)
    )


def _return_heap() -> None:
    """Ask the C library to give freed memory back to the operating system."""
    if sys.platform != "linux":
        return
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
