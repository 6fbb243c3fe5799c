"""What a plugin may provide: pluggy hook specifications and the data they exchange.

Owner: plugins. Invariants: this module imports neither torch nor transformers; hooks run
while an engine starts (or a command line is parsed), never inside a step. A plugin is a
module or object named by an entry point of the group ``pagedllm``; each function in it that
is marked with :data:`hookimpl` and named like one below takes any subset of that hook's
arguments. ``docs/plugins.md`` walks through them.

Hooks come in two shapes. *Registries* return ``{name: "module:attribute"}``, so that what
they name is imported only when it is used. *First result* hooks are asked one plugin after
the other until one does not answer None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pagedllm.config import Config
    from pagedllm.executors.base import Executor
    from pagedllm.models.base import PagedModel

API_VERSION = 1
"""Raised when a hook changes in a way that breaks plugins written for it. A plugin states the
version it was written for as ``PAGEDLLM_API_VERSION``; one that states another is refused."""

ENTRY_POINT_GROUP = "pagedllm"

hookspec = pluggy.HookspecMarker("pagedllm")
hookimpl = pluggy.HookimplMarker("pagedllm")
"""Marks a plugin's function as the implementation of the hook of the same name."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """A short name that a plugin can resolve."""

    name: str
    description: str = ""
    """One line for listings."""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model lies, after all downloading and converting."""

    path: Path
    """A folder in the Hugging Face layout: config.json, ``*.safetensors``, tokenizer files."""
    name: str
    """What the user asked for; reports and metrics call the model so."""
    revision: str | None = None
    """What identifies these very weights, such as a commit hash; None when nothing does."""


class ResponseCache(Protocol):
    """A store of whole answers that engines share; keys and answers mean nothing to it.

    An engine makes one when it starts and calls it in one thread of its own, so neither a
    request nor an event loop ever waits in these methods for longer than ``timeout``. Whatever
    they raise counts as an outage: the engine warns once, goes on without the cache, and
    tries it again after some seconds.
    """

    @property
    def timeout(self) -> float:
        """Seconds that a look-up may hold up the requests in it; after that they run."""
        ...

    def get(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the answer of each key, None for one that is not there (any more).

        Args:
            keys: one or more; each at most 80 ASCII letters, digits, ``:``, ``.`` and ``-``.
        """
        ...

    def put(self, key: str, answer: bytes) -> None:
        """Keep an answer, in place of one of the same key; what is too large may be dropped."""
        ...

    def close(self) -> None:
        """Give up connections and threads; nothing is called after it. Must not raise."""
        ...


class KVStore(ResponseCache, Protocol):
    """A store of pages of keys and values that engines of one model share.

    The methods are those of :class:`ResponseCache`, under the same rules. What is kept under a
    key is one page of all layers: hundreds of kilobytes to megabytes. Pages of one prompt are
    asked for in order, and are of use only up to the first that is not there.
    """


class MetricsSink(Protocol):
    """Receives the engine's metrics in a thread of its own; may block, and may raise."""

    def write(self, report: Mapping[str, Any]) -> None:
        """Take a report, every ``metrics_interval`` seconds and once when the engine closes.

        Args:
            report: plain data, as JSON has it: ``time`` (seconds since 1970), ``model``, and
                the fields of :class:`pagedllm.metrics.EngineStats`. Counters only grow.
        """
        ...

    def close(self) -> None:
        """Give up connections and threads; called after the last report."""
        ...


@hookspec
def pagedllm_model_names() -> Iterable[ModelName]:
    """List the short names that this plugin's ``pagedllm_resolve_model`` knows.

    They appear in listings and as suggestions for a misspelt name. Example::

        @hookimpl
        def pagedllm_model_names():
            return [ModelName("tiny-llama", "TinyLlama 1.1B chat", aliases=("tinyllama",))]
    """
    return ()


@hookspec(firstresult=True)
def pagedllm_resolve_model(
    name: str, revision: str | None, config: Config | None
) -> ResolvedModel | None:
    """Turn a model's name into a folder, downloading or converting as needed.

    Plugins are asked first; then the local folder of that name, then the Hugging Face Hub.
    What comes back is checked to hold a configuration and safetensors files.

    Args:
        name: what the user wrote.
        revision: the branch, tag or commit asked for, if any.
        config: the engine's configuration (``token``, ``download_dir`` ...); None outside one.

    Returns:
        The folder; None when the name is not this plugin's.

    Raises:
        PagedLLMError: the name is this plugin's and cannot be had; the user sees the message.

    Example::

        @hookimpl
        def pagedllm_resolve_model(name):
            if name != "our-model":
                return None
            return ResolvedModel(Path("/models/our-model"), name, revision="2026-01")
    """
    return None


@hookspec(firstresult=True)
def pagedllm_create_executor(
    name: str, config: Config, load: Callable[[], PagedModel]
) -> Executor | None:
    """Build the executor that the configuration names.

    Args:
        name: such as ``"ray"``; None must be returned for names that are not this plugin's.
        config: the resolved configuration.
        load: loads the model into the process that calls it.

    Returns:
        An object that satisfies :class:`pagedllm.executors.base.Executor`, not yet started.

    Example::

        @hookimpl
        def pagedllm_create_executor(name, config, load):
            return RayExecutor(config, load) if name == "ray" else None
    """
    return None


@hookspec
def pagedllm_attention_backends() -> Mapping[str, str]:
    """Register implementations of ``pagedllm_kernels.types.AttentionBackend``.

    Each name leads to a class or function that is called without arguments and returns the
    backend. One that keeps pages in int8 says so by an attribute ``int8_pages``. Example::

        @hookimpl
        def pagedllm_attention_backends():
            return {"my-attention": "my_package.attention:MyAttention"}
    """
    return {}


@hookspec
def pagedllm_quantizers() -> Mapping[str, str]:
    """Register ways to round weights to fewer bits.

    Each name leads to a callable that takes a weight (tensor [out, in]) and returns the tensor
    that it is rounded to, or two whose product that is, such as integers and their scales. The
    model keeps the rounded weights in its own dtype. ``Config.quantization`` gives the name.
    Example::

        @hookimpl
        def pagedllm_quantizers():
            return {"int4-ours": "my_package.quant:quantize_int4"}
    """
    return {}


@hookspec
def pagedllm_logits_processors() -> Mapping[str, str]:
    """Register logits processors that a request may name.

    ``SamplingParams(logits_processors=["no-digits", {"name": "forbid", "token_ids": [1]}])``
    names some. Each name leads to a callable that takes the request's options as keywords and
    returns a processor: ``processor(token_ids: list[int], logits: Tensor [vocab]) -> Tensor
    [vocab]``, or one of transformers'. It is called in the step, for every token, with prompt
    and answer so far; its result may depend on nothing else, since a request's answers share
    it. Example::

        @hookimpl
        def pagedllm_logits_processors():
            return {"no-digits": "my_package.processors:no_digits"}
    """
    return {}


@hookspec
def pagedllm_response_caches() -> Mapping[str, str]:
    """Register stores for whole answers, shared by engines.

    Each name leads to a callable ``make(config, **options)`` that returns a
    :class:`ResponseCache`. ``Config(response_cache=...)`` names one, alone or with options:
    ``{"name": "redis", "ttl": 3600}``. Options are the callable's keywords, so that unknown
    ones are reported by name; for wrong values it raises ConfigError. It connects to nothing
    yet, so that an engine starts whether or not the store is up.
    Example::

        @hookimpl
        def pagedllm_response_caches():
            return {"redis": "pagedllm_redis.cache:RedisResponseCache"}
    """
    return {}


@hookspec
def pagedllm_kv_stores() -> Mapping[str, str]:
    """Register stores for pages of keys and values, shared by engines of one model.

    Each name leads to a callable ``make(config, **options)`` that returns a :class:`KVStore`;
    ``Config(kv_store=...)`` names it, alone or with options. It connects to nothing yet, and
    is made in the process that the engine runs in. Example::

        @hookimpl
        def pagedllm_kv_stores():
            return {"nvme": "my_package.pages:FolderOfPages"}
    """
    return {}


@hookspec
def pagedllm_metrics_sinks() -> Mapping[str, str]:
    """Register receivers of the engine's metrics.

    Each name leads to a callable ``make(config, **options)`` that returns a
    :class:`MetricsSink`; ``Config(metrics_sinks=[...])`` names it, alone or with options. It
    connects to nothing yet. Example::

        @hookimpl
        def pagedllm_metrics_sinks():
            return {"statsd": "my_package.metrics:StatsdSink"}
    """
    return {}


@hookspec
def pagedllm_adapters() -> Mapping[str, str]:
    """Register names that can be imported from ``pagedllm`` itself.

    Example, after which ``from pagedllm import MyLLM`` works::

        @hookimpl
        def pagedllm_adapters():
            return {"MyLLM": "my_package.adapter:MyLLM"}
    """
    return {}


@hookspec
def pagedllm_cli_commands() -> Mapping[str, str]:
    """Register sub-commands of the ``pagedllm`` command.

    Each name leads to a callable that takes the arguments after the sub-command's name (a
    list of strings) and returns the exit status. Example::

        @hookimpl
        def pagedllm_cli_commands():
            return {"convert": "my_package.convert:main"}
    """
    return {}


@hookspec
def pagedllm_server_routes() -> Mapping[str, str]:
    """Register groups of HTTP routes; a server adds only those that its configuration names.

    Each name leads to a callable that takes the server's application and its engine.
    Example::

        @hookimpl
        def pagedllm_server_routes():
            return {"admin": "my_package.routes:add_admin_routes"}
    """
    return {}
