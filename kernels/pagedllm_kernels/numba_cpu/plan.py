"""Planning attention: which tile of queries, KV head and part of the context is one task.

Owner: numba_cpu; :mod:`pagedllm_kernels.numba_cpu.attend` runs the tasks.
"""

from __future__ import annotations

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.layout import PART_KEYS, TASK
from pagedllm_kernels.numba_cpu.simd import field, jit, load32, set_field, store64, unit, via


@unit
def plan(op: int, job: int) -> None:
    """List the tasks of ATTEND: tiles of queries by KV head, in parts where tiles are few."""
    seqs, heads = field(job, at.NUM_SEQS), field(op, at.A_KV_HEADS)
    starts = field(job, at.QUERY_STARTS)
    queries = field(op, at.A_TILE_QUERIES)
    tiles = 0
    for seq in range(seqs):
        count = load32(starts + 4 * seq + 4) - load32(starts + 4 * seq)
        tiles += (count + queries - 1) // queries * heads
    parts = 1
    if field(job, at.THREADS) > 1:
        parts = max(1, (4 * field(job, at.THREADS) + tiles - 1) // max(tiles, 1))
    first = via(job, op, at.A_TASKS_AT)
    number = 0
    for seq in range(seqs):
        start = load32(starts + 4 * seq)
        count = load32(starts + 4 * seq + 4) - start
        # The last queries see the most keys: they go first, so that no long task ends late.
        for tile in range((count + queries - 1) // queries - 1, -1, -1):
            row, rows = start + tile * queries, min(queries, count - tile * queries)
            for head in range(heads):
                place = first + (number + 1) * TASK
                number += _plan_tile(op, job, place, seq, head, row, rows, parts)
    store64(number, first)


@jit
def _plan_tile(
    op: int, job: int, task: int, seq: int, head: int, row: int, rows: int, parts: int
) -> int:
    """Write the tasks of one tile; return how many they are."""
    page_size = field(job, at.PAGE_SIZE)
    low, high = visible_keys(op, job, seq, row, rows)
    first = low // page_size
    pages = (high + page_size - 1) // page_size - first
    parts = max(1, min(parts, pages * page_size // PART_KEYS))
    for part in range(parts):
        set_field(task, at.T_SEQ, seq)
        set_field(task, at.T_HEAD, head)
        set_field(task, at.T_ROW, row)
        set_field(task, at.T_ROWS, rows)
        set_field(task, at.T_FIRST, first + pages * part // parts)
        set_field(task, at.T_LAST, first + pages * (part + 1) // parts)
        set_field(task, at.T_PART, part)
        # Of part 0: the number of parts in the low half; in the high half, how many were done,
        # counted over all layers.
        set_field(task, at.T_PARTS, parts)
        task += TASK
    return parts


@jit
def visible_keys(op: int, job: int, seq: int, row: int, rows: int) -> tuple[int, int]:
    """Positions of the first and past the last key that any of these rows sees."""
    end = load32(field(job, at.QUERY_STARTS) + 4 * seq + 4)
    position = load32(field(job, at.CONTEXT_LENS) + 4 * seq) - end + row
    window = field(op, at.A_WINDOW)
    low = max(0, position - window + 1) if window else 0
    return low, position + rows
