"""Starting and closing: memory and threads come back, scripts need no guard, exits are clean."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


_MEMORY = """
import gc, sys
from pagedllm import LLM, SamplingParams

def resident():
    gc.collect()
    lines = open("/proc/self/status")
    return next(int(l.split()[1]) for l in lines if l.startswith("VmRSS")) / 1024

def use():
    with LLM(sys.argv[1], skip_tokenizer_init=True, preallocate_kv_cache=True,
             kv_cache_memory="300MiB") as llm:
        llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=8))
        return resident()

use()  # torch, its threads and its caches stay
before = resident()
peaks, rests = [], []
for _ in range(3):  # the C library gives memory back late at times; a leak would pile up
    peaks.append(use())
    rests.append(resident())
print(min(peaks) - before, min(rests) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_gives_memory_back(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=8, max_position_embeddings=2048, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(tmp_path)
    done = run(_MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    during, after = map(float, done.stdout.split())
    assert during > 350, "the model and its cache were hardly there"
    # Weights and pages are half each; what an allocator keeps for its own use varies.
    assert after < 0.15 * during, f"{after:.0f} of {during:.0f} MiB stay"


def test_threads_end_with_their_engines(tiny_model: Path) -> None:
    from pagedllm import LLM

    def engine_threads() -> int:
        return sum(thread.name == "pagedllm-engine" for thread in threading.enumerate())

    before = engine_threads()
    closed = LLM(str(tiny_model), skip_tokenizer_init=True)
    dropped = LLM(str(tiny_model), skip_tokenizer_init=True)
    assert engine_threads() == before + 2
    closed.close()
    del dropped
    assert engine_threads() == before


def test_a_failed_start_leaves_no_thread(tmp_path: Path, tiny_model: Path) -> None:
    from pagedllm import LLM
    from pagedllm.errors import ConfigError

    def running() -> set[threading.Thread]:
        # What compiles kernels beside the loading ends by itself, when they are compiled.
        return {t for t in threading.enumerate() if t.name != "pagedllm-compile"}

    before = running()
    with pytest.raises(ConfigError):
        LLM(str(tiny_model), skip_tokenizer_init=True, max_model_len=5000)
    assert running() <= before


@pytest.mark.parametrize(
    "ending",
    ["", "llm.stream([1, 2], SamplingParams(max_tokens=None)); raise SystemExit(0)"],
)
def test_a_plain_script_runs_and_exits_cleanly(tiny_model: Path, ending: str) -> None:
    code = (
        "import sys\nfrom pagedllm import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], skip_tokenizer_init=True)\n"
        "print(len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
        f"{ending}\n"
    )
    done = run(code, str(tiny_model))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_it_runs_in_a_thread_and_inside_a_running_event_loop(tiny_model: Path) -> None:
    code = """
import asyncio, sys, threading
from pagedllm import LLM, SamplingParams
def work():
    with LLM(sys.argv[1], skip_tokenizer_init=True) as llm:
        print(len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
thread = threading.Thread(target=work); thread.start(); thread.join()
async def notebook_cell(): work()
asyncio.run(notebook_cell())
"""
    done = run(code, str(tiny_model))
    assert (done.returncode, done.stdout) == (0, "3\n3\n"), done.stderr


def test_ctrl_c_ends_generate_and_the_engine_goes_on(tiny_model: Path) -> None:
    code = """
import signal, sys, threading, os
from pagedllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        llm.generate([[1, 2]] * 8, SamplingParams(max_tokens=None))
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
stats = llm.stats()
print(stats.running, stats.waiting, stats.cache.pages_used)
"""
    done = run(code, str(tiny_model))
    assert (done.returncode, done.stdout) == (0, "interrupted\n3\n0 0 0\n"), done.stderr


def test_a_line_says_how_it_goes_unless_it_is_turned_off(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pagedllm import LLM, SamplingParams, metrics

    monkeypatch.setattr(metrics.StatsLogger, "is_due", True)  # not after ten seconds
    caplog.set_level("INFO", "pagedllm")
    for off in (True, False):
        with LLM(str(tiny_model), skip_tokenizer_init=True, disable_log_stats=off) as llm:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        lines = [line for line in caplog.messages if "tok/s generated" in line]
        assert len(lines) == (0 if off else 4)  # as many as steps
