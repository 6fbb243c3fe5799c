"""The attention backend: one program of three operations per call.

Owner: numba_cpu. Not safe to call from two threads at once: it keeps its buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.program import AttentionShape, Job, operation
from pagedllm_kernels.numba_cpu.team import Team
from pagedllm_kernels.types import LayerCache

if TYPE_CHECKING:
    from pagedllm_kernels.numba_cpu.program import Fields
    from pagedllm_kernels.types import AttentionMetadata

_QUERY_AT, _KEY_AT, _VALUE_AT, _OUT_AT = range(at.TASKS + 1, at.TASKS + 5)
_FUNCTIONS = {
    torch.float32: "attention_f32",
    torch.bfloat16: "attention_bf16",
    torch.float16: "attention_f16",
    torch.int8: "attention_f32_i8",
}


class NumbaAttention:
    """Paged attention on CPU cores, compiled by Numba.

    Keys and values are kept in the cache's dtype, and queries and softmax weights are rounded
    to it before they are multiplied; sums are fp32. Page layouts are those of
    :mod:`pagedllm_kernels.numba_cpu.attend`.

    Args:
        threads: cores to use; None takes what affinity, cgroup quota and torch allow.
    """

    name = "numba"
    int8_pages = True

    def __init__(self, threads: int | None = None) -> None:
        self.team = Team(threads)
        self._jobs: dict[tuple[object, ...], Job] = {}

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerCache:
        """Return uninitialised pages for one layer.

        Raises:
            ValueError: the dtype or the device is not one that this runs on.
        """
        if dtype not in _FUNCTIONS or torch.device(device).type != "cpu":
            raise ValueError(
                f"numba attention keeps fp32, bf16, fp16 or int8 pages on the CPU, not {dtype} "
                f"on {device}"
            )
        shape = AttentionShape(num_kv_heads, num_kv_heads, head_dim, value_dim, dtype.itemsize)
        sizes = (shape.fields(page_size)[name] for name in (at.A_KEY_BYTES, at.A_VALUE_BYTES))
        heads = (num_pages, num_kv_heads)
        return LayerCache(
            *(torch.empty((*heads, int(size) // dtype.itemsize), dtype=dtype) for size in sizes)
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend; see :class:`AttentionBackend`."""
        dtype = cache.key.dtype
        direct = query.dtype == key.dtype == value.dtype == dtype
        query_in, key, value = (_rows(t if direct else t.float()) for t in (query, key, value))
        shape = AttentionShape(
            query.shape[1], key.shape[1], query.shape[2], value.shape[2], dtype.itemsize
        )
        out = torch.empty(
            (query.shape[0], query.shape[1], value.shape[2]),
            dtype=dtype if direct else torch.float32,
        )
        job = self._job(shape, metadata.page_size, dtype, direct, float(scale), window, softcap)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        job.operations[2, at.A_SINKS] = 0 if sinks is None else sinks.data_ptr()
        job.operations[:, at.A_KEYS] = cache.key.data_ptr()
        job.operations[:, at.A_VALUES] = cache.value.data_ptr()
        for at_field, stride, tensor in (
            (_QUERY_AT, at.W_QUERY_STRIDE, query_in),
            (_KEY_AT, at.W_KEY_STRIDE, key),
            (_VALUE_AT, at.W_VALUE_STRIDE, value),
        ):
            job.fields[at_field] = tensor.data_ptr()
            job.operations[1, stride] = tensor.stride(0) * tensor.element_size()
        job.fields[_OUT_AT] = out.data_ptr()
        job.bind(metadata, shape)
        job.run()
        return out.to(query.dtype)

    def _job(
        self,
        shape: AttentionShape,
        page_size: int,
        dtype: torch.dtype,
        direct: bool,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Job:
        key = (shape, page_size, dtype, direct, scale, window, softcap)
        job = self._jobs.get(key)
        if job is None:
            common = shape.fields(page_size) | {
                at.A_WINDOW: window or 0,
                at.A_TASKS_AT: at.TASKS,
                at.A_SCALE: scale,
                at.A_CAP: float(softcap or 0.0),
                at.A_OUT_AT: _OUT_AT,
                at.A_OUT_STRIDE: shape.num_heads
                * shape.value_dim
                * (dtype.itemsize if direct else 4),
                at.A_OUT_F32: int(not direct),
            }
            inputs: Fields = {
                at.W_QUERY_AT: _QUERY_AT,
                at.W_KEY_AT: _KEY_AT,
                at.W_VALUE_AT: _VALUE_AT,
                at.W_IN_F32: int(not direct or dtype == torch.float32),
            }
            records = [
                operation(at.PLAN, common),
                operation(at.WRITE, common | inputs),
                operation(at.ATTEND, common),
            ]
            job = self._jobs[key] = Job(self.team, _FUNCTIONS[dtype], records)
        return job


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its heads and numbers contiguous within a row."""
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()
