"""What the sub-commands share: the parser, the settings, the engine, the terminal.

Owner: the command line. Invariant: imports neither torch nor transformers itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from pagedllm._kinds import nearest
from pagedllm._options import add_flags, given_flags
from pagedllm.errors import ValidationError
from pagedllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pagedllm.config import Config
    from pagedllm.llm import LLM

CLI_NAME = "pagedllm"


class UsageError(Exception):
    """The command was called wrongly."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`UsageError` instead of printing usage."""

    def __init__(self, **kwargs: Any) -> None:
        # Abbreviations would change their meaning whenever a flag is added.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise UsageError(message)

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Report arguments that nobody took, with the nearest flag."""
        flag = unknown[0].partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        if not flag.startswith("-"):
            raise UsageError(f"unexpected argument '{unknown[0]}'; put it beside the others")
        raise UsageError(f"unknown flag '{flag}'{nearest(flag, known)}")


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add a flag per field of SamplingParams; ``defaults`` are this command's own."""
    group = parser.add_argument_group("sampling")
    add_flags(group, SamplingParams, defaults=defaults)


def sampling_from(options: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Build from the flags of :func:`add_sampling_flags`."""
    given = given_flags(options, SamplingParams, ValidationError)
    return SamplingParams(**{**defaults, **given})


def load_llm(config: Config) -> LLM:
    """Load the model, with progress bars on a terminal only."""
    quiet_downloads()
    from pagedllm import LLM

    return LLM(config)


def quiet_downloads() -> None:
    """Keep the Hub's progress bars off when nobody watches; before it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def read_file(path: Path) -> str:
    """Return a text file the user named.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8") from error


def note(text: str) -> None:
    """Tell the user something that is not part of the result."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def median_and_p99(values: Iterable[float]) -> dict[str, float] | None:
    """Median and 99th percentile (nearest rank above); None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(median, 3), "p99": round(p99, 3)}
