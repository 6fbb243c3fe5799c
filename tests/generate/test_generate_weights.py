"""Never an answer from stale weights; never a second copy of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pagedllm
from generate_pairs import build

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def _optimiser_step(model: PreTrainedModel) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=5.0)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def _adam_step(model: PreTrainedModel) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=False, foreach=True)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimiser.step()


def _first_matrix(model: PreTrainedModel) -> torch.nn.Parameter:
    skipped = ("embed", "wte", "wpe", "lm_head")
    return next(
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and not any(word in name for word in skipped)
    )


def _merge_through_data(model: PreTrainedModel) -> None:
    weight = _first_matrix(model)
    low, high = torch.randn(weight.shape[0], 4), torch.randn(4, weight.shape[1])
    weight.data += low @ high


def _one_number_through_data(model: PreTrainedModel) -> None:
    _first_matrix(model).data[1, 2] += 40.0


def _swap_rows_through_data(model: PreTrainedModel) -> None:
    data = model.get_input_embeddings().weight.data
    data.copy_(data.flip(0))


def _load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict({k: v.roll(1) * 1.1 for k, v in model.state_dict().items()})


def _load_and_assign(model: PreTrainedModel) -> None:
    state = {k: v.roll(1) * 1.1 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()


def _replace_parameter(model: PreTrainedModel) -> None:
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own.get("weight") is _first_matrix(model):
            module.weight = torch.nn.Parameter(torch.randn_like(module.weight))
            return


def _replace_data(model: PreTrainedModel) -> None:
    weight = _first_matrix(model)
    weight.data = torch.randn_like(weight)


def _in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        _first_matrix(model).mul_(-2.0)


CHANGES: list[Callable[[PreTrainedModel], None]] = [
    _optimiser_step, _adam_step, _merge_through_data, _one_number_through_data,
    _swap_rows_through_data, _load_state_dict, _load_and_assign, _replace_parameter,
    _replace_data, _in_place,
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2"], ids=["native", "generic"])
def test_changed_weights_are_noticed(family: str) -> None:
    # Long enough for cached pages: the prompt was computed with the old weights too.
    ids = torch.tensor([list(range(1, 40))])
    model = build(family, 11)
    with pagedllm.accelerate(model, strict=True, num_pages=128, page_size=4):
        old = model.generate(ids, max_new_tokens=10)
        for change in CHANGES:
            torch.manual_seed(3)
            change(model)
            for settings in ({}, {"num_beams": 2}):
                expected = type(model).generate(model, ids, max_new_tokens=10, **settings)
                found = model.generate(ids, max_new_tokens=10, **settings)
                assert torch.equal(found, expected), (change.__name__, settings)
        assert not torch.equal(found, old)


def test_without_a_look_at_the_weights_refresh_makes_up_for_it() -> None:
    ids = torch.tensor([list(range(1, 40))])
    model = build("llama", 11)
    with pagedllm.accelerate(model, check_weights=False, num_pages=128, page_size=4) as handle:
        model.generate(ids, max_new_tokens=10)
        _in_place(model)  # counted by torch
        expected = type(model).generate(model, ids, max_new_tokens=10)
        assert torch.equal(model.generate(ids, max_new_tokens=10), expected)
        _merge_through_data(model)  # not counted
        handle.refresh()
        expected = type(model).generate(model, ids, max_new_tokens=10)
        assert torch.equal(model.generate(ids, max_new_tokens=10), expected)


def test_unchanged_weights_keep_the_engine_and_its_pages() -> None:
    model = build("llama", 12)
    ids = torch.tensor([list(range(1, 40))])
    with pagedllm.accelerate(model, num_pages=128, page_size=4) as handle:
        engine = handle.llm
        for _ in range(3):
            model.generate(ids, max_new_tokens=3)
        assert handle.llm is engine
        assert engine.stats().cache.prefix_hits >= 2 * 36


def test_changed_modules_and_settings_are_noticed() -> None:
    model = build("llama", 13)
    ids = torch.tensor([[1, 2, 3, 4]])
    with pagedllm.accelerate(model, num_pages=64):
        model.generate(ids, max_new_tokens=6)
        model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
        expected = type(model).generate(model, ids, max_new_tokens=6)
        assert torch.equal(model.generate(ids, max_new_tokens=6), expected)
        model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        expected = type(model).generate(model, ids, max_new_tokens=6)
        assert torch.equal(model.generate(ids, max_new_tokens=6), expected)


class _LoRALinear(torch.nn.Module):
    """An adapter beside a linear layer, as libraries for fine-tuning put them in."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low = torch.nn.Parameter(torch.randn(4, base.in_features))
        self.high = torch.nn.Parameter(torch.randn(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.low.T) @ self.high.T

    def merged(self) -> torch.nn.Linear:
        self.base.weight.data += (self.high @ self.low).data
        return self.base


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_put_in_and_merged_away() -> None:
    model = build("llama", 14)
    ids = torch.tensor([[1, 2, 3, 4]])
    with pagedllm.accelerate(model, num_pages=64) as handle:
        plain = model.generate(ids, max_new_tokens=8)
        for layer in model.model.layers:
            layer.self_attn.q_proj = _LoRALinear(layer.self_attn.q_proj)
        expected = type(model).generate(model, ids, max_new_tokens=8)
        assert torch.equal(model.generate(ids, max_new_tokens=8), expected)
        for layer in model.model.layers:
            layer.self_attn.q_proj = layer.self_attn.q_proj.merged()
        found = model.generate(ids, max_new_tokens=8)
        assert torch.equal(found, type(model).generate(model, ids, max_new_tokens=8))
        assert not torch.equal(found, plain)
        assert handle.llm.model_info.tier == "native"


def test_another_dtype_is_noticed() -> None:
    model = build("llama", 15)
    ids = torch.tensor([[1, 2, 3, 4]])
    with pagedllm.accelerate(model, num_pages=64) as handle:
        model.generate(ids, max_new_tokens=2)
        model.to(torch.bfloat16)
        model.generate(ids, max_new_tokens=2)
        assert handle.llm.model_info.dtype == "bfloat16"
        model.float()
        expected = type(model).generate(model, ids, max_new_tokens=8)
        assert torch.equal(model.generate(ids, max_new_tokens=8), expected)


def test_training_goes_on_through_an_accelerated_model() -> None:
    """A loop that trains and generates in turns learns what it would have learnt without."""
    losses: list[list[float]] = []
    for accelerated in (False, True):
        model = build("llama", 16)
        handle = pagedllm.accelerate(model, num_pages=64) if accelerated else None
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
        losses.append([])
        for _ in range(4):
            model.train()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses[-1].append(loss.item())
            model.eval()
            model.generate(ids[:, :3], max_new_tokens=3)
        if handle is not None:
            handle.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


_MEMORY = """
import gc, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import pagedllm

def resident():
    gc.collect()
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

def make():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=None,
    )).eval()

ids = torch.arange(8)[None]
small = make()
with pagedllm.accelerate(small, num_pages=64):
    small.generate(ids, max_new_tokens=2)  # torch and the kernels take their own, once
del small
model = make()
model.generate(ids, max_new_tokens=2)
weights = sum(p.nbytes for p in model.parameters()) / 2**20
before = resident()
handle = pagedllm.accelerate(model, kv_cache_memory="64MiB", preallocate_kv_cache=True)
model.generate(ids, max_new_tokens=2)
print(weights, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_by_the_cache_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=False, timeout=240,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights, grown = map(float, done.stdout.split())
    assert weights > 200
    assert 40 < grown < 64 + 0.2 * weights, f"{grown} MiB for a cache of 64 MiB"


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model: Any = build("llama", 17)
    ids = torch.tensor([[1, 2, 3, 4]])
    with pagedllm.accelerate(model, strict=True, num_pages=64):
        expected = type(model).generate(model, ids, max_new_tokens=6)
        assert torch.equal(model.generate(ids, max_new_tokens=6), expected)
