"""The LangChain chat model: tools, structured output, streams, batches.

Owner: the LangChain integration. Invariants: conversations that are asked together reach the
engine together, although LangChain hands them over one by one; streaming and asyncio go to
the engine's own streams; a tool call or structured output holds whatever the model is.
"""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import (
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import Field

from langchain_pagedllm.answers import chat_chunks, chat_result
from langchain_pagedllm.base import SAMPLING, PagedModel
from langchain_pagedllm.messages import spec_of, to_template
from langchain_pagedllm.together import Asked, Together
from pagedllm import EngineError, ValidationError
from pagedllm.structured import ToolRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models import LanguageModelInput, ModelProfile
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
    from langchain_core.runnables import RunnableConfig
    from langchain_core.tools import BaseTool

    Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool

_CHAT = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template")
_METHODS = ("json_schema", "function_calling", "json_mode")


class ChatPagedLLM(PagedModel, BaseChatModel):
    """A local model as a LangChain chat model.

    Example::

        chat = ChatPagedLLM(model_id="smollm2", temperature=0)
        chat.invoke("Name three colours.").content
        chat.batch(["Hello", "Good bye"])               # one batch in the engine
        chat.bind_tools([get_weather], tool_choice="any").invoke("Paris?").tool_calls
        chat.with_structured_output(Person).invoke("Ann is 31.")

    A call takes as keywords the sampling fields, ``tools``, ``tool_choice``,
    ``parallel_tool_calls``, ``response_format`` and the ``chat_template_options``; unknown ones
    raise. Reasoning of models that think is ``additional_kwargs["reasoning_content"]`` and a
    ``reasoning`` content block.
    """

    chat_template: str | None = None
    """Jinja text in place of the model's own template."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """What else the template takes, such as ``{"enable_thinking": False}``."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several tool calls."""

    # -- what LangChain asks about ------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "chat-pagedllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = ("chat_template", "chat_template_options", "parallel_tool_calls")
        return self.identifying | {name: getattr(self, name) for name in own}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params.update(self.tracing(stop, kwargs))  # type: ignore[typeddict-item]
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # Core's own leaves out what cannot be written down, such as logits processors.
        return str(sorted(self._get_invocation_params(stop=stop, **kwargs).items(), key=str))

    def _resolve_model_profile(self) -> ModelProfile:
        profile: ModelProfile = {
            "text_inputs": True,
            "image_inputs": False,
            "audio_inputs": False,
            "video_inputs": False,
            "pdf_inputs": False,
            "text_outputs": True,
            "tool_calling": True,
            "tool_choice": True,
            "tool_call_streaming": True,
            "structured_output": True,
        }
        if self.max_model_len is not None:
            profile["max_input_tokens"] = self.max_model_len
        return profile

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's tokens in the model's own vocabulary, without special ones added."""
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def get_num_tokens_from_messages(
        self, messages: Sequence[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Return the number of tokens of the prompt that these messages and tools become."""
        formatted = None if tools is None else [convert_to_openai_tool(tool) for tool in tools]
        return len(self._ask(messages, None, {"tools": formatted}).chat.prompt_token_ids)

    # -- tools and structured output ----------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: functions, classes, tools, or descriptions of them.
            tool_choice: ``"auto"`` (also None), ``"none"``, ``"any"`` or ``"required"`` (also
                True), or the name of the tool to call.
            parallel_tool_calls: whether one answer may hold several calls; None: as the
                model object says.
            strict: refuse schemas that no grammar can hold in full.
            kwargs: other parameters of the calls.
        """
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        if tool_choice is True and len(formatted) == 1:
            tool_choice = formatted[0]["function"]["name"]
        once = {tool["function"]["name"]: tool for tool in formatted}
        ToolRequest.of(once.values(), tool_choice)  # wrong ones are reported here and now
        options = {"tools": formatted, "tool_choice": tool_choice} | kwargs
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        tools: Sequence[Tool] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Hold the answer to a schema, and parse it.

        The answer satisfies the schema whatever the model is, unless ``max_tokens`` cuts it
        off, which is an OutputParserException.

        Args:
            schema: a Pydantic class, a TypedDict, a JSON schema or a function's description;
                None, with ``json_mode`` alone, for any JSON object.
            method: ``json_schema`` holds the text to the schema; ``function_calling`` has the
                model call a tool of that schema, which also shows it the descriptions;
                ``json_mode`` is ``json_schema`` without the need of one.
            include_raw: give ``{"raw", "parsed", "parsing_error"}`` instead.
            strict: with ``function_calling``, refuse schemas that no grammar can hold in full,
                which the other methods always do.
            tools: cannot be combined with an answer that is held to a schema.
            kwargs: other parameters of the calls.
        """
        if method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, not {method!r}")
        if schema is None and method != "json_mode":
            raise ValueError(f"schema must be given with method={method!r}")
        if tools:
            raise ValueError("tools: an answer that is held to a schema cannot call tools")
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        format_kwargs = {"method": method} | ({} if strict is None else {"strict": strict})
        shown = {"kwargs": format_kwargs, "schema": schema}
        if method == "function_calling":
            described: Any = schema
            name = convert_to_openai_tool(described)["function"]["name"]
            llm = self.bind_tools(
                [described],
                tool_choice=name,
                strict=strict,
                parallel_tool_calls=False,
                ls_structured_output_format=shown,
                **kwargs,
            )
            parser: Runnable[Any, Any] = (
                PydanticToolsParser(tools=[described], first_tool_only=True)
                if is_class
                else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            )
        else:
            spec: dict[str, Any] = {"json_object": True}
            if schema is not None:
                spec = {"json_schema": convert_to_json_schema(schema)}
            llm = self.bind(structured_output=spec, ls_structured_output_format=shown, **kwargs)
            parser = JsonOutputParser()
            if is_class:
                as_class: Any = schema
                parser = PydanticOutputParser(pydantic_object=as_class)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # -- asking the engine --------------------------------------------------------------------

    def _ask(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: dict[str, Any]
    ) -> Asked:
        """Check one call and render its prompt. Raises ValidationError."""
        options = dict(kwargs)
        response_format = options.pop("response_format", None)
        if response_format is not None:
            options["structured_output"] = spec_of(response_format)
        params = self.call_params(stop, options)
        template = options.pop("chat_template", None) or self.chat_template
        parallel = options.pop("parallel_tool_calls", None)
        tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
        extra = {**self.chat_template_options, **options.pop("chat_template_options", {})}
        self.refuse(options, also=(*_CHAT, "chat_template_options"))
        chat = self.engine.prepare_chat(
            to_template(messages),
            params,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls if parallel is None else parallel,
            chat_template=template,
            **extra,
        )
        return Asked(chat, self.handle)

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        # A handler that wants tokens gets the whole answers when there are several.
        if kwargs.get("n", self.n) > 1 and not kwargs.get("stream"):
            return False
        return super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = self._ask(messages, stop, kwargs)
        with asked.stream() as stream, self.deadline(self.engine, [stream]):
            output = list(stream)[-1]
        return chat_result(self.model_id, asked.chat, output)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = await asyncio.to_thread(self._ask, messages, stop, kwargs)
        stream = await asked.astream()
        try:
            async with asyncio.timeout(self.timeout):
                output = [output async for output in stream][-1]
        finally:
            await stream.aclose()
        return chat_result(self.model_id, asked.chat, output)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked = self._one(self._ask(messages, stop, kwargs))
        parser = asked.chat.parser()
        with asked.stream() as stream, self.deadline(self.engine, [stream]):
            for output in stream:
                for chunk in chat_chunks(self.model_id, parser, output):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        asked = self._one(await asyncio.to_thread(self._ask, messages, stop, kwargs))
        parser = asked.chat.parser()
        stream = await asked.astream()
        try:
            async with asyncio.timeout(self.timeout):
                async for output in stream:
                    for chunk in chat_chunks(self.model_id, parser, output):
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        finally:
            await stream.aclose()

    @staticmethod
    def _one(asked: Asked) -> Asked:
        if asked.chat.params.n > 1:
            raise ValidationError(f"n={asked.chat.params.n}: a stream has one answer", "n")
        return asked

    # -- many conversations at once ------------------------------------------------------------

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations as one batch; otherwise as LangChain's own."""
        with self._together(messages, stop, kwargs):
            return super().generate(messages, stop, *args, **kwargs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer conversations as one batch; otherwise as LangChain's own."""
        async with await asyncio.to_thread(self._together, messages, stop, kwargs):
            return await super().agenerate(messages, stop, *args, **kwargs)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Answer inputs as one batch, or ``max_concurrency`` of them at a time."""
        with self._together_inputs(inputs, config, kwargs):
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Answer inputs as one batch, or ``max_concurrency`` of them at a time."""
        async with await asyncio.to_thread(self._together_inputs, inputs, config, kwargs):
            return await super().abatch(
                inputs, config, return_exceptions=return_exceptions, **kwargs
            )

    def _together_inputs(
        self, inputs: Sequence[LanguageModelInput], config: Any, kwargs: Any
    ) -> Together:
        first = config[0] if isinstance(config, list) and config else config or {}
        if first.get("max_concurrency") is not None:
            return Together([])
        messages = []
        for each in inputs:
            try:
                messages.append(self._convert_input(each).to_messages())
            except Exception:  # noqa: BLE001 - raised again when this input has its turn
                continue
        return self._together(messages, kwargs.get("stop"), kwargs)

    def _together(
        self, conversations: Sequence[Sequence[BaseMessage]], stop: Any, kwargs: dict[str, Any]
    ) -> Together:
        """Prepare conversations that are about to be asked one by one.

        A rate limiter wants each to wait for its turn. What is wrong with one of them is
        reported when its turn has come.
        """
        if len(conversations) < 2 or self.rate_limiter is not None:
            return Together([])
        own = (*SAMPLING, *_CHAT, "chat_template_options", "model")
        options = {name: value for name, value in kwargs.items() if name in own and name != "stop"}
        asked = []
        for messages in conversations:
            try:
                asked.append(self._ask(messages, stop, options))
            except (ValidationError, EngineError):
                continue
        return Together(asked)
