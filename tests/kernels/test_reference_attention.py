"""The reference implementation of paged attention against torch's own dense attention."""

from __future__ import annotations

import random

import pytest
import torch

from pagedllm_kernels import AttentionMetadata, attention_backends, select_attention
from pagedllm_kernels.int8_pages import quantize_rows
from pagedllm_kernels.reference import ReferenceAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.int8: 2e-5}


class Case:
    """A step of sequences, each with some tokens in the cache before it."""

    def __init__(self, spans, heads=6, kv_heads=2, dim=16, value_dim=16, page_size=4, seed=None):
        """``spans``: (tokens before the step, tokens in the step) per sequence."""
        seed = random.randrange(2**31) if seed is None else seed
        print("seed", seed)
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.spans, self.page_size = spans, page_size
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim
        lengths = [before + count for before, count in spans]
        self.query = [torch.randn(n, heads, dim) for n in lengths]
        self.key = [torch.randn(n, kv_heads, dim) for n in lengths]
        self.value = [torch.randn(n, kv_heads, value_dim) for n in lengths]
        pages = [-(-n // page_size) for n in lengths]
        self.num_pages = sum(pages) + 5
        ids = list(range(self.num_pages))
        rng.shuffle(ids)
        self.tables = [[ids.pop() for _ in range(n)] for n in pages]

    def metadata(self, spans):
        size = self.page_size
        starts, slots = [0], []
        table = torch.full((len(spans), max(map(len, self.tables))), 10**6, dtype=torch.int32)
        for i, (before, count) in enumerate(spans):
            used = -(-(before + count) // size)
            table[i, :used] = torch.tensor(self.tables[i][:used], dtype=torch.int32)
            slots += [
                self.tables[i][p // size] * size + p % size for p in range(before, before + count)
            ]
            starts.append(starts[-1] + count)
        contexts = [before + count for before, count in spans]
        return AttentionMetadata(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            page_table=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(count for _, count in spans),
            max_context_len=max(contexts),
            page_size=size,
        )

    def run(self, attention, dtype=torch.float32, **options):
        """Fill the cache with what came before, then run the step: a list per sequence."""
        cache = attention.allocate(
            self.num_pages, self.page_size, self.kv_heads, self.dim, self.value_dim, dtype, "cpu"
        )
        for pages in (cache.key, cache.value):
            pages.view(torch.uint8).fill_(255)  # NaN in any float, and in the scales of int8
        dtype = torch.float32 if dtype == torch.int8 else dtype
        if any(before for before, _ in self.spans):
            self._step(attention, cache, [(0, before) for before, _ in self.spans], dtype, options)
        return self._step(attention, cache, self.spans, dtype, options)

    def _step(self, attention, cache, spans, dtype, options):
        def packed(tensors):
            rows = [t[before : before + n] for t, (before, n) in zip(tensors, spans)]
            return torch.cat(rows).to(dtype)

        query = packed(self.query)
        output = attention.attend(
            query,
            packed(self.key),
            packed(self.value),
            cache,
            self.metadata(spans),
            **{"scale": self.dim**-0.5, **options},
        )
        assert output.shape == (query.shape[0], self.heads, self.value_dim)
        assert output.dtype == dtype
        return output.float().split([count for _, count in spans])

    def expected(self, dtype=torch.float32, scale=None, window=None, softcap=None, sinks=None):
        """Dense attention over each whole sequence, in fp32 on inputs as pages hold them."""
        outputs = []
        for i, (before, count) in enumerate(self.spans):
            given = [t[i] for t in (self.query, self.key, self.value)]
            if dtype == torch.int8:
                given[1:] = [torch.mul(*quantize_rows(t)) for t in given[1:]]
            else:
                given = [t.to(dtype).float() for t in given]
            q, k, v = (t.transpose(0, 1) for t in given)
            groups = self.heads // self.kv_heads
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            n = before + count
            place = torch.arange(n)
            seen = place[:, None] >= place
            if window is not None:
                seen &= place[:, None] - place < window
            scale_ = self.dim**-0.5 if scale is None else scale
            if softcap is None and sinks is None:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale_)
            else:
                scores = q @ k.transpose(1, 2) * scale_
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.masked_fill(~seen, float("-inf")).exp()
                total = weights.sum(-1, keepdim=True)
                if sinks is not None:
                    total = total + sinks[:, None, None].exp()
                out = weights / total @ v
            outputs.append(out.transpose(0, 1)[before:])
        return outputs


MIXED = [(0, 9), (5, 1), (30, 1), (0, 1), (17, 6), (3, 1), (64, 1), (0, 40)]


def check(case, dtype=torch.float32, **options):
    got = case.run(ReferenceAttention(), dtype, **options)
    for ours, theirs in zip(got, case.expected(dtype, **options), strict=True):
        assert (ours - theirs).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_prefill_and_decode_mixed_in_one_step(dtype, kv_heads):
    check(Case(MIXED, kv_heads=kv_heads), dtype)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 16, 1000])
def test_a_window_counts_the_query_itself(window):
    check(Case(MIXED), window=window)


def test_scale_softcap_and_sinks():
    check(Case(MIXED), scale=0.7)
    check(Case(MIXED), softcap=1.5)
    check(Case(MIXED), sinks=torch.randn(6))
    check(Case(MIXED), scale=0.3, softcap=2.0, sinks=torch.randn(6) * 2, window=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_values_may_be_wider_or_narrower_than_keys(dtype):
    check(Case(MIXED, value_dim=24), dtype, window=7)
    check(Case(MIXED, value_dim=8), dtype)
    check(Case(MIXED, dim=13, value_dim=7), dtype, softcap=3.0, sinks=torch.randn(6))


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_any_page_size(page_size):
    check(Case(MIXED, page_size=page_size))
    check(Case(MIXED, page_size=page_size), window=5)


def test_long_prefill_in_blocks_of_rows():
    check(Case([(700, 1300), (3, 1)], heads=2, kv_heads=1, dim=8, value_dim=8))
    check(Case([(700, 1300), (3, 1)], heads=2, kv_heads=1, dim=8, value_dim=8), window=90)


def test_many_decoding_sequences_of_all_lengths():
    rng = random.Random()
    check(Case([(rng.randrange(300), 1) for _ in range(60)]))
    check(Case([(rng.randrange(300), 1) for _ in range(60)]), window=20)


def test_a_window_reads_no_page_before_it():
    case = Case([(90, 1), (80, 7)])
    metadata = case.metadata(case.spans)
    table = metadata.page_table.clone()
    # An engine may have given these pages to someone else by then: no such page exists.
    table[:, : (80 - 10) // case.page_size] = 10**6
    attention = ReferenceAttention()
    for metadata_ in (metadata, type(metadata)(**{**_fields(metadata), "page_table": table})):
        cache = attention.allocate(case.num_pages, case.page_size, 2, 16, 16, torch.float32, "cpu")
        case._step(attention, cache, [(0, 90), (0, 80)], torch.float32, {"window": 10})
        out = attention.attend(
            torch.cat([case.query[0][90:], case.query[1][80:]]),
            torch.cat([case.key[0][90:], case.key[1][80:]]),
            torch.cat([case.value[0][90:], case.value[1][80:]]),
            cache,
            metadata_,
            scale=0.25,
            window=10,
        )
        wanted = torch.cat(case.expected(scale=0.25, window=10))
        assert (out - wanted).abs().max() < 2e-5


def _fields(metadata):
    return {name: getattr(metadata, name) for name in type(metadata).__slots__}


def test_one_instance_serves_one_step_after_another():
    attention = ReferenceAttention()
    for spans in (MIXED, [(4, 1), (9, 2)], [(11, 1)] * 3):
        case = Case(spans)
        for window in (None, 5):
            got = torch.cat(case.run(attention, window=window))
            assert (got - torch.cat(case.expected(window=window))).abs().max() < 2e-5


def test_rounding_to_int8_is_to_the_nearest_step_and_spares_extremes():
    steps = torch.tensor([127.0, 2.5, 3.5, -2.5, 0.4999, -127.0])
    for factor in (1.0, 2.0**100, 2.0**-60):
        numbers, scales = quantize_rows(steps * factor)
        assert numbers.tolist() == [127, 2, 4, -2, 0, -127]
        assert torch.allclose(scales / factor, torch.ones(1))
    assert [t.abs().max() for t in quantize_rows(torch.zeros(3, 4))] == [0, 0]
    assert quantize_rows(torch.full((4,), 1e-40))[0].abs().max() == 0
    for bad in (float("nan"), float("inf")):
        assert not quantize_rows(torch.tensor([1.0, bad]))[1].isfinite()


def test_pages_are_the_first_dimension_so_that_they_can_be_copied():
    attention = ReferenceAttention()
    cache = attention.allocate(7, 4, 2, 16, 8, torch.bfloat16, torch.device("cpu"))
    assert cache.key.shape[0] == cache.value.shape[0] == 7
    assert cache.key.dtype == torch.bfloat16


def test_selection_by_name_and_by_device(caplog):
    caplog.set_level("INFO")
    assert "reference" in attention_backends()
    assert select_attention("cpu", torch.float32, "reference").name == "reference"
    assert select_attention("cpu", torch.float32).name in attention_backends()
    assert select_attention(torch.device("cpu"), torch.bfloat16, "auto").name in caplog.text
    with pytest.raises(ValueError, match=r"'flash'.*auto.*reference"):
        select_attention("cpu", torch.float32, "flash")
    with pytest.raises(ValueError, match="float64"):
        select_attention("cpu", torch.float64, "reference")
