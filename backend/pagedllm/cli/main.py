"""Entry point of the ``pagedllm`` command: finds the sub-command and reports its errors.

Owner: the command line. Invariants: nothing heavy is imported before a sub-command needs
it; what the user did wrong is one line on standard error and status 2, anything else that
fails one line and status 1, and only ``--debug`` shows a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import TYPE_CHECKING

from pagedllm.cli.common import CLI_NAME, Parser, UsageError
from pagedllm.errors import EngineError, PagedLLMError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "generate": "continue one prompt or many",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput or latency",
    "quantize": "say what quantising a model saves and what it costs",
    "plugins": "list the plugins that are installed, or begin a new one",
}
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (by default the process's) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in ours
    if debug:
        arguments.remove("--debug")
        import logging

        # Not DEBUG for everyone: numba alone would log each instruction it compiles.
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        logging.getLogger("pagedllm").setLevel(logging.DEBUG)
    try:
        try:
            status = _dispatch(arguments)
        except SystemExit as leaving:  # argparse, after --help and --version
            status = leaving.code if isinstance(leaving.code, int) else 0
        sys.stdout.flush()  # while a reader that has gone can still be told from other errors
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; without this Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the last resort of the program
        if debug:
            traceback.print_exception(error)
        return _report(error)


def _report(error: BaseException) -> int:
    message = " ".join(str(error).split())
    expected = isinstance(error, (PagedLLMError, UsageError))
    if not expected:
        message = f"{type(error).__name__}: {message} (run again with --debug for a traceback)"
    print(f"{CLI_NAME}: error: {message}", file=sys.stderr)
    return 2 if expected and not isinstance(error, EngineError) else 1


def _dispatch(arguments: list[str]) -> int:
    name = next((each for each in arguments if not each.startswith("-")), None)
    if name is None or name in COMMANDS:
        parser = _parser(list_plugins=name is None and not {"-h", "--help"}.isdisjoint(arguments))
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            options.parser.refuse(unknown)
        if name is None:
            raise UsageError(f"no command given; try {CLI_NAME} --help")
        return int(options.run(options))
    from pagedllm.plugins import get_manager

    commands = get_manager().registry("pagedllm_cli_commands")
    if name not in commands:
        from pagedllm._kinds import nearest

        hint = nearest(name, [*COMMANDS, *commands]) or f"; try {CLI_NAME} --help"
        raise UsageError(f"there is no command '{name}'{hint}")
    return int(commands[name].load()(arguments[arguments.index(name) + 1 :]) or 0)


def _parser(*, list_plugins: bool) -> Parser:
    from pagedllm import __version__

    parser = Parser(
        prog=CLI_NAME, description="Run language models with paged attention and batching."
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"{CLI_NAME} {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and log messages")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"pagedllm.cli.{name}")
        sub = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        sub.set_defaults(run=module.run, parser=sub)
        module.add_arguments(sub)
    if list_plugins:
        from pagedllm.plugins import get_manager

        for name, entry in get_manager().registry("pagedllm_cli_commands").items():
            commands.add_parser(name, help=f"from the plugin {entry.plugin.distribution}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
