"""Every hook is documented, and every example in docs/plugins.md is a plugin that loads."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pagedllm import LLM, SamplingParams, hookspecs
from pagedllm.plugins import REGISTRIES, PluginManager
from plugin_site import installed

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
HOOKS = [name for name in vars(hookspecs) if name.startswith("pagedllm_")]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_section_an_example_and_a_docstring_with_one(hook):
    assert re.search(rf"^#+ `{hook}", TEXT, re.MULTILINE)
    assert any(f"def {hook}(" in example for example in EXAMPLES)
    assert f"def {hook}(" in getattr(hookspecs, hook).__doc__


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_loads_as_a_plugin_and_what_it_registers_can_be_imported(
    number, tmp_path, monkeypatch
):
    module = f"documented_plugin_{number}"
    (tmp_path / f"{module}.py").write_text(EXAMPLES[number])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    point = metadata.EntryPoint(name="documented", value=module, group="pagedllm")
    manager = PluginManager(entry_points=[point])
    [record] = [r for r in manager.list_plugins() if r.name == "documented"]
    assert (record.status, record.error) == ("loaded", None)
    assert record.hooks
    for hook in set(record.hooks) & set(REGISTRIES):
        entries = manager.registry(hook)
        assert entries
        for entry in entries.values():
            assert callable(entry.load())
    assert manager.list_plugins() == PluginManager(entry_points=[point]).list_plugins()


def test_the_examples_that_a_setting_names_work_together(tmp_path, tiny_with_text, capfd):
    hooks = {
        "executors": "pagedllm_create_executor",
        "attention": "pagedllm_attention_backends",
        "processors": "pagedllm_logits_processors",
        "caches": "pagedllm_response_caches",
        "sinks": "pagedllm_metrics_sinks",
    }
    plugins = {
        f"documented_{name}": next(each for each in EXAMPLES if f"def {hook}(" in each)
        for name, hook in hooks.items()
    }
    report = tmp_path / "report.jsonl"
    (tmp_path / "site").mkdir()
    settings = {
        "executor": "counting",
        "attention_backend": "logged",
        "response_cache": {"name": "memory", "max_answers": 10},
        "metrics_sinks": [{"name": "jsonl", "path": str(report)}],
    }
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with (
        installed(tmp_path / "site", **plugins),
        LLM(str(tiny_with_text), threads=1, **settings) as llm,
    ):
        [first] = llm.generate("Once", greedy)
        token = first.outputs[0].token_ids[0]
        forbid = {"name": "forbid", "token_ids": [token]}
        [other] = llm.generate("Once", greedy.replace(logits_processors=[forbid]))
    assert token not in other.outputs[0].token_ids
    assert "attend (" in capfd.readouterr().out
    reports = [json.loads(line) for line in report.read_text().splitlines()]
    assert reports[-1]["requests"] == 2
    assert reports[-1]["response_cache"]["lookups"] >= 1


def test_the_example_of_a_store_of_pages_works(tmp_path, tiny_with_text):
    code = next(each for each in EXAMPLES if "def pagedllm_kv_stores(" in each)
    (tmp_path / "site").mkdir()
    spec = {"name": "folder", "path": str(tmp_path / "pages")}
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with installed(tmp_path / "site", documented_store=code):
        for cached in (0, 32):
            with LLM(str(tiny_with_text), threads=1, kv_store=spec) as llm:
                [found] = llm.generate(list(range(10, 43)), greedy)
                assert found.num_cached_tokens == cached
    assert len(list((tmp_path / "pages").iterdir())) == 2
