"""Choosing tokens from logits: arg max, filters, and the draw itself.

Owner: the worker. Invariants: pure functions of their arguments; no row influences another,
so a row's token is the same in every batch. Filters keep whole groups of equal logits and the
draw walks the kept tokens in order of their ids, so that a token never depends on the order
in which a sort leaves ties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_BLOCK = 32
"""Columns whose maximum stands for them when the largest values are sought."""
_CHUNK = 2**19
"""Logits worked on at a time on a CPU, so that what is in between stays in its cache."""
_SLACK = 16
"""Candidates beyond ``top_k``, so that ties with the last one are seen."""
_PART = 64
"""Columns that are summed up before the one that is drawn is sought among them."""
_NUCLEUS = 240
"""Candidates tried first when only ``top_p`` or ``min_p`` limit them."""
_MIN_TEMPERATURE = 1e-30
"""Below it float32 logits divided by the temperature are arg max anyway."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawParams:
    """How to draw, for r rows."""

    temperature: NDArray[np.float64]
    """[r], above 0."""
    top_k: NDArray[np.int64]
    """[r]; 0 or less is off."""
    top_p: NDArray[np.float64]
    """[r]; 1 is off."""
    min_p: NDArray[np.float64]
    """[r]; 0 is off."""
    typical_p: NDArray[np.float64]
    """[r]; 1 is off."""
    uniform: NDArray[np.float64]
    """[r], the random numbers, in [0, 1)."""

    def take(self, rows: NDArray[np.int64]) -> DrawParams:
        """The parameters of some of the rows."""
        return DrawParams(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.typical_p[rows],
            self.uniform[rows],
        )


def take_rows(x: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """``x[rows]`` for ascending rows; a view where they are all of them or a run."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first + 1 == count:
        return x if count == len(x) else x[first : first + count]
    return x[to_device(rows, x.device)]


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor, copied only when the device is not the CPU."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def argmax(x: Tensor) -> NDArray[np.int64]:
    """The lowest id among each row's largest values; -1 where there is none that is finite.

    Args:
        x: float32 [r, V]. A NaN counts as largest, and so makes its row -1.

    Returns:
        int64 [r].
    """
    if x.device.type == "cpu":  # NumPy's is vectorised: 5 us a row of 49152, torch's 45 us
        array = x.numpy()
        ids = array.argmax(axis=1)
        return np.where(np.isfinite(array[np.arange(len(array)), ids]), ids, -1)
    best = x.argmax(dim=1, keepdim=True)
    best = torch.where(x.gather(1, best).isfinite(), best, -1)
    return best[:, 0].cpu().numpy()


def top_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest values in descending order, and their columns.

    The largest k values lie in the k blocks of columns with the largest maxima (a value
    outside them would have k larger ones before it), so only those blocks are searched.

    Args:
        x: float32 [r, V].
        k: how many, at most V.

    Returns:
        float32 [r, k] and int64 [r, k]; which of several equal values at the end is chosen
        is not defined.
    """
    r, width = x.shape
    blocks = width // _BLOCK
    if 2 * k > blocks:
        values, ids = torch.sort(x, dim=1, descending=True) if 4 * k > width else x.topk(k, dim=1)
        return values[:, :k], ids[:, :k]
    body = x[:, : blocks * _BLOCK].reshape(r, blocks, _BLOCK)
    chosen = body.amax(dim=2).topk(k, dim=1, sorted=False).indices
    columns = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=x.device)).flatten(1)
    if blocks * _BLOCK < width:
        tail = torch.arange(blocks * _BLOCK, width, device=x.device).expand(r, -1)
        columns = torch.cat((columns, tail), dim=1)
    values, places = x.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, places)


def draw(x: Tensor, params: DrawParams) -> NDArray[np.int64]:
    """Draw one token per row after temperature, top_k, top_p, min_p and typical_p.

    Each filter sees the distribution that the one before it left, renormalised, as
    transformers' logits warpers do.

    Args:
        x: float32 [r, V], not changed.
        params: of the r rows.

    Returns:
        int64 [r]; -1 where a row has a NaN or infinity, or nothing but -inf.
    """
    width = x.shape[1]
    has_k = (params.top_k > 0) & (params.top_k < width)
    limited = has_k | (params.top_p < 1.0) | (params.min_p > 0.0)
    count = np.where(limited, np.where(has_k, params.top_k, _NUCLEUS) + _SLACK, width)
    # Rows that few candidates will do for; rows with a large top_k; rows that need all logits.
    # Apart, so that none pays for another.
    some_do = count < width
    few_do = some_do & (count <= _NUCLEUS + _SLACK)
    size = max(1, _CHUNK // width) if x.device.type == "cpu" else len(x)
    tokens = np.empty(len(x), np.int64)
    for group in (few_do, some_do & ~few_do, ~some_do):
        indices = np.flatnonzero(group)
        for start in range(0, len(indices), size):
            rows = indices[start : start + size]
            logits, chosen = take_rows(x, rows), params.take(rows)
            if some_do[rows[0]]:
                tokens[rows] = _draw_from_top(logits, chosen, int(count[rows].max()))
            else:
                tokens[rows] = _draw_from_all(logits, chosen)
    return tokens


def _draw_from_all(x: Tensor, params: DrawParams) -> NDArray[np.int64]:
    """:func:`draw`, looking at the whole vocabulary; sorts it only for top_k and top_p."""
    top = x.amax(dim=1, keepdim=True)
    logits = _tempered(x, top, params)
    if (params.top_k > 0).any() or (params.top_p < 1.0).any():
        logits.masked_fill_(logits < cutoffs(_descending(logits), params), -torch.inf)
    elif (params.min_p > 0.0).any():
        logits.masked_fill_(logits < cutoffs(torch.zeros_like(top), params), -torch.inf)
    typical_(logits, params)
    return _inverse_cdf(logits.exp_(), top, params).cpu().numpy()


def _draw_from_top(x: Tensor, params: DrawParams, count: int) -> NDArray[np.int64]:
    """:func:`draw`, looking at each row's ``count`` largest logits.

    Where those turn out not to do, in a flat distribution or with ties beyond the last of
    them, it looks at all.
    """
    values, ids = top_values(x, count)
    top = values[:, :1]
    total = None
    if ((params.top_p < 1.0) & (params.top_k <= 0)).any():
        total = _tempered(x, top, params).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
    logits = _tempered(values, top, params)
    cut = cutoffs(logits, params, total)
    # Equals of the k-th logit may go on beyond what is seen; top_p's mass counts them too.
    nucleus_of_k = (params.top_p < 1.0) & (params.top_k > 0)
    kth = logits.gather(1, to_device(np.clip(params.top_k, 1, count) - 1, x.device)[:, None])
    lowest = torch.where(to_device(nucleus_of_k, x.device)[:, None], kth, torch.inf)
    cut_short = torch.minimum(cut, lowest)[:, 0] <= logits[:, -1]
    ids, order = ids.sort(dim=1)
    logits = logits.masked_fill_(logits < cut, -torch.inf).gather(1, order)
    typical_(logits, params)
    places = _inverse_cdf(logits.exp_(), top, params)
    tokens = torch.where(places >= 0, ids.gather(1, places.clamp(min=0)[:, None])[:, 0], -1)
    found: NDArray[np.int64]
    found, redo = torch.stack((tokens, cut_short.long())).cpu().numpy()
    rows = np.flatnonzero(redo)
    if len(rows):
        found[rows] = _draw_from_all(take_rows(x, rows), params.take(rows))
    return found


def cutoffs(logits: Tensor, params: DrawParams, total: Tensor | None = None) -> Tensor:
    """The lowest logit that top_k, then top_p, then min_p keep.

    Args:
        logits: float32 [r, n], each row's largest, in descending order and divided by the
            temperature, the first 0 (their maximum subtracted).
        params: of the r rows.
        total: float64 [r, 1], the sum of ``exp`` over the whole vocabulary, for rows with
            top_p and no top_k; None when the n logits are all there are.

    Returns:
        float32 [r, 1], at most 0.
    """
    device, n = logits.device, logits.shape[1]
    has_k = to_device(params.top_k > 0, device)[:, None]
    last = to_device(np.clip(params.top_k, 1, n) - 1, device)[:, None]
    cut = torch.where(has_k, logits.gather(1, last), -torch.inf)
    if (params.top_p < 1.0).any():
        weights = logits.exp().masked_fill_(logits < cut, 0.0).double()
        mass = weights.cumsum(dim=1)
        whole = mass[:, -1:]
        if total is not None:
            whole = torch.where(has_k, whole, total)
        # A token stays while those before it hold less than top_p: the one that crosses stays.
        share = np.where(params.top_p < 1.0, params.top_p, np.inf)
        inside = mass - weights < to_device(share, device)[:, None] * whole
        inside[:, 0] = True
        lowest = torch.where(inside & (logits >= cut), logits, torch.inf)
        cut = lowest.amin(dim=1, keepdim=True)
    if (params.min_p > 0.0).any():
        with np.errstate(divide="ignore"):
            floor = np.log(params.min_p).astype(np.float32)
        cut = torch.maximum(cut, to_device(floor, device)[:, None])
    return cut


def typical_(logits: Tensor, params: DrawParams) -> None:
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666), in place.

    Keeps the tokens whose information is nearest to the distribution's entropy, until they
    hold ``typical_p`` of the mass; the others become -inf.

    Args:
        logits: float32 [r, n], -inf for tokens that are out already.
        params: of the r rows.
    """
    rows = np.flatnonzero(params.typical_p < 1.0)
    if not len(rows):
        return
    some = take_rows(logits, rows)
    # float64: however many columns are out already, the sums and so the choice are the same.
    log_p = some.double().log_softmax(dim=1)
    p = log_p.exp()
    entropy = -(log_p * p).nansum(dim=1, keepdim=True)
    distance = (-log_p - entropy).abs_()
    ordered, order = distance.sort(dim=1)
    mass = p.gather(1, order).cumsum_(dim=1)
    bound = to_device(params.typical_p[rows], logits.device)
    last = (mass < bound[:, None]).sum(dim=1, keepdim=True).clamp_(max=some.shape[1] - 1)
    kept = some.masked_fill(distance > ordered.gather(1, last), -torch.inf)
    logits[to_device(rows, logits.device)] = kept


def _descending(logits: Tensor) -> Tensor:
    """Sort each row; NumPy's sort is vectorised, torch's takes 3 times as long on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=1)).flip(1)
    return logits.sort(dim=1, descending=True).values


def _tempered(x: Tensor, top: Tensor, params: DrawParams) -> Tensor:
    """(x - top) / temperature, a new tensor; ``top`` first, so that nothing overflows."""
    temperature = np.maximum(params.temperature, _MIN_TEMPERATURE).astype(np.float32)
    y = x - top
    return y if (temperature == 1.0).all() else y.div_(to_device(temperature, x.device)[:, None])


def _inverse_cdf(weights: Tensor, top: Tensor, params: DrawParams) -> Tensor:
    """The place at which each row's running sum passes its random number.

    Args:
        weights: float32 [r, n], not negative, not normalised.
        top: float32 [r, 1], each row's largest logit.
        params: of the r rows.

    Returns:
        int64 [r]; -1 where ``top`` is not finite.
    """
    uniform = to_device(params.uniform, weights.device)[:, None]
    base: Tensor | None = None
    if weights.shape[1] > _PART**2:  # first find the part, then the place in it
        parts = _part_sums(weights).cumsum_(dim=1)
        target = uniform * parts[:, -1:]
        part = torch.searchsorted(parts, target, right=True).clamp_(max=parts.shape[1] - 1)
        target -= torch.where(part > 0, parts.gather(1, (part - 1).clamp_(min=0)), 0.0)
        base = part * _PART
        columns = base + torch.arange(_PART, device=weights.device)
        inside = columns < weights.shape[1]
        weights = weights.gather(1, columns.clamp_(max=weights.shape[1] - 1)) * inside
        mass = weights.cumsum(dim=1, dtype=torch.float64)
    else:
        mass = weights.cumsum(dim=1, dtype=torch.float64)
        target = uniform * mass[:, -1:]
    place = torch.searchsorted(mass, target, right=True)
    # Rounding may leave the target at the end of the part: its last token with a weight.
    order = torch.arange(weights.shape[1], device=weights.device)
    place = torch.minimum(place, torch.where(weights > 0, order, 0).amax(dim=1, keepdim=True))
    token = place if base is None else base + place
    return torch.where(top.isfinite(), token, -1)[:, 0]


def _part_sums(weights: Tensor) -> Tensor:
    """Sums of each ``_PART`` columns, the last of what is left: float64 [r, ceil(n / _PART)]."""
    r, n = weights.shape
    body = n - n % _PART
    sums = weights[:, :body].reshape(r, -1, _PART).sum(dim=2, dtype=torch.float64)
    if body == n:
        return sums
    rest = weights[:, body:].sum(dim=1, keepdim=True, dtype=torch.float64)
    return torch.cat((sums, rest), dim=1)
