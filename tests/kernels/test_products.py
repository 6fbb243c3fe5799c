"""Single products of the generic tier's linear layers against float64."""

from __future__ import annotations

import random

import pytest
import torch

from pagedllm_kernels.numba_cpu.attention import NumbaAttention
from pagedllm_kernels.numba_cpu.products import LEAST_BYTES, Products

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def team():
    return NumbaAttention(2).team


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_match_float64(dtype, team):
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    multiply = Products(team, dtype)
    # Different shapes in turn, since they share one job: wide, narrow, odd outputs, a slice.
    for out, width, gap in ((300, 64, 0), (37, 208, 0), (1, 16, 0), (129, 1024, 16), (37, 208, 3)):
        whole = torch.randn(out, width + gap, generator=generator).to(dtype)
        weight = whole[:, :width]
        for rows in (0, 1, 2, 8, 9, 33, 200):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            got = multiply(x, weight)
            wanted = x.double() @ weight.double().T
            assert got.dtype == torch.float32
            assert got.shape == (rows, out)
            assert (got - wanted).norm() <= 1e-5 * wanted.norm(), (out, width, rows)


def test_rows_that_lie_apart_are_taken_as_they_are(team):
    multiply = Products(team, torch.float32)
    x, weight = torch.randn(32, 9).T, torch.randn(40, 32)
    assert (multiply(x, weight) - x @ weight.T).abs().max() < 1e-4


def test_what_is_left_to_torch(team):
    multiply = Products(team, torch.bfloat16)
    side = 16 * int(LEAST_BYTES**0.5 / 16)
    weight = torch.zeros(side, side, dtype=torch.bfloat16)
    assert multiply.covers(weight)
    assert multiply.covers(weight, rows=64)
    assert not multiply.covers(weight, rows=4096)
    assert not multiply.covers(weight.T)
    assert not multiply.covers(weight.float())
    assert not multiply.covers(weight[:, : side - 8])
    assert not multiply.covers(weight[:16])
    assert Products(team, torch.float32).covers(weight.float(), rows=4096)
