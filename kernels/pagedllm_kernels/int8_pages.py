"""Keys and values in int8: how a row is rounded, and pages of such rows in torch.

Owner: pagedllm_kernels; :mod:`numba_cpu.int8_pages` rounds alike, to the last bit. A row is
the key, or the value, of one token in one KV head. It is kept as whole numbers from -127 to
127 and one float32 ``scale``, the row's largest magnitude over 127. A scale is float32 and
not float16 because keys may be large (some models have channels past 1000) or tiny, and
because 16 of them are then a vector: at 64 numbers to a row it costs two bytes more, 3%.

The scale lies in the page, behind what it belongs to: whoever copies a page has it too.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
MOST = 127.0
LEAST = 1e-30
"""Magnitudes below it are 0: a row of them would have no finite factor."""


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to int8, half to even.

    Args:
        rows: floats [..., dim].

    Returns:
        int8 [..., dim], and float32 [..., 1], the scales. A row that holds a NaN or an infinity
        has no finite scale, so that what is computed from it is no number either.
    """
    rows = rows.float()
    top = rows.abs().amax(-1, keepdim=True)
    # One division of two numbers: torch takes 127.0 / top for 127.0 * (1 / top).
    inverse = torch.where(top > LEAST, torch.full_like(top, MOST) / top, 0.0)
    return (rows * inverse).round().to(torch.int8), top * (1 / MOST)


def allocate_rows(shape: tuple[int, ...], dim: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised rows with their scales, int8 [*shape, dim rounded up + 4]."""
    return torch.empty((*shape, -(-dim // 4) * 4 + SCALE_BYTES), dtype=torch.int8, device=device)


def write_rows(
    pages: torch.Tensor, at: tuple[torch.Tensor | slice, ...], rows: torch.Tensor
) -> None:
    """Round rows and store them at an index of :func:`allocate_rows`'s pages."""
    numbers, scales = quantize_rows(rows)
    pages[(*at, slice(rows.shape[-1]))] = numbers
    pages.view(torch.float32)[(*at, slice(-1, None))] = scales


def widen_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return float32 [..., dim] of rows picked from :func:`allocate_rows`'s pages."""
    return rows[..., :dim].float() * rows.view(torch.float32)[..., -1:]
