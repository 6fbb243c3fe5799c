"""The facade: a model that one calls, from plain code or from asyncio.

Owner: the public API. Invariants: both classes are thin clients of one
:class:`~pagedllm.engine.loop.EngineLoop`, so any thread may call them and all their
requests share batches; ``close()``, leaving a ``with`` block, garbage collection and the
interpreter's exit each give all memory back.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.config import Config
from pagedllm.engine.driven import DrivenSequences, Room
from pagedllm.engine.engine import Engine
from pagedllm.engine.intake import Intake
from pagedllm.engine.loop import EngineLoop
from pagedllm.engine.remote import RemoteLoop
from pagedllm.engine.requests import RequestState
from pagedllm.engine.streams import AsyncOutputStream, OutputStream
from pagedllm.engine.text import TokenDecoder, load_tokenizer
from pagedllm.errors import ConfigError, EngineError, RequestAbortedError, ValidationError
from pagedllm.sampling_params import SamplingParams
from pagedllm.structured.chat import ChatFormat, PreparedChat, ToolRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pagedllm.engine.intake import Prompt
    from pagedllm.executors.base import Executor
    from pagedllm.metrics import EngineStats
    from pagedllm.models.base import PagedModel
    from pagedllm.outputs import RequestOutput
    from pagedllm.types import ModelInfo, Request

Messages = Sequence[Mapping[str, Any]]


class _Client:
    """What :class:`LLM` and :class:`AsyncLLM` share: an engine, its tokenizer, its intake."""

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
        path = str(resolved.path)
        loop: EngineLoop | RemoteLoop
        if config.engine == "process":
            loop = RemoteLoop(config, partial(_make_there, path=path))
        else:
            loop = EngineLoop(config, _make_executor(config, partial(_load_model, config, path)))
        try:
            self._start(config, loop, _tokenizer(config, path))
        except BaseException:
            loop.close()
            raise

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
        if config.engine == "process":
            raise ConfigError(
                "engine: a model that is loaded already stays in its process", "engine"
            )
        self = cls.__new__(cls)
        executor = _make_executor(config, partial(_wrap, config, model))
        self._start(config, EngineLoop(config, executor), tokenizer)
        _return_heap()  # the native tier merged projections and freed the separate ones
        return self

    def _start(
        self,
        config: Config,
        loop: EngineLoop | RemoteLoop,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.config = config
        self._loop = loop
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._intake = Intake(config, self._loop.info, tokenizer)
        self._chat_formats: dict[str | None, ChatFormat] = {}
        self._room = Room(config.max_batch_size, self._loop.info.num_pages, config.page_size)
        # Runs when the last reference goes, and at exit.
        self._finalizer = weakref.finalize(self, loop.close)

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
        return self._tokenizer

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
        request = ToolRequest.of(tools, tool_choice, parallel=parallel_tool_calls)
        template = chat_template or self.config.chat_template
        if template not in self._chat_formats:
            self._chat_formats[template] = ChatFormat.of(self.tokenizer, template)
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

    def stats(self) -> EngineStats:
        """Counters, and the batch and cache at this moment. Raises EngineClosedError."""
        return self._loop.call(Engine.stats)

    def health(self) -> str | None:
        """None when requests can be served, else one line that says why not."""
        if self._loop.closed:
            return "the engine is closed"
        return self._loop.call(Engine.health)

    def _submit(self, request: Request, listener: Callable[[RequestState], None]) -> RequestState:
        state = RequestState(request, self._decoder, listener)
        limit = self._intake.max_tokens(len(request.prompt_token_ids), request.params)
        self._loop.add(state, limit)
        return state

    def _close(self) -> None:
        self._finalizer()
        gc.collect()
        _return_heap()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._loop.closed


class LLM(_Client):
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
        many = _as_list(prompts)
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
        return OutputStream(self._loop, partial(self._submit, request))

    def chat_stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> OutputStream:
        """Answer a conversation as :meth:`stream` does, with the options of :meth:`chat`."""
        chat = self.prepare_chat(messages, sampling_params, **options)
        return self.stream(chat.prompt_token_ids, chat.params)

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
        self._loop.abort(request_id)

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
                self._loop.abort(state.request.request_id)
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


class AsyncLLM(_Client):
    """A model behind an engine, for asyncio.

    The constructor loads the model and blocks; :meth:`create` does so in a thread.

    Example::

        async with await AsyncLLM.create("smollm2") as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text_delta, end="")
    """

    @classmethod
    async def create(cls, model: str | Config | None = None, **settings: Any) -> Self:
        """Construct without blocking the event loop."""
        import asyncio

        return await asyncio.to_thread(cls, model, **settings)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncOutputStream:
        """Return an async iterator over a request's growing output.

        Each item is a snapshot; ``outputs[0].text_delta`` is what it adds. Cancelling the
        task that waits for an item aborts the request; so does closing or dropping the
        iterator.

        Raises:
            ValidationError: at once, when the request cannot be served.
        """
        return self.submit(
            self.prepare(
                prompt,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttft_target: float | None = None,
        e2e_target: float | None = None,
    ) -> Request:
        """Do what :meth:`generate` does first: tokenise, check, compile a constraint.

        Any thread may call it, so that a long prompt or a large grammar need not hold up the
        event loop; :meth:`submit` starts what it returns.

        ``ttft_target`` and ``e2e_target`` are the seconds from now within which the first
        token and the whole answer are wanted, for ``scheduling_policy='deadline'``.

        Raises:
            ValidationError: the request cannot be served.
        """
        return self._intake.request(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            ttft_target=ttft_target,
            e2e_target=e2e_target,
        )

    def submit(self, request: Request) -> AsyncOutputStream:
        """Start a request of :meth:`prepare`; as :meth:`generate` from there on."""
        return AsyncOutputStream(self._loop, partial(self._submit, request))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncOutputStream:
        """Answer a conversation as :meth:`generate` does, with the options of ``LLM.chat``."""
        chat = self.prepare_chat(messages, sampling_params, **options)
        return self.generate(chat.prompt_token_ids, chat.params, request_id=request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator's last item says ``finish_reason='abort'``."""
        self._loop.abort(request_id)

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self._close)

    def close(self) -> None:
        """Free the model, its cache and its thread; unfinished requests fail. Idempotent."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


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
    executor: Executor | None = manager.create_executor(config.executor, config)
    if executor is None:
        raise ConfigError(
            f"executor: no plugin has one named '{config.executor}'; use 'auto', or install "
            f"the plugin that provides it",
            "executor",
        )
    return executor


def _make_there(config: Config, path: str) -> tuple[Executor, TokenDecoder | None]:
    """What an engine in a process of its own needs, made in that process."""
    tokenizer = _tokenizer(config, path)
    executor = _make_executor(config, partial(_load_model, config, path))
    return executor, None if tokenizer is None else TokenDecoder(tokenizer)


def _tokenizer(config: Config, path: str) -> PreTrainedTokenizerBase | None:
    if config.skip_tokenizer_init:
        return None
    return load_tokenizer(
        config.tokenizer or path,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision if config.tokenizer is None else None,
    )


def _load_model(config: Config, path: str) -> PagedModel:
    from pagedllm.models.registry import load_model

    return load_model(
        path,
        dtype=config.dtype,
        device=config.device,
        model_impl=config.model_impl,
        trust_remote_code=config.trust_remote_code,
        attention=config.attention_backend,
        progress=sys.stderr.isatty(),
    )


def _wrap(config: Config, model: PreTrainedModel) -> PagedModel:
    from pagedllm.models.registry import wrap_model

    return wrap_model(model, model_impl=config.model_impl, attention=config.attention_backend)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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


def _return_heap() -> None:
    """Ask the C library to give freed memory back to the operating system."""
    if sys.platform != "linux":
        return
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
