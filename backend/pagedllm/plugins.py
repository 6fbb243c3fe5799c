"""Finds plugins, keeps the broken ones from harming the rest, and asks the sound ones.

Owner: plugins. Invariants: nothing a plugin does wrong (import, declaration, exception,
result of the wrong type) reaches the caller, except a :class:`PagedLLMError`, which a plugin
raises for the user to read; every such fault is logged once and kept for
:meth:`PluginManager.list_plugins`. Plugins are asked in the order built-ins, then by
distribution name, whatever order the file system gives. Entry points are read on first use.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pluggy

from pagedllm import hookspecs
from pagedllm.errors import ConfigError, ModelNotFoundError, PagedLLMError
from pagedllm.hookspecs import API_VERSION, ENTRY_POINT_GROUP, ModelName, ResolvedModel, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pagedllm.config import Config
    from pagedllm.executors.base import Executor
    from pagedllm.models.base import PagedModel

logger = logging.getLogger(__name__)

_EXECUTOR_METHODS = ("start", "submit", "collect", "health", "close")
BUILTIN_DISTRIBUTION = "pagedllm"
REGISTRIES = tuple(
    name
    for name in vars(hookspecs)
    if name.startswith("pagedllm_")
    and name not in {"pagedllm_model_names", "pagedllm_resolve_model", "pagedllm_create_executor"}
)
"""Hooks that return ``{name: "module:attribute"}``."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin."""

    name: str
    """The entry point's name."""
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    """Hooks it implements, sorted."""
    status: str = "loaded"
    """``loaded``; ``blocked`` by configuration; ``failed``: not usable; ``faulty``: loaded, but
    a hook of it went wrong."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """An entry of a registry hook."""

    name: str
    target: str
    """``module:attribute``."""
    plugin: PluginRecord

    def load(self) -> Any:
        """Import the target. Raises ConfigError naming the plugin when that fails."""
        module, _, attribute = self.target.partition(":")
        try:
            return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except Exception as error:
            raise ConfigError(
                f"{self.name!r} of plugin {_describe(self.plugin)} cannot be loaded from "
                f"{self.target!r}: {_one_line(error)}"
            ) from error


class LocalFolders:
    """The built-in resolver of paths; asked after every plugin but the Hub's."""

    @staticmethod
    @hookimpl(trylast=True)
    def pagedllm_resolve_model(name: str) -> ResolvedModel | None:
        """Accept a folder with a model in it; None when there is nothing at that path."""
        path = Path(name).expanduser()
        if path.is_dir():
            return ResolvedModel(path=path.resolve(), name=name)
        if path.is_file():
            raise ModelNotFoundError(
                f"{name!r} is a file. Give the folder that holds the model's config.json and "
                "safetensors files."
            )
        if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
            raise ModelNotFoundError(f"There is no folder {name!r}.")
        return None


class PluginManager:
    """The plugins of one process under one set of allow and block rules.

    Args:
        allow: names of plugins or distributions; None allows all. Built-ins always load.
        block: names of plugins or distributions that are not even imported.
        entry_points: what to load; by default the installed ones of group ``pagedllm``.
    """

    def __init__(
        self,
        allow: Sequence[str] | None = None,
        block: Sequence[str] = (),
        entry_points: Sequence[metadata.EntryPoint] | None = None,
    ) -> None:
        self._allow = None if allow is None else {_normal(name) for name in allow}
        self._block = {_normal(name) for name in block}
        self._pluggy = pluggy.PluginManager("pagedllm")
        self._pluggy.add_hookspecs(hookspecs)
        self._records: dict[str, PluginRecord] = {}
        self._reported: set[tuple[str, str]] = set()
        self._registries: dict[str, Mapping[str, Registration]] = {}
        builtin = PluginRecord("local", BUILTIN_DISTRIBUTION, "built-in")
        self._register(builtin, LocalFolders)
        points = (
            metadata.entry_points(group=ENTRY_POINT_GROUP)
            if entry_points is None
            else (entry_points)
        )
        # pluggy asks the plugin registered last first: hence backwards, built-ins at the end.
        for point in sorted(points, key=_point_order, reverse=True):
            self._load(point)

    # --- loading ---------------------------------------------------------------------------

    def _load(self, point: metadata.EntryPoint) -> None:
        distribution = point.dist.name if point.dist else "unknown"
        version = point.dist.version if point.dist else "unknown"
        record = PluginRecord(point.name, distribution, version)
        if not self._permitted(record):
            self._records[_key(record)] = replace(record, status="blocked")
            return
        if _key(record) in self._records:
            return  # one distribution seen twice on sys.path
        try:
            plugin = point.load()
            version_wanted = getattr(plugin, "PAGEDLLM_API_VERSION", API_VERSION)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any import may fail anyhow
            self._fail(record, f"it cannot be imported: {_one_line(error)}")
            return
        if version_wanted != API_VERSION:
            self._fail(
                record,
                f"it was written for plugin API {version_wanted}, and this pagedllm has "
                f"{API_VERSION}: install a release of {distribution} made for it",
            )
            return
        self._register(record, plugin)

    def _register(self, record: PluginRecord, plugin: object) -> None:
        key = _key(record)
        try:
            self._pluggy.register(plugin, key)
            implementations = self._pluggy.get_hookcallers(plugin) or []
            for caller in implementations:
                self._check_declaration(caller, key)
        except Exception as error:  # noqa: BLE001 - pluggy reads every attribute of the plugin
            if self._pluggy.has_plugin(key):
                self._pluggy.unregister(name=key)
            self._fail(record, _one_line(error))
            return
        hooks = tuple(sorted(caller.name for caller in implementations))
        self._records[key] = replace(record, hooks=hooks)

    @staticmethod
    def _check_declaration(caller: pluggy.HookCaller, key: str) -> None:
        """Refuse what pluggy itself lets pass: unknown hooks, and wrappers."""
        if not caller.has_spec():
            known = [name for name in vars(hookspecs) if name.startswith("pagedllm_")]
            near = difflib.get_close_matches(caller.name, known, n=1)
            raise ValueError(
                f"there is no hook {caller.name!r}"
                + (f"; did it mean {near[0]!r}?" if near else "")
            )
        for implementation in caller.get_hookimpls():
            if implementation.plugin_name == key and (
                implementation.wrapper or implementation.hookwrapper
            ):
                raise ValueError(f"{caller.name!r} is a hook wrapper, and those are not called")

    def _permitted(self, record: PluginRecord) -> bool:
        names = {_normal(record.name), _normal(record.distribution)}
        if record.distribution == BUILTIN_DISTRIBUTION:
            return _normal(record.name) not in self._block
        return not names & self._block and (self._allow is None or bool(names & self._allow))

    def _fail(self, record: PluginRecord, error: str, status: str = "failed") -> None:
        key = _key(record)
        self._records[key] = replace(record, status=status, error=error)
        if (key, error) not in self._reported:
            self._reported.add((key, error))
            logger.warning("Plugin %s is skipped: %s", _describe(record), error)

    # --- asking ----------------------------------------------------------------------------

    def _answers(
        self, hook: str, check: Callable[[Any], str | None], **arguments: Any
    ) -> Iterator[tuple[PluginRecord, Any]]:
        """Ask one plugin after the other; yield (plugin, answer) of each that gives one.

        pluggy's own call would end at the first exception, so implementations are called
        here, in the order in which pluggy would. A PagedLLMError passes from hooks that act
        on something the user named; listings go on without the plugin that raises one.
        """
        user_facing = hook not in REGISTRIES and hook != "pagedllm_model_names"
        for implementation in reversed(getattr(self._pluggy.hook, hook).get_hookimpls()):
            record = self._records[implementation.plugin_name]
            try:
                answer = implementation.function(
                    *(arguments[name] for name in implementation.argnames)
                )
                problem = None if answer is None else check(answer)
            except Exception as error:
                if user_facing and isinstance(error, PagedLLMError):
                    raise
                logger.debug("Traceback of %s", _describe(record), exc_info=True)
                answer, problem = None, f"raised {_one_line(error)}"
            if problem is not None:
                self._fail(record, f"{hook} {problem}", status="faulty")
            elif answer is not None:
                yield record, answer

    def registry(self, hook: str) -> Mapping[str, Registration]:
        """Collect a registry hook's entries, by name; of two equal names the first wins.

        Plugins are asked once: names in requests are looked up here.

        Args:
            hook: one of :data:`REGISTRIES`, such as ``pagedllm_adapters``.
        """
        if hook in self._registries:
            return self._registries[hook]
        found: dict[str, Registration] = {}
        for record, entries in self._answers(hook, _check_registry):
            for name, target in entries.items():
                if name in found:
                    other = _describe(found[name].plugin)
                    self._fail(record, f"{hook}: {name!r} is taken by {other}", status="faulty")
                else:
                    found[name] = Registration(name, target, record)
        return self._registries.setdefault(hook, found)

    def model_names(self) -> tuple[ModelName, ...]:
        """Return every short name that a plugin offers, sorted."""
        names: list[ModelName] = []
        for _, some in self._answers("pagedllm_model_names", _check_model_names):
            names.extend(some)
        return tuple(sorted(names, key=lambda model: model.name))

    def create_executor(
        self, name: str, config: Config, load: Callable[[], PagedModel] | None = None
    ) -> Executor | None:
        """Return the first executor that a plugin builds for this name, or None."""
        answers = self._answers(
            "pagedllm_create_executor", _check_executor, name=name, config=config, load=load
        )
        return next((executor for _, executor in answers), None)

    def resolve_model(
        self,
        name: str,
        revision: str | None = None,
        config: Config | None = None,
    ) -> ResolvedModel:
        """Turn a name into a folder; see :func:`resolve_model`."""
        answers = self._answers(
            "pagedllm_resolve_model",
            _check_resolved,
            name=name,
            revision=revision,
            config=config,
        )
        try:
            for _, resolved in answers:
                check_model_folder(resolved.path)
                return cast(ResolvedModel, resolved)
            raise ModelNotFoundError(f"No plugin and no folder has a model named {name!r}.")
        except ModelNotFoundError as error:
            suggestion = self._suggest(name)
            if not suggestion:
                raise
            raise ModelNotFoundError(f"{error} {suggestion}") from error

    def _suggest(self, name: str) -> str:
        """Say which known short names come near; empty for a name that has none."""
        if "/" in name:
            return ""
        known = [n for model in self.model_names() for n in (model.name, *model.aliases)]
        if name in known:
            return ""
        near = difflib.get_close_matches(name.lower(), known, n=3)
        if near:
            return f"Did you mean {' or '.join(map(repr, near))}?"
        return f"Names known here: {', '.join(known)}." if known else ""

    def list_plugins(self) -> tuple[PluginRecord, ...]:
        """Return a record of every plugin found, sound or not, built-ins first."""
        records = self._records.values()
        return tuple(sorted(records, key=lambda r: _ask_order(r.distribution, r.name)))


@functools.lru_cache(maxsize=8)
def _manager(allow: tuple[str, ...] | None, block: tuple[str, ...]) -> PluginManager:
    return PluginManager(allow, block)


def get_manager(allow: Sequence[str] | None = None, block: Sequence[str] = ()) -> PluginManager:
    """Return the process's plugin manager for these rules, loading plugins on the first call."""
    return _manager(None if allow is None else tuple(sorted(allow)), tuple(sorted(block)))


def list_plugins(config: Config | None = None) -> tuple[PluginRecord, ...]:
    """Return a record of every installed plugin, sound or not, under a config's rules."""
    return _manager_for(config).list_plugins()


def plugin_registry(hook: str, config: Config | None = None) -> Mapping[str, Registration]:
    """Return what plugins have registered under a hook, by name.

    Args:
        hook: one of :data:`REGISTRIES`, such as ``pagedllm_server_routes``.
        config: whose plugin rules hold; None: the defaults.

    Raises:
        ConfigError: there is no such registry.
    """
    if hook not in REGISTRIES:
        raise ConfigError(f"{hook!r} is no registry of plugins; there are {', '.join(REGISTRIES)}")
    return _manager_for(config).registry(hook)


def _manager_for(config: Config | None) -> PluginManager:
    return get_manager(config.plugins_allow, config.plugins_block) if config else get_manager()


def resolve_model(
    name: str,
    revision: str | None = None,
    config: Config | None = None,
) -> ResolvedModel:
    """Turn a model's name into a folder with its files, downloading or converting as needed.

    Args:
        name: a short name from a plugin, a path, or ``organisation/model`` on the Hub.
        revision: branch, tag or commit, for names that have them.
        config: whose ``token``, ``download_dir`` and plugin rules hold; None: the defaults.

    Raises:
        ModelNotFoundError: nothing has that name, or it cannot be had; says what to do.
    """
    return _manager_for(config).resolve_model(name, revision, config)


def check_model_folder(path: Path) -> None:
    """Raise ModelNotFoundError unless the folder holds a configuration and safe weights."""
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"The folder {str(path)!r} has no config.json: give the folder that a model was "
            "saved to with save_pretrained."
        )
    if any(path.glob("*.safetensors")):
        return
    pickled = sorted(p.name for p in (*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")))
    if pickled:
        raise ModelNotFoundError(
            f"The folder {str(path)!r} has its weights in {pickled[0]!r} only. Such files are "
            "pickled, and unpickling runs code of whoever wrote them, so they are not read. "
            "Load it once with transformers and save it with save_pretrained."
        )
    raise ModelNotFoundError(f"The folder {str(path)!r} has no weights (*.safetensors).")


def _check_registry(answer: Any) -> str | None:
    if not hasattr(answer, "items"):
        return f"returned {type(answer).__name__}, not a mapping of names to 'module:attribute'"
    for name, target in answer.items():
        if not (isinstance(name, str) and isinstance(target, str) and ":" in target):
            return f"returned {name!r}: {target!r}, not a name and 'module:attribute'"
    return None


def _check_model_names(answer: Any) -> str | None:
    if not isinstance(answer, (list, tuple)):
        return f"returned {type(answer).__name__}, not a list of ModelName"
    wrong = next((item for item in answer if not isinstance(item, ModelName)), None)
    return None if wrong is None else f"returned {wrong!r} in its list, not a ModelName"


def _check_resolved(answer: Any) -> str | None:
    if isinstance(answer, ResolvedModel):
        return None
    return f"returned {type(answer).__name__}, not a ResolvedModel"


def _check_executor(answer: Any) -> str | None:
    missing = [name for name in _EXECUTOR_METHODS if not callable(getattr(answer, name, None))]
    return f"returned {type(answer).__name__}, which has no {missing[0]}()" if missing else None


def _ask_order(distribution: str, name: str) -> tuple[bool, str, str]:
    return (distribution != BUILTIN_DISTRIBUTION, distribution, name)


def _point_order(point: metadata.EntryPoint) -> tuple[bool, str, str]:
    return _ask_order(point.dist.name if point.dist else "", point.name)


def _key(record: PluginRecord) -> str:
    return f"{record.distribution}:{record.name}"


def _describe(record: PluginRecord) -> str:
    return f"{record.name!r} ({record.distribution} {record.version})"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
