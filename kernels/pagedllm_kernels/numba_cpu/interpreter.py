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
from pagedllm_kernels.numba_cpu.atomics import fetch_add, give_way, load_acquire, pause
from pagedllm_kernels.numba_cpu.attend import attend
from pagedllm_kernels.numba_cpu.layout import LANES
from pagedllm_kernels.numba_cpu.linear import linear, linear_tasks
from pagedllm_kernels.numba_cpu.plan import plan
from pagedllm_kernels.numba_cpu.rows import EMBED_ROWS, NORM_ROWS, embed, norm, pack
from pagedllm_kernels.numba_cpu.simd import BF16, F16, F32, field, jit, via
from pagedllm_kernels.numba_cpu.write import WRITE_ROWS, write

# What is compiled on its own, each after what it calls.
ATTENTION_UNITS = ("write", "plan", "_scores", "_softmax", "_values", "_block", "attend")
MODEL_UNITS = ("embed", "norm", "pack", "finish", "_product", "_linear_few", "_linear_many")


@jit
def _tasks(op: int, job: int) -> int:
    """Return the number of tasks of an operation."""
    code = field(op, at.CODE)
    if code == at.LINEAR:
        return linear_tasks(op, job)
    if code == at.PACK:
        rows = via(job, op, at.P_ROWS_AT)
        return 0 if rows < field(job, at.FEW_ROWS) else (rows + LANES - 1) // LANES
    if code == at.NORM:
        return (via(job, op, at.N_ROWS_AT) + NORM_ROWS - 1) // NORM_ROWS
    if code == at.WRITE:
        return (field(job, at.NUM_TOKENS) + WRITE_ROWS - 1) // WRITE_ROWS
    if code == at.ATTEND:
        return load_acquire(via(job, op, at.A_TASKS_AT))
    if code == at.EMBED:
        return (field(job, at.NUM_TOKENS) + EMBED_ROWS - 1) // EMBED_ROWS
    return 1


@jit
def _run_task(op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any) -> None:
    code = field(op, at.CODE)
    if code == at.WRITE:
        write(op, job, task, scratch, atag)
    elif code == at.ATTEND:
        attend(op, job, task, scratch, atag)
    elif code == at.PLAN:
        plan(op, job)
    # Numba prunes this where there are no weights, and attention alone compiles faster.
    if wtag is not None:
        _run_model_task(code, op, job, task, scratch, wtag, atag)


@jit
def _run_model_task(
    code: int, op: int, job: int, task: int, scratch: int, wtag: Any, atag: Any
) -> None:
    if code == at.LINEAR:
        linear(op, job, task, scratch, wtag, atag)
    elif code == at.PACK:
        pack(op, job, task)
    elif code == at.NORM:
        norm(op, job, task, atag)
    elif code == at.EMBED:
        embed(op, job, task, wtag)


@jit
def _run(job: int, wtag: Any, atag: Any) -> None:
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
        done_at = sync + at.LINE + number * (threads + 1) * at.LINE
        done = 0
        for i in range(threads):
            owner = (me + i) % threads
            low = tasks * owner // threads
            size = tasks * (owner + 1) // threads - low
            counter = done_at + (1 + owner) * at.LINE
            while load_acquire(counter) < size:
                task = fetch_add(counter, 1)
                if task < size:
                    _run_task(op, job, low + task, scratch, wtag, atag)
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


# The functions that are compiled: storage of weights, and of activations and cache.


def model_f32(job: int) -> None:
    """fp32 throughout."""
    _run(job, F32, F32)


def model_bf16(job: int) -> None:
    """bf16 storage; sums, norms and the residual stream are fp32."""
    _run(job, BF16, BF16)


def model_f16(job: int) -> None:
    """fp16 storage; sums, norms and the residual stream are fp32."""
    _run(job, F16, F16)


def attention_f32(job: int) -> None:
    """Attention alone, fp32 cache."""
    _run(job, None, F32)


def attention_bf16(job: int) -> None:
    """Attention alone, bf16 cache."""
    _run(job, None, BF16)


def attention_f16(job: int) -> None:
    """Attention alone, fp16 cache."""
    _run(job, None, F16)
