"""The functions of :mod:`interpreter` for pages in int8, which are compiled when one is used.

Owner: numba_cpu. A tag says how activations are stored, as there.
"""

from __future__ import annotations

from pagedllm_kernels.numba_cpu.interpreter import _run
from pagedllm_kernels.numba_cpu.simd import BF16, F16, F32, S8


def attention_f32_i8(job: int) -> None:
    """Attention alone."""
    _run(job, None, None, F32, S8)


def model_f32_i8(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, F32, S8)


def model_bf16_i8(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, BF16, S8)


def model_f16_i8(job: int) -> None:
    """A decoder's step."""
    _run(job, True, None, F16, S8)


def quantized_f32_i8(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, F32, S8)


def quantized_bf16_i8(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, BF16, S8)


def quantized_f16_i8(job: int) -> None:
    """A decoder's step with quantised weights, all or some."""
    _run(job, True, True, F16, S8)
