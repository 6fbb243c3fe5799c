"""Constraints that would exhaust the stack of whoever compiles them: refused, and in time.

Each of these ended the process that it was sent to.
"""

from __future__ import annotations

import json

import pytest

from pagedllm import ValidationError
from pagedllm.structured import StructuredOutput
from pagedllm.structured.bounds import MOST_CHOICES, MOST_LEVELS, MOST_RULES
from pagedllm.structured.grammar import GrammarCompiler


@pytest.fixture(scope="module")
def compiler(tiny_with_text):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_with_text)
    return GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def chain(number, inside="array", name="#/$defs/d{}", **more):
    """A schema of definitions that each refer to the next one."""
    definitions = {
        f"d{index}": {"type": inside, "items": {"$ref": name.format(index + 1)}}
        | {key: value.format(index) for key, value in more.items()}
        for index in range(number)
    }
    last = {"type": "null"} | {key: value.format(number) for key, value in more.items()}
    return {"$ref": name.format(0), "$defs": {**definitions, f"d{number}": last}}


def backwards(schema):
    """The same, with the deepest first."""
    definitions = dict(reversed(schema["$defs"].items()))
    return {"$defs": definitions, "anyOf": [{"$ref": schema["$ref"]}]}


def escaped(schema):
    return json.dumps(schema).replace("$ref", "\\u0024ref")


RULES = 'start: r0\n{}\nr{}: "y"'.format
SCHEMAS = {
    "references": chain(20_000),
    "backwards": backwards(chain(20_000)),
    "anchors": chain(5_000, name="#a{}", **{"$anchor": "a{}"}),
    "names": chain(5_000, name="urn:x:{}", **{"$id": "urn:x:{}"}),
    "in a tuple": {"x": [*chain(9)["$defs"].values()], **chain(9_000)},
}
GRAMMARS = {
    "rules": RULES("\n".join(f'r{i}: r{i + 1} | "x"' for i in range(20_000)), 20_000),
    "brackets": RULES("\n".join(f'r{i}: (((r{i + 1})?)*)+ "x"' for i in range(5_000)), 5_000),
    "a schema inside": f"start: %json {json.dumps(chain(20_000))}",
    "with its references escaped": f"start: %json {escaped(chain(20_000))}",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_lead_too_deep(compiler, name):
    with pytest.raises(ValidationError, match=f"nested too deeply.* {MOST_LEVELS} levels"):
        compiler.grammar(StructuredOutput(json_schema=SCHEMAS[name]))


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_that_lead_too_deep(compiler, name):
    with pytest.raises(ValidationError, match=f"{MOST_LEVELS} levels|at most {MOST_RULES}"):
        compiler.grammar(StructuredOutput(grammar=GRAMMARS[name]))


def test_more_choices_than_there_is_room_for(compiler):
    choices = [f"c{index}" for index in range(MOST_CHOICES + 1)]
    with pytest.raises(ValidationError, match="enum of a json_schema"):
        compiler.grammar(StructuredOutput(choice=choices))
    compiler.grammar(StructuredOutput(json_schema={"enum": choices}))


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutput(json_schema=chain(60)),
        StructuredOutput(json_schema=backwards(chain(60))),
        StructuredOutput(json_schema=chain(20, name="#a{}", **{"$anchor": "a{}"})),
        StructuredOutput(json_schema={"type": "array", "items": {"$ref": "#"}, "maxItems": 2}),
        StructuredOutput(grammar=RULES("\n".join(f"r{i}: r{i + 1}" for i in range(900)), 900)),
        StructuredOutput(grammar=f"start: %json {json.dumps(chain(60))}"),
        StructuredOutput(choice=[f"c{index}" for index in range(1500)]),
    ],
    ids=["chain", "backwards", "anchors", "circle", "rules", "inside", "choices"],
)
def test_what_people_write_is_far_from_that(compiler, spec):
    assert compiler.grammar(spec) is not None
