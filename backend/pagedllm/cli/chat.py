"""``pagedllm chat``: a conversation in the terminal, or over a pipe with a turn per line.

Owner: the command line. Invariant: Ctrl-C during an answer ends the answer, keeps what was
said so far in the history, and does the engine no harm, since that runs in another thread.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedllm.cli.common import (
    CLI_NAME,
    UsageError,
    add_sampling_flags,
    load_llm,
    note,
    sampling_from,
)
from pagedllm.config import Config
from pagedllm.errors import PagedLLMError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pagedllm.llm import LLM
    from pagedllm.sampling_params import SamplingParams

DEFAULTS = {"max_tokens": 1024}
HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling_flags(parser, **DEFAULTS)
    Config.add_cli_arguments(parser, exclude=("seed",))


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends; return the exit status."""
    params = sampling_from(options, **DEFAULTS)
    if params.n > 1:
        raise UsageError("a chat has one answer a turn; leave out --n")
    config = Config.from_cli(options)
    with load_llm(config) as llm:
        conversation = Conversation(llm, params, options.system)
        interactive = sys.stdin.isatty()
        if interactive:
            note(f"{config.model}. {HELP}")
        for line in _lines(interactive):
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            if text == "/reset":
                conversation.reset()
            elif text.startswith("/") and " " not in text:
                note(HELP if text == "/help" else f"There is no {text}. {HELP}")
            elif text:
                _turn(conversation, text, interactive=interactive)
    return 0


def _turn(conversation: Conversation, text: str, *, interactive: bool) -> None:
    try:
        conversation.ask(text)
    except PagedLLMError as error:
        if not interactive:
            raise
        note(f"{CLI_NAME}: error: {error} (/reset starts a new conversation)")
    except KeyboardInterrupt:  # a second one, while the first was dealt with
        note("[stopped]")


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines until the input ends; on a terminal with line editing."""
    if not interactive:
        yield from sys.stdin
        return
    with suppress(ImportError):  # Windows has none; its console edits lines itself
        import readline  # noqa: F401 - importing it gives input() editing and a history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            note("(/exit or Ctrl-D leaves)")


@dataclass(slots=True)
class Conversation:
    """The messages so far. A failed turn leaves no trace in them."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the system message."""
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> None:
        """Print the answer as it comes.

        Raises:
            PagedLLMError: the conversation cannot be continued like this.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        said, reason = "", None
        try:
            with self.llm.chat_stream(asked, self.params) as stream:  # leaving it aborts
                for output in stream:
                    answer = output.outputs[0]
                    print(answer.text_delta, end="", flush=True)
                    said, reason = answer.text, answer.finish_reason
        except KeyboardInterrupt:
            pass
        finally:
            print(flush=True)
        if reason is None:
            note("[stopped]")
        elif reason == "length":
            note("[cut off by max_tokens or the model's length]")
        self.messages = [*asked, {"role": "assistant", "content": said}]
