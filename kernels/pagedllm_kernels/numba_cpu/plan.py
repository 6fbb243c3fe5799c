"""Planning attention: which tile of queries, KV head and part of the context is one task.

Owner: numba_cpu; :mod:`pagedllm_kernels.numba_cpu.attend` runs the tasks.
"""

from __future__ import annotations

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import PART_KEYS
from pagedllm_kernels.numba_cpu.simd import (
    field,
    jit,
    load32,
    store64,
    unit,
    via,
)


@unit
def plan(op: int, job: int) -> None:
    """List the tasks of ATTEND: tiles of queries by KV head, in parts where tiles are few."""
    seqs = field(job, at.NUM_SEQS)
    starts = field(job, at.QUERY_STARTS)
    queries = field(op, at.A_TILE_QUERIES)
    tiles = 0
    for seq in range(seqs):
        count = load32(starts + 4 * seq + 4) - load32(starts + 4 * seq)
        tiles += (count + queries - 1) // queries
    tiles *= field(op, at.A_KV_HEADS)
    parts = max(1, (4 * field(job, at.THREADS) + tiles - 1) // max(tiles, 1))
    if field(job, at.THREADS) == 1:
        parts = 1
    first = via(job, op, at.A_TASKS_AT)
    number = 0
    for seq in range(seqs):
        start = load32(starts + 4 * seq)
        count = load32(starts + 4 * seq + 4) - start
        # The last queries see the most keys: they go first, so that no long task ends late.
        for tile in range((count + queries - 1) // queries - 1, -1, -1):
            rows = min(queries, count - tile * queries)
            for head in range(field(op, at.A_KV_HEADS)):
                number += _plan_tile(op, job, first + (number + 1) * at.TASK * 8, seq, head,
                                     start + tile * queries, rows, parts)  # fmt: skip
    store64(number, first)


@jit
def _plan_tile(
    op: int, job: int, task: int, seq: int, head: int, row: int, rows: int, parts: int
) -> int:
    """Write the tasks of one tile; return how many they are."""
    page_size = field(job, at.PAGE_SIZE)
    low, high = visible_keys(op, job, seq, row, rows)
    first, last = low // page_size, (high + page_size - 1) // page_size
    parts = max(1, min(parts, (last - first) * page_size // PART_KEYS))
    for part in range(parts):
        place = task + part * at.TASK * 8
        store64(seq, place + 8 * at.T_SEQ)
        store64(head, place + 8 * at.T_HEAD)
        store64(row, place + 8 * at.T_ROW)
        store64(rows, place + 8 * at.T_ROWS)
        store64(first + (last - first) * part // parts, place + 8 * at.T_FIRST)
        store64(first + (last - first) * (part + 1) // parts, place + 8 * at.T_LAST)
        store64(part, place + 8 * at.T_PART)
        # Of part 0: the number of parts in the low half, of those done in the high half.
        store64(parts, place + 8 * at.T_PARTS)
    return parts


@jit
def visible_keys(op: int, job: int, seq: int, row: int, rows: int) -> tuple[int, int]:
    """Positions of the first and past the last key that any of these rows sees."""
    end = load32(field(job, at.QUERY_STARTS) + 4 * seq + 4)
    position = load32(field(job, at.CONTEXT_LENS) + 4 * seq) - end + row
    window = field(op, at.A_WINDOW)
    low = max(0, position - window + 1) if window else 0
    return low, position + rows
