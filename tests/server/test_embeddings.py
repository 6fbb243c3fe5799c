"""``/v1/embeddings``: its clients, its forms, and what it refuses."""

from __future__ import annotations

import base64
import struct

import openai
import pytest
import torch
from langchain_openai import OpenAIEmbeddings
from transformers import AutoModel, AutoTokenizer

from server_process import wait_until

TEXTS = ["Once upon a time there was a fox.", "Hello", "The sum of two and three is " * 12]


@pytest.fixture(scope="module")
def oracle(tiny_with_text):
    """What a text's vector is, by transformers: its states' mean or the last, of length 1."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_with_text)
    model = AutoModel.from_pretrained(tiny_with_text, dtype=torch.float32).eval()

    def embed(text, pooling="mean"):
        ids = tokenizer(text)["input_ids"] if isinstance(text, str) else text
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        vector = states.mean(0) if pooling == "mean" else states[-1]
        return (vector / vector.norm()).tolist(), len(ids)

    return embed


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("form", ["float", "base64", openai.NOT_GIVEN])
def test_openai_client(client, oracle, form):
    found = client.embeddings.create(model="any", input=TEXTS, encoding_format=form)
    assert [each.index for each in found.data] == [0, 1, 2]
    expected = [oracle(text) for text in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(n for _, n in expected)
    for each, (vector, _) in zip(found.data, expected, strict=True):
        values = each.embedding
        if isinstance(values, str):  # the client decodes it where it chose it itself
            raw = base64.b64decode(values)
            values = struct.unpack(f"<{len(raw) // 4}f", raw)
        assert list(values) == pytest.approx(vector, abs=1e-4)


def test_every_form_of_input(client, oracle):
    ids = [6403, 1980, 253, 655]
    for given, each in ((TEXTS[0], TEXTS[0]), ([TEXTS[0]], TEXTS[0]), (ids, ids), ([ids], ids)):
        found = client.embeddings.create(model="any", input=given, encoding_format="float")
        vector, tokens = oracle(each)
        assert [e.embedding for e in found.data] == [pytest.approx(vector, abs=1e-4)]
        assert found.usage.prompt_tokens == tokens


def test_pooling_and_dimensions(client, oracle, http):
    last = client.embeddings.create(
        model="any", input=TEXTS[0], encoding_format="float", extra_body={"pooling": "last"}
    )
    vector, _ = oracle(TEXTS[0], "last")
    assert last.data[0].embedding == pytest.approx(vector, abs=1e-4)
    short = client.embeddings.create(
        model="any", input=TEXTS[0], encoding_format="float", dimensions=8
    )
    kept = torch.tensor(oracle(TEXTS[0])[0][:8])
    assert short.data[0].embedding == pytest.approx((kept / kept.norm()).tolist(), abs=1e-4)
    answer = http.post("/v1/embeddings", json={"input": "A", "dimensions": 33})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "dimensions"
    assert "32" in answer.json()["error"]["message"]


def test_langchain_and_more_texts_than_a_request_may_have_prompts(server, oracle):
    # Without this it sends the token ids of another model's tokenizer.
    made = OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="any", check_embedding_ctx_length=False
    )
    texts = [f"Text number {index}" for index in range(150)]
    vectors = made.embed_documents(texts)
    assert len(vectors) == 150
    for index in (0, 70, 149):
        assert vectors[index] == pytest.approx(oracle(texts[index])[0], abs=1e-4)
    assert made.embed_query("Hello") == pytest.approx(oracle("Hello")[0], abs=1e-4)
    wait_until(server.is_idle)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["A", ""]}, "input"),
        ({"input": [1, 10**6]}, "input"),
        ({"input": ["A"] * 2049}, "input"),
        ({"input": "word " * 600}, "input"),
        ({"input": "A", "pooling": "max"}, "pooling"),
        ({"input": "A", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "A", "dimensions": 0}, "dimensions"),
        ({"input": "A", "dimension": 3}, "dimension"),
    ],
)
def test_what_is_refused_is_named(http, body, param):
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_the_text_at_fault_is_named(http, server):
    answer = http.post("/v1/embeddings", json={"input": ["A", "word " * 600, "B"]})
    assert answer.json()["error"]["message"].startswith("input[1]: ")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    wait_until(server.is_idle)
