"""Things of plugins that a setting or a request names: found, made, or refused in one line.

Owner: plugins. Invariants: a name stands alone or with options (``"forbid"``, or ``{"name":
"forbid", "token_ids": [1]}``), which become keywords of what the plugin registered; whatever
is wrong with either, or goes wrong in the plugin, is one error that names the setting; what
was made from a name travels to other processes as that name, and is made there again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedllm._kinds import nearest
from pagedllm.errors import ConfigError, PagedLLMError, ValidationError
from pagedllm.plugins import get_manager

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedllm.config import Config
    from pagedllm.plugins import Registration
    from pagedllm.sampling_params import SamplingParams

LOGITS_PROCESSORS = "pagedllm_logits_processors"
_Rules = tuple[tuple[str, ...] | None, tuple[str, ...]]


def make(
    hook: str,
    setting: str,
    spec: str | Mapping[str, Any],
    rules: Config | _Rules,
    *arguments: Any,
    error: type[ConfigError | ValidationError] = ConfigError,
    also: Iterable[str] = (),
) -> Any:
    """Make what a plugin registers under a name.

    Args:
        hook: a registry, such as ``pagedllm_metrics_sinks``.
        setting: the field that names it, for messages.
        spec: the name, alone or with options.
        rules: which plugins may load: a config, or its (plugins_allow, plugins_block).
        arguments: given to what is registered, before the options.
        error: what is raised.
        also: names that are no plugin's, to be suggested.

    Raises:
        error: nobody registers the name, or it cannot be made from these options.
    """
    name, options = (spec, {}) if isinstance(spec, str) else (spec["name"], dict(spec))
    options.pop("name", None)
    registration = find(hook, setting, name, rules, error=error, also=also)
    plugin = registration.plugin
    try:
        return registration.load()(*arguments, **options)
    except PagedLLMError as problem:
        raise error(f"{setting}: {problem}", setting) from problem
    except Exception as problem:
        given = ", ".join(options)  # not their values: one may be a password
        text = " ".join(str(problem).split())
        raise error(
            f"{setting}: '{name}' of the plugin {plugin.name} ({plugin.distribution} "
            f"{plugin.version}) cannot be made from ({given}): {type(problem).__name__}: {text}",
            setting,
        ) from problem


def find(
    hook: str,
    setting: str,
    name: str,
    rules: Config | _Rules,
    *,
    error: type[ConfigError | ValidationError] = ConfigError,
    also: Iterable[str] = (),
) -> Registration:
    """Find what a plugin registers under a name; see :func:`make`."""
    allow, block = rules if isinstance(rules, tuple) else (rules.plugins_allow, rules.plugins_block)
    registry = get_manager(allow, block).registry(hook)
    if name not in registry:
        known = sorted({*registry, *also})
        there = f"; there are {', '.join(known)}" if known else " (see: pagedllm plugins)"
        raise error(
            f"{setting}: no plugin registers '{name}'{nearest(name, known) or there}", setting
        )
    return registry[name]


class NamedProcessor:
    """A logits processor that a request named; the sampler calls what is in it.

    Raises:
        ValidationError: there is no such processor, or it does not take these options.
    """

    __slots__ = ("_rules", "processor", "spec")

    def __init__(self, spec: str | Mapping[str, Any], rules: _Rules) -> None:
        self.spec = spec
        self._rules = rules
        self.processor: Any = make(
            LOGITS_PROCESSORS, "logits_processors", spec, rules, error=ValidationError
        )
        if not callable(self.processor):
            raise ValidationError(
                f"logits_processors: {spec!r} made {type(self.processor).__name__}, which cannot "
                "be called as a processor; the plugin has to return one",
                "logits_processors",
            )

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """As the processor itself."""
        return self.processor(token_ids, logits)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the name."""
        return NamedProcessor, (self.spec, self._rules)

    def __repr__(self) -> str:
        return f"NamedProcessor({self.spec!r})"


def with_processors(params: SamplingParams, config: Config) -> SamplingParams:
    """Put logits processors in the place of their names. Raises ValidationError."""
    rules = (config.plugins_allow, config.plugins_block)
    made = [
        NamedProcessor(each, rules) if isinstance(each, (str, Mapping)) else each
        for each in params.logits_processors
    ]
    named = any(isinstance(each, NamedProcessor) for each in made)
    return params.replace(logits_processors=made) if named else params
