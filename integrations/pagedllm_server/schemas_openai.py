"""What OpenAI's routes take, with vLLM's well-known additions.

Owner: the server integration. Invariants: unknown fields are refused; a field that asks for
nothing this server lacks is accepted with the values that say so, and refused with others
(:data:`ONLY`); everything else that is accepted has an effect.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from pagedllm_server.schemas_tgi import Many, Strict

Name = str | None
MOST_BIASES = 10_000


def _few_biases(value: Any) -> Any:
    """Before each is looked at: a report of each takes time."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"there are {len(value)} tokens; no more than {MOST_BIASES} may be")
    return value


class StreamOptions(Strict):
    """What a stream has beside the answer."""

    include_usage: bool = Field(False, description="end with a chunk that counts tokens")
    continuous_usage_stats: bool = Field(False, description="count tokens in every chunk")
    include_obfuscation: Literal[False] | None = None


class Message(Strict):
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Many[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Clients send a former answer back as it was, with what was empty in it.
    refusal: str | None = None
    annotations: Many[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        # OpenAI's newer name for the system's role, which templates do not know.
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": self.content}
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        if self.reasoning is not None and self.reasoning_content is None:
            found["reasoning_content"] = self.reasoning
        return found


class Sampling(Strict):
    """What all of OpenAI's generating routes share."""

    model: Name = Field(None, description="the model's name; see /v1/models")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stream: bool | None = False
    user: str | None = Field(None, description="noted in the log")
    # vLLM's additions
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, description="share no cached prefix outside")
    timeout: float | None = Field(None, gt=0, le=1e7, description="seconds after which to stop")
    ttft_target: float | None = Field(
        None, gt=0, le=1e7, description="seconds to the first token (the deadline policy)"
    )
    e2e_target: float | None = Field(
        None, gt=0, le=1e7, description="seconds to the whole answer (the deadline policy)"
    )

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {}
    NAMES: ClassVar[dict[str, str]] = {}
    """The engine's names for parts of the request, and the request's; empty: it has no such."""
    INSTEAD: ClassVar[dict[str, str]] = {}
    """The same, where the request has two fields for one thing and gives this one."""


class Generating(Sampling):
    """What chats and completions share."""

    n: int | None = Field(None, ge=1, le=2**31 - 1)
    stop: str | Many[str] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases)] | None = None
    stream_options: StreamOptions | None = None
    # vLLM's additions
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    stop_token_ids: Many[int] | None = Field(None, max_length=256)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    bad_words: Many[str] | None = Field(None, max_length=256)
    allowed_token_ids: Many[int] | None = Field(None, min_length=1)
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json_schema, json_object, regex, choice, grammar"
    )
    logits_processors: Many[str | dict[str, Any]] | None = Field(
        None,
        max_length=16,
        description="names of plugins' processors, each alone or as {name, options}; those that "
        "the server was started with",
    )

    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ResponseFormat(Strict):
    """What the answer must look like; OpenAI's form and TGI's."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: dict[str, Any] | None = None
    value: Any = Field(None, description="the schema or expression, as TGI's clients send it")


class ChatRequest(Generating):
    """A conversation to answer."""

    messages: Many[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Many[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    tool_prompt: str | None = Field(None, description="TGI's: said before the tools")
    guideline: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="given to the chat template")
    chat_template: str | None = Field(
        None, description="refused: a template is a program, and the server's own to choose"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: Many[Any] | None = None
    function_call: Any = None
    modalities: Many[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = Field(None, description="noted; prefixes are shared anyway")
    safety_identifier: str | None = Field(None, description="noted in the log")

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "functions": (),
        "function_call": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "verbosity": (),
        "guideline": (),
        "tool_prompt": (),
    }
    """Fields that ask for what there is not here, and the values of them that do not."""
    NAMES: ClassVar[dict[str, str]] = {
        "structured_output": "response_format",
        "logprobs": "top_logprobs",
        "prompt": "messages",
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        "structured_output": "structured_outputs",
        "max_tokens": "max_completion_tokens",
    }


class CompletionRequest(Generating):
    """Prompts to continue."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: int | None = Field(16, ge=1, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=2**31 - 1)
    suffix: str | None = None
    response_format: ResponseFormat | None = None

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}
    NAMES: ClassVar[dict[str, str]] = {
        "structured_output": "response_format",
        "prompt_logprobs": "logprobs",
    }
    INSTEAD: ClassVar[dict[str, str]] = {"structured_output": "structured_outputs", "n": "best_of"}


class ResponsesRequest(Sampling):
    """OpenAI's newer form of a conversation."""

    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    tools: Many[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    reasoning: dict[str, Any] | None = None
    include: Many[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "max_tool_calls": (),
        "include": ([],),
        "stream_options": ({}, {"include_obfuscation": False}),
        "store": (False,),
    }
    NAMES: ClassVar[dict[str, str]] = {
        "structured_output": "text.format",
        "max_tokens": "max_output_tokens",
        "prompt": "input",
        "messages": "input",
        "truncate_prompt_tokens": "",
    }


class EmbeddingsRequest(Strict):
    """Texts to embed."""

    model: Name = None
    input: str | Many[str] | Many[int] | Many[Many[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, ge=1, description="entries to keep of each vector, before it is scaled to length 1"
    )
    user: str | None = None
    pooling: Literal["mean", "last"] | None = Field(
        None, description="how a text's states become one vector; else --embedding-pooling"
    )
    timeout: float | None = Field(None, gt=0, le=1e7, description="seconds after which to stop")
    cache_salt: str | None = Field(None, min_length=1, description="share no cached prefix outside")
