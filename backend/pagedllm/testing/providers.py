"""What every plugin that provides models must do.

Owner: plugins; public.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from pagedllm import LLM, Config, ModelName, PagedLLMError, ResolvedModel, SamplingParams
from pagedllm.hookspecs import ENTRY_POINT_GROUP
from pagedllm.plugins import PluginManager, check_model_folder

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("torch", "transformers", "numpy", "huggingface_hub")
_NAMES = """
import json, sys
from pagedllm.plugins import get_manager
plugin, *heavy = sys.argv[1:]
names = [model.name for model in get_manager(allow=[plugin]).model_names()]
print(json.dumps([names, sorted(set(heavy) & set(sys.modules))]))
"""
_RESOLVE = """
import sys
from pagedllm import Config, resolve_model
print("PATH", resolve_model(sys.argv[1], config=Config(download_dir=sys.argv[2])).path)
"""


class ModelProviderSuite:
    """Checks of a plugin with ``pagedllm_model_names`` and ``pagedllm_resolve_model``.

    Set :attr:`plugin`; the rest has defaults. The plugin has to be installed. All names are
    resolved, so the models are downloaded or made if they are not there.
    """

    plugin: str
    """The entry point's name: what stands left of ``=`` in the plugin's pyproject.toml."""
    prompt = "Hello"
    """Given to the first model."""
    engine: Any = {"max_model_len": 64, "max_batch_size": 2}  # noqa: RUF012 - to be replaced whole
    """Settings of the engine that runs the first model."""

    # -- what the checks stand on ----------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def entry_point(cls) -> metadata.EntryPoint:
        """The plugin's entry point."""
        found = metadata.entry_points(group=ENTRY_POINT_GROUP, name=cls.plugin)
        points = {point.value: point for point in found}
        assert len(points) == 1, (
            f"{len(points)} installed distributions have an entry point {cls.plugin!r} in the "
            f"group {ENTRY_POINT_GROUP!r}; install the plugin (pip install -e .) and set "
            f"`plugin` to the name in its pyproject.toml"
        )
        return next(iter(points.values()))

    @pytest.fixture(scope="class")
    @classmethod
    def manager(cls, entry_point: metadata.EntryPoint) -> PluginManager:
        """A manager of this plugin alone."""
        return PluginManager(entry_points=[entry_point])

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, manager: PluginManager) -> tuple[ModelName, ...]:
        """What the plugin lists."""
        return manager.model_names()

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, tmp_path_factory: pytest.TempPathFactory) -> Config:
        """Whose ``download_dir`` is an empty folder; override it to use one that is filled."""
        return Config(download_dir=str(tmp_path_factory.mktemp("downloads")))

    def resolve(
        self, point: metadata.EntryPoint, name: str, revision: str | None, config: Config
    ) -> Any:
        """Call the plugin's own hook with the arguments that it takes."""
        hook = point.load().pagedllm_resolve_model
        given = {"name": name, "revision": revision, "config": config}
        return hook(**{key: given[key] for key in inspect.signature(hook).parameters})

    # -- the checks --------------------------------------------------------------------------

    def test_the_plugin_loads_without_a_fault(self, manager: PluginManager) -> None:
        """It is loaded, and has both hooks."""
        manager.model_names()
        record = next(r for r in manager.list_plugins() if r.name == self.plugin)
        assert record.error is None, f"the plugin is {record.status}: {record.error}"
        for hook in ("pagedllm_model_names", "pagedllm_resolve_model"):
            assert hook in record.hooks, f"the plugin has no {hook} marked with @hookimpl"

    def test_listing_it_is_light(self, models: tuple[ModelName, ...]) -> None:
        """A command that lists plugins must not wait for torch, in any process."""
        run = subprocess.run(
            [sys.executable, "-c", _NAMES, self.plugin, *HEAVY],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"plugins cannot be listed in a fresh process: {run.stderr}"
        names, heavy = json.loads(run.stdout)
        missing = {model.name for model in models} - set(names)
        assert not missing, f"a fresh process does not list {sorted(missing)}"
        assert not heavy, f"loading the plugin imports {heavy}: import them inside functions"

    def test_names_can_be_listed(self, models: tuple[ModelName, ...]) -> None:
        """Short, different, on one line."""
        assert models, "pagedllm_model_names lists nothing"
        every = [name for model in models for name in (model.name, *model.aliases)]
        assert len(set(every)) == len(every), f"a name is there twice: {sorted(every)}"
        for model in models:
            for name in (model.name, *model.aliases):
                assert name == name.strip() and name, f"{name!r} is no name"
                assert "/" not in name, f"{name!r} looks like a folder or a Hub repository"
            assert "\n" not in model.description, f"{model.name}: a description is one line"

    def test_every_name_leads_to_a_model(
        self,
        entry_point: metadata.EntryPoint,
        models: tuple[ModelName, ...],
        config: Config,
    ) -> None:
        """A whole folder that loads, the same for a name and its aliases."""
        from transformers import AutoConfig, AutoTokenizer

        for model in models:
            found = self.resolve(entry_point, model.name, None, config)
            assert isinstance(found, ResolvedModel), (
                f"pagedllm_resolve_model({model.name!r}) gave {found!r}, not a ResolvedModel"
            )
            assert found.path.is_absolute(), f"{found.path} depends on the working directory"
            check_model_folder(found.path)  # says what is missing
            AutoConfig.from_pretrained(found.path)
            AutoTokenizer.from_pretrained(found.path)
            for alias in model.aliases:
                other = self.resolve(entry_point, alias, None, config)
                assert other is not None, f"the alias {alias!r} of {model.name!r} is not resolved"
                assert other.path == found.path, f"{alias!r} and {model.name!r} are two models"
                assert other.name == alias, f"resolving {alias!r} reports the name {other.name!r}"

    def test_a_second_time_changes_nothing(
        self, entry_point: metadata.EntryPoint, models: tuple[ModelName, ...], config: Config
    ) -> None:
        """An engine that starts must not rewrite what another one reads."""
        name = models[0].name
        first = self.resolve(entry_point, name, None, config)
        before = _stamps(first.path)
        second = self.resolve(entry_point, name, None, config)
        assert second == first, f"{name!r} led to {first}, then to {second}"
        assert _stamps(second.path) == before, f"resolving {name!r} again rewrote its files"

    def test_other_names_are_left_to_others(
        self, entry_point: metadata.EntryPoint, models: tuple[ModelName, ...], config: Config
    ) -> None:
        """None for whatever is not the plugin's, lest it take models from other plugins."""
        name = models[0].name
        for other in ("no-such-model", "organisation/model", "/a/folder", f"{name}-x", "x" * 300):
            try:
                found = self.resolve(entry_point, other, None, config)
            except Exception as error:
                raise AssertionError(
                    f"pagedllm_resolve_model({other!r}) raised {type(error).__name__}: {error}; "
                    "it must return None for names that are not the plugin's"
                ) from error
            assert found is None, f"{other!r} is not the plugin's, and it gave {found!r}"

    def test_a_revision_is_obeyed_or_refused(
        self, entry_point: metadata.EntryPoint, models: tuple[ModelName, ...], config: Config
    ) -> None:
        """Other weights than those asked for are wrong answers."""
        asked = "no-such-revision"
        try:
            found = self.resolve(entry_point, models[0].name, asked, config)
        except PagedLLMError:
            return
        assert found is None or found.revision == asked, (
            f"revision {asked!r} was asked for and ignored: raise pagedllm.ModelNotFoundError "
            "for a revision that is not there"
        )

    def test_two_processes_at_once(
        self, models: tuple[ModelName, ...], tmp_path: Path, config: Config
    ) -> None:
        """Two engines that start together on a new machine both find a whole model."""
        del config  # an empty folder of their own
        name = models[0].name
        command = [sys.executable, "-c", _RESOLVE, name, str(tmp_path / "downloads")]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        results = [process.communicate() for process in processes]
        paths = set()
        for process, (out, error) in zip(processes, results, strict=True):
            assert process.returncode == 0, f"one of two processes failed: {error}"
            paths.add(out.rpartition("PATH ")[2].strip())
        assert len(paths) == 1, f"two processes were led to {sorted(paths)}"

    def test_an_engine_runs_the_model(self, models: tuple[ModelName, ...], config: Config) -> None:
        """From the name to text."""
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        with LLM(config.replace(model=models[0].name, **self.engine)) as llm:
            output = llm.generate(self.prompt, params, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 4, f"4 tokens were wanted, {output.token_ids} came"


def _stamps(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }
