"""Each check of the conformance suites fails for a plugin that is broken in just that way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET

import pytest

from pagedllm.testing import (
    ExecutorSuite,
    KVStoreSuite,
    LogitsProcessorSuite,
    ModelProviderSuite,
    ResponseCacheSuite,
    tiny_model,
)
from plugin_site import installed

PROVIDER = """
    import os, shutil
    from pathlib import Path
    from pagedllm import ModelName, ModelNotFoundError, ResolvedModel, hookimpl

    @hookimpl
    def pagedllm_model_names():
        return [ModelName("NAME", aliases=("NAME-alias",))]

    @hookimpl
    def pagedllm_resolve_model(name, revision, config):
        if name not in ("NAME", "NAME-alias"):
            return None
        if revision is not None:
            raise ModelNotFoundError("there are no revisions")
        return ResolvedModel(Path(SOURCE), name)
"""
# What is put in place of what, the check that must notice, and a word of its message.
PROVIDERS = {
    "lists_texts": ('ModelName("NAME", aliases=("NAME-alias",))', '"NAME"',
                    "test_the_plugin_loads_without_a_fault", "not a ModelName"),
    "is_heavy": ("import os, shutil", "import os, shutil, numpy",
                 "test_listing_it_is_light", "imports ['numpy']"),
    "says_it_twice": ('aliases=("NAME-alias",)', 'aliases=("NAME",)',
                      "test_names_can_be_listed", "there twice"),
    "forgets_its_alias": ('not in ("NAME", "NAME-alias")', '!= "NAME"',
                          "test_every_name_leads_to_a_model", "is not resolved"),
    "is_relative": ("Path(SOURCE)", "Path(os.path.relpath(SOURCE))",
                    "test_every_name_leads_to_a_model", "working directory"),
    "writes_again": ("return ResolvedModel", "Path(SOURCE, 'config.json').touch(); "
                     "return ResolvedModel", "test_a_second_time_changes_nothing", "rewrote"),
    "takes_all": ('name not in ("NAME", "NAME-alias")', "False",
                  "test_other_names_are_left_to_others", "not the plugin's"),
    "raises": ('return None', 'raise KeyError(name)',
               "test_other_names_are_left_to_others", "must return None"),
    "drops_revisions": ("revision is not None", "False",
                        "test_a_revision_is_obeyed_or_refused", "ignored"),
    "cannot_share": ("return ResolvedModel(Path(SOURCE), name)",
                     "return ResolvedModel(shutil.copytree(SOURCE, Path(config.download_dir, "
                     "str(os.getpid()))), name)", "test_two_processes_at_once", "were led to"),
    "has_no_weights": ("Path(SOURCE), name", "Path(SOURCE + '-bare'), name",
                       "test_an_engine_runs_the_model", "no weights"),
}  # fmt: skip

EXECUTORS = """
    import dataclasses
    from pagedllm import hookimpl

    KEPT = []

    def make(config, load, starts=None, change=None, collects=None, **more):
        from pagedllm.executors.inline import InlineExecutor

        class Broken(InlineExecutor):
            def submit(self, step):
                super().submit(change(step) if change else step)

            def start(self):
                return starts(self, super().start) if starts else super().start()

            def collect(self):
                return collects(self, super().collect) if collects else super().collect()

        for name, value in more.items():
            setattr(Broken, name, value)
        return Broken(config, load)

    def swallow(self, start):
        try:
            return start()
        except Exception:
            return None

    def keep(self, start):
        info = start()
        KEPT.append(self._worker._model)
        return info

    def latest(self, collect):
        return self._results.pop()

    def throw(self, collect):
        output = collect()
        if output.error is not None:
            raise output.error
        return output

    def fail_all(self, collect):
        output = collect()
        errors = [row.error for row in output.rows if row.error]
        return dataclasses.replace(output, error=errors[0], rows=()) if errors else output

    def off_by_one(self, collect):
        output = collect()
        rows = [dataclasses.replace(row, token_id=row.token_id and row.token_id ^ 1)
                for row in output.rows]
        return dataclasses.replace(output, rows=tuple(rows))

    @hookimpl
    def pagedllm_create_executor(name, config, load):
        without = dataclasses.replace
        kinds = {
            "is_ill": dict(health=lambda self: "not well"),
            "takes_the_latest": dict(collects=latest),
            "keeps_slots": dict(change=lambda step: without(step, added=()) if step.step_id
                                else step),
            "throws": dict(collects=throw),
            "fails_all": dict(collects=fail_all),
            "swallows": dict(starts=swallow),
            "keeps_the_model": dict(starts=keep),
            "is_off_by_one": dict(collects=off_by_one),
            "copies_no_pages": dict(change=lambda step: without(step, page_copies=())),
        }
        return make(config, load, **kinds[name]) if name in kinds else None
"""
EXECUTOR_FAULTS = {
    "is_ill": ("test_start_describes_the_model", "not well"),
    "takes_the_latest": ("test_steps_come_back_in_their_order", "collected"),
    "keeps_slots": ("test_a_slot_is_used_again", "failed"),
    "throws": ("test_a_failing_step_is_its_result", "must come back"),
    "fails_all": ("test_a_failing_row_fails_alone", "failed the step"),
    "swallows": ("test_a_model_that_cannot_be_loaded", "DID NOT RAISE"),
    "keeps_the_model": ("test_close_gives_all_back", "still held"),
    "is_off_by_one": ("test_an_engine_gives_transformers_tokens", "transformers"),
    "copies_no_pages": ("test_an_engine_that_runs_out_of_pages", "three answers"),
}

PROCESSORS = """
    import sys
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_logits_processors():
        names = ("swallows", "is_short", "is_idle", "counts", "grabs", "differs")
        return {name: f"processors:{name}" for name in names}

    def swallows(**options):
        return lambda ids, logits: logits

    def is_short():
        return lambda ids, logits: logits[1:]

    def is_idle():
        return lambda ids, logits: logits

    def counts():
        calls = []
        def process(ids, logits):
            calls.append(ids)
            logits[len(calls)] = 9.0
            return logits
        return process

    def grabs():
        def process(ids, logits):
            ids.append(0)
            return logits
        return process

    def differs():
        def process(ids, logits):
            logits[:] = 0.0
            logits[5 if sys.argv[0] == "-c" else 6] = 1.0
            return logits
        return process
"""
PROCESSOR_FAULTS = {
    "swallows": ("test_options_that_it_does_not_know_are_refused", "was accepted"),
    "is_short": ("test_it_gives_back_logits", "shape"),
    "is_idle": ("test_it_does_something", "stay as they are"),
    "counts": ("test_it_depends_on_the_sequence_alone", "keep no state"),
    "grabs": ("test_it_keeps_its_hands_off_the_tokens", "changed the token ids"),
    "differs": ("test_it_works_in_engines_of_both_kinds", "in a process"),
}

CACHES = """
    import os, sqlite3, tempfile
    from pathlib import Path
    from pagedllm import hookimpl

    class Files:
        timeout = 60.0
        def __init__(self, config, *, folder):
            self.folder = Path(folder)
        def path(self, key):
            return self.folder / key.encode().hex()
        def get(self, keys):
            return [self.path(k).read_bytes() if self.path(k).exists() else None for k in keys]
        def put(self, key, answer):
            self.path(key).write_bytes(answer)
        def close(self):
            pass

    class swallows(Files):
        def __init__(self, config, *, folder, **others):
            super().__init__(config, folder=folder)

    class is_endless(Files):
        timeout = None

    class skips(Files):
        def get(self, keys):
            return [found for found in super().get(keys) if found is not None]

    class writes_text(Files):
        def put(self, key, answer):
            self.path(key).write_bytes(answer.decode("utf-8", "replace").encode())

    class mixes_case(Files):
        def path(self, key):
            return super().path(key.lower())

    class keeps_the_first(Files):
        def put(self, key, answer):
            if not self.path(key).exists():
                super().put(key, answer)

    class stays_in_its_thread(Files):
        def __init__(self, config, *, folder):
            super().__init__(config, folder=folder)
            self.database = sqlite3.connect(":memory:")
        def get(self, keys):
            self.database.execute("select 1")
            return super().get(keys)

    class is_alone(Files):
        def __init__(self, config, *, folder):
            super().__init__(config, folder=tempfile.mkdtemp(dir=folder))

    class forgets(Files):
        def put(self, key, answer):
            pass

    @hookimpl
    def pagedllm_response_caches():
        return {each.__name__: f"caches:{each.__name__}" for each in Files.__subclasses__()}

    @hookimpl
    def pagedllm_kv_stores():
        return pagedllm_response_caches()
"""
CACHE_FAULTS = {
    "swallows": ("test_options_that_it_does_not_know_are_refused", "was accepted"),
    "is_endless": ("test_it_has_a_timeout", "timeout is None"),
    "skips": ("test_what_is_not_there_is_none", "an empty store gave []"),
    "writes_text": ("test_answers_come_back_as_they_were", "256 bytes were put"),
    "mixes_case": ("test_keys_are_told_apart", "asked for"),
    "keeps_the_first": ("test_the_last_answer_of_a_key_counts", "b'old'"),
    "stays_in_its_thread": ("test_it_is_called_in_another_thread", "ProgrammingError"),
    "is_alone": ("test_engines_share_it", "another store"),
    "forgets": ("test_an_engine_answers_from_it", "was computed"),
}
# A store of pages is asked the same, but for what an engine does with it.
_NOT_FOUND = ("test_an_engine_goes_on_from_it", "0 of the prompt's 64 tokens")
STORE_FAULTS = {**CACHE_FAULTS, "forgets": _NOT_FOUND}
FIXTURES = """
import pytest
@pytest.fixture
def options(self, tmp_path):
    return {"folder": str(tmp_path)}
"""


SUITES = {
    # What tells the suite which plugin's part it is to check.
    "ModelProviderSuite": (
        "plugin",
        {n: (test, word) for n, (_, _, test, word) in PROVIDERS.items()},
    ),
    "ExecutorSuite": ("executor", EXECUTOR_FAULTS),
    "LogitsProcessorSuite": ("processor", PROCESSOR_FAULTS),
    "ResponseCacheSuite": ("cache", CACHE_FAULTS),
    "KVStoreSuite": ("kv_store", STORE_FAULTS),
}


def write_suite(folder, suite):
    """Write a class for each broken plugin; return the check of each that must notice."""
    attribute, faults = SUITES[suite]
    lines = [f"from pagedllm.testing import {suite}"]
    lines += [f"class Test_{name}({suite}):\n    {attribute} = {name!r}" for name in faults]
    if suite == "ExecutorSuite":
        lines.append("Test_takes_the_latest.settings = {'steps_in_flight': 2}")
    if suite in ("ResponseCacheSuite", "KVStoreSuite"):  # where the store keeps its files
        lines += [FIXTURES, *(f"Test_{name}.options = options" for name in faults)]
    (folder / f"test_{suite}.py").write_text("\n".join(lines))
    return [f"test_{suite}.py::Test_{name}::{check}" for name, (check, _) in faults.items()]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """Folder in which all the broken plugins are installed."""
    folder = tmp_path_factory.mktemp("broken")
    tiny_model(folder / "tiny")
    (folder / "tiny-bare").mkdir()
    (folder / "tiny-bare" / "config.json").write_text("{}")
    plugins = {"executors": EXECUTORS, "processors": PROCESSORS, "caches": CACHES}
    for name, (old, new, _, _) in PROVIDERS.items():
        code = textwrap.dedent(PROVIDER)
        assert old in code
        code = code.replace(old, new).replace("NAME", name.replace("_", "-"))
        plugins[name] = code.replace("SOURCE", repr(str(folder / "tiny")))
    with installed(folder, **plugins):
        yield folder


@pytest.fixture(scope="module")
def found(plugins):
    """What each check said that must notice something: all in one run, which is slow to start."""
    nodes = [node for suite in SUITES for node in write_suite(plugins, suite)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(
        [*command, "--junitxml=report.xml"],
        cwd=plugins, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert " error" not in done.stdout.splitlines()[-1], done.stdout
    said = {}
    for case in ET.parse(plugins / "report.xml").iter("testcase"):
        failure = case.find("failure")
        suite, _, name = case.get("classname").partition(".")
        key = (suite.removeprefix("test_"), name.removeprefix("Test_"), case.get("name"))
        said[key] = None if failure is None else (failure.text or "")
    return said


@pytest.mark.parametrize(
    "suite",
    [ModelProviderSuite, ExecutorSuite, LogitsProcessorSuite, ResponseCacheSuite, KVStoreSuite],
)
def test_every_check_notices_its_fault(found, suite):
    _, faults = SUITES[suite.__name__]
    checks = {name for name in dir(suite) if name.startswith("test_")}
    assert {test for test, _ in faults.values()} == checks
    for name, (test, word) in faults.items():
        said = found[suite.__name__, name, test]
        assert said is not None, f"{test} did not notice that a plugin {name}"
        assert word in said, said
