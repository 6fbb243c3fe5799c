"""Metrics sinks that a configuration names: in their own threads, harmless whatever they do."""

from __future__ import annotations

import importlib
import json
import logging

import pytest

from pagedllm import LLM, Config, ConfigError, SamplingParams, _sinks
from plugin_site import installed

PLUGIN = """
    import queue, threading
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_metrics_sinks():
        return {name: f"sinks:{name}" for name in ("Kept", "Stuck", "Broken", "Half")}

    seen = queue.Queue()
    go_on = threading.Event()

    class Kept:
        def __init__(self, config, *, label="plain"):
            self.label = (config.model, label)
        def write(self, report):
            seen.put((threading.current_thread().name, self.label, report))
        def close(self):
            seen.put(("closed", self.label, None))

    class Stuck(Kept):
        def write(self, report):
            seen.put(("stuck", self.label, None))
            go_on.wait()

    class Broken(Kept):
        def write(self, report):
            seen.put(("broken", self.label, None))
            raise ConnectionError("nobody listens")
        def close(self):
            raise ConnectionError("nor now")

    class Half:
        def __init__(self, config):
            pass
        def write(self, report):
            pass
"""
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
WAIT = 120  # for what has to come, on a machine however slow


@pytest.fixture
def sinks(tmp_path):
    with installed(tmp_path, sinks=PLUGIN):
        module = importlib.import_module("sinks")
        yield module
        module.go_on.set()


def start(path, *names, **settings):
    settings = {"threads": 1, "metrics_interval": 0.01, **settings}
    return LLM(str(path), metrics_sinks=names, **settings)


def left(seen):
    found = []
    while not seen.empty():
        found.append(seen.get())
    return found


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_reports_come_at_intervals_and_a_last_one_when_it_closes(sinks, tiny_with_text, engine):
    with start(tiny_with_text, {"name": "Kept", "label": "mine"}, engine=engine) as llm:
        first = sinks.seen.get(timeout=WAIT)
        llm.generate(["a", "b"], GREEDY)
        sinks.seen.get(timeout=WAIT)
    *_, last, closed = [first, *left(sinks.seen)]
    label = (str(tiny_with_text), "mine")
    assert closed == ("closed", label, None)
    thread, told, report = last
    assert (thread, told) == ("pagedllm-metrics", label)
    assert json.loads(json.dumps(report))["requests"] == 2
    assert report["model"] == str(tiny_with_text)
    assert (report["requests"], report["generated_tokens"]) == (2, 10)
    assert report["finished"] == {"length": 2}
    assert sum(report["step_rows"]["counts"]) == report["steps"]
    assert report["cache"]["pages_used"] == 0
    assert report["time"] >= first[2]["time"]
    assert sinks.seen.empty()


def test_the_last_report_comes_though_no_interval_has_passed(sinks, tiny_with_text):
    llm = start(tiny_with_text, "Kept", metrics_interval=1e6)
    llm.generate("a", GREEDY)
    assert sinks.seen.empty()
    del llm  # collected, not closed
    (_, _, report), (closed, _, _) = left(sinks.seen)
    assert (report["generated_tokens"], closed) == (5, "closed")


def test_a_sink_that_hangs_holds_nothing_up(sinks, tiny_with_text, monkeypatch, caplog):
    monkeypatch.setattr(_sinks, "CLOSE_SECONDS", 0.2)
    with start(tiny_with_text, "Stuck", metrics_interval=0.01) as llm:
        while sinks.seen.get(timeout=WAIT)[0] != "stuck":
            pass
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 5
        assert llm.stats().generated_tokens == 5
    assert llm.closed
    assert "sink 'Stuck' takes too long" in caplog.text


def test_a_sink_that_fails_is_one_warning_and_is_called_again(sinks, tiny_with_text, caplog):
    with (
        caplog.at_level(logging.WARNING, "pagedllm"),
        start(tiny_with_text, "Broken", "Kept") as llm,
    ):
        kinds = set()
        for _ in range(3):
            while (kind := sinks.seen.get(timeout=WAIT)[0]) != "broken":
                kinds.add(kind)
        assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 5
    kinds |= {kind for kind, _, _ in left(sinks.seen)}
    assert "pagedllm-metrics" in kinds  # the other one's
    [warning] = [record for record in caplog.records if record.name == "pagedllm._sinks"]
    assert "'Broken' failed in write(): ConnectionError: nobody listens" in warning.getMessage()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Keep", "metrics_sinks: no plugin registers 'Keep'; did you mean 'Kept'"),
        ({"name": "Kept", "lable": 1}, "'Kept' of the plugin sinks .*'lable'"),
        ("Half", r"'Half' made Half, which has no close\(\)"),
    ],
)
def test_a_wrong_one_is_one_clear_error_before_anything_is_loaded(sinks, spec, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match=message) as caught:
        start(tmp_path, spec)
    assert caught.value.parameter == "metrics_sinks"


def test_settings_files_and_flags_have_them(tmp_path):
    config = Config(metrics_sinks=["a", {"name": "b", "port": 1}], metrics_interval=2)
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert Config.from_yaml(tmp_path / "c.yaml") == config
    assert hash(config) == hash(Config.from_yaml(tmp_path / "c.yaml"))
    with pytest.raises(ConfigError, match="metrics_sinks"):
        Config(metrics_sinks=[{"port": 1}])
    with pytest.raises(ConfigError, match="metrics_interval"):
        Config(metrics_interval=0)
