"""What ``pagedllm serve`` can be told beside the engine's own settings.

Owner: the server integration. Invariants: :class:`ServerOptions` is frozen and checked, and
each field is declared once: its flag, its help, its name in a settings file and the names
by which TGI's launcher knows it are all read from there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from pagedllm import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

GROUPS = {
    "address": "address and transport",
    "access": "access",
    "limits": "limits",
    "log": "logging and tracing",
}


def _flag(default: Any, text: str, group: str, *aliases: str, **checks: Any) -> Any:
    return Field(
        default,
        description=text,
        json_schema_extra={"group": group, "aliases": list(aliases)},
        **checks,
    )


class ServerOptions(BaseModel):
    """Settings of the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = _flag("127.0.0.1", "address to listen on", "address", "hostname")
    port: int = _flag(8000, "port to listen on; 0 takes a free one", "address", ge=0, le=65535)
    root_path: str = _flag("", "path that a proxy in front puts before every route", "address")
    ssl_certfile: str | None = _flag(None, "certificate, for HTTPS", "address")
    ssl_keyfile: str | None = _flag(None, "the certificate's key", "address")
    ssl_keyfile_password: SecretStr | None = _flag(None, "password of the key", "address")
    ssl_ca_certs: str | None = _flag(
        None, "authorities that clients' certificates must come from", "address"
    )
    cors_allow_origin: tuple[str, ...] = _flag(
        (), "web origins that may call this server from a browser; * is any", "address"
    )
    ui: bool = _flag(True, "serve the page at /ui", "address")
    routes: tuple[str, ...] = _flag((), "groups of routes of plugins to add", "address")

    api_key: tuple[SecretStr, ...] = _flag(
        (), "key that clients must send as 'Authorization: Bearer KEY'; several may be", "access"
    )
    api_key_file: str | None = _flag(None, "file of such keys, one a line", "access")
    served_model_name: tuple[str, ...] = _flag(
        (),
        "names that clients may ask for; none: any name is answered by the one model",
        "access",
    )

    max_concurrent_requests: int = _flag(
        512, "prompts that run or wait at a time; more are refused with 429", "limits", ge=1
    )
    max_client_batch_size: int = _flag(64, "prompts in one request", "limits", ge=1)
    max_best_of: int = _flag(16, "answers to one prompt (n, best_of)", "limits", ge=1)
    max_stop_sequences: int = _flag(4, "stop strings of a request", "limits", ge=0)
    max_top_n_tokens: int = _flag(
        20, "alternatives reported for a token (top_n_tokens, top_logprobs)", "limits", ge=0
    )
    max_input_tokens: int | None = _flag(
        None,
        "tokens of a prompt; none: what the model's length leaves",
        "limits",
        "max_input_length",
        ge=1,
    )
    payload_limit: int = _flag(2_000_000, "bytes of a request's body", "limits", ge=1)
    embedding_pooling: Literal["mean", "last"] = _flag(
        "mean", "how /v1/embeddings makes one vector of a text's states: mean or last", "limits"
    )
    timeout: float | None = _flag(
        None,
        "seconds that a request may take, if it does not say itself; none: any",
        "limits",
        gt=0,
    )
    client_timeout: float = _flag(
        60.0,
        "seconds that a client has to send a request, and in which it must take a part of its "
        "answer",
        "limits",
        gt=0,
        allow_inf_nan=False,
    )
    graceful_timeout: float = _flag(
        90.0,
        "seconds that running requests are given when the server is told to stop",
        "limits",
        "graceful_termination_timeout",
        ge=0,
    )
    logits_processors: tuple[str, ...] = _flag(
        (), "logits processors of plugins that requests may name; none: no request may", "limits"
    )
    disable_grammar_support: bool = _flag(False, "refuse grammars and JSON schemas", "limits")

    log_level: Literal["debug", "info", "warning", "error", "critical"] = _flag(
        "info", "least urgent messages to log", "log"
    )
    json_logs: bool = _flag(False, "log a JSON object per line", "log", "json_output")
    access_log: bool = _flag(True, "log a line per request", "log")
    otlp_endpoint: str | None = _flag(
        None, "OpenTelemetry collector (OTLP over HTTP) that spans of requests go to", "log"
    )
    otlp_service_name: str = _flag("pagedllm", "what the spans call this server", "log")

    @model_validator(mode="after")
    def _together(self) -> ServerOptions:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both")
        if any(not key.get_secret_value().strip() for key in self.api_key):
            raise ValueError("api_key is empty")
        return self

    def keys(self) -> tuple[str, ...]:
        """Every key that clients may use.

        Raises:
            ConfigError: ``api_key_file`` cannot be read or has no key in it.
        """
        keys = [key.get_secret_value() for key in self.api_key]
        if self.api_key_file is not None:
            try:
                with open(self.api_key_file, encoding="utf-8") as file:  # noqa: PTH123
                    found = [line.strip() for line in file if line.strip()]
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
                raise ConfigError(
                    f"api_key_file: cannot read {self.api_key_file}: {reason}", "api_key_file"
                ) from error
            if not found:
                raise ConfigError(
                    f"api_key_file: there is no key in {self.api_key_file}", "api_key_file"
                )
            keys += found
        return tuple(keys)


LAUNCHER = {
    "model_id": "model",
    "revision": "revision",
    "num_shard": "tensor_parallel_size",
    "quantize": "quantization",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "trust_remote_code": "trust_remote_code",
    "max_total_tokens": "max_model_len",
    "max_batch_prefill_tokens": "max_num_batched_tokens",
    "max_batch_size": "max_batch_size",
    "cuda_memory_fraction": "gpu_memory_utilization",
    "max_batch_total_tokens": "num_pages",
}
"""Names of TGI's launcher, and the engine's settings that they mean; the last counts tokens,
and its setting the pages that they fill."""

MEANINGLESS = {
    "sharded": "num_shard alone says how many devices share the model",
    "max_waiting_tokens": "prompts and answers share every step, so nobody waits for tokens",
    "lora_adapters": "adapters are not supported",
    "tokenizer_config_path": "use --tokenizer or --chat-template",
    "validation_workers": "the server decides by itself",
}
"""Names of TGI's launcher that have no counterpart, and why."""

HARMLESS = {"sharded": ("false", "0")}
"""Values of some of those that ask for nothing but what there is."""


def add_arguments(parser: argparse.ArgumentParser, engine_flags: frozenset[str]) -> None:
    """Add a flag per option and alias, and TGI's names for settings of the engine.

    Args:
        parser: already has the engine's flags.
        engine_flags: those, so that none is declared twice.
    """
    import argparse

    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for name, field in ServerOptions.model_fields.items():
        extra: Any = field.json_schema_extra
        flags = [f"--{each.replace('_', '-')}" for each in (name, *extra["aliases"])]
        shown = f"{field.description}{_default(field.default)}".replace("%", "%%")
        common: dict[str, Any] = {"dest": f"server.{name}", "default": argparse.SUPPRESS}
        if field.annotation is bool:
            groups[extra["group"]].add_argument(
                *flags, action=argparse.BooleanOptionalAction, help=shown, **common
            )
            continue
        action = "append" if str(field.annotation).startswith("tuple") else "store"
        metavar = "N" if field.annotation in (int, float) else name.rpartition("_")[2].upper()
        groups[extra["group"]].add_argument(
            *flags, action=action, metavar=metavar, help=shown, **common
        )
    launcher = parser.add_argument_group(
        "names that TGI's launcher used", "also read from environment variables in upper case"
    )
    for name, target in LAUNCHER.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in engine_flags and f"--{target.replace('_', '-')}" in engine_flags:
            launcher.add_argument(
                flag,
                dest=f"launcher.{name}",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=f"--{target.replace('_', '-')}",
            )
    for name in MEANINGLESS:
        flag = f"--{name.replace('_', '-')}"
        if flag not in engine_flags:
            launcher.add_argument(
                flag, dest=f"launcher.{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def _default(value: Any) -> str:
    if value is None or value in ((), ""):
        return ""
    return f" (default: {'on' if value is True else 'off' if value is False else value})"


def server_options(
    namespace: argparse.Namespace, file: Mapping[str, Any], environment: Mapping[str, str]
) -> ServerOptions:
    """Build from flags, over a settings file's ``server`` section, over the environment.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    values: dict[str, Any] = {}
    for name, field in ServerOptions.model_fields.items():
        extra: Any = field.json_schema_extra
        for each in (name, *extra["aliases"]):
            # HOSTNAME is the machine's own name in every shell, so it says nothing here;
            # HOST and TIMEOUT belong to too many programs.
            text = environment.get(each.upper())
            if text and each not in ("host", "hostname", "timeout", "ui", "routes", "log_level"):
                values[name] = _split(field.annotation, text)
    if key := environment.get("PAGEDLLM_API_KEY"):
        values["api_key"] = (key,)
    values |= _renamed(file)
    for name, field in ServerOptions.model_fields.items():
        given = getattr(namespace, f"server.{name}", None)
        if given is not None:
            flat = (
                [part for each in given for part in _split(field.annotation, each)]
                if isinstance(given, list)
                else given
            )
            values[name] = flat
    try:
        return ServerOptions(**values)
    except ValidationError as error:
        raise _config_error(error) from None


def _renamed(file: Mapping[str, Any]) -> dict[str, Any]:
    names: dict[str, str] = {}
    for name, field in ServerOptions.model_fields.items():
        extra: Any = field.json_schema_extra
        names |= dict.fromkeys(extra["aliases"], name)
    return {names.get(key, key): value for key, value in file.items()}


def _split(annotation: Any, text: str) -> Any:
    many = str(annotation).startswith("tuple")
    return tuple(part.strip() for part in text.split(",")) if many else text


def _config_error(error: ValidationError) -> ConfigError:
    import difflib

    first = error.errors(include_input=False, include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, ServerOptions.model_fields, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return ConfigError(f"unknown server setting '{name}'{hint}", name)
    text = str(first["msg"]).removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    return ConfigError(f"{name}: {text}" if name else text, name or None)


def launcher_settings(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return TGI's names as the engine's settings.

    Returns:
        from the environment, from flags, and names in the environment that mean nothing here.

    Raises:
        ConfigError: a flag has no meaning here.
    """
    ignored = []
    for name, reason in MEANINGLESS.items():
        said, value = f"--{name.replace('_', '-')}", getattr(namespace, f"launcher.{name}", None)
        flagged = value is not None
        if not flagged:
            said, value = name.upper(), environment.get(name.upper()) or None
        if value is None or value.lower() in HARMLESS.get(name, ()):
            continue
        if flagged:  # variables may be there for TGI alone
            raise ConfigError(f"{said} has no meaning here: {reason}; leave it out", name)
        ignored.append(said)
    outside = {
        target: environment[name.upper()]
        for name, target in LAUNCHER.items()
        if environment.get(name.upper())
    }
    flags = {
        target: getattr(namespace, f"launcher.{name}")
        for name, target in LAUNCHER.items()
        if hasattr(namespace, f"launcher.{name}")
    }
    return outside, flags, ignored


def process_environment() -> Mapping[str, str]:
    """The environment variables of this process."""
    return os.environ
