"""What every logits processor that a request may name must do.

Owner: plugins; public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pagedllm import LLM, Config, SamplingParams, ValidationError
from pagedllm._named import NamedProcessor
from pagedllm.testing.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


class LogitsProcessorSuite:
    """Checks of what ``pagedllm_logits_processors`` registers under :attr:`processor`.

    The plugin has to be installed. :attr:`sequences` are token ids, prompt and answer, on
    which it is called; give some on which it has something to do.
    """

    processor: str
    """The name that requests use."""
    options: Any = {}  # noqa: RUF012 - to be replaced whole
    """What a request gives with the name."""
    sequences: Any = ([1], [1, 2], [1, 2, 3, 2, 1], list(range(30)), [7] * 12)
    """Token ids below 257."""

    @property
    def spec(self) -> dict[str, Any]:
        """The name with its options, as a request has them."""
        return {"name": self.processor, **self.options}

    def make(self) -> NamedProcessor:
        """Make the processor as an engine does."""
        return NamedProcessor(self.spec, (None, ()))

    def run(self, made: NamedProcessor, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Call it as the sampler does, on logits of its own."""
        import numpy as np

        from pagedllm.worker.logit_edits import run_processor

        return run_processor(made.processor, np.array(token_ids, np.int64), logits.clone())

    @pytest.fixture(scope="class")
    @classmethod
    def logits(cls) -> list[Tensor]:
        """float32 [257] for each of the sequences."""
        import torch

        random = torch.Generator().manual_seed(0)
        return [torch.randn(257, generator=random) for _ in cls.sequences]

    def test_options_that_it_does_not_know_are_refused(self) -> None:
        """A misspelt option must not be dropped in silence."""
        self.make()
        wrong = {**self.spec, "no_such_option": 1}
        try:
            NamedProcessor(wrong, (None, ()))
        except ValidationError as error:
            message = str(error)
        else:
            raise AssertionError(f"{wrong} was accepted: name each option in the signature")
        assert "no_such_option" in message, f"the error does not name the option: {message}"

    def test_it_gives_back_logits(self, logits: list[Tensor]) -> None:
        """Of the same shape, finite or -inf, and never -inf for all tokens."""
        made = self.make()
        for token_ids, row in zip(self.sequences, logits, strict=True):
            result = self.run(made, token_ids, row)  # raises for what the sampler refuses
            assert not result.isnan().any(), f"NaN after {token_ids}"

    def test_it_does_something(self, logits: list[Tensor]) -> None:
        """On one of the sequences at least."""
        made = self.make()
        pairs = zip(self.sequences, logits, strict=True)
        changed = any(not self.run(made, ids, row).equal(row) for ids, row in pairs)
        assert changed, "the logits of all sequences stay as they are: give others in `sequences`"

    def test_it_depends_on_the_sequence_alone(self, logits: list[Tensor]) -> None:
        """Answers of a request share it, and a preempted one comes back from its beginning."""
        made = self.make()
        pairs = list(zip(self.sequences, logits, strict=True))
        fresh = [self.run(self.make(), ids, row) for ids, row in pairs]
        forth = list(range(len(pairs)))
        for number in (*forth, *forth[::-1], *forth[::2], *forth):
            found = self.run(made, *pairs[number])
            assert found.equal(fresh[number]), (
                f"after {pairs[number][0]} the result depends on what the processor was called "
                "with before; keep no state in it"
            )

    def test_it_keeps_its_hands_off_the_tokens(self, logits: list[Tensor]) -> None:
        """The list of token ids may be one that somebody else reads."""
        import torch

        made = self.make().processor
        for token_ids, row in zip(self.sequences, logits, strict=True):
            given: Any = list(token_ids)
            if _is_transformers(made):
                given = torch.tensor([given])
                made(given, row.clone()[None])
                given = given[0].tolist()
            else:
                made(given, row.clone())
            assert given == list(token_ids), f"it changed the token ids {token_ids} to {given}"

    def test_it_works_in_engines_of_both_kinds(self, tmp_path: Path) -> None:
        """In the engine's thread and in its own process: same tokens, and no other's touched."""
        folder = tiny_model(tmp_path / "model")
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        named = params.replace(logits_processors=[self.spec])
        prompts = [list(ids) for ids in self.sequences]
        found = {}
        for engine in ("thread", "process"):
            config = Config(
                str(folder), skip_tokenizer_init=True, threads=1, max_batch_size=8, engine=engine
            )
            with LLM(config) as llm:
                plain = _tokens(llm, prompts, [params] * len(prompts))
                both = [named] * len(prompts) + [params] * len(prompts)
                mixed = _tokens(llm, prompts * 2, both)
            beside = mixed[len(prompts) :]
            assert beside == plain, f"engine={engine!r}: requests without it are changed, too"
            found[engine] = mixed[: len(prompts)]
        assert found["thread"] == found["process"], (
            f"in a thread {found['thread']}, in a process {found['process']}"
        )


def _tokens(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _is_transformers(processor: Any) -> bool:
    from pagedllm.worker.logit_edits import _is_transformers as check

    return check(processor)
