"""One call of ``generate``, made on a model and on its accelerated twin, and compared."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import pagedllm

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

VOCAB = 264
PAD, BOS, EOS = 256, 257, 258
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **_SPECIAL,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special tokens of the tiny models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build(family: str, seed: int) -> PreTrainedModel:
    """Make a model whose greedy answers are not one token over and over."""
    torch.manual_seed(seed)
    model: Any
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SIZES))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **_SIZES))
    elif family == "gemma3":
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                head_dim=8,
                sliding_window=7,
                layer_types=["sliding_attention", "full_attention"],
                **_SIZES,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, **_SPECIAL
            )
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model.eval()


class Lines(logging.Handler):
    """Collects the log's lines about falling back."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Pair:
    reference: PreTrainedModel
    model: PreTrainedModel
    handle: Any
    random: random.Random
    lines: Lines

    @classmethod
    def of(
        cls, model: PreTrainedModel, rng: random.Random, **config: Any
    ) -> AbstractContextManager[Pair]:
        from contextlib import contextmanager

        @contextmanager
        def made() -> Iterator[Pair]:
            reference = copy.deepcopy(model)
            lines = Lines()
            logger = logging.getLogger("pagedllm_hf.accelerate")
            logger.addHandler(lines)
            settings = {"num_pages": 600, "page_size": 4, **config}
            try:
                with pagedllm.accelerate(model, **settings) as handle:
                    yield cls(reference, model, handle, rng, lines)
            finally:
                logger.removeHandler(lines)

        return made()

    def prompts(self, rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
        """Left-padded prompts of different lengths with their mask."""
        ids = torch.tensor([[self.random.randrange(256) for _ in range(length)]
                            for _ in range(rows)])  # fmt: skip
        mask = torch.ones_like(ids)
        for row in range(rows - 1):
            hidden = self.random.randrange(length - 1)
            mask[row, :hidden] = 0
            ids[row, :hidden] = PAD
        return {"input_ids": ids, "attention_mask": mask}

    def compare(
        self, make: Callable[[], dict[str, Any]], *, seed: int = 0, falls_back: bool = False
    ) -> Any:
        """Make a call on both and compare all there is in the answers.

        Two logits may be so near that rounding decides; that does not happen twice in a row.
        ``make`` is called for each attempt and each model: processors may have a state.
        """
        for attempt in range(2):
            state = self.random.getstate()
            before = len(self.lines.lines)
            call = make()
            mask = call.get("attention_mask")
            expected = run(self.reference, call, seed)
            self.random.setstate(state)
            found = run(self.model, make(), seed)
            told = self.lines.lines[before:]
            assert len(told) == falls_back, told
            try:
                check_equal(found, expected, mask)
            except AssertionError:
                if attempt:
                    raise
            else:
                return found
        raise AssertionError


def run(model: PreTrainedModel, call: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return model.generate(**call)


def check_equal(found: Any, expected: Any, mask: torch.Tensor | None = None) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return
    torch.testing.assert_close(found.sequences, expected.sequences, rtol=0, atol=0)
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"sequences", "cache", "past_key_values"}:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-3)
    for name in expected.keys() & {"cache", "past_key_values"}:
        check_caches_equal(found[name], expected[name], mask)


def check_caches_equal(found: Any, expected: Any, mask: torch.Tensor | None) -> None:
    """Compare keys and values wherever no padding is: nobody looks at what lies there."""
    assert len(found) == len(expected)  # they are made when one looks at them
    assert type(found) is type(expected)
    assert found.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert type(layer) is type(other)
        rows, _, length, _ = other.keys.shape
        shown = torch.ones(rows, expected.get_seq_length(), dtype=torch.bool)
        if mask is not None:
            shown[:, : mask.shape[1]] = mask.bool().repeat_interleave(rows // len(mask), dim=0)
        kept = shown[:, -length:]  # a sliding window has the last ones only
        for name in ("keys", "values"):
            ours, theirs = (getattr(each, name).transpose(1, 2)[kept] for each in (layer, other))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
