"""Programs: operations written down by name, and the job that carries one through a step.

Owner: numba_cpu. A :class:`Job` owns its buffers; they grow and never shrink, and every
address that the compiled function sees is kept alive by the job or by its caller. Not safe
to run from two threads at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.compiler import Compiled, compiled
from pagedllm_kernels.numba_cpu.layout import BLOCK_KEYS, LANES, TILE_ROWS, linear_scratch_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedllm_kernels.numba_cpu.team import Team
    from pagedllm_kernels.types import AttentionMetadata

Fields = dict[int, int | float]
"""Fields of an operation by their index in its record."""

SPINS = 2000  # some 50 us


def operation(code: int, fields: Fields) -> list[int]:
    """Return the record of an operation; floats become float32 in the low half of a field."""
    record = [0] * at.RECORD
    record[at.CODE] = code
    for index, value in fields.items():
        if isinstance(value, float):
            value = int(np.float32(value).view(np.uint32))
        record[index] = value
    return record


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that attention's buffers depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    """Bytes of a number in pages; in those of one, keys and values have scales."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_queries(self) -> int:
        """Queries in a tile."""
        return max(1, TILE_ROWS * self.num_kv_heads // self.num_heads)

    @property
    def width(self) -> int:
        """Bytes of a row of weighted values."""
        return _up(self.value_dim, LANES) * 4

    @property
    def part_bytes(self) -> int:
        """Bytes of a partial result of a tile."""
        return self.tile_queries * self.group * (self.width + 2 * at.LINE)

    def fields(self, page_size: int) -> Fields:
        """Return the fields that every operation of attention has."""
        slots, unit = _up(page_size, LANES), 1 if self.itemsize == 1 else 4
        scales = slots * 4 if self.itemsize == 1 else 0
        return {
            at.A_HEADS: self.num_heads,
            at.A_KV_HEADS: self.num_kv_heads,
            at.A_DIM: self.head_dim,
            at.A_VALUE_DIM: self.value_dim,
            at.A_GROUP: self.group,
            at.A_UNITS: self.units,
            at.A_SLOTS: slots,
            at.A_KEY_BYTES: self.units * slots * unit + scales,
            at.A_VALUE_BYTES: slots * self.itemsize * _up(self.value_dim, LANES) + scales,
            at.A_KEY_STRIDE: slots * unit,
            at.A_VALUE_STRIDE: self.width * unit // 4,
            at.A_WIDTH: self.width,
            at.A_TILE_QUERIES: self.tile_queries,
            at.A_PART_BYTES: self.part_bytes,
            at.A_PER_BLOCK: max(1, BLOCK_KEYS // page_size),
        }

    @property
    def units(self) -> int:
        """Units in a key, of 4 bytes or of one number in int8."""
        return self.head_dim if self.itemsize == 1 else -(-self.head_dim * self.itemsize // 4)

    def query_bytes(self, tokens: int) -> int:
        """Bytes of the queries of a step, beside their KV heads."""
        return tokens * self.num_heads * self.units * 4

    def scratch_bytes(self, page_size: int) -> int:
        """Bytes of a thread's scratch."""
        rows = self.tile_queries * self.group
        per_block = max(1, BLOCK_KEYS // page_size)
        groups = -(-per_block * _up(page_size, LANES) // (4 * LANES))
        lists = (groups + 1) * 32 + (per_block + 4) * 8 + at.LINE
        row = _up(max(self.head_dim, self.value_dim), LANES) * 4
        return at.WORK + self.part_bytes + lists + rows * groups * 256 + row


class Job:
    """A program with its buffers, ready to run step after step.

    Args:
        team: the threads.
        function: name of the compiled function in :mod:`interpreter`.
        records: the program, records of :func:`operation`.
        few_rows: row counts below it use the kernels for few rows.
        split_rows: row counts below it keep each row as the sum of two; not above few_rows.
    """

    def __init__(
        self,
        team: Team,
        function: str,
        records: list[list[int]],
        few_rows: int = 0,
        split_rows: int = 0,
    ) -> None:
        self.operations: NDArray[np.int64] = np.array(records, dtype=np.int64)
        self.fields: NDArray[np.int64] = np.zeros(at.JOB_SIZE, dtype=np.int64)
        self._function, self._team = function, team
        self._compiled: Compiled | None = None
        self._buffers: dict[int, torch.Tensor] = {}
        self._metadata: AttentionMetadata | None = None
        lines = 1 + len(records) * (team.threads + 1)
        self._sync: NDArray[np.int64] = np.zeros(lines * at.LINE // 8 + 8, dtype=np.int64)
        address = self._sync.ctypes.data
        self.fields[at.SYNC] = _up(address, at.LINE)
        self.fields[at.OPS] = self.operations.ctypes.data
        self.fields[at.NUM_OPS] = len(records)
        self.fields[at.THREADS] = team.threads
        self.fields[at.FEW_ROWS] = few_rows
        self.fields[at.SPLIT_ROWS] = split_rows
        self.fields[at.SPINS] = SPINS
        multiply = np.isin(self.operations[:, at.CODE] % at.EXPERT, (at.LINEAR, at.LINEAR_Q))
        products = self.operations[multiply, at.L_UNITS]
        if len(products):
            self.reserve_scratch(linear_scratch_bytes(int(products.max())))
        self._address = self.fields.ctypes.data

    def reserve(self, index: int, size: int) -> None:
        """Make a buffer of at least ``size`` bytes and put its address into the job."""
        buffer = self._buffers.get(index)
        if buffer is None or buffer.numel() < size + at.LINE:
            grown = size if buffer is None else max(size, buffer.numel() * 3 // 2)
            buffer = torch.empty(grown + at.LINE, dtype=torch.uint8)
            self._buffers[index] = buffer
            self.fields[index] = _up(buffer.data_ptr(), at.LINE)

    def floats(self, index: int, shape: tuple[int, int]) -> torch.Tensor:
        """The beginning of a buffer of :meth:`reserve` as float32: a view."""
        buffer = self._buffers[index]
        start = int(self.fields[index]) - buffer.data_ptr()
        size = shape[0] * shape[1] * 4
        return buffer[start : start + size].view(torch.float32).view(shape)

    def reserve_scratch(self, size: int) -> None:
        """Make every thread's scratch at least ``size`` bytes."""
        size = _up(size, at.LINE)
        if size > self.fields[at.SCRATCH_SIZE]:
            self.reserve(at.SCRATCH, size * self._team.threads)
            self.fields[at.SCRATCH_SIZE] = size

    def take(self, index: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Put a tensor's address into the job; the tensor must outlive the run.

        Raises:
            ValueError: compiled code could not read it as it lies.
        """
        rows_lie_apart = tensor.dim() == 2 and tensor.stride(1) == 1
        if tensor.dtype != dtype or not (rows_lie_apart or tensor.is_contiguous()):
            raise ValueError(
                f"a contiguous {dtype} tensor is needed, not {tensor.dtype} with strides "
                f"{tensor.stride()}"
            )
        self.fields[index] = tensor.data_ptr()

    def bind(self, metadata: AttentionMetadata, shape: AttentionShape, task_lists: int = 1) -> None:
        """Take a step's boundaries and page table, and make room for its attention."""
        if self._metadata is metadata:
            return
        fields = self.fields
        tokens, seqs = metadata.slot_mapping.shape[0], metadata.context_lens.shape[0]
        fields[at.NUM_TOKENS], fields[at.NUM_SEQS] = tokens, seqs
        self.take(at.QUERY_STARTS, metadata.query_starts, torch.int32)
        self.take(at.CONTEXT_LENS, metadata.context_lens, torch.int32)
        self.take(at.PAGE_TABLE, metadata.page_table, torch.int32)
        fields[at.PAGE_TABLE_WIDTH] = metadata.page_table.stride(0) if seqs > 1 else 0
        self.take(at.SLOT_MAPPING, metadata.slot_mapping, torch.int64)
        fields[at.PAGE_SIZE] = metadata.page_size
        tiles = (tokens // shape.tile_queries + seqs) * shape.num_kv_heads
        parts = 8 * self._team.threads
        for i in range(task_lists):
            self.reserve(at.TASKS + i, (tiles + parts + 1) * at.TASK)
        self.reserve(at.PARTIALS, parts * shape.part_bytes)
        self.reserve(at.QUERIES, shape.query_bytes(tokens))
        self.reserve_scratch(shape.scratch_bytes(metadata.page_size))
        self._metadata = metadata

    def run(self) -> None:
        """Run the program on every thread; returns when it is done."""
        if self._compiled is None:
            self._compiled = compiled(self._function)
            self.fields[at.TILES] = self._compiled.tiles.ctypes.data
        self._sync.fill(0)
        self._team.run(self._compiled.address, self._address)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
