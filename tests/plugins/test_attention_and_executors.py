"""Attention backends and executors of plugins, by name, in a thread and in another process."""

from __future__ import annotations

import os

import pytest

from pagedllm import LLM, ConfigError, SamplingParams
from plugin_site import installed

PLUGIN = """
    import os
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_attention_backends():
        return {"counted": "parts:Counted", "no-good": "parts:no_good"}

    class Counted:
        name = "counted"

        def __init__(self):
            from pagedllm_kernels.reference import ReferenceAttention
            self.inner = ReferenceAttention()

        def allocate(self, *arguments):
            return self.inner.allocate(*arguments)

        def attend(self, *arguments, **options):
            with open(os.environ["CALLS"], "a") as file:
                file.write(f"attend {os.getpid()}\\n")
            return self.inner.attend(*arguments, **options)

    def no_good():
        raise RuntimeError("no such device")

    @hookimpl
    def pagedllm_create_executor(name, config, load):
        if name == "broken":
            raise ZeroDivisionError("in the hook")
        if name != "counting":
            return None
        from pagedllm.executors.inline import InlineExecutor

        class Counting(InlineExecutor):
            def submit(self, step):
                with open(os.environ["CALLS"], "a") as file:
                    file.write(f"step {os.getpid()}\\n")
                super().submit(step)

        return Counting(config, load)
"""
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    path = tmp_path / "calls"
    path.write_text("")
    monkeypatch.setenv("CALLS", str(path))
    (tmp_path / "site").mkdir()
    with installed(tmp_path / "site", parts=PLUGIN):
        yield path


@pytest.fixture(scope="module")
def expected(tiny_with_text):
    with LLM(str(tiny_with_text), threads=1, dtype="float32") as llm:
        return llm.generate("Once", GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize(
    ("setting", "word"), [({"attention_backend": "counted"}, "attend"), ({"executor": "counting"},
                                                                        "step")]
)  # fmt: skip
def test_it_is_used_where_the_engine_is(calls, tiny_with_text, expected, engine, setting, word):
    rules = {"plugins_allow": ["parts"]}
    with LLM(
        str(tiny_with_text), threads=1, dtype="float32", engine=engine, **setting, **rules
    ) as llm:
        assert llm.generate("Once", GREEDY)[0].outputs[0].token_ids == expected
        if word == "attend":
            assert llm.model_info.attention_backend == "counted"
    lines = [line.split() for line in calls.read_text().splitlines()]
    assert {kind for kind, _ in lines} == {word}
    assert len(lines) >= 5
    assert {int(pid) == os.getpid() for _, pid in lines} == {engine == "thread"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "countd"}, "no plugin registers 'countd'; did you mean 'counted'"),
        ({"attention_backend": "numbar"}, "did you mean 'numba'"),
        ({"attention_backend": "no-good"}, r"'no-good' of the plugin parts.*no such device"),
        ({"attention_backend": "counted", "plugins_block": ["parts"]}, "no plugin registers"),
        ({"attention_backend": "counted", "kv_cache_dtype": "int8"}, "'counted' keeps no pages in"),
        ({"executor": "cuonting"}, "no plugin has one named 'cuonting'"),
        ({"executor": "broken"}, "ZeroDivisionError: in the hook"),
        ({"executor": "counting", "plugins_allow": []}, "no plugin has one named 'counting'"),
    ],
)
def test_what_is_wrong_is_one_clear_error(calls, tiny_with_text, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(tiny_with_text), threads=1, **settings)
    assert "\n" not in str(caught.value)


def test_it_comes_whole_from_the_engines_process(calls, tiny_with_text):
    with pytest.raises(
        ConfigError, match=r"'no-good' of the plugin parts.*no such device"
    ) as caught:
        LLM(str(tiny_with_text), threads=1, engine="process", attention_backend="no-good")
    assert "\n" not in str(caught.value)
