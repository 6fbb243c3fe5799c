"""NumbaAttention against attention computed in float64 from the definition."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from other_processor import HASWELL
from pagedllm_kernels.int8_pages import quantize_rows
from pagedllm_kernels.numba_cpu.attention import NumbaAttention
from pagedllm_kernels.numba_cpu.team import available_threads
from pagedllm_kernels.types import AttentionMetadata, LayerCache

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.int8: 2e-6}
"""By what pages hold; of int8 ones, to attention over keys and values that were rounded."""


@dataclass
class Sequences:
    """Sequences that grow in a cache of poisoned pages, beside everything they were given."""

    backend: NumbaAttention
    cache: LayerCache
    tables: torch.Tensor
    page_size: int
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def start(cls, backend, count, max_len, page_size, kv_heads, dim, value_dim, dtype):
        pages = -(-max_len // page_size)
        cache = backend.allocate(
            count * pages + 3, page_size, kv_heads, dim, value_dim, dtype, torch.device("cpu")
        )
        poison(cache.key, ...)
        poison(cache.value, ...)
        tables = torch.randperm(count * pages + 3)[: count * pages].view(count, pages).int()
        empty = [torch.empty(0, kv_heads, d, dtype=given(dtype)) for d in (dim, value_dim)]
        return cls(backend, cache, tables, page_size, [empty[0]] * count, [empty[1]] * count)

    def step(self, counts, heads, input_dtype=None, **options):
        """Give each sequence so many new tokens; return what came out and what should have."""
        dtype = given(self.cache.key.dtype)
        (kv_heads, dim), value_dim = self.keys[0].shape[1:], self.values[0].shape[2]
        query, key, value = (
            torch.randn(sum(counts), n, d).to(dtype)
            for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        )
        before = [len(k) for k in self.keys]
        self.keys = [torch.cat(p) for p in zip(self.keys, key.split(counts))]
        self.values = [torch.cat(p) for p in zip(self.values, value.split(counts))]
        context = [len(k) for k in self.keys]
        size = self.page_size
        width = max(-(-c // size) for c in context)
        table = self.tables[:, :width].clone()
        slots = []
        for i, (begin, end) in enumerate(zip(before, context)):
            positions = torch.arange(begin, end)
            slots.append(table[i, positions // size].long() * size + positions % size)
            table[i, -(-end // size) :] = -1
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor(context).int(),
            page_table=table,
            slot_mapping=torch.cat(slots),
            max_query_len=max(counts),
            max_context_len=max(context),
            page_size=size,
        )
        new = (t.to(input_dtype or dtype) for t in (query, key, value))
        got = self.backend.attend(*new, self.cache, metadata, **options)
        parts = zip(query.split(counts), self.keys, self.values)
        if self.cache.key.dtype != torch.int8:
            return got, torch.cat([attend_f64(*part, **options) for part in parts])
        wanted = []
        for q, k, v in parts:
            if len(q) == 0:
                continue
            wanted.append(attend_f64(q, rounded(k), rounded(v), **options))
            if len(q) < 100:  # the definition takes its time
                error = (wanted[-1] - attend_f64(q, k, v, **options)).abs().amax()
                assert error <= rounding_bound(q, k, v, options["scale"])
        return got, torch.cat(wanted)


def metadata_of(sequences, count):
    """A first step of one sequence, in pages of 16."""
    place = torch.arange(count)
    return AttentionMetadata(
        query_starts=torch.tensor([0, count]).int(),
        context_lens=torch.tensor([count]).int(),
        page_table=sequences.tables,
        slot_mapping=sequences.tables[0, place // 16].long() * 16 + place % 16,
        max_query_len=count,
        max_context_len=count,
        page_size=16,
    )


def given(dtype):
    """The dtype of what is written to pages of this one."""
    return torch.float32 if dtype == torch.int8 else dtype


def poison(pages, index):
    """Fill pages with what is NaN in any float, and in int8's scales."""
    pages.view(torch.uint8)[index] = 255


def rounded(rows):
    numbers, scales = quantize_rows(rows)
    assert ((numbers * scales - rows).abs() <= 0.501 * scales).all()
    return numbers.double() * scales


def rounding_bound(query, key, value, scale):
    """What rounding keys and values, each by half a step at most, can change in any output.

    No score changes by more than ``d``, so no weight by more than a factor of ``exp(2 * d)``.
    """
    steps = [0.501 * t.double().abs().amax() / 127 for t in (key, value)]
    d = scale * query.double().abs().sum(-1).amax() * steps[0]
    return steps[1] + torch.expm1(2 * d) * value.double().abs().amax()


def attend_f64(query, key, value, scale, window=None, softcap=None, sinks=None):
    """Causal attention of the last rows of a sequence, in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(len(key) - len(query), len(key))[:, None]
    seen = torch.arange(len(key)) <= position
    if window is not None:
        seen &= torch.arange(len(key)) > position - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def check(got, expected, dtype):
    assert got.dtype == given(dtype)
    error = (got.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


@pytest.fixture(autouse=True)
def seed():
    value = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(value)
    print("seed", value)


# How threads share the work does not depend on the processor.
@pytest.fixture(scope="module", params=[2] if "NUMBA_CPU_NAME" in os.environ else [1, 2, 3])
def backend(request):
    return NumbaAttention(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "page_size"),
    [
        (9, 3, 64, 64, 16),
        (8, 1, 80, 80, 32),
        (4, 4, 33, 17, 16),
        (14, 2, 128, 128, 64),
        (6, 2, 256, 256, 16),
        (5, 1, 8, 24, 4),
        (64, 1, 16, 16, 7),
        (2, 2, 48, 48, 300),
    ],
)
def test_mixed_steps_match_the_definition(
    backend, dtype, heads, kv_heads, dim, value_dim, page_size
):
    options = {"scale": dim**-0.5}
    sequences = Sequences.start(backend, 4, 420, page_size, kv_heads, dim, value_dim, dtype)
    # Prefills of odd lengths, then a chunk beside decoding rows and a row that rests.
    for counts in ([37, 1, 300, 5], [1, 1, 61, 18], [1, 0, 1, 1]):
        got, expected = sequences.step(counts, heads, **options)
        check(got, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 16},
        {"window": 45},
        {"window": 1000},
        {"softcap": 5.0},
        {"softcap": 20.0, "window": 33},
        {"sinks": True},
        {"sinks": True, "window": 20, "softcap": 30.0},
    ],
    ids=str,
)
def test_windows_softcaps_and_sinks(backend, dtype, options):
    options = {"scale": 0.3, **options}
    if "sinks" in options:
        options["sinks"] = torch.randn(6) * 3
    sequences = Sequences.start(backend, 3, 700, 16, 2, 32, 32, dtype)
    for counts in ([70, 513, 1], [1, 1, 90], [1, 1, 1]):
        got, expected = sequences.step(counts, 6, **options)
        check(got, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("options", [{}, {"window": 900}, {"sinks": True}], ids=str)
def test_a_long_context_is_split_and_merged(backend, dtype, options):
    options = {"scale": 0.2, **options}
    if "sinks" in options:
        options["sinks"] = torch.randn(4)
    sequences = Sequences.start(backend, 1, 1700, 16, 2, 40, 40, dtype)
    for count in (1101 if dtype == torch.int8 else 1601, 1, 7, 1):
        got, expected = sequences.step([count], 4, **options)
        check(got, expected, dtype)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
def test_float32_inputs_with_a_narrow_cache(backend, cache_dtype):
    sequences = Sequences.start(backend, 2, 100, 16, 2, 64, 64, cache_dtype)
    got, expected = sequences.step([40, 9], 4, torch.float32, scale=0.125)
    assert got.dtype == torch.float32
    assert (got.double() - expected).norm() / expected.norm() < TOLERANCE[cache_dtype]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_cannot_be_rounded_is_no_number_afterwards(backend, bad):
    sequences = Sequences.start(backend, 1, 32, 16, 1, 16, 16, torch.int8)
    zero = torch.zeros(5, 1, 16)
    value = zero.clone()
    value[3, 0, 7] = bad
    got = backend.attend(zero, zero, value, sequences.cache, metadata_of(sequences, 5), scale=1.0)
    assert got[3:].isnan().all()


def test_keys_and_values_may_be_slices_of_one_projection(backend):
    plain = Sequences.start(backend, 1, 64, 16, 2, 32, 32, torch.bfloat16)
    qkv = torch.randn(20, 8, 32).bfloat16()
    metadata = metadata_of(plain, 20)
    got = backend.attend(*qkv.split([4, 2, 2], 1), plain.cache, metadata, scale=0.2)
    query, key, value = qkv.split([4, 2, 2], 1)
    check(got, attend_f64(query, key, value, 0.2), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_pages_can_be_copied_whatever_their_layout(backend, dtype):
    sequences = Sequences.start(backend, 1, 64, 16, 2, 24, 24, dtype)
    sequences.step([33], 4, scale=0.2)
    used = sequences.tables[0].long()
    target = torch.tensor(
        [p for p in range(sequences.cache.key.shape[0]) if p not in used[:3].tolist()]
    )[:3]
    cache = sequences.cache
    cache.key[target], cache.value[target] = cache.key[used[:3]], cache.value[used[:3]]
    poison(cache.key, used[:3])
    poison(cache.value, used[:3])
    sequences.tables[0, :3] = target.int()
    got, expected = sequences.step([1], 4, scale=0.2)
    check(got, expected, dtype)


def test_a_dtype_that_no_kernel_has_is_refused():
    with pytest.raises(ValueError, match="int16"):
        NumbaAttention(1).allocate(4, 16, 1, 16, 16, torch.int16, torch.device("cpu"))
    with pytest.raises(ValueError, match="threads=0"):
        NumbaAttention(0)


def test_threads_follow_the_cgroup_quota(tmp_path):
    everything = available_threads(tmp_path)
    assert 1 <= everything <= (os.cpu_count() or 1)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert available_threads(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_threads(tmp_path) == everything


@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="this is the second run")
@pytest.mark.slow
def test_everything_again_on_a_processor_without_avx512():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", __file__]
    run = subprocess.run(
        command, env={**os.environ, **HASWELL}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-3000:]
