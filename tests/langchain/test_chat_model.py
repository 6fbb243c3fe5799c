"""ChatPagedLLM: batches, tools, structured output, streams, messages, usage."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.tools import tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from in_step import slowly
from pagedllm import ChatPagedLLM, PagedLLM

SEED = 20


class Pet(BaseModel):
    """A pet."""

    kind: str = Field(description="which animal", max_length=6)
    legs: int = Field(description="how many", ge=0, le=8)


class Place(TypedDict):
    """A place."""

    floor: Annotated[int, ..., "which floor"]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


SMALL = {
    "name": "small",
    "description": "Takes a digit.",
    "parameters": {
        "type": "object",
        "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["digit"],
    },
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
STRICT = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


@pytest.fixture
def chat(settings):
    return ChatPagedLLM(**settings, temperature=0)


def prompt_of(chat, messages, **kwargs):
    """The text that the model sees."""
    ids = chat._ask(messages, None, kwargs).chat.prompt_token_ids
    return chat.engine.tokenizer.decode(ids)


def whole(chunks):
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


class TestBatches:
    @pytest.mark.parametrize("way", ["batch", "abatch", "generate", "agenerate"])
    def test_64_conversations_are_one_batch_in_the_engine(self, chat, way):
        prompts = [f"Number {i}?" for i in range(64)]
        messages = [[HumanMessage(prompt)] for prompt in prompts]
        before = chat.engine.stats()
        match way:
            case "batch":
                contents = [m.content for m in chat.batch(prompts)]
            case "abatch":
                contents = [m.content for m in asyncio.run(chat.abatch(prompts))]
            case "generate":
                contents = [g[0].text for g in chat.generate(messages).generations]
            case "agenerate":
                result = asyncio.run(chat.agenerate(messages))
                contents = [g[0].text for g in result.generations]
        after = chat.engine.stats()
        assert after.requests - before.requests == 64
        # 64 prompts of about 35 tokens fill two steps; then 12 tokens each, together. On a busy
        # machine the engine may begin before the last ones are there.
        assert after.steps - before.steps <= 5 * 12
        assert contents[3] == chat.invoke(prompts[3]).content
        assert len(contents) == 64

    def test_a_chain_batches_too(self, chat):
        chain = ChatPromptTemplate.from_template("About {thing}") | chat | StrOutputParser()
        before = chat.engine.stats().steps
        texts = chain.batch([{"thing": f"number {i}"} for i in range(32)])
        assert chat.engine.stats().steps - before <= 5 * 12
        assert texts[5] == chain.invoke({"thing": "number 5"})

    def test_max_concurrency_is_respected(self, chat):
        before = chat.engine.stats().steps
        chat.batch(["a", "b", "c"], config={"max_concurrency": 1})
        assert chat.engine.stats().steps - before >= 3 * 12

    def test_a_bad_conversation_fails_alone_with_return_exceptions(self, chat):
        bad = [HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])]
        one, two, three = chat.batch(["x", bad, "y"], return_exceptions=True)
        assert isinstance(one, AIMessage)
        assert isinstance(two, ValueError)
        assert "image_url" in str(two)
        assert isinstance(three, AIMessage)
        with pytest.raises(ValueError, match="image_url"):
            chat.batch(["x", bad, "y"])
        assert chat.engine.stats().running == 0

    def test_equal_conversations_get_an_answer_each(self, settings):
        chat = ChatPagedLLM(**settings)
        before = chat.engine.stats().requests
        answers = chat.batch(["Hello"] * 6)
        assert chat.engine.stats().requests - before == 6
        assert len({answer.content for answer in answers}) > 1

    def test_what_a_cache_knows_is_not_asked_for_in_vain(self, settings):
        chat = ChatPagedLLM(**settings, temperature=0, cache=InMemoryCache())
        known = chat.invoke("Hello").content
        one, two = chat.batch(["Hello", "Good bye"])
        assert one.content == known
        assert two.content == chat.invoke("Good bye").content
        assert chat.engine.stats().running == 0

    def test_a_rate_limiter_holds_each_call_back(self, settings):
        import time

        limiter = InMemoryRateLimiter(requests_per_second=10, max_bucket_size=1)
        chat = ChatPagedLLM(**settings, rate_limiter=limiter)
        started = time.monotonic()
        chat.batch(["a", "b", "c"])
        assert time.monotonic() - started >= 0.2


class TestStreams:
    @pytest.fixture
    def chat(self, settings):
        # Drawn, not greedy: a random model's likeliest token may be no text at all.
        return ChatPagedLLM(**{**settings, "max_tokens": 48}, seed=SEED, ignore_eos=True)

    def test_chunks_come_singly_and_add_up_to_the_message(self, chat):
        chunks = list(chat.stream("Once upon", logits_processors=[slowly]))
        message = chat.invoke("Once upon")
        assert len(chunks) > 2
        total = whole(chunks)
        assert total.content == message.content
        assert total.response_metadata == message.response_metadata
        assert total.usage_metadata["output_tokens"] == message.usage_metadata["output_tokens"]
        assert [c.chunk_position for c in chunks].count("last") == 1
        assert chunks[-1].chunk_position == "last"
        assert sum(c.usage_metadata is not None for c in chunks) == 1
        assert sum("model_name" in c.response_metadata for c in chunks) == 1

    def test_async_chunks_too(self, chat):
        async def run():
            stream = chat.astream("Once upon", logits_processors=[slowly])
            return [chunk async for chunk in stream]

        chunks = asyncio.run(run())
        assert len(chunks) > 2
        assert whole(chunks).content == chat.invoke("Once upon").content

    def test_an_answer_without_text_is_still_a_stream(self, chat):
        stop = [chat.invoke("Once upon").content[:2]]
        chunks = list(chat.stream("Once upon", stop=stop))
        assert whole(chunks).content == ""
        assert whole(chunks).response_metadata["finish_reason"] == "stop"
        assert chat.invoke("Once upon", stop=stop).content == ""

    def test_logprobs_stream_as_they_come(self, chat):
        total = whole(chat.stream("Once upon", logprobs=1))
        message = chat.invoke("Once upon", logprobs=1)
        tokens = [e["token_id"] for e in total.response_metadata["logprobs"]["content"]]
        assert len(tokens) == 48
        assert tokens == [e["token_id"] for e in message.response_metadata["logprobs"]["content"]]

    def test_handlers_get_tokens_from_invoke_with_streaming(self, settings):
        class Tokens(BaseCallbackHandler):
            seen: list[str] = []  # noqa: RUF012

            def on_llm_new_token(self, token, **kwargs):
                self.seen.append(token)

        handler = Tokens()
        chat = ChatPagedLLM(
            **{**settings, "max_tokens": 48},
            seed=SEED,
            streaming=True,
            logits_processors=[slowly],
        )
        message = chat.invoke("Once upon", config={"callbacks": [handler]})
        assert "".join(handler.seen) == message.content
        assert len(handler.seen) > 2

    def test_events_stream(self, chat):
        async def run():
            kinds, text = set(), ""
            async for event in chat.astream_events("Once upon", version="v2"):
                kinds.add(event["event"])
                if event["event"] == "on_chat_model_stream":
                    text += event["data"]["chunk"].content
            return kinds, text

        kinds, text = asyncio.run(run())
        assert {"on_chat_model_start", "on_chat_model_stream", "on_chat_model_end"} <= kinds
        assert text == chat.invoke("Once upon").content

    def test_streaming_can_be_disabled(self, settings):
        chat = ChatPagedLLM(**settings, temperature=0, disable_streaming=True)
        assert len(list(chat.stream("Once upon"))) == 1


class TestTools:
    def check(self, message, names=("small",)):
        assert message.tool_calls
        for call in message.tool_calls:
            assert call["name"] in names
            if call["name"] == "small":
                assert call["args"]["digit"] in range(10)
            assert call["id"]
        assert not message.invalid_tool_calls
        assert message.response_metadata["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize(
        "choice", ["any", "required", True, "small", {"function": {"name": "small"}}], ids=str
    )
    def test_a_call_that_must_be_is_made(self, chat, choice):
        bound = chat.bind_tools(
            [SMALL], tool_choice=choice, parallel_tool_calls=False, max_tokens=120
        )
        self.check(bound.invoke("Hello"))
        self.check(asyncio.run(bound.ainvoke("Hello")))
        self.check(whole(bound.stream("Hello")))
        for message in bound.batch(["a", "b", "c"]):
            self.check(message)

    def test_streamed_calls_come_in_chunks_that_add_up(self, chat):
        bound = chat.bind_tools(
            [SMALL], tool_choice="small", max_tokens=120, logits_processors=[slowly]
        )
        chunks = list(bound.stream("Hello"))
        pieces = [c.tool_call_chunks[0] for c in chunks if c.tool_call_chunks]
        assert pieces[0]["name"] == "small"
        assert pieces[0]["id"]
        assert all(piece["name"] is None and piece["id"] is None for piece in pieces[1:])
        assert len(pieces) > 3
        args = json.loads("".join(piece["args"] for piece in pieces))
        assert args == whole(chunks).tool_calls[0]["args"]

    def test_parallel_calls(self, settings):
        chat = ChatPagedLLM(**{**settings, "max_tokens": 300}, seed=1)
        bound = chat.bind_tools([SMALL], tool_choice="any")
        for seed in range(100):  # a third of the answers have two calls
            message = bound.invoke("Hello", seed=seed)
            if message.response_metadata["finish_reason"] == "tool_calls":
                self.check(message)
            if len(message.tool_calls) > 1:
                return
        pytest.fail("no answer of a hundred had two calls")

    def test_none_and_auto(self, chat):
        assert "small" not in prompt_of(
            chat, [HumanMessage("x")], tools=[SMALL], tool_choice="none"
        )
        assert "small" in prompt_of(chat, [HumanMessage("x")], tools=[SMALL], tool_choice="auto")
        for choice in ("none", "auto", None):
            message = chat.bind_tools([SMALL], tool_choice=choice).invoke("Hello")
            assert not message.tool_calls  # random weights hardly begin a call

    def test_every_kind_of_tool_reaches_the_template(self, chat):
        def plain(x: int) -> int:
            """A plain function."""
            return x

        template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + CHATML
        bound = chat.bind_tools([add, Pet, SMALL, plain])
        text = prompt_of(chat, [HumanMessage("x")], chat_template=template, **bound.kwargs)
        assert text.startswith("[add][Pet][small][plain]")

    def test_a_call_cut_off_is_reported_as_it_is(self, chat):
        bound = chat.bind_tools([shout], tool_choice="shout", max_tokens=18)
        message = bound.invoke("Hello")
        assert message.response_metadata["finish_reason"] == "length"
        assert message.tool_calls or message.invalid_tool_calls or message.content

    def test_a_wrong_choice_raises_when_binding(self, chat):
        with pytest.raises(ValueError, match="did you mean 'add'"):
            chat.bind_tools([add, shout], tool_choice="adds")

    def test_calls_and_results_of_earlier_turns_reach_the_model(self, chat):
        messages = [
            HumanMessage("1 + 2?"),
            AIMessage(
                [{"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "1"}],
                tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "abc123456"}],
            ),
            ToolMessage("three", tool_call_id="abc123456", name="add"),
        ]
        text = prompt_of(chat, messages, tools=[SMALL])
        for part in ("Let me see.", '"add"', '{"a": 1, "b": 2}', "three"):
            assert part in text
        template = (
            CHATML
            + "{% for m in messages %}{% for c in m.tool_calls or [] %}"
            + (
                "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.b }}>{% endfor %}"
                "{{ m.tool_call_id }}{% endfor %}"
            )
        )
        text = prompt_of(chat, messages, chat_template=template)
        assert text.endswith("<abc123456 add 2>abc123456")


class TestStructuredOutput:
    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_every_method_holds_for_a_model_of_random_weights(self, settings, method, temperature):
        chat = ChatPagedLLM(**{**settings, "max_tokens": 200}, temperature=temperature)
        structured = chat.with_structured_output(Pet, method=method)
        pets = [structured.invoke("A pet!"), *structured.batch(["One more!", "And another!"])]
        pets.append(asyncio.run(structured.ainvoke("And now!")))
        pets.append(list(structured.stream("Stream!"))[-1])
        for pet in pets:
            assert isinstance(pet, Pet)
            assert 0 <= pet.legs <= 8

    def test_schemas_of_every_kind(self, settings):
        chat = ChatPagedLLM(**{**settings, "max_tokens": 200}, logit_bias=None)
        for schema in (Pet.model_json_schema(), SMALL):
            found = chat.with_structured_output(schema, include_raw=True).invoke("x")
            assert isinstance(found["parsed"], dict)
        raw = chat.with_structured_output(Place, include_raw=True).invoke("x")["raw"].content
        assert raw.lstrip().startswith("{")
        assert '"floor"' in raw

    def test_what_is_cut_off_is_a_parser_error_or_reported_with_the_raw_message(self, chat):
        with pytest.raises(OutputParserException):
            chat.with_structured_output(Pet, max_tokens=3).invoke("x")
        found = chat.with_structured_output(Pet, include_raw=True, max_tokens=3).invoke("x")
        assert found["parsed"] is None
        assert found["parsing_error"] is not None
        assert found["raw"].response_metadata["finish_reason"] == "length"

    def test_the_format_is_told_to_tracers(self, settings):
        seen = []

        class Handler(BaseCallbackHandler):
            def on_chat_model_start(self, serialized, messages, *, options=None, **kwargs):
                seen.append(options)

        chat = ChatPagedLLM(**{**settings, "max_tokens": 200})
        structured = chat.with_structured_output(Pet)
        structured.invoke("x", config={"callbacks": [Handler()]})
        structured.batch(["x", "y"], config={"callbacks": [Handler()]})
        assert len(seen) == 3
        assert all(o["ls_structured_output_format"]["schema"]["title"] == "Pet" for o in seen)

    def test_response_format_as_openai_has_it(self, settings):
        chat = ChatPagedLLM(**{**settings, "max_tokens": 200})
        wanted = {"type": "json_schema", "json_schema": {"schema": Pet.model_json_schema()}}
        assert Pet.model_validate_json(chat.invoke("x", response_format=wanted).content)
        with pytest.raises(ValueError, match="response_format"):
            chat.invoke("x", response_format="json")

    def test_wrong_uses_are_refused(self, chat):
        with pytest.raises(ValueError, match="method"):
            chat.with_structured_output(Pet, method="magic")
        with pytest.raises(ValueError, match="schema"):
            chat.with_structured_output()
        with pytest.raises(ValueError, match="no_such"):
            chat.with_structured_output(Pet, no_such=1).invoke("x")


class TestMessages:
    def test_two_messages_of_one_role_are_joined_for_strict_templates(self, chat):
        messages = [
            SystemMessage("One."),
            SystemMessage("Two."),
            HumanMessage("Three."),
            HumanMessage("Four."),
            AIMessage("Five."),
            AIMessage("Six."),
            HumanMessage([{"type": "text", "text": "Seven."}, "Eight."]),
        ]
        text = prompt_of(chat, messages, chat_template=STRICT)
        assert "<|im_start|>system\nOne.\n\nTwo.<|im_end|>" in text
        assert "<|im_start|>user\nThree.\n\nFour.<|im_end|>" in text
        assert "<|im_start|>assistant\nFive.\n\nSix.<|im_end|>" in text
        assert "Seven.\nEight." in text

    def test_a_tool_result_and_a_question_are_joined_too(self, chat):
        messages = [
            HumanMessage("1 + 2?"),
            AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "1"}]),
            ToolMessage("3", tool_call_id="1"),
            HumanMessage("And now?"),
        ]
        text = prompt_of(chat, messages, chat_template=STRICT)
        assert text.count("<|im_start|>user") == 2
        assert "And now?" in text

    def test_what_is_no_text_is_refused_by_name(self, chat):
        with pytest.raises(ValueError, match=r"messages\[0\].*'audio'"):
            chat.invoke([HumanMessage([{"type": "audio", "base64": ""}])])

    def test_reasoning_is_apart_from_content(self, settings):
        closing = "</think>"
        chat = ChatPagedLLM(**{**settings, "max_tokens": 40}, chat_template=CHATML + "<think>\n")
        forced = chat.get_token_ids("hm" + closing + "yes")
        start = len(chat._ask([HumanMessage("x")], None, {}).chat.prompt_token_ids)

        def force(token_ids, logits):
            place = len(token_ids) - start
            logits[forced[place] if place < len(forced) else 2] = float("inf")
            return logits

        message = chat.invoke("x", logits_processors=[force])
        total = whole(chat.stream("x", logits_processors=[force]))
        for found in (message, total):
            assert found.content == "yes"
            assert found.additional_kwargs["reasoning_content"] == "hm"
            assert {"type": "reasoning", "reasoning": "hm"} in [
                {key: block[key] for key in ("type", "reasoning") if key in block}
                for block in found.content_blocks
            ]

    def test_template_options_reach_the_template(self, chat):
        template = CHATML + "{{ mood }}"
        text = prompt_of(
            chat,
            [HumanMessage("x")],
            chat_template=template,
            chat_template_options={"mood": "cheerful"},
        )
        assert text.endswith("cheerful")


class TestReports:
    def test_usage_counts_tokens_and_prefix_hits(self, chat):
        question = "The same long beginning, over and over again, and once more. " * 3
        chat.invoke(question)
        usage = chat.invoke(question).usage_metadata
        tokens = chat.get_num_tokens_from_messages([HumanMessage(question)])
        assert usage["input_tokens"] == tokens
        assert usage["output_tokens"] == 12
        assert usage["total_tokens"] == tokens + 12
        assert 16 <= usage["input_token_details"]["cache_read"] < tokens
        with get_usage_metadata_callback() as callback:
            chat.batch(["a", "b"])
        (total,) = callback.usage_metadata.values()
        assert total["output_tokens"] == 24

    def test_n_answers_come_with_finish_reasons(self, settings):
        chat = ChatPagedLLM(**settings, n=3)
        (answers,) = chat.generate([[HumanMessage("x")]]).generations
        assert len({answer.text for answer in answers}) > 1
        for answer in answers:
            assert answer.message.response_metadata["finish_reason"] in ("stop", "length")
            assert answer.message.response_metadata["model_name"] == chat.model_id

    def test_tracing_profile_and_identity(self, settings):
        chat = ChatPagedLLM(**settings, stop=["x"])
        params = chat._get_ls_params()
        assert params["ls_provider"] == "pagedllm"
        assert params["ls_model_name"] == chat.model_id
        assert params["ls_stop"] == ["x"]
        assert chat.profile["tool_calling"]
        assert not chat.profile["image_inputs"]
        assert ChatPagedLLM(max_model_len=512).profile["max_input_tokens"] == 512
        assert chat._identifying_params["engine_config"] == settings["engine_config"]

    def test_serialisation_round_trips_without_the_secret(self, settings):
        chat = ChatPagedLLM(**settings, api_key="hf_secret", stop="x")
        assert chat.stop == ["x"]
        written = dumpd(chat)
        assert "hf_secret" not in json.dumps(written)
        again = load(
            written, allowed_objects=[ChatPagedLLM], valid_namespaces=["langchain_pagedllm"]
        )
        assert again._identifying_params == chat._identifying_params

    def test_a_cache_tells_settings_apart(self, settings):
        cache = InMemoryCache()
        plain = ChatPagedLLM(**settings, cache=cache, temperature=0)
        first = plain.invoke("Hello").content
        before = plain.engine.stats().requests
        assert plain.invoke("Hello").content == first
        assert plain.engine.stats().requests == before
        for change in ({"repetition_penalty": 1.8}, {"logits_processors": [lambda i, x: -x]}):
            other = ChatPagedLLM(**settings, cache=cache, temperature=0, **change)
            before = other.engine.stats().requests
            other.invoke("Hello")  # random weights: the text may well be the same
            assert other.engine.stats().requests == before + 1, change
        assert plain.invoke("Hello", structured_output={"choice": ["a"]}).content == "a"

    def test_unknown_names_raise(self, chat, settings):
        with pytest.raises(ValueError, match="did you mean 'chat_template'"):
            ChatPagedLLM(**settings, chat_templat="x")
        with pytest.raises(ValueError, match="did you mean 'tool_choice'"):
            chat.invoke("x", tool_choise="any")

    def test_it_shares_the_engine_with_the_llm(self, chat, settings):
        assert chat.engine is PagedLLM(**settings).engine

    def test_v1_output_has_blocks(self, settings):
        chat = ChatPagedLLM(**settings, temperature=0, output_version="v1")
        message = chat.invoke("Hello")
        assert message.content[0]["type"] == "text"
        total = whole(chat.stream("Hello"))
        assert isinstance(total, AIMessageChunk)
        assert total.content[0]["text"] == message.content[0]["text"]

    def test_a_timeout_aborts(self, settings):
        slow = ChatPagedLLM(**{**settings, "max_tokens": 900}, timeout=0.02, ignore_eos=True)
        with pytest.raises(TimeoutError):
            slow.invoke("x")
        with pytest.raises(TimeoutError):
            asyncio.run(slow.ainvoke("x"))
        assert slow.engine.stats().running == 0


def test_an_agent_of_langchains_own_runs_on_it(settings):
    from langchain.agents import create_agent

    chat = ChatPagedLLM(**{**settings, "max_tokens": 100}, chat_template=CHATML)
    call = chat.get_token_ids('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}')
    starts = []

    def call_once(token_ids, logits):
        """Force the first answer to be a call, and the second to end at once."""
        if not starts:
            starts.append(len(token_ids))
        place = len(token_ids) - starts[0]
        if place < len(call):
            logits[call[place]] = float("inf")
        elif len(token_ids) > starts[0] + 60:
            logits[2] = float("inf")
        return logits

    chat.logits_processors.append(call_once)
    agent = create_agent(chat, tools=[add])
    messages = agent.invoke({"messages": [HumanMessage("1 + 2?")]})["messages"]
    kinds = [type(message).__name__ for message in messages]
    assert kinds[:3] == ["HumanMessage", "AIMessage", "ToolMessage"]
    assert messages[2].content == "3"
    assert kinds[-1] == "AIMessage"
