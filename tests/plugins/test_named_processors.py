"""Logits processors that a request names, in an engine in a thread and in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys

import pytest

import pagedllm
import preloaded
from pagedllm import LLM, AsyncLLM, EngineError, SamplingParams, ValidationError
from pagedllm._named import NamedProcessor
from plugin_site import installed

PLUGIN = """
    import os
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_logits_processors():
        names = ("forbid", "theirs", "only", "broken", "broken_mask", "number", "needs", "pid")
        return {name.replace("_", "-"): f"house:{name}" for name in names}

    def forbid(token_ids):
        def process(generated, logits):
            logits[list(token_ids)] = float("-inf")
            return logits
        return process

    def theirs(token_ids):
        from transformers import SuppressTokensLogitsProcessor
        return SuppressTokensLogitsProcessor(list(token_ids), device="cpu")

    class only:
        def __init__(self, token_id):
            self.token_id = token_id
        def __call__(self, generated, logits):
            raise AssertionError("masks are asked for, not this")
        def for_sequence(self):
            return self
        def fill(self, output, mask):
            mask[self.token_id // 32] = 1 << (self.token_id % 32)

    def broken(after):
        def process(generated, logits):
            if len(generated) >= after:
                raise ZeroDivisionError("the plugin's own mistake")
            return logits
        return process

    class broken_mask(only):
        def fill(self, output, mask):
            raise ZeroDivisionError("the plugin's own mistake")

    def number():
        return 5

    def needs():
        import pagedllm
        raise pagedllm.ConfigError("it needs a licence")

    def pid():
        def process(generated, logits):
            logits[:] = float("-inf")
            logits[os.getpid() % 1000] = 0.0
            return logits
        return process
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("site"), house=PLUGIN) as folder:
        yield folder


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request, site, tiny_with_text):
    with LLM(str(tiny_with_text), engine=request.param, threads=1, max_batch_size=4) as engine:
        yield engine


def greedy(*processors, **more):
    return SamplingParams(temperature=0, max_tokens=4, logits_processors=processors, **more)


def tokens(llm, params):
    return llm.generate("Once upon a time", params)[0].outputs[0].token_ids


@pytest.mark.parametrize("name", ["forbid", "theirs"])
def test_a_named_processor_acts_as_the_same_bias_does(llm, name):
    [first, *_] = tokens(llm, greedy())
    expected = tokens(llm, greedy(logit_bias={first: -1e9}))
    assert first not in expected
    assert tokens(llm, greedy({"name": name, "token_ids": [first]})) == expected


def test_processors_act_in_their_order_and_with_masks(llm):
    both = greedy({"name": "forbid", "token_ids": [7]}, {"name": "only", "token_id": 40})
    assert tokens(llm, both) == [40] * 4
    many = llm.generate("x", greedy({"name": "only", "token_id": 41}, n=1))
    assert many[0].outputs[0].token_ids == [41] * 4


def test_it_is_called_where_the_engine_is(llm):
    here = tokens(llm, greedy("pid"))[0] == os.getpid() % 1000
    assert here == (llm.config.engine != "process")


def test_every_answer_of_a_request_obeys(llm):
    params = SamplingParams(
        n=3, seed=1, max_tokens=6, logits_processors=[{"name": "only", "token_id": 9}]
    )
    assert [o.token_ids for o in llm.generate("x", params)[0].outputs] == [[9] * 6] * 3


def test_asyncio_and_streams(site, tiny_with_text):
    async def run():
        async with await AsyncLLM.create(str(tiny_with_text), threads=1) as llm:
            async for output in llm.generate("x", greedy({"name": "only", "token_id": 12})):
                last = output
            return last.outputs[0].token_ids

    assert asyncio.run(run()) == [12] * 4


@pytest.mark.parametrize(
    "broken", [{"name": "broken", "after": 6}, {"name": "broken-mask", "token_id": 1}]
)
def test_a_failing_one_fails_its_request_alone(llm, broken):
    expected = tokens(llm, greedy())
    with pytest.raises(EngineError, match=r"ZeroDivisionError.*own mistake") as caught:
        llm.generate(["Once upon a time"] * 2, [greedy(), greedy(broken)])
    good, bad = caught.value.outputs
    assert good.outputs[0].token_ids == expected
    assert bad.outputs[0].finish_reason == "error"
    assert llm.stats().cache.pages_used == 0
    assert tokens(llm, greedy()) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("forbit", "no plugin registers 'forbit'; did you mean 'forbid'?"),
        ("xyzzyxyzzy", "there are broken, broken-mask, forbid, needs, number, only, pid, theirs"),
        ("forbid", r"'forbid' of the plugin house \(house 1.2.3\).*token_ids"),
        ({"name": "forbid", "tokens": [1]}, r"cannot be made from \(tokens\):.*'tokens'"),
        ("number", "'number' made int"),
        ("needs", "it needs a licence"),
    ],
)
def test_what_is_wrong_is_one_clear_error_at_intake(llm, spec, message):
    with pytest.raises(ValidationError, match=message) as caught:
        llm.stream("x", greedy(spec))
    assert caught.value.parameter == "logits_processors"
    assert "\n" not in str(caught.value)
    assert len(tokens(llm, greedy())) == 4


def test_plugin_rules_hold_here_and_in_the_engines_process(site, tiny_with_text):
    with (
        LLM(str(tiny_with_text), threads=1, plugins_block=["house"]) as blocked,
        pytest.raises(ValidationError, match="no plugin registers 'forbid'"),
    ):
        blocked.generate("x", greedy({"name": "forbid", "token_ids": [1]}))
    allowed = NamedProcessor("pid", (("house",), ()))
    code = (
        "import pickle, sys, pagedllm.plugins as plugins\n"
        "found = pickle.loads(sys.stdin.buffer.read())\n"
        "hit = plugins._manager.cache_info()\n"
        "print(found, plugins.get_manager(('house',), ()).list_plugins()[-1].status)\n"
        "assert plugins._manager.cache_info().misses == hit.misses == 1\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(allowed), capture_output=True, check=True
    )
    assert there.stdout.decode().split() == ["NamedProcessor('pid')", "blocked"]


def test_what_cannot_reach_the_engines_process_fails_alone(llm, tmp_path, monkeypatch):
    if llm.config.engine != "process":
        assert len(tokens(llm, greedy(lambda ids, logits: logits))) == 4
        return
    with pytest.raises(ValidationError, match=r"engine's own process.*engine='thread'"):
        tokens(llm, greedy(lambda ids, logits: logits))
    # Importable here, and not there: its path was added after the engine had started.
    (tmp_path / "only_here.py").write_text("def keep(ids, logits):\n    return logits\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(EngineError, match=r"cannot read it: ModuleNotFoundError.*only_here"):
        tokens(llm, greedy(only_here.keep))
    assert len(tokens(llm, greedy())) == 4


def test_the_command_line_takes_names_and_json(site, tiny_with_text):
    def generate(*flags):
        command = ["generate", "Hi", "--model", str(tiny_with_text), "--max-tokens", "3", "--json"]
        return preloaded.run(["-m", "pagedllm.cli.main", *command, *flags])

    run = generate("--logits-processors", json.dumps({"name": "only", "token_id": 15}))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["outputs"][0]["token_ids"] == [15, 15, 15]
    wrong = generate("--logits-processors", '{"name": 5')
    assert wrong.returncode == 2
    assert "logits_processors" in wrong.stderr
    assert "JSON" in wrong.stderr


def test_the_list_of_plugins_names_it(site):
    [record] = [r for r in pagedllm.list_plugins() if r.distribution == "house"]
    assert (record.status, record.hooks) == ("loaded", ("pagedllm_logits_processors",))
