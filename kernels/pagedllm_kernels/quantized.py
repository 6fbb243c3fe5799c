"""Matrices in 8 or 4 bits, in the layout that the compiled products read.

Owner: pagedllm_kernels. A matrix [out, in] is cut into *panels* of 16 rows. A panel holds,
for every *unit* of 4 columns, the 4 numbers of row 0, of row 1, and so on: 64 bytes that a
processor multiplies at once. Columns are padded to whole *groups* of 32.

- 8 bits: a number is a byte less 128, times its row's scale.
- 4 bits: two units share 64 bytes, the first in the low halves. A number is ``LEVELS`` of its
  4 bits, times its group's factor (float16, behind the panel's numbers), times its row's
  scale. The levels are closer together near zero, where weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
"""Columns that share a factor, of 4-bit weights and of quantised activations."""
PANEL = 16
LEVELS = (-125, -99, -79, -62, -47, -33, -21, -8, 4, 16, 28, 41, 55, 71, 89, 112)
"""Of 4 bits. Lloyd and Max's levels, to which numbers are nearest on average, for normal ones
in groups of 32, each scaled so that its largest, whatever its sign, becomes -127."""
_CHUNK = 1024  # rows that are quantised or widened at once
_STEPS = (0.9, 1.0, 1.1)  # scales tried for a group, of the one that its largest number asks for


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in], or a stack of them [n, out, in], of 8 or 4 bits."""

    data: torch.Tensor
    """uint8 [panels, bytes of a panel], or [n, panels, bytes of a panel]."""
    scales: torch.Tensor
    """float32 [16 * panels], or [n, 16 * panels]."""
    bits: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the activations that it is multiplied by."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.data.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    def data_ptr(self) -> int:
        """Return the address of the first panel."""
        return self.data.data_ptr()

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Return one matrix of a stack."""
        return QuantizedWeight(
            self.data[index], self.scales[index], self.bits, self.shape[1:], self.dtype
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the matrix or the stack, in its dtype unless another is given."""
        if len(self.shape) == 3:
            return torch.stack([self[i].dequantize(dtype) for i in range(self.shape[0])])
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        for begin in range(0, self.shape[0], _CHUNK):
            part = out[begin : begin + _CHUNK]
            panels = slice(begin // PANEL, (begin + _CHUNK) // PANEL)
            wide = _unpack(self.data[panels], self.bits).flatten(0, 1)
            wide *= self.scales[begin : begin + len(wide), None]
            part.copy_(wide[: len(part), : self.shape[1]])
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, in], the rows of int64 [T]."""
        parts = [self.scales.new_empty((0, self.shape[1]))]
        for some in ids.split(_CHUNK // PANEL) if len(ids) else ():
            wide = _unpack(self.data[some // PANEL], self.bits)
            wide = wide[torch.arange(len(some), device=self.device), some % PANEL]
            parts.append(wide[:, : self.shape[1]] * self.scales[some, None])
        return torch.cat(parts)


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantise a matrix [out, in], or a stack of them, some rows at a time.

    Raises:
        ValueError: the number of bits is neither 8 nor 4.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits}; it must be 8 or 4")
    out, columns = weight.shape[-2:]
    panels, groups = -(-out // PANEL), -(-columns // GROUP)
    size = -(-(groups * PANEL * (GROUP if bits == 8 else GROUP // 2 + 2)) // 64) * 64
    lead = weight.shape[:-2]
    data = torch.zeros((*lead, panels, size), dtype=torch.uint8, device=weight.device)
    scales = torch.zeros((*lead, panels * PANEL), device=weight.device)
    stacks = zip(weight, data, scales) if lead else [(weight, data, scales)]
    for matrix, matrix_data, matrix_scales in stacks:
        for begin in range(0, out, _CHUNK):
            part = matrix[begin : begin + _CHUNK]
            rows = -(-len(part) // PANEL) * PANEL
            wide = torch.zeros((rows, groups * GROUP), device=weight.device)
            wide[: len(part), :columns] = part
            scale = wide.abs().amax(1) / 127
            matrix_scales[begin : begin + rows] = scale
            wide /= torch.where(scale > 0, scale, 1.0)[:, None]
            packed = _pack8(wide) if bits == 8 else _pack4(wide)
            matrix_data[begin // PANEL :][: len(packed), : packed.shape[1]] = packed
    return QuantizedWeight(data, scales, bits, tuple(weight.shape), weight.dtype)


def _pack8(wide: torch.Tensor) -> torch.Tensor:
    levels = (wide.round() + 128).to(torch.uint8)
    return levels.view(-1, PANEL, wide.shape[1] // 4, 4).transpose(1, 2).flatten(1)


def _pack4(wide: torch.Tensor) -> torch.Tensor:
    """Choose each group's factor by what rounding to the levels leaves of it."""
    table = torch.tensor(LEVELS, dtype=torch.float32, device=wide.device)
    between = (table[1:] + table[:-1]) / 2
    groups = wide.view(len(wide), -1, GROUP)
    top = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / table[0]
    best_error = torch.full_like(top, torch.inf)
    best_factor, best = torch.zeros_like(top), torch.zeros_like(groups, dtype=torch.uint8)
    for step in _STEPS:
        factor = top * step
        codes = torch.bucketize(groups / torch.where(factor == 0, 1.0, factor), between)
        levels = table[codes]
        # The factor for these levels that leaves the least (least squares).
        factor = (levels * groups).sum(-1, True) / levels.square().sum(-1, True)
        factor = factor.to(torch.float16).float()
        error = (levels * factor - groups).square().sum(-1, True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_factor = torch.where(better, factor, best_factor)
        best = torch.where(better, codes.to(torch.uint8), best)
    halves = best.view(-1, PANEL, wide.shape[1] // 8, 2, 4)
    numbers = (halves[..., 0, :] | halves[..., 1, :] << 4).transpose(1, 2).flatten(1)
    factors = best_factor.view(-1, PANEL, groups.shape[1]).transpose(1, 2).to(torch.float16)
    return torch.cat([numbers, factors.contiguous().view(torch.uint8).flatten(1)], 1)


def _unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 [panels, 16, padded columns] of panels, before their rows' scales."""
    panels = len(data)
    if bits == 8:
        levels = data.view(panels, -1, PANEL, 4).transpose(1, 2).flatten(2)
        return levels.float() - 128
    groups = data.shape[1] // (PANEL * (GROUP // 2 + 2))
    split = groups * PANEL * GROUP // 2
    numbers = data[:, :split].view(panels, -1, PANEL, 1, 4)
    codes = torch.cat([numbers & 15, numbers >> 4], 3).transpose(1, 2)
    table = torch.tensor(LEVELS, dtype=torch.float32, device=data.device)
    levels = table[codes.flatten(2).int()].view(panels, PANEL, groups, GROUP)
    factors = data[:, split : split + groups * PANEL * 2].contiguous().view(torch.float16)
    return (levels * factors.view(panels, groups, PANEL, 1).transpose(1, 2)).flatten(2)
