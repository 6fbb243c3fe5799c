"""Constraints hold for a model of random weights, which would satisfy none by itself."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

import preloaded
from in_step import slowly
from pagedllm import LLM, EngineError, SamplingParams, ValidationError
from pagedllm.structured import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
        "address": {"$ref": "#/$defs/Address"},
    },
    "required": ["name", "age", "pets", "address"],
    "additionalProperties": False,
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
ARITHMETIC = """
start: expression
expression: term (("+" | "-") term)~0..2
term: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[0-9]{1,2}/
"""


@pytest.fixture(scope="module")
def llm(tiny_text_model):
    with LLM(str(tiny_text_model), dtype="float32", kv_cache_memory="64MiB") as llm:
        yield llm


def params(seed=None, **fields):
    seed = random.randrange(2**31) if seed is None else seed
    print("seed:", seed)
    return SamplingParams(seed=seed, **{"max_tokens": 200, **fields})


def is_person(text):
    value = json.loads(text)
    assert set(value) == {"name", "age", "pets", "address"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 120
    assert set(value["pets"]) <= {"cat", "dog"}
    assert len(value["pets"]) <= 2
    assert re.fullmatch("[0-9]{5}", value["address"]["zip"])
    return True


CASES = {
    "json_schema": (StructuredOutput(json_schema=PERSON), is_person),
    "regex": (
        StructuredOutput(regex=r"[0-9]{4}-(0[1-9]|1[0-2])( [a-zé]{2,5}){1,3}"),
        lambda text: re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])( [a-zé]{2,5}){1,3}", text),
    ),
    "choice": (
        StructuredOutput(choice=["Zürich", 'a "quoted" one', "back\\slash", "line\nbreak"]),
        lambda text: text in ("Zürich", 'a "quoted" one', "back\\slash", "line\nbreak"),
    ),
    "grammar": (
        StructuredOutput(grammar=ARITHMETIC),
        lambda text: eval(_decimal(text)) <= 3 * 99 * 99,
    ),
}


def _decimal(text):
    return re.sub(r"\d+", lambda found: str(int(found[0])), text)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_whole_answer_keeps_to_the_constraint(llm, kind, temperature):
    spec, holds = CASES[kind]
    outputs = llm.generate(
        ["Once upon", "x"], params(structured_output=spec, temperature=temperature)
    )
    for output in outputs:
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", answer.text
        assert holds(answer.text), answer.text


def test_any_json_object_is_one_or_the_beginning_of_one(llm):
    spec = {"json_object": True}
    for output in llm.generate(["a"] * 4, params(structured_output=spec, max_tokens=30)):
        answer = output.outputs[0]
        assert answer.text.lstrip().startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_constrained_and_free_requests_share_a_batch(llm):
    free = params(seed=5, max_tokens=12)
    alone = llm.generate("Tell me", free)[0].outputs[0].token_ids
    many = [free] + [params(structured_output=spec) for spec, _ in CASES.values()]
    outputs = llm.generate(["Tell me"] * len(many), many)
    assert outputs[0].outputs[0].token_ids == alone
    for output, (_, holds) in zip(outputs[1:], CASES.values(), strict=True):
        assert holds(output.outputs[0].text), output.outputs[0].text


def test_answers_of_one_request_have_their_own_state(llm):
    spec, holds = CASES["json_schema"]
    (output,) = llm.generate("Someone:", params(structured_output=spec, n=4))
    texts = {answer.text for answer in output.outputs}
    assert len(texts) > 1
    assert all(holds(text) for text in texts)


def test_the_state_survives_preemption(tiny_text_model):
    spec, holds = CASES["json_schema"]
    wanted = [params(structured_output=spec) for _ in range(16)]
    with LLM(
        str(tiny_text_model), dtype="float32", num_pages=52, max_model_len=208, page_size=4
    ) as tight:
        outputs = tight.generate(["Who?"] * 16, wanted)
        assert tight.stats().preemptions > 0
    for output in outputs:
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert holds(answer.text), answer.text


def test_stop_strings_penalties_and_logprobs_work_on_top(llm):
    wanted = params(
        structured_output={"regex": "(ab){30}"},
        stop="bab",
        repetition_penalty=1.3,
        logprobs=2,
        min_tokens=1,
    )
    (answer,) = llm.generate("x", wanted)[0].outputs
    assert answer.text == "a"
    assert answer.stop_reason == "bab"
    assert len(answer.logprobs) == len(answer.token_ids)


def test_streams_are_constrained_too(llm):
    spec, holds = CASES["json_schema"]
    wanted = params(structured_output=spec, logits_processors=[slowly])
    pieces = [o.outputs[0].text_delta for o in llm.stream("x", wanted)]
    assert len(pieces) > 3
    assert holds("".join(pieces))


def test_other_logits_processors_still_run(llm):
    def no_zero(token_ids, logits):
        for token in forbidden:
            logits[token] = float("-inf")
        return logits

    forbidden = [i for i in range(len(llm.tokenizer)) if "0" in llm.tokenizer.decode([i])]
    wanted = params(structured_output={"regex": "[0-9]{20}"}, logits_processors=[no_zero])
    (answer,) = llm.generate("x", wanted)[0].outputs
    assert re.fullmatch("[1-9]{20}", answer.text)


def test_a_contradiction_ends_that_request_alone(llm):
    def only_x(token_ids, logits):
        logits[:] = float("-inf")
        logits[llm.tokenizer.convert_tokens_to_ids("x")] = 0.0
        return logits

    wanted = [
        params(structured_output={"regex": "[0-9]+"}, logits_processors=[only_x]),
        params(structured_output={"choice": ["yes"]}),
    ]
    with pytest.raises(EngineError, match="structured_output") as caught:
        llm.generate(["x", "x"], wanted)
    assert caught.value.outputs[1].outputs[0].text == "yes"


BAD = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json_schema": {"type": "spam"}}, "Invalid type: spam"),
    ({"json_schema": {"$ref": "#/$defs/Nowhere"}}, "does not exist"),
    ({"json_schema": {"$ref": "https://example.org/schema"}}, "https://example.org/schema"),
    ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"\\]'),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
    ({"json_schema": {"$ref": "#"}}, "no token continues it"),
    ({"grammar": "start: nothing"}, "unknown name"),
    ({"grammar": "begin: /a/"}, "start"),
]


@pytest.mark.parametrize(("spec", "message"), BAD, ids=str)
def test_what_cannot_be_used_is_refused_before_any_step(llm, spec, message):
    steps = llm.stats().steps
    with pytest.raises(ValidationError, match=message) as caught:
        llm.generate("x", SamplingParams(structured_output=spec))
    assert caught.value.parameter == "structured_output"
    assert "\n" not in str(caught.value)
    assert llm.stats().steps == steps


@pytest.mark.parametrize(
    "spec",
    [
        {"regex": "(.*a.{20}b.{20}){500}"},
        {"regex": "(x+x+)+y" * 2000},
        {"grammar": "start: " + "|".join(f'"{i}" start' for i in range(4_000))},
        {"json_schema": {"enum": [f"value {i}" * 20 for i in range(2_000)]}},
        {
            "json_schema": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string", "maxLength": 999} for i in range(300)},
            }
        },
    ],
    ids=lambda spec: str(spec)[:40],
)
def test_a_costly_constraint_is_taken_or_refused_in_bounded_time(llm, spec):
    started = time.monotonic()
    try:
        llm.generate("x", params(structured_output=spec, max_tokens=4))
        message = ""
    except (ValidationError, EngineError) as error:
        message = str(error)
    assert not message or message.startswith("structured_output: ")
    assert len(message) < 500
    assert time.monotonic() - started < 20
    assert llm.health() is None


def test_without_an_end_token_there_is_no_constraint(llm, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(llm.config.model)
    tokenizer.eos_token = None
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    endless = LlamaForCausalLM(config).eval()
    with (
        LLM.from_model(endless, tokenizer, num_pages=8) as other,
        pytest.raises(ValidationError, match="end token"),
    ):
        other.generate("x", SamplingParams(structured_output={"choice": ["a"]}))


def test_without_a_tokenizer_the_message_says_so(tiny_text_model):
    with (
        LLM(str(tiny_text_model), skip_tokenizer_init=True, num_pages=8) as bare,
        pytest.raises(ValidationError, match="tokenizer"),
    ):
        bare.generate([[1, 2]], SamplingParams(structured_output={"choice": ["a"]}))


def test_without_llguidance_the_message_says_what_to_install(tiny_text_model):
    code = f"""
import sys
sys.modules["llguidance"] = None
from pagedllm import LLM, SamplingParams
with LLM({str(tiny_text_model)!r}, num_pages=8) as llm:
    print(len(llm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].token_ids))
    try:
        llm.generate("x", SamplingParams(structured_output={{"choice": ["a"]}}))
    except ValueError as error:
        print(error)
"""
    run = preloaded.run(["-c", code])
    lines = run.stdout.splitlines()
    assert lines[0] == "2", run.stderr
    assert "pip install 'pagedllm[structured]'" in lines[1]


class TestSpec:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "exactly one"),
            ({"regex": "a", "choice": ["b"]}, "regex and choice"),
            ({"json_schema": "{"}, "not valid JSON"),
            ({"json_schema": 3}, "json_schema must be"),
            ({"choice": "yes"}, "list of strings"),
            ({"choice": [1]}, "strings"),
            ({"choice": [""]}, "not empty"),
            ({"regex": ""}, "not empty"),
            ({"regexp": "a"}, "did you mean 'regex'"),
        ],
        ids=str,
    )
    def test_wrong_ones_are_refused_with_what_to_change(self, fields, message):
        with pytest.raises(ValidationError, match=message) as caught:
            SamplingParams(structured_output=fields)
        assert caught.value.parameter == "structured_output"
        assert str(caught.value).count("structured_output:") == 1

    def test_is_hashable_and_equal_by_value_and_so_are_params_with_it(self):
        one = SamplingParams(structured_output={"json_schema": PERSON})
        two = SamplingParams(structured_output=StructuredOutput(json_schema=json.dumps(PERSON)))
        assert one == two
        assert hash(one) == hash(two)

    def test_a_pydantic_class_is_a_schema(self, llm):
        from pydantic import BaseModel, Field

        class Pet(BaseModel):
            """A pet."""

            kind: str = Field(max_length=5)
            legs: int = Field(ge=0, le=8, description="how many")

        answer = llm.generate("x", params(structured_output=StructuredOutput(json_schema=Pet)))
        assert 0 <= Pet.model_validate_json(answer[0].outputs[0].text).legs <= 8

    def test_ignoring_the_end_token_contradicts_it(self):
        with pytest.raises(ValidationError, match="ignore_eos"):
            SamplingParams(structured_output={"choice": ["a"]}, ignore_eos=True)


def test_a_compiled_grammar_travels_to_another_process(llm):
    import pickle

    import numpy as np

    from pagedllm.structured.grammar import GrammarCompiler

    compiler = GrammarCompiler(llm.tokenizer, llm.model_info.vocab_size, {2})
    sent = pickle.dumps(compiler.grammar(StructuredOutput(choice=["yes", "no"])))
    assert len(sent) < 10_000  # not with the vocabulary
    grammar = pickle.loads(sent)
    words = np.zeros(-(-llm.model_info.vocab_size // 32), np.int32)
    grammar.for_sequence().fill(np.array([], np.int64), words)
    bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert {llm.tokenizer.decode([token])[0] for token in bits} == {"y", "n"}


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_vocabularies_of_other_families_keep_to_constraints_too(family):
    """Random tokens among those allowed, without a model."""
    import numpy as np

    from pagedllm.structured.grammar import GrammarCompiler
    from text_tokenizers import FAMILIES

    tokenizer = FAMILIES[family]()
    size = len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size, {tokenizer.eos_token_id})
    seed = random.randrange(2**31)
    print("seed:", seed)
    chance = random.Random(seed)
    for spec in ({"regex": "[a-e]{3} is (here|far)"}, {"choice": ["the capital", "Paris"]}):
        grammar = compiler.grammar(StructuredOutput(**spec))
        mask, output = grammar.for_sequence(), []
        while tokenizer.eos_token_id not in output:
            words = np.zeros(-(-size // 32), np.int32)
            mask.fill(np.array(output, np.int64), words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=size)
            output.append(int(chance.choice(np.flatnonzero(bits))))
        text = tokenizer.decode(output[:-1], skip_special_tokens=False)
        if "regex" in spec:
            assert re.fullmatch(spec["regex"], text), text
        else:
            assert text in spec["choice"]


def test_a_vocabulary_that_cannot_be_read_is_refused():
    from pagedllm.structured.grammar import GrammarCompiler
    from text_tokenizers import metaspace

    tokenizer = metaspace()
    with pytest.raises(ValidationError, match="tokenizer cannot be used"):
        GrammarCompiler(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
