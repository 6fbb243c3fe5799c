"""``pagedllm chat`` on the real model, over a pipe and on a real terminal."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import preloaded
from pagedllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "pagedllm.cli.main", "chat"]
SMALL = ["--num-pages", "300", "--max-model-len", "2048", "--threads", "1"]
GREEDY = ["--temperature", "0", "--max-tokens", "16"]
QUESTION = "What is the capital of Italy?"
FOLLOW_UP = "And of Spain?"


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> list[str]:
    return ["--model", str(smollm2_path), *SMALL]


def _pipe(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run([*COMMAND[1:], *arguments], text=text)


def test_a_turn_per_line_with_history_and_reset(smollm2_path: Path, model: list[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    system = {"role": "system", "content": "Answer briefly."}
    with LLM(str(smollm2_path), num_pages=300, threads=1) as llm:
        messages = [system, {"role": "user", "content": QUESTION}]
        first = llm.chat(messages, params)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}]
        messages += [{"role": "user", "content": FOLLOW_UP}]
        second = llm.chat(messages, params)[0].outputs[0].text
        alone = llm.chat([system, messages[-1]], params)[0].outputs[0].text
    assert alone != second  # so the history is seen to matter
    lines = [QUESTION, FOLLOW_UP, "", "/reset", FOLLOW_UP, "/exit", QUESTION]
    result = _pipe("\n".join(lines), "--system", "Answer briefly.", *GREEDY, *model)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{first}\n{second}\n{alone}\n"


def test_a_turn_that_cannot_be_served_ends_a_piped_chat(model: list[str]) -> None:
    result = _pipe("word " * 300, *GREEDY, *model, "--max-model-len", "64")
    assert result.returncode == 2
    assert result.stderr.count("pagedllm: error: ") == 1
    assert "Traceback" not in result.stderr


class Terminal:
    """The command on a pseudo-terminal, as a user sits before it."""

    def __init__(self, *arguments: str) -> None:
        self.fd, other = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, *COMMAND, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 200) -> str:
        """Return what came up to and with the pattern, and forget it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern!r} in {self.seen!r}")
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the other side has closed
                    raise EOFError(f"no {pattern!r} in {self.seen!r}") from None
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)


# Makes the pseudo-terminal the process's own, so that Ctrl-C there is a SIGINT here.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def terminal(model: list[str]) -> Iterator[Terminal]:
    long_answers = ["--max-tokens", "1500", "--ignore-eos", "--temperature", "0"]
    made = Terminal(*long_answers, *model)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_control_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("/exit")
    terminal.wait_for("> ")
    terminal.type(f"{QUESTION}\n")
    terminal.wait_for("Italy.*\n.*[a-z]{3}")  # the echo, then the answer's first words
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped\]", seconds=60)
    terminal.wait_for("> ")
    # It goes on, with the half answer in its history.
    terminal.type(f"{FOLLOW_UP}\n")
    terminal.wait_for("Spain.*\n.*[a-z]{3}")
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped\].*> ", seconds=60)
    # At the prompt it drops the line and no more.
    for attempt in range(4):  # a key pressed before the prompt listens is lost on any terminal
        terminal.type("half a li\x03")
        try:
            terminal.wait_for("Ctrl-D.*> ", seconds=4)
            break
        except TimeoutError:
            assert attempt < 3, "Ctrl-C at the prompt is not noticed"
    terminal.type("/nonsense\n")
    terminal.wait_for("/nonsense.*> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_failed_turn_leaves_an_interactive_chat_running(model: list[str]) -> None:
    made = Terminal(*GREEDY, *model, "--max-model-len", "80")
    try:
        made.wait_for("> ")
        made.type("word " * 100 + "\n")
        made.wait_for("pagedllm: error: .*/reset.*> ")
        made.type(f"{QUESTION}\n")
        assert "error" not in made.wait_for("Italy.*\n.*[a-z]{3}.*> ")
        made.type("/exit\n")
        assert made.process.wait(timeout=60) == 0
    finally:
        made.close()
