"""Matrix products one at a time, for models whose layers somebody else's code calls.

Owner: numba_cpu. The same operations as in a decoder's program, on weights where they lie: no
copy of them is kept. Not safe to call from two threads at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.decoder import FEW_ROWS, TAGS
from pagedllm_kernels.numba_cpu.layout import linear_scratch_bytes
from pagedllm_kernels.numba_cpu.program import Job, operation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedllm_kernels.numba_cpu.program import Fields
    from pagedllm_kernels.numba_cpu.team import Team

_PACKED, _IN, _OUT = range(at.TASKS, at.TASKS + 3)

LEAST_BYTES = 1 << 18
"""Of weights, below which starting the threads costs more than the product gains."""


class Products:
    """Multiplies rows by matrices.

    Args:
        team: the threads.
        dtype: of rows and matrices: float32, bfloat16 or float16.
    """

    def __init__(self, team: Team, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._records: dict[tuple[int, ...], NDArray[np.int64]] = {}
        empty = [operation(at.PACK, {}), operation(at.LINEAR, {})]
        self._job = Job(team, f"model_{TAGS[dtype]}", empty, FEW_ROWS)

    def covers(self, weight: torch.Tensor, *, rows: int = 1) -> bool:
        """Whether a matrix [out, in] can be multiplied, and so many rows faster than by torch.

        On 2 cores of Zen 4 a product of 3072 by 768 in bf16 takes 0.4 of oneDNN's time at 1 and
        at 8 rows, 0.65 at 32 and the same at 256; in fp32 a quarter at 8 and 0.65 at 256.
        """
        return (
            weight.dtype == self._dtype
            and weight.dim() == 2
            and weight.stride(1) == 1
            and weight.shape[1] % at.LANES == 0
            and weight.nbytes >= LEAST_BYTES
            and (rows <= at.GROUP or self._dtype == torch.float32)
        )

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return float32 ``x @ weight.T`` [T, out] of ``x`` [T, in] and a matrix [out, in]."""
        job, x = self._job, x.contiguous()
        rows, units = x.shape[0], x.shape[1] * x.itemsize // 4
        out = torch.empty((rows, weight.shape[0]))
        job.operations[:] = self._operations(weight, units)
        job.operations[1, at.L_WEIGHT] = weight.data_ptr()
        job.fields[at.NUM_TOKENS] = rows
        job.fields[_IN], job.fields[_OUT] = x.data_ptr(), out.data_ptr()
        job.reserve(_PACKED, (rows + at.LANES) * units * 8)
        job.run()
        return out

    def _operations(self, weight: torch.Tensor, units: int) -> NDArray[np.int64]:
        key = (*weight.shape, weight.stride(0))
        if key not in self._records:
            self._job.reserve_scratch(linear_scratch_bytes(units))
            pack: Fields = {
                at.P_ROWS_AT: at.NUM_TOKENS,
                at.P_IN_AT: _IN,
                at.P_IN_STRIDE: units * 4,
                at.P_UNITS: units,
                at.P_OUT_AT: _PACKED,
            }
            linear: Fields = {
                at.L_ROWS_AT: at.NUM_TOKENS,
                at.L_SIZE: weight.shape[0],
                at.L_STRIDE: weight.stride(0) * weight.itemsize,
                at.L_UNITS: units,
                at.L_IN_AT: _IN,
                at.L_IN_STRIDE: units * 4,
                at.L_PACKED_AT: _PACKED,
                at.L_OUT_AT: _OUT,
                at.L_OUT_STRIDE: weight.shape[0] * 4,
                at.L_MODE: at.STORE_F32,
                at.L_SCALE: 1.0,
            }
            records = [operation(at.PACK, pack), operation(at.LINEAR, linear)]
            self._records[key] = np.array(records, dtype=np.int64)
        return self._records[key]
