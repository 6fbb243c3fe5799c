"""``pagedllm serve``: from flags to a process that serves, and stops when it is told to.

Owner: the server integration. Invariants: the port is taken before anything slow happens, so
that a second server fails at once; whatever is wrong with a flag or a file is one line;
SIGTERM lets running requests finish, within limits, and ends with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import importlib.util
import os
import signal
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pagedllm import Config, ConfigError, PagedLLMError, plugin_registry
from pagedllm_server.heap import return_large_blocks
from pagedllm_server.options import (
    ServerOptions,
    add_arguments,
    launcher_settings,
    process_environment,
    server_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import uvicorn
    from fastapi import FastAPI

    from pagedllm_server.service import Service

SPARE_SECONDS = 5.0
"""What connections are given to take the last of their answers, after the engine is closed."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    """Serve a model until the process is told to stop; return the exit status.

    Raises:
        PagedLLMError: it cannot start, in one line.
    """
    config, options, notes = parse(argv)
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"the server needs {name}: pip install 'pagedllm[server]'")
    # The port first: a second server must not load anything before it learns that it is one.
    with _listen(options) as listener:
        return _start(config, options, notes, listener)


def _start(
    config: Config, options: ServerOptions, notes: Sequence[str], listener: socket.socket
) -> int:
    from prometheus_client import disable_created_metrics

    from pagedllm_server import logs
    from pagedllm_server.app import create_app
    from pagedllm_server.metrics import Metrics
    from pagedllm_server.service import Service
    from pagedllm_server.tracing import Tracer

    return_large_blocks()
    logs.configure(options.log_level, options.keys(), as_json=options.json_logs)
    for note in notes:
        sys.stderr.write(f"pagedllm serve: {note}\n")
    # A line more for each, that no dashboard reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    names = options.served_model_name
    name = names[0] if names else config.model
    tracer = None
    if options.otlp_endpoint is not None:
        tracer = Tracer(options.otlp_endpoint, options.otlp_service_name, name)
    metrics = Metrics(name)
    service = Service(config, options, metrics, tracer)
    app = create_app(service, metrics, options)
    return _serve(app, service, options, listener)


def parse(argv: Sequence[str], environment: Any = None) -> tuple[Config, ServerOptions, list[str]]:
    """Read flags, the settings file and the environment, in this order of precedence.

    Returns:
        the engine's settings, the server's, and remarks for the user.

    Raises:
        ConfigError: something in them is unknown or wrong.
    """
    environment = process_environment() if environment is None else environment
    parser = _Parser(
        prog="pagedllm serve",
        description="Serve a model over HTTP, in TGI's protocol and in OpenAI's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the model, as --model names it"
    )
    Config.add_cli_arguments(parser)
    mine = frozenset(flag for action in parser._actions for flag in action.option_strings)
    parser.add_argument(
        "--enable-fp8", action="store_true", help="short for --quantization fp8, a plugin's method"
    )
    add_arguments(parser, mine)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        _refuse(parser, unknown[0])
    file_engine, file_server = _settings_file(namespace)
    outside, flags, ignored = launcher_settings(namespace, environment)
    if namespace.positional_model is not None:
        if hasattr(namespace, "Config.model") or "model" in flags:
            raise ConfigError("the model is given twice; give it once", "model")
        flags["model"] = namespace.positional_model
    if namespace.enable_fp8:
        other = getattr(namespace, "Config.quantization", flags.get("quantization"))
        if other not in (None, "fp8"):
            raise ConfigError(
                f"--enable-fp8 and --quantization {other}: give one of the two", "quantization"
            )
        flags["quantization"] = "fp8"
    given = {**_typed(outside), **file_engine, **_typed(flags)}
    config = Config.from_cli(namespace, **given)
    if namespace.enable_fp8 and "fp8" not in plugin_registry("pagedllm_quantizers", config):
        raise ConfigError(
            "--enable-fp8: no plugin that is installed has a method 'fp8'; use --quantization "
            "int8, or int4, instead",
            "quantization",
        )
    tokens = given.get("num_pages") if "num_pages" in {**outside, **flags} else None
    if tokens is not None and config.num_pages == tokens:  # TGI's name counts tokens
        config = config.replace(num_pages=-(-tokens // config.page_size))
    options = server_options(namespace, file_server, environment)
    notes = [f"the environment variable {name} has no meaning here" for name in ignored]
    return config, options, notes


def _typed(texts: dict[str, str]) -> dict[str, Any]:
    """Values of the launcher's names, read as the engine's own flags are."""
    if not texts:
        return {}
    parser = argparse.ArgumentParser(allow_abbrev=False)
    Config.add_cli_arguments(parser)
    flags = []
    for name, text in texts.items():
        flag = name.replace("_", "-")
        if name == "trust_remote_code":
            off = text.lower() in ("0", "false", "no", "off")
            flags.append(f"--no-{flag}" if off else f"--{flag}")
        else:
            flags.append(f"--{flag}={text}")
    namespace, unknown = parser.parse_known_args(flags)
    if unknown:
        raise ConfigError(f"{unknown[0].partition('=')[0]} is not a setting of this engine")
    made = Config.from_cli(namespace)
    return {name: getattr(made, name) for name in texts}


def _settings_file(namespace: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``--config``'s file into the engine's settings and its ``server`` section."""
    path = namespace.config
    if path is None:
        return {}, {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            values = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        values = None
    if not isinstance(values, dict) or "server" not in values:
        return {}, {}  # the engine reads it, and reports what is wrong with it
    server = values.pop("server") or {}
    if not isinstance(server, dict):
        raise ConfigError(f"{path}: section 'server' must hold settings")
    try:
        made, plain = Config.from_dict(values), Config()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.parameter) from None
    namespace.config = None
    found = made.to_dict(secrets=True)
    return {k: v for k, v in found.items() if v != getattr(plain, k)}, server


def _refuse(parser: argparse.ArgumentParser, argument: str) -> NoReturn:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        raise ConfigError(f"unexpected argument '{argument}'; one model can be served")
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(flag, known, n=1)
    raise ConfigError(f"unknown flag '{flag}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = " ".join(str(error.strerror or error).split()).lower()
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {reason}; give another --port or "
            f"--host",
            "port",
        ) from error
    return listener


def transport(
    app: FastAPI, options: ServerOptions, parser: Literal["auto", "h11", "httptools"] = "auto"
) -> uvicorn.Config:
    """Say how uvicorn is to run the application.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    import uvicorn

    from pagedllm_server.connection import MOST_HEAD, protocol_class, room_for_connections

    password = options.ssl_keyfile_password
    try:
        settings = uvicorn.Config(
            app,
            http=protocol_class(options.client_timeout, room_for_connections(), parser),
            ws="none",
            h11_max_incomplete_event_size=MOST_HEAD,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(options.graceful_timeout + SPARE_SECONDS),
            backlog=2048,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
            ssl_keyfile_password=password.get_secret_value() if password else None,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=2 if options.ssl_ca_certs else 0,
        )
        settings.load()
    except OSError as error:
        raise ConfigError(f"ssl_certfile: cannot be used: {error}", "ssl_certfile") from error
    return settings


def _serve(app: FastAPI, service: Service, options: ServerOptions, listener: socket.socket) -> int:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to :func:`_run`, which ends with status 0 on SIGTERM."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    settings = transport(app, options)
    with asyncio.Runner(loop_factory=settings.get_loop_factory()) as loop:
        status = loop.run(_run(Server(settings), service, options, listener))
    if service.failed is not None:
        if isinstance(service.failed, PagedLLMError):
            raise service.failed
        raise ConfigError(f"the model cannot be loaded: {service.failed}") from service.failed
    return status


async def _run(
    server: uvicorn.Server, service: Service, options: ServerOptions, listener: socket.socket
) -> int:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def stop() -> None:
        if told.is_set():  # asked twice: at once, then
            os._exit(130)
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)

    def ready() -> None:
        sys.stdout.write(f"{_banner(service, options, listener)}\n")
        sys.stdout.flush()

    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(service.load(ready, told.set))
    stopping = asyncio.create_task(told.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if service.failed is None and not loading.done():
        # The thread that loads cannot be stopped, and it must not outlive the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    service.draining = True
    service.problem = service.problem or "the server is shutting down"
    server.should_exit = True
    _, late = await asyncio.wait({serving}, timeout=options.graceful_timeout)
    await service.close()  # what still runs gets an error
    if late:
        await asyncio.wait({serving}, timeout=SPARE_SECONDS)
    stopping.cancel()
    return 0


def _banner(service: Service, options: ServerOptions, listener: socket.socket) -> str:
    """One line: where, what, on what, in how much memory, with room for how much."""
    model = service.llm.model_info
    scheme = "https" if options.ssl_certfile else "http"
    port = listener.getsockname()[1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    memory = model.weight_bytes + model.num_pages * model.bytes_per_page
    tokens = model.num_pages * model.page_size
    return (
        f"pagedllm serves {service.model_name} at {scheme}://{host}:{port} on {model.device} "
        f"in {model.dtype}: {_size(model.weight_bytes)} of weights and "
        f"{_size(memory - model.weight_bytes)} of cache, which holds {tokens:,} tokens"
    )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
