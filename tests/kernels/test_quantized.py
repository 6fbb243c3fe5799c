"""Quantised matrices, and products with them against float64."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from other_processor import HASWELL
from pagedllm_kernels.numba_cpu import layout as at
from pagedllm_kernels.numba_cpu.program import Job, operation
from pagedllm_kernels.numba_cpu.team import Team
from pagedllm_kernels.quantized import GROUP, LEVELS, quantize

SPLIT_ROWS, GUARD = 3, 3
TAGS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@pytest.fixture(autouse=True)
def seed():
    value = random.randrange(2**31)
    torch.manual_seed(value)
    print("seed", value)
    return value


@pytest.mark.parametrize("shape", [(16, 32), (50, 70), (1, 8), (1500, 64), (3, 32, 96)], ids=str)
def test_eight_bits_are_the_nearest_of_255_steps_of_a_row(shape):
    weight = torch.randn(shape).bfloat16()
    kept = quantize(weight, 8)
    wide = kept.dequantize(torch.float64)
    step = weight.double().abs().amax(-1, True) / 127
    assert wide.shape == weight.shape
    assert ((wide - weight).abs() <= step * 0.50001).all()


@pytest.mark.parametrize("shape", [(16, 32), (50, 70), (1200, 96), (2, 48, 64)], ids=str)
def test_four_bits_are_levels_times_a_factor_of_a_group(shape):
    weight = torch.randn(shape)
    weight.view(-1, shape[-1])[1] = 0
    kept = quantize(weight, 4)
    wide = kept.dequantize(torch.float64)
    if len(shape) == 3:
        assert torch.equal(kept[1].dequantize(torch.float64), wide[1])
    assert (wide - weight).norm() < 0.11 * weight.norm()
    for group in torch.nn.functional.pad(wide, (0, -shape[-1] % GROUP)).view(-1, GROUP)[:40]:
        # Whatever the factor, the ratios of the group's numbers are ratios of levels.
        ratios = {round(a / b, 4) for a in LEVELS for b in LEVELS}
        largest = group[group.abs().argmax()]
        for value in group[group != 0]:
            assert min(abs(float(value / largest) - r) for r in ratios) < 2e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_those_of_the_matrix(bits):
    kept = quantize(torch.randn(77, 96), bits)
    ids = torch.randint(0, 77, (300,))
    assert torch.equal(kept.rows(ids), kept.dequantize(torch.float32)[ids])
    assert kept.rows(ids[:0]).shape == (0, 96)


def test_a_matrix_of_zeros_and_other_numbers_of_bits():
    for bits in (8, 4):
        assert not quantize(torch.zeros(20, 40), bits).dequantize().any()
    with pytest.raises(ValueError, match="bits is 3"):
        quantize(torch.ones(2, 2), 3)


def rounded(x):
    """What activations are rounded to, in float64."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    top = groups.abs().amax(-1, True)
    scaled = groups * torch.where(top > 0, 127 / top, 0.0)
    whole = scaled.round()
    if len(x) < SPLIT_ROWS:
        whole = whole.double() + ((scaled - whole) * 254).round().double() / 254
    return (whole.double() * (top.double() / 127)).flatten(1)[:, : x.shape[1]]


MODES = {"plain": at.STORE_F32, "add": at.ADD, "gated": at.GATED, "logits": at.LOGITS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TAGS, ids=str)
def test_products_match_float64(mode, bits, dtype, seed):
    draw = random.Random(seed)
    for rows in (1, 2, 3, 4, 5, 47, draw.randint(6, 46), draw.randint(48, 150)):
        columns = 16 * draw.randint(1, 40)
        size = 16 * draw.randint(1, 20)
        if mode != "gated":
            size += draw.randint(-15, 0)
        threads = draw.randint(1, 3)
        case = f"{rows} rows, {size} by {columns}, {threads} threads"
        halves = 2 if mode == "gated" else 1
        weight = torch.randn(size * halves, columns) * columns**-0.5
        weight = quantize(weight.to(dtype), bits)
        bias = torch.nn.functional.pad(torch.randn(size * halves), (0, 32))
        x = torch.randn(rows, columns) * torch.rand(rows, 1).exp()
        x[:, draw.randrange(columns)] *= 20
        if rows >= SPLIT_ROWS:
            # Whole steps, since what lies half-way between two may be rounded to either.
            x = torch.randint(-127, 128, (rows, columns)).float()
            x[:, ::GROUP] = 127
            x /= 2.0 ** torch.randint(5, 9, (rows, 1))
        narrow = x.to(dtype)
        lines = 2 if rows < SPLIT_ROWS and dtype.itemsize < 4 else 1
        given = torch.stack([narrow, (x - narrow.float()).to(dtype)][:lines], 1).contiguous()
        x = given.float().sum(1)
        out_dtype = dtype if mode == "gated" else torch.float32
        out_lines = lines if mode == "gated" else 1
        out = torch.full((rows * out_lines + GUARD, size), torch.nan, dtype=out_dtype)
        before = torch.randn(rows, size)
        if mode == "add":
            out[:rows] = before
        run(weight, bias, given, out, rows, size, MODES[mode], dtype, threads)
        exact = rounded(x) @ weight.dequantize(torch.float64).T + bias[: size * halves]
        if mode == "gated":
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate) * up
        elif mode == "add":
            exact = exact * 0.5 + before
        elif mode == "logits":
            exact = torch.tanh(exact * 0.5 / 30) * 30
        assert out[rows * out_lines :].isnan().all(), case
        got = out[: rows * out_lines].double().view(rows, out_lines, size).sum(1)
        tolerance = 3e-5
        if mode == "gated" and lines == 1:
            tolerance += {2: 2**-8 if dtype == torch.bfloat16 else 2**-10, 4: 0}[dtype.itemsize]
        assert (got - exact).norm() <= tolerance * exact.norm(), case


@pytest.mark.parametrize("dtype", TAGS, ids=str)
@pytest.mark.parametrize("rows", [2, 5])
def test_what_cannot_be_rounded_spoils_its_row_and_no_other(rows, dtype, seed):
    weight = quantize(torch.randn(32, 96), 8)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        given = torch.randn(rows, 2 if rows < SPLIT_ROWS and dtype.itemsize < 4 else 1, 96)
        given[1, 0, 70] = wrong
        out = torch.full((rows + GUARD, 32), 7.0)
        run(weight, torch.zeros(64), given.to(dtype), out, rows, 32, at.STORE_F32, dtype, 1)
        assert out[1].isnan().all()
        assert out[0].isfinite().all()
        assert out[2:rows].isfinite().all()


def run(weight, bias, x, out, rows, size, mode, dtype, threads):
    """One quantised product as a program of its own."""
    rows_at, in_at, packed_at, factors_at, out_at = range(at.TASKS + 1, at.TASKS + 6)
    columns, groups = weight.shape[1], -(-weight.shape[1] // GROUP)
    quantise = {
        at.Q_ROWS_AT: rows_at, at.Q_IN_AT: in_at, at.Q_IN_STRIDE: columns * dtype.itemsize,
        at.Q_WIDTH: columns, at.Q_OUT_AT: packed_at, at.Q_FACTORS_AT: factors_at,
    }  # fmt: skip
    linear = {
        at.L_ROWS_AT: rows_at, at.L_WEIGHT: weight.data_ptr(), at.L_STRIDE: weight.data.stride(0),
        at.L_SIZE: size, at.L_UNITS: groups, at.L_IN_AT: packed_at, at.L_FACTORS_AT: factors_at,
        at.L_SCALES: weight.scales.data_ptr(), at.L_BITS: weight.bits,
        at.L_BIAS: bias.data_ptr() if mode != at.LOGITS else 0, at.L_OUT_AT: out_at,
        at.L_OUT_STRIDE: size * out.itemsize, at.L_MODE: mode, at.L_SCALE: 0.5,
        at.L_CAP: 30.0, at.L_ACTIVATION: at.SILU,
    }  # fmt: skip
    if mode == at.LOGITS:
        bias.zero_()
    records = [operation(at.QUANTIZE, quantise), operation(at.LINEAR_Q, linear)]
    job = Job(Team(threads), f"quantized_{TAGS[dtype]}", records, split_rows=SPLIT_ROWS)
    packed = torch.full(((rows + 8) * 2, groups * GROUP), 99, dtype=torch.int8)
    factors = torch.full(((rows + 8) * 2, groups * 2), torch.nan)
    job.fields[rows_at] = rows
    for index, tensor in ((in_at, x), (packed_at, packed), (factors_at, factors), (out_at, out)):
        job.fields[index] = tensor.data_ptr()
    job.run()


@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="this is the second run")
@pytest.mark.slow
def test_everything_again_on_a_processor_without_avx512():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__]
    run = subprocess.run(
        command, env={**os.environ, **HASWELL}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-3000:]
