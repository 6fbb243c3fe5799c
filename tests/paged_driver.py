"""Runs a PagedModel by hand: shuffled pages, uneven chunks, mixed batches; no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pagedllm.models.base import DeviceBatch
from pagedllm_kernels.types import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.models.base import PagedModel


@dataclass
class Running:
    tokens: list[int]
    wanted: int
    """Length at which it is done."""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """float32 [V] of each generated token."""


class Driver:
    """Every page starts as NaN, so a result that a stray slot reached is NaN too."""

    def __init__(
        self,
        model: PagedModel,
        rng: random.Random,
        page_size: int = 4,
        num_pages: int = 200,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.rng, self.page_size = model, rng, page_size
        self.cache = [
            model.attention.allocate(
                num_pages,
                page_size,
                layer.num_kv_heads,
                layer.head_dim,
                layer.value_dim,
                cache_dtype or model.dtype,
                model.device,
            )
            for layer in model.layers
        ]
        self.free = list(range(num_pages))
        rng.shuffle(self.free)
        self._poison(self.free)
        self.running: list[Running] = []

    def add(self, prompt: Sequence[int], new: int, prefix: Running | None = None) -> Running:
        """Start a sequence; with ``prefix`` on the full pages that the two have in common."""
        sequence = Running(list(prompt), len(prompt) + new)
        if prefix is not None:
            while (
                sequence.computed + self.page_size < len(prompt)
                and prompt[: sequence.computed + self.page_size]
                == prefix.tokens[: sequence.computed + self.page_size]
                and sequence.computed + self.page_size <= prefix.computed
            ):
                sequence.pages.append(prefix.pages[len(sequence.pages)])
                sequence.computed += self.page_size
        self.running.append(sequence)
        return sequence

    def preempt(self, sequence: Running) -> None:
        """Take a sequence's pages away; it computes all its tokens again."""
        self._poison(sequence.pages)
        self.free += sequence.pages
        sequence.pages, sequence.computed = [], 0

    def step(self, chunks: Sequence[int]) -> None:
        """Compute up to a chunk of tokens of every unfinished sequence; draw greedily."""
        parts = []
        for sequence in self.running:
            if len(sequence.tokens) < sequence.wanted:
                left = len(sequence.tokens) - sequence.computed
                parts.append((sequence, min(left, self.rng.choice(chunks))))
        self.rng.shuffle(parts)
        for sequence, count in parts:
            while len(sequence.pages) * self.page_size < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        draws = [s for s, count in parts if s.computed + count == len(s.tokens)]
        logits = self.model.forward(self._batch(parts), self.cache)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(draws), self.model.vocab_size)
        for sequence, count in parts:
            sequence.computed += count
        for sequence, row in zip(draws, logits, strict=True):
            sequence.logprobs.append(torch.log_softmax(row, dim=-1))
            sequence.tokens.append(int(row.argmax()))

    def run(self, chunks: Sequence[int] = (1, 3, 7, 13)) -> None:
        while any(len(s.tokens) < s.wanted for s in self.running):
            self.step(chunks)

    def _batch(self, parts: list[tuple[Running, int]]) -> DeviceBatch:
        size, device = self.page_size, self.model.device
        width = max(len(s.pages) for s, _ in parts)
        # Entries past a sequence's pages must not be read: these are no page at all.
        table = torch.full((len(parts), width), 10**6, dtype=torch.int32)
        ids, positions, slots, starts, read = [], [], [], [0], []
        for i, (sequence, count) in enumerate(parts):
            table[i, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
            span = range(sequence.computed, sequence.computed + count)
            ids += [sequence.tokens[p] for p in span]
            positions += list(span)
            slots += [sequence.pages[p // size] * size + p % size for p in span]
            starts.append(len(ids))
            if span.stop == len(sequence.tokens):
                read.append(len(ids) - 1)
        contexts = [s.computed + count for s, count in parts]
        return DeviceBatch(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            logit_indices=torch.tensor(read, dtype=torch.int64, device=device),
            attention=AttentionMetadata(
                query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
                context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
                page_table=table.to(device),
                slot_mapping=torch.tensor(slots, device=device),
                max_query_len=max(count for _, count in parts),
                max_context_len=max(contexts),
                page_size=size,
            ),
        )

    def _poison(self, pages: list[int]) -> None:
        index = torch.tensor(pages, dtype=torch.int64, device=self.model.device)
        for layer in self.cache:
            # NaN in any float, and in the scales of int8.
            layer.key.view(torch.uint8)[index] = 255
            layer.value.view(torch.uint8)[index] = 255


def logits_of(model: PagedModel, tokens: Sequence[int], chunk: int = 7) -> torch.Tensor:
    """float32 [T, V]: the logits at every position of one sequence."""
    size = 4
    pages = list(range(-(-len(tokens) // size)))
    random.Random(0).shuffle(pages)
    table = torch.tensor([pages], dtype=torch.int32)
    cache = [
        model.attention.allocate(
            len(pages), size, s.num_kv_heads, s.head_dim, s.value_dim, model.dtype, model.device
        )
        for s in model.layers
    ]
    rows = []
    for begin in range(0, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        positions = torch.arange(begin, end)
        slots = table[0, positions // size].long() * size + positions % size
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            page_table=table,
            slot_mapping=slots,
            max_query_len=end - begin,
            max_context_len=end,
            page_size=size,
        )
        ids = torch.tensor(list(tokens[begin:end]))
        batch = DeviceBatch(ids, positions, torch.arange(end - begin), metadata)
        rows.append(model.forward(batch, cache))
    return torch.cat(rows)
