"""The compiled function that every thread runs: a program's operations, one after the other.

Owner: numba_cpu. Invariants: an operation starts when all tasks of the one before are done,
not when all threads have arrived. A thread that the operating system holds up delays nothing
but the task it is in; whoever comes late finds the work taken. So a program also completes
with fewer threads than it was planned for.

Each thread has its own range of an operation's tasks, claimed from its own counter, and
takes from the others' ranges when its own is empty: neighbouring weights stay with one
thread, and no cache line is fought over until the end.
"""

from __future__ import annotations

from typing import Any

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.attend import attend
from pagedllm_kernels.numba_cpu.experts import expert_tasks, run_experts
from pagedllm_kernels.numba_cpu.layout import LANES, LINE
from pagedllm_kernels.numba_cpu.linear import linear, linear_tasks
from pagedllm_kernels.numba_cpu.plan import plan
from pagedllm_kernels.numba_cpu.quantized import (
    embed_quantized,
    linear_quantized,
    quantize,
    quantized_tasks,
)
from pagedllm_kernels.numba_cpu.rows import EMBED_ROWS, NORM_ROWS, embed, norm, pack
from pagedllm_kernels.numba_cpu.simd import (
    BF16,
    F16,
    F32,
    fetch_add,
    field,
    give_way,
    jit,
    load_acquire,
    pause,
    via,
)
from pagedllm_kernels.numba_cpu.write import WRITE_ROWS, write

# What is compiled on its own, each after what it calls. A unit's ``atag`` is how activations
# are stored.
ATTENTION_UNITS = ("write", "plan", "_scores", "_softmax", "_values", "_block", "attend")
MODEL_UNITS = ("embed", "norm", "pack", "finish", "_product", "_linear_few", "_linear_many",
               "route", "sort", "combine")  # fmt: skip
QUANTIZED_UNITS = ("embed_quantized", "quantize", "linear_quantized")


@jit
def _tasks(op: int, job: int) -> int:
    """Return the number of tasks of an operation."""
    code = field(op, at.CODE)
    if code == at.LINEAR:
        return linear_tasks(op, job)
    if code == at.LINEAR_Q:
        return quantized_tasks(op, job)
    if code >= at.ROUTE:
        return expert_tasks(op, job)
    if code == at.PACK:
        rows = via(job, op, at.P_ROWS_AT)
        return 0 if rows < field(job, at.FEW_ROWS) else (rows + LANES - 1) // LANES
    if code in (at.NORM, at.QUANTIZE):  # the number of rows is the first field of both
        return (via(job, op, at.N_ROWS_AT) + NORM_ROWS - 1) // NORM_ROWS
    if code == at.WRITE:
        return (field(job, at.NUM_TOKENS) + WRITE_ROWS - 1) // WRITE_ROWS
    if code == at.ATTEND:
        return load_acquire(via(job, op, at.A_TASKS_AT))
    if code == at.EMBED:
        return (field(job, at.NUM_TOKENS) + EMBED_ROWS - 1) // EMBED_ROWS
    return 1


# A parameter that is None leads nowhere: Numba prunes the branch, and less is compiled.


@jit
def _run_task(
    op: int, job: int, task: int, scratch: int, model: Any, quantized: Any, atag: Any, ptag: Any
) -> None:
    code = field(op, at.CODE)
    if code == at.WRITE:
        write(op, job, task, scratch, atag, ptag)
    elif code == at.ATTEND:
        attend(op, job, task, scratch, atag, ptag)
    elif code == at.PLAN:
        plan(op, job)
    if model is not None:
        if code == at.LINEAR:
            linear(op, job, task, scratch, atag)
        elif code == at.PACK:
            pack(op, job, task, scratch, atag)
        elif code == at.NORM:
            norm(op, job, task, atag)
        elif code >= at.ROUTE:
            run_experts(op, job, task, scratch, atag)
        elif code == at.EMBED:
            if field(op, at.E_BITS) == 0:
                embed(op, job, task, atag)
            elif quantized is not None:
                embed_quantized(op, job, task, EMBED_ROWS)
    if quantized is not None:
        if code == at.LINEAR_Q:
            linear_quantized(op, job, task, scratch, atag)
        elif code == at.QUANTIZE:
            quantize(op, job, task, atag)


@jit
def _run(job: int, model: Any, quantized: Any, atag: Any, ptag: Any) -> None:
    """Take part in a program.

    ``SYNC`` points to zeros: a thread counter, then per operation a line for the tasks done
    and a line per thread for the tasks it has claimed.
    """
    sync = field(job, at.SYNC)
    threads = field(job, at.THREADS)
    me = fetch_add(sync, 1) % threads
    scratch = field(job, at.SCRATCH) + me * field(job, at.SCRATCH_SIZE)
    spins = field(job, at.SPINS)
    for number in range(field(job, at.NUM_OPS)):
        op = field(job, at.OPS) + number * at.RECORD * at.FIELD
        tasks = _tasks(op, job)
        done_at = sync + LINE + number * (threads + 1) * LINE
        done = 0
        for i in range(threads):
            owner = (me + i) % threads
            low = tasks * owner // threads
            size = tasks * (owner + 1) // threads - low
            counter = done_at + (1 + owner) * LINE
            while load_acquire(counter) < size:
                task = fetch_add(counter, 1)
                if task < size:
                    _run_task(op, job, low + task, scratch, model, quantized, atag, ptag)
                    done += 1
        if done:
            fetch_add(done_at, done)
        waited = 0
        while load_acquire(done_at) < tasks:
            pause()
            waited += 1
            if waited >= spins:
                give_way()
                waited = 0


# The functions that are compiled: what for, and how activations and cache are stored. Sums,
# norms and the residual stream are float32 in all of them. Those for pages in int8 are in
# :mod:`int8_programs`.


def attention_f32(job: int) -> None:
    """Attention alone."""
    _run(job, None, None, F32, F32)


def attention_bf16(job: int) -> None:
    """Attention alone."""
    _run(job, None, None, BF16, BF16)


def attention_f16(job: int) -> None:
    """Attention alone."""
    _run(job, None, None, F16, F16)


def model_f32(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, F32, F32)


def model_bf16(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, BF16, BF16)


def model_f16(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, F16, F16)


def quantized_f32(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, F32, F32)


def quantized_bf16(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, BF16, BF16)


def quantized_f16(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, F16, F16)
