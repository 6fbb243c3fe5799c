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
_SLACK = 16
"""Candidates beyond ``top_k``, so that ties with the last one are seen."""
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
    limited = (
        ((params.top_k > 0) & (params.top_k < x.shape[1]))
        | (params.top_p < 1.0)
        | (params.min_p > 0.0)
    )
    if limited.all():
        return _draw_limited(x, params)
    if not limited.any():
        return _draw_all(x, params)
    tokens = np.empty(len(limited), np.int64)
    for mask, function in ((limited, _draw_limited), (~limited, _draw_all)):
        rows = np.flatnonzero(mask)
        tokens[rows] = function(take_rows(x, rows), params.take(rows))
    return tokens


def _draw_all(x: Tensor, params: DrawParams) -> NDArray[np.int64]:
    """:func:`draw` for rows without top_k, top_p or min_p: no sort."""
    top = x.amax(dim=1, keepdim=True)
    weights = _tempered(x, top, params)
    typical_(weights, params)
    return _inverse_cdf(weights.exp_(), top, params).cpu().numpy()


def _draw_limited(x: Tensor, params: DrawParams) -> NDArray[np.int64]:
    """:func:`draw` for rows with top_k, top_p or min_p: few candidates, hence no full sort."""
    width = x.shape[1]
    ks = np.where((params.top_k > 0) & (params.top_k < width), params.top_k, _NUCLEUS)
    tokens = np.empty(len(ks), np.int64)
    cut_short = np.zeros(len(ks), np.bool_)
    for group in (ks <= _NUCLEUS, ks > _NUCLEUS):  # a large top_k is dear for its own row only
        rows = np.flatnonzero(group)
        if len(rows):
            count = min(int(ks[rows].max()) + _SLACK, width)
            tokens[rows], cut_short[rows] = _draw_from_top(
                take_rows(x, rows), params.take(rows), count
            )
    rows = np.flatnonzero(cut_short)
    if len(rows):  # a flat distribution, or ties beyond the last candidate
        tokens[rows], _ = _draw_from_top(take_rows(x, rows), params.take(rows), width)
    return tokens


def _draw_from_top(
    x: Tensor, params: DrawParams, count: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw from each row's ``count`` largest values.

    Returns:
        int64 [r], the tokens, and bool [r], whether the filters might have kept more than
        ``count``, so that the token must not be used.
    """
    width = x.shape[1]
    values, ids = top_values(x, count)
    top = values[:, :1]
    total = None
    nucleus = params.top_p < 1.0
    if (nucleus & ~((params.top_k > 0) & (params.top_k < width))).any() and count < width:
        total = _tempered(x, top, params).exp_().sum(dim=1, dtype=torch.float64)
    logits = _tempered(values, top, params)
    keep = keep_sorted(logits, params, total, width)
    cut_short = keep[:, -1] if count < width else keep.new_zeros(len(keep))
    logits.masked_fill_(~keep, -torch.inf)
    typical_(logits, params)
    ids, order = ids.sort(dim=1)
    places = _inverse_cdf(logits.exp_().gather(1, order), top, params)
    tokens = torch.where(places >= 0, ids.gather(1, places.clamp(min=0)[:, None])[:, 0], -1)
    both = torch.stack((tokens, cut_short.long())).cpu().numpy()
    return both[0], both[1].astype(np.bool_)


def keep_sorted(logits: Tensor, params: DrawParams, total: Tensor | None, width: int) -> Tensor:
    """Which candidates top_k, then top_p, then min_p keep.

    Args:
        logits: float32 [r, n] in descending order, the first 0 (their maximum subtracted),
            divided by the temperature.
        params: of the r rows.
        total: float64 [r], the sum of ``exp`` of a row over the whole vocabulary, used for
            rows with top_p and no top_k; None when the n candidates are all there are.
        width: V, the size of the vocabulary.

    Returns:
        bool [r, n], true for a run of candidates from the first on that ends between two
        different values.
    """
    device, n = logits.device, logits.shape[1]
    has_k = (params.top_k > 0) & (params.top_k < width)
    last = to_device(np.where(has_k, np.minimum(params.top_k, n), n) - 1, device)
    keep = logits >= logits.gather(1, last[:, None])
    if (params.top_p < 1.0).any():
        weights = torch.where(keep, logits, -torch.inf).double().exp_()
        mass = weights.cumsum(dim=1)
        whole = mass[:, -1]
        if total is not None:
            whole = torch.where(to_device(has_k, device), whole, total)
        # A token stays while those before it hold less than top_p: the one that crosses stays.
        bound = to_device(np.where(params.top_p < 1.0, params.top_p, np.inf), device) * whole
        inside = keep & (mass - weights < bound[:, None])
        inside[:, 0] = True
        keep &= logits >= torch.where(inside, logits, torch.inf).amin(dim=1, keepdim=True)
    if (params.min_p > 0.0).any():
        with np.errstate(divide="ignore"):
            floor = np.log(params.min_p).astype(np.float32)
        keep &= logits >= to_device(floor, device)[:, None]
        keep[:, 0] = True
    return keep


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
    log_p = some.log_softmax(dim=1)
    p = log_p.exp()
    entropy = -(log_p * p).nansum(dim=1, keepdim=True)
    distance = (-log_p - entropy).abs_()
    ordered, order = distance.sort(dim=1)
    mass = p.gather(1, order).cumsum(dim=1)
    bound = to_device(params.typical_p[rows].astype(np.float32), logits.device)
    last = (mass < bound[:, None]).sum(dim=1, keepdim=True).clamp_(max=some.shape[1] - 1)
    kept = some.masked_fill(distance > ordered.gather(1, last), -torch.inf)
    logits[to_device(rows, logits.device)] = kept


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
    mass = weights.cumsum(dim=1, dtype=torch.float64)
    target = to_device(params.uniform, weights.device)[:, None] * mass[:, -1:]
    place = torch.searchsorted(mass, target, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel running sum may not be monotone in its last bit; no weight, no draw.
    sound = top.isfinite() & (weights.gather(1, place) > 0)
    return torch.where(sound, place, -1)[:, 0]
