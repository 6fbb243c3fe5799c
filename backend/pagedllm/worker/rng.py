"""Random numbers that depend on nothing but a sequence's seed and a token's position.

Owner: the worker. Invariants: stateless; equal (seed, position) give equal numbers on every
platform, whatever else is in the batch and however often a sequence was preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits, one to one.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014; constants: Stafford's variant 13).
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position).

    The seed is mixed before positions count on from it, so that neighbouring seeds do not
    give shifted copies of one stream: the sequences of one request may take ``seed``,
    ``seed + 1`` and so on.

    Returns:
        float64 [len(seeds)], multiples of 2**-52: the largest stays below 1 also after it is
        multiplied with any float64 total.
    """
    key = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(key + _GAMMA) + (counter + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
