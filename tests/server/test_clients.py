"""The clients that people have, unchanged, against a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess

import openai
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    TextGenerationError,
)
from huggingface_hub.errors import ValidationError as HubValidationError
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module", autouse=True)
def hub_client_may_connect():
    """The suite runs offline, and this client takes that for a ban of local servers, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield


@pytest.fixture(scope="module")
def hub(server):
    return InferenceClient(server.url)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# -- huggingface_hub ------------------------------------------------------------------


def test_hub_generates_text_with_and_without_details(hub):
    text = hub.text_generation("Once upon", max_new_tokens=8)
    assert isinstance(text, str)
    assert text
    whole = hub.text_generation(
        "Once upon",
        max_new_tokens=8,
        details=True,
        decoder_input_details=True,
        return_full_text=True,
        top_n_tokens=3,
    )
    assert whole.generated_text == "Once upon" + text
    assert whole.details.finish_reason == "length"
    assert whole.details.generated_tokens == len(whole.details.tokens) == 8
    assert "".join(token.text for token in whole.details.tokens) == text
    assert whole.details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in whole.details.prefill[1:])
    assert [len(tokens) for tokens in whole.details.top_tokens] == [3] * 8
    likeliest = whole.details.top_tokens[0][0]  # a dict: the client types only its first level
    assert likeliest["id"] == whole.details.tokens[0].id  # greedy


def test_hub_streams_what_it_generates(hub):
    text = hub.text_generation("Once upon", max_new_tokens=12)
    assert "".join(hub.text_generation("Once upon", max_new_tokens=12, stream=True)) == text
    pieces = list(hub.text_generation("Once upon", max_new_tokens=12, stream=True, details=True))
    assert len(pieces) == 12
    assert [piece.generated_text for piece in pieces[:-1]] == [None] * 11
    assert pieces[-1].generated_text == text
    assert pieces[-1].details.finish_reason == "length"
    assert pieces[-1].details.generated_tokens == 12


def test_hub_samples_the_same_with_the_same_seed(hub):
    first, second, other = (
        hub.text_generation("A", do_sample=True, seed=seed, max_new_tokens=10, temperature=0.9)
        for seed in (7, 7, 8)
    )
    assert first == second != other


def test_hub_gets_the_best_of_several(hub):
    whole = hub.text_generation("A", do_sample=True, best_of=3, details=True, max_new_tokens=6)
    assert len(whole.details.best_of_sequences) == 2

    def mean(tokens):
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(whole.details.tokens) >= max(
        mean(each.tokens) for each in whole.details.best_of_sequences
    )


def test_hub_stops_at_a_string_that_stays_in_the_text(hub):
    text = hub.text_generation("Once upon", max_new_tokens=30)
    stop = text[10:14]
    whole = hub.text_generation("Once upon", max_new_tokens=30, stop=[stop], details=True)
    assert whole.details.finish_reason == "stop_sequence"
    assert whole.generated_text == text[: text.index(stop) + len(stop)]
    streamed = list(hub.text_generation("Once upon", max_new_tokens=30, stop=[stop], stream=True))
    assert "".join(streamed) == whole.generated_text


@pytest.mark.parametrize("stream", [False, True])
def test_hub_raises_its_own_errors(hub, stream):
    with pytest.raises(HubValidationError, match="max_new_tokens"):
        list(hub.text_generation("A", max_new_tokens=10_000, stream=stream))
    with pytest.raises(HubValidationError, match="empty"):
        list(hub.text_generation("", stream=stream))
    with pytest.raises(HubValidationError, match="watermark"):
        list(hub.text_generation("A", watermark=True, stream=stream))


def test_hub_chats(hub):
    whole = hub.chat_completion(
        MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    [choice] = whole.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 8
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert whole.usage.completion_tokens == 8
    pieces = list(hub.chat_completion(MESSAGES, max_tokens=8, temperature=0, stream=True))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == choice.message.content
    with pytest.raises(HfHubHTTPError, match="max_tokens"):
        hub.chat_completion(MESSAGES, max_tokens=100_000)


def test_hub_is_async_too(server):
    async def ask():
        hub = AsyncInferenceClient(server.url)
        text = await hub.text_generation("Once upon", max_new_tokens=8)
        stream = await hub.text_generation("Once upon", max_new_tokens=8, stream=True)
        assert "".join([piece async for piece in stream]) == text
        chat = await hub.chat_completion(MESSAGES, max_tokens=8, temperature=0)
        pieces = await hub.chat_completion(MESSAGES, max_tokens=8, temperature=0, stream=True)
        found = [p.choices[0].delta.content or "" async for p in pieces if p.choices]
        assert "".join(found) == chat.choices[0].message.content
        with pytest.raises(TextGenerationError):
            await hub.text_generation("A", max_new_tokens=10_000)

    asyncio.run(ask())


# -- openai ---------------------------------------------------------------------------


def test_openai_lists_models(client):
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_openai_chats_several_answers_with_logprobs(client):
    # A random model may draw special tokens, whose names are among the bytes in any case.
    body = {"ignore_eos": True, "skip_special_tokens": False}
    whole = client.chat.completions.create(
        model="any", messages=MESSAGES, n=3, max_tokens=6, seed=5, logprobs=True, top_logprobs=2,
        extra_body=body,
    )  # fmt: skip
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert choice.finish_reason == "length"
        text = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert text.decode(errors="replace") == choice.message.content or "\ufffd" in str(text)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    again = client.chat.completions.create(
        model="any", messages=MESSAGES, n=3, max_tokens=6, seed=5, extra_body=body
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in whole.choices]


def test_openai_streams_with_usage(client):
    options = {"model": "any", "messages": MESSAGES, "max_tokens": 9, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usages = ["", ""], [None, None], []
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        assert chunk.object == "chat.completion.chunk"
        if not chunk.choices:
            usages.append(chunk.usage)
            continue
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    [usage] = usages
    assert usage.completion_tokens == 18
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the same prompt came before


def test_openai_completes_many_prompts(client):
    options = {"model": "any", "prompt": ["One", "Two"], "max_tokens": 5, "temperature": 0, "n": 2}
    whole = client.completions.create(**options, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text != whole.choices[2].text
    assert [len(choice.logprobs.tokens) for choice in whole.choices] == [5] * 4
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    echoed = client.completions.create(
        model="any", prompt="One", max_tokens=5, temperature=0, echo=True, logprobs=0
    )
    assert echoed.choices[0].text == "One" + whole.choices[0].text
    tokens = echoed.choices[0].logprobs
    for text, offset in zip(tokens.tokens, tokens.text_offset, strict=True):
        assert echoed.choices[0].text[offset:].startswith(text)


def test_openai_stops_without_the_string(client):
    options = {"model": "any", "prompt": "One", "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[12:15]
    [choice] = client.completions.create(**options, stop=stop).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_openai_errors_name_the_field(client):
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        client.chat.completions.create(model="any", messages=MESSAGES, modalities=["audio"])
    assert wrong.value.param == "modalities"
    assert wrong.value.code == "unsupported_parameter"
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        client.completions.create(model="any", prompt="A", extra_body={"temprature": 1})
    assert "did you mean 'temperature'" in wrong.value.message
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=100_000)
    assert wrong.value.code == "context_length_exceeded"


def test_openai_is_async_too(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            options = {"model": "any", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(**options, stream=True)
            found = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(found) == whole.choices[0].message.content

    asyncio.run(ask())


# -- LangChain ------------------------------------------------------------------------


def test_langchain_openai(server):
    options = {"base_url": f"{server.url}/v1", "api_key": "x", "model": "any", "temperature": 0}
    chat = ChatOpenAI(**options, max_tokens=8)
    whole = chat.invoke("Say something.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 8
    assert "".join(piece.content for piece in chat.stream("Say something.")) == whole.content
    assert [m.content for m in chat.batch(["Say something."] * 2)] == [whole.content] * 2
    text = OpenAI(**options, max_tokens=8)
    assert text.invoke("One") == "".join(text.stream("One"))


def test_langchain_huggingface(server):
    llm = HuggingFaceEndpoint(
        endpoint_url=server.url, max_new_tokens=8, seed=3, huggingfacehub_api_token="x",
        temperature=0.02,
    )  # fmt: skip
    # It samples, by defaults of its own; so cold that it draws words, not the end token.
    whole = llm.invoke("Once upon")
    assert whole
    assert "".join(llm.stream("Once upon")) == whole
    assert asyncio.run(llm.ainvoke("Once upon")) == whole
    stop = whole[3:6]
    assert llm.invoke("Once upon", stop=[stop]) == whole[: whole.index(stop)]


# -- curl -----------------------------------------------------------------------------


def test_curl_sees_each_event_when_it_comes(server):
    # More than a pipe holds, so that curl cannot have ended before it is read.
    body = {"inputs": "Once upon", "parameters": {"max_new_tokens": 450, "top_n_tokens": 5}}
    curl = subprocess.Popen(
        ["curl", "-sN", f"{server.url}/generate_stream"]  # noqa: RUF005 - in two lines
        + ["-H", "content-type: application/json", "-d", json.dumps(body)],
        stdout=subprocess.PIPE,
        text=True,
    )
    first = curl.stdout.readline()
    assert json.loads(first.removeprefix("data:"))["index"] == 1
    assert curl.poll() is None  # and the rest is still to come
    rest = [line for line in curl.stdout if line.strip()]
    assert curl.wait() == 0
    assert len(rest) == 449
    assert json.loads(rest[-1].removeprefix("data:"))["details"]["generated_tokens"] == 450
