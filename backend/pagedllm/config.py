"""Every setting of the engine, from keywords, YAML or command-line flags.

Owner: the public API. Invariants: a :class:`Config` is frozen and every value in it is
checked and normalised; ``resolve()`` leaves no setting for the engine to guess, but for
those that need the model (``dtype``, ``max_model_len``, the number of pages). Each field's
:func:`~pagedllm._options.option` is the only place that knows of a setting.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm._kinds import Boolean, Integer, Many, Named, Number, Size, Text
from pagedllm._options import (
    add_flags,
    canonical,
    check_all,
    checked,
    given_flags,
    option,
    options_of,
)
from pagedllm.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

SECTIONS = ("model", "cache", "scheduler", "distributed", "optimization")

DTYPES = Text(
    ("auto", "float32", "bfloat16", "float16"),
    {"fp32": "float32", "float": "float32", "f32": "float32", "bf16": "bfloat16"}
    | {"fp16": "float16", "half": "float16", "f16": "float16"},
    metavar="DTYPE",
)
_DEVICES = Text(
    ("auto", "cpu", "cuda"), {"gpu": "cuda"}, r"cuda:[0-9]+", also="cuda:N", metavar="DEVICE"
)


@checked(ConfigError)
@dataclass(frozen=True, slots=True)
class Config:
    """The engine's settings; :meth:`resolve` fills in what is left to the machine.

    Raises:
        ConfigError: for an unknown name or a wrong value, with the nearest valid name.
    """

    model: str = option(
        "smollm2",
        Text(metavar="MODEL"),
        "a name on the Hub, a folder, or a name that a plugin knows",
        section="model",
    )
    _: dataclasses.KW_ONLY
    revision: str | None = option(
        None, Text(), "branch, tag or commit of the model on the Hub", section="model"
    )
    tokenizer: str | None = option(
        None, Text(), "name or folder of the tokenizer; none: the model's", section="model"
    )
    skip_tokenizer_init: bool = option(
        False, Boolean(), "take and give token ids only, and load no tokenizer", section="model"
    )
    dtype: str = option(
        "auto", DTYPES, "of weights and arithmetic; auto: the model's own", section="model"
    )
    device: str = option(
        "auto", _DEVICES, "where to run; auto: the GPU if there is one", section="model"
    )
    max_model_len: int | None = option(
        None,
        Integer(low=1),
        "longest prompt and answer together, in tokens; none: what the model was made for",
        section="model",
    )
    seed: int | None = option(
        None,
        Integer(low=-(2**63), high=2**64 - 1),
        "base of the random numbers of requests without a seed of their own; none: a new one",
        section="model",
    )
    trust_remote_code: bool = option(
        False, Boolean(), "run Python code that comes with the model", section="model"
    )
    model_impl: str = option(
        "auto",
        Text(("auto", "native", "generic"), metavar="TIER"),
        "pagedllm's own decoder (native) or transformers' model (generic)",
        section="model",
    )
    chat_template: str | None = option(
        None, Text(), "file or text of a Jinja chat template; none: the model's", section="model"
    )
    download_dir: str | None = option(
        None,
        Text(metavar="DIR"),
        "where downloads are kept; none: the Hugging Face cache",
        section="model",
        aliases=("cache_dir",),
    )
    token: str | None = option(
        None,
        Text(),
        "access token of the Hub; none: the one you are logged in with",
        section="model",
        secret=True,
    )
    plugins_allow: tuple[str, ...] | None = option(
        None, Many(Text(metavar="NAME")), "load no plugins but these; none: all", section="model"
    )
    plugins_block: tuple[str, ...] = option(
        (), Many(Text(metavar="NAME")), "plugins not to load", section="model"
    )

    page_size: int = option(
        16, Integer(low=1), "tokens in a page", section="cache", aliases=("block_size",)
    )
    gpu_memory_utilization: float = option(
        0.9,
        Number(low=0, high=1, exclude_low=True),
        "fraction of the device's memory for weights, activations and pages together",
        section="cache",
    )
    kv_cache_memory: int | str | None = option(
        None,
        Size(),
        "memory for pages, such as 2GiB; none: from the memory there is",
        section="cache",
        aliases=("kv_cache_memory_bytes",),
    )
    num_pages: int | None = option(
        None,
        Integer(low=1),
        "exact number of pages; none: as many as the memory allows",
        section="cache",
        aliases=("num_gpu_blocks_override",),
    )
    kv_cache_dtype: str = option(
        "auto",
        Text(("auto", "int8"), metavar="DTYPE"),
        "of keys and values in pages: int8 halves them; auto: as the model computes",
        section="cache",
        aliases=("cache_dtype",),
    )
    preallocate_kv_cache: bool = option(
        False, Boolean(), "claim the pages' memory at the start", section="cache"
    )
    enable_prefix_caching: bool = option(
        True, Boolean(), "share the pages of prompts that begin alike", section="cache"
    )

    response_cache: str | Mapping[str, Any] | None = option(
        None,
        Named(),
        "a plugin's store of whole answers to repeatable requests, shared by engines: its name, "
        'or with options {"name": ..., ...}; none: answers are not kept',
        section="cache",
    )

    kv_store: str | Mapping[str, Any] | None = option(
        None,
        Named(),
        "a plugin's store of full pages of keys and values, shared by engines of one model: its "
        'name, or with options {"name": ..., ...}; none: pages are not kept elsewhere',
        section="cache",
    )

    max_num_batched_tokens: int | None = option(
        None, Integer(low=1), "most tokens computed in one step; none: 2048", section="scheduler"
    )
    max_batch_size: int = option(
        64,
        Integer(low=1),
        "most sequences that run at a time",
        section="scheduler",
        aliases=("max_num_seqs",),
    )
    batch_timeout_ms: float = option(
        0.0,
        Number(low=0),
        "milliseconds that an idle engine waits for company before it starts",
        section="scheduler",
    )
    scheduling_policy: str = option(
        "fcfs",
        Text(("fcfs", "priority", "deadline"), metavar="POLICY"),
        "first come first served, or by the requests' priority, or by their targets of time",
        section="scheduler",
    )
    steps_in_flight: int | None = option(
        None,
        Integer(low=1),
        "steps submitted ahead of their results; none: what the executor does best",
        section="scheduler",
    )
    force_max_tokens: int | None = option(
        None, Integer(low=1), "hard cap on the tokens of any answer", section="scheduler"
    )
    disable_log_stats: bool = option(
        False, Boolean(), "do not log statistics now and then", section="scheduler"
    )
    metrics_sinks: tuple[str | Mapping[str, Any], ...] = option(
        (),
        Many(Named(), separator=None),
        "plugins' receivers of the engine's metrics: names, each alone or with options "
        '({"name": ..., ...})',
        section="scheduler",
    )
    metrics_interval: float = option(
        10.0,
        Number(low=0.01),
        "seconds from one report to a metrics sink to the next",
        section="scheduler",
    )

    engine: str = option(
        "auto",
        Text(("auto", "thread", "process"), metavar="WHERE"),
        "run the engine in a thread, or in a process of its own; auto: a thread, and for a "
        "server on a GPU a process",
        section="distributed",
    )
    executor: str = option(
        "auto", Text(metavar="NAME"), "auto, inline or one of a plugin's", section="distributed"
    )
    tensor_parallel_size: int = option(
        1, Integer(low=1), "devices that share each layer", section="distributed"
    )
    pipeline_parallel_size: int = option(
        1, Integer(low=1), "devices that the layers are spread over", section="distributed"
    )

    attention_backend: str = option(
        "auto", Text(metavar="NAME"), "implementation of paged attention", section="optimization"
    )
    quantization: str | None = option(
        None,
        Text(metavar="METHOD"),
        "of the weights: int8, int4, or a plugin's; none: as the model was saved",
        section="optimization",
    )
    quantization_skip: tuple[str, ...] = option(
        (),
        Many(Text(metavar="MODULE")),
        "modules to leave as they are, such as lm_head or layers.0.*",
        section="optimization",
    )
    threads: int | None = option(
        None,
        Integer(low=1),
        "CPU threads to compute with; none: OMP_NUM_THREADS, else all that this process may use",
        section="optimization",
    )

    def __post_init__(self) -> None:
        """Check and normalise every value, then what does not go together.

        Raises:
            ConfigError: see the class.
        """
        check_all(self, ConfigError)
        if self.kv_cache_memory is not None and self.num_pages is not None:
            raise ConfigError(
                "kv_cache_memory and num_pages both set the number of pages; give one", "num_pages"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1 and self.executor in ("auto", "inline"):
                raise ConfigError(
                    f"{name}: {getattr(self, name)} needs an executor for several devices and "
                    f"there is none yet; set it to 1",
                    name,
                )
        if self.quantization_skip and self.quantization is None:
            raise ConfigError(
                "quantization_skip: nothing is quantised; set quantization too, or leave it out",
                "quantization_skip",
            )
        if both := set(self.plugins_allow or ()) & set(self.plugins_block):
            raise ConfigError(
                f"plugins_block: '{min(both)}' is in plugins_allow too; take it out of one",
                "plugins_block",
            )

    @property
    def kv_cache_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        return None if self.kv_cache_memory is None else int(self.kv_cache_memory)

    def replace(self, **changes: Any) -> Config:
        """Return a copy with some settings changed; checks them as construction does."""
        return dataclasses.replace(self, **canonical(type(self), changes, ConfigError))

    def resolve(self) -> Config:
        """Return a complete config: device, threads, seed and token budget are decided.

        Raises:
            ConfigError: a CUDA device is asked for that torch cannot see.
        """
        from pagedllm import _machine

        changes: dict[str, Any] = {"device": _machine.resolve_device(self.device)}
        if self.threads is None:
            changes["threads"] = _machine.default_threads()
        if self.seed is None:
            changes["seed"] = _machine.random_seed()
        if self.max_num_batched_tokens is None:
            changes["max_num_batched_tokens"] = max(2048, self.max_batch_size)
        return self.replace(**changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build from a mapping, flat or with the sections of :data:`SECTIONS` nested in it.

        Raises:
            ConfigError: also for a setting in the wrong section.
        """
        flat = _flatten(cls, values)
        try:
            return cls(**flat)
        except ConfigError as error:
            if error.parameter in flat and error.parameter not in values:
                section = options_of(cls)[error.parameter].section
                raise ConfigError(f"section '{section}': {error}", error.parameter) from None
            raise

    def to_dict(self, *, secrets: bool = False) -> dict[str, Any]:
        """Every setting by name; the Hub token only with ``secrets``."""
        return {
            name: getattr(self, name)
            for name, made in options_of(type(self)).items()
            if secrets or not made.secret
        }

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Config:
        """Build from a YAML file with sections, or flat.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or holds a wrong setting.
        """
        try:
            return cls.from_dict(_read_yaml(path))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}", error.parameter) from None

    def to_yaml(self) -> str:
        """YAML with sections that :meth:`from_yaml` reads back; without the Hub token."""
        import yaml

        nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in self.to_dict().items():
            plain = list(value) if isinstance(value, tuple) else value
            nested[options_of(type(self))[name].section][name] = plain
        return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)

    @classmethod
    def add_cli_arguments(
        cls, parser: argparse.ArgumentParser, *, exclude: tuple[str, ...] = ()
    ) -> None:
        """Add ``--config FILE`` and a flag per setting and alias, in a group per section."""
        parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags win")
        for section in SECTIONS:
            group = parser.add_argument_group(f"{section} settings")
            add_flags(group, cls, skip=exclude, section=section)

    @classmethod
    def from_cli(cls, namespace: argparse.Namespace, **defaults: Any) -> Config:
        """Build from parsed flags, over ``--config``'s file, over ``defaults``."""
        flags = given_flags(namespace, cls, ConfigError)
        path = getattr(namespace, "config", None)
        if path is None:
            return cls(**{**defaults, **flags})
        file = cls.from_yaml(path)  # reports its own errors, whatever the flags override
        given = {name: getattr(file, name) for name in _flatten(cls, _read_yaml(path))}
        return cls(**{**defaults, **given, **flags})


def _flatten(cls: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by their own names, out of their sections."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        # `model` is a section and a setting: text makes it the setting.
        if key not in SECTIONS or (key == "model" and isinstance(value, str)):
            inner = canonical(cls, {key: value}, ConfigError, also=SECTIONS)
        else:
            inner = _unpack(cls, key, value)
        for name in inner:
            if name in flat:
                raise ConfigError(f"'{name}' is given twice; keep one", name)
        flat |= inner
    return flat


def _unpack(cls: type[Config], section: str, values: object) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"section '{section}' must hold settings, not {values!r}")
    try:
        inner = canonical(cls, values, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"section '{section}': {error}", error.parameter) from None
    for name in inner:
        if (right := options_of(cls)[name].section) != section:
            raise ConfigError(f"'{name}' belongs in section '{right}', not in '{section}'", name)
    return inner


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is there twice, where YAML would silently keep the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"'{key}' is given twice; keep one", str(key))
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(Path(path).read_text("utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"cannot read the settings: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("expected settings as 'name: value' lines")
    return values
