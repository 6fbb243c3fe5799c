"""Applies steps to slots and pages, runs the model, draws tokens.

Owner: an executor. Invariants: a step's delta is applied before anything is computed, so
a step that fails leaves slots and page tables as the scheduler believes them to be; the
drawn tokens are appended here, so the next step can be submitted before this one's tokens
have been collected.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedllm.types import ModelInfo, RowOutput, StepOutput
from pagedllm.worker.batch import build_batch
from pagedllm.worker.device import allocate_pages, plan_cache
from pagedllm.worker.sampler import Sampler
from pagedllm.worker.slot import SlotState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.config import Config
    from pagedllm.models.base import PagedModel
    from pagedllm.types import Row, ScheduleStep, TokenLogprobs
    from pagedllm.worker.batch import LogitRows
    from pagedllm.worker.sampler import Sampled


class Worker:
    """One model with its pages and slots on one device.

    Args:
        model: a loaded model.
        config: a resolved config.

    Raises:
        ConfigError: the page cache cannot be made as configured.
    """

    def __init__(self, model: PagedModel, config: Config) -> None:
        plan = plan_cache(config, model)
        self.info = ModelInfo(
            num_pages=plan.num_pages,
            page_size=config.page_size,
            max_model_len=plan.max_model_len,
            vocab_size=model.vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            tier=model.tier,
            architecture=model.architecture,
            bytes_per_page=plan.bytes_per_page,
            weight_bytes=model.weight_bytes,
            attention_backend=model.attention.name,
            eos_token_ids=model.eos_token_ids,
        )
        self._model = model
        self.layers = allocate_pages(config, model, plan.num_pages)
        self._sampler = Sampler(model.vocab_size, model.device)
        self._slots: list[SlotState | None] = [None] * config.max_batch_size
        pages = -(-plan.max_model_len // config.page_size)
        self._page_tables = np.zeros((config.max_batch_size, pages), dtype=np.int32)

    def execute(self, step: ScheduleStep) -> StepOutput:
        """Run a step. An exception in it is returned, never raised."""
        try:
            with torch.inference_mode():
                self._apply(step)
                return StepOutput(step.step_id, self._compute(step.rows))
        except Exception as error:  # noqa: BLE001 - the engine fails the step's requests with it
            return StepOutput(step.step_id, error=error)

    def close(self) -> None:
        """Give the pages' memory back."""
        self.layers = ()
        self._slots = []
        del self._model, self._sampler
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def _apply(self, step: ScheduleStep) -> None:
        for slot in step.released:
            self._slots[slot] = None
        for init in step.added:
            self._slots[init.slot] = SlotState.from_init(init, init.bad_words_ids)
        for slot, token in step.appended:
            state = self._slots[slot]
            if state is None:
                raise RuntimeError(f"slot {slot} is empty")
            state.append(token)
        for write in step.page_writes:
            end = write.index + len(write.page_ids)
            self._page_tables[write.slot, write.index : end] = write.page_ids
        if step.page_copies:
            source, target = torch.tensor(step.page_copies, device=self._model.device).T
            for layer in self.layers:
                layer.key[target] = layer.key[source]
                layer.value[target] = layer.value[source]

    def _compute(self, rows: Sequence[Row]) -> tuple[RowOutput, ...]:
        pooled = [row for row in rows if self._state(row).pooling is not None]
        if not pooled:
            return self._generate(rows)
        others = [row for row in rows if self._state(row).pooling is None]
        try:
            embedded = self._pool(pooled)
        except Exception as error:  # noqa: BLE001 - theirs alone; others' rows go on
            embedded = [RowOutput(r.slot, r.generation, error=error) for r in pooled]
        found = dict(zip(pooled, embedded, strict=True))
        if others:
            found |= zip(others, self._generate(others), strict=True)
        return tuple(found[row] for row in rows)

    def _pool(self, rows: Sequence[Row]) -> list[RowOutput]:
        """Compute prompts that are to become embeddings."""
        batch, _ = build_batch(
            rows, self._slots, self._page_tables, self.info.page_size, self._model.device
        )
        states = self._model.states(batch, self.layers)
        outputs = []
        for row, part in zip(rows, states.split([row.count for row in rows]), strict=True):
            state, embedding = self._state(row), None
            if state.pooling == "mean":
                total = part.sum(0, dtype=torch.float64)
                state.pooled = total if state.pooled is None else state.pooled + total
            if row.sample:  # the last of the prompt
                whole = part[-1] if state.pooled is None else state.pooled / state.num_tokens
                embedding = tuple(whole.tolist())
            outputs.append(RowOutput(row.slot, row.generation, embedding=embedding))
        return outputs

    def _generate(self, rows: Sequence[Row]) -> tuple[RowOutput, ...]:
        batch, logit_rows = build_batch(
            rows, self._slots, self._page_tables, self.info.page_size, self._model.device
        )
        logits = self._model.forward(batch, self.layers)
        drawn = self._draw(rows, logit_rows, logits)
        prompt = self._prompt_logprobs(rows, logit_rows, logits)
        given = self._handed_out(rows, logit_rows, logits)
        return tuple(
            RowOutput(row.slot, row.generation, logits=given[index])
            if index in given
            else _output(row, drawn.get(index), prompt.get(index, ()))
            for index, row in enumerate(rows)
        )

    def _handed_out(
        self, rows: Sequence[Row], where: LogitRows, logits: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """The logits of driven rows, whose callers choose the tokens."""
        return {
            index: logits[last]
            for index, last in zip(where.sampling, where.last, strict=True)
            if self._state(rows[index]).driven
        }

    def _draw(
        self, rows: Sequence[Row], where: LogitRows, logits: torch.Tensor
    ) -> dict[int, Sampled | Exception]:
        drawing = [
            (index, last)
            for index, last in zip(where.sampling, where.last, strict=True)
            if not self._state(rows[index]).driven
        ]
        if not drawing:
            return {}
        states = [self._state(rows[index]) for index, _ in drawing]
        if len(drawing) != len(logits):
            logits = logits[[last for _, last in drawing]]
        drawn = self._sampler.sample(logits, states)
        for state, result in zip(states, drawn, strict=True):
            # A row that failed gets any token, for the steps that were submitted behind it;
            # the engine drops their results.
            state.append(0 if isinstance(result, Exception) else result.token_id)
        return {index: result for (index, _), result in zip(drawing, drawn, strict=True)}

    def _prompt_logprobs(
        self, rows: Sequence[Row], where: LogitRows, logits: torch.Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        for index, first, count in where.prompt:
            row = rows[index]
            state = self._state(row)
            targets = state.tokens[row.start + 1 : row.start + 1 + count]
            found[index] = tuple(
                self._sampler.prompt_logprobs(
                    logits[first : first + count],
                    torch.from_numpy(targets).to(logits.device),
                    state.params.prompt_logprobs or 0,
                )
            )
        return found

    def _state(self, row: Row) -> SlotState:
        state = self._slots[row.slot]
        if state is None:
            raise RuntimeError(f"slot {row.slot} is empty")
        return state


def _output(
    row: Row, drawn: Sampled | Exception | None, prompt: tuple[TokenLogprobs, ...]
) -> RowOutput:
    if isinstance(drawn, Exception):
        return RowOutput(row.slot, row.generation, error=drawn)
    return RowOutput(
        row.slot,
        row.generation,
        token_id=None if drawn is None else drawn.token_id,
        logprobs=None if drawn is None else drawn.logprobs,
        prompt_logprobs=prompt,
    )
