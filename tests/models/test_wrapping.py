"""A model that the caller already holds: its weights are shared and it stays the caller's."""

from __future__ import annotations

import random

import pytest
import torch

from paged_driver import logits_of
from pagedllm.errors import UnsupportedModelError
from pagedllm.models import wrap_model
from tiny_families import FAMILIES, build, build_clear

TIERS = ("native", "generic")


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture
def tokens():
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(30)]


def storages(model):
    return {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.native])
def test_weights_are_shared_and_the_model_still_works(name, tier, tokens):
    model = build_clear(name, random.randrange(2**31), [tokens]).train()
    size = sum(storages(model).values())
    model.eval()
    before = reference_logits(model, tokens)
    implementation = model.config._attn_implementation
    model.train()

    wrapped = wrap_model(model, model_impl=tier)

    assert wrapped.tier == tier
    assert (logits_of(wrapped, tokens) - before).abs().max() < 1e-3
    # Whatever was merged replaced what it was merged from.
    assert sum(storages(model).values()) == size == wrapped.weight_bytes
    assert model.training
    assert model.config._attn_implementation == implementation
    model.eval()
    assert (reference_logits(model, tokens) - before).abs().max() < 1e-5


@pytest.mark.parametrize("tier", TIERS)
def test_training_the_model_changes_what_the_engine_answers(tier, tokens):
    model = build("llama", 1)
    wrapped = wrap_model(model, model_impl=tier)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.tensor([tokens])
    model(input_ids=ids, labels=ids).loss.backward()
    before = reference_logits(model, tokens)
    optimizer.step()
    after = reference_logits(model, tokens)
    assert (after - before).abs().max() > 0.01
    assert (logits_of(wrapped, tokens) - after).abs().max() < 1e-3


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_can_be_wrapped_again(tier, tokens):
    model = build("llama-biased", 2)
    wanted = reference_logits(model, tokens)
    first = wrap_model(model, model_impl=tier)
    pointers = storages(model)
    second = wrap_model(model, model_impl=tier)
    assert storages(model) == pointers
    for wrapped in (first, second):
        assert (logits_of(wrapped, tokens) - wanted).abs().max() < 1e-3


def test_a_wrapped_model_can_be_saved_and_loaded(tmp_path, tokens):
    model = build("qwen2", 3)
    wanted = reference_logits(model, tokens)
    wrap_model(model, model_impl="native")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(reference_logits(again, tokens), wanted)


class _Scaled(torch.nn.Module):
    """Stands for an adapter: the layer that it replaced is inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.5


def test_replaced_modules_go_to_the_generic_tier_and_count(tokens, caplog):
    caplog.set_level("INFO")
    model = build("llama", 4)
    layer = model.model.layers[1].self_attn
    layer.v_proj = _Scaled(layer.v_proj)
    wanted = reference_logits(model, tokens)
    wrapped = wrap_model(model)
    assert wrapped.tier == "generic"
    assert "_Scaled" in caplog.text
    assert (logits_of(wrapped, tokens) - wanted).abs().max() < 1e-3


def test_hooks_go_to_the_generic_tier_and_count(tokens):
    model = build("llama", 5)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    wanted = reference_logits(model, tokens)
    wrapped = wrap_model(model)
    assert wrapped.tier == "generic"
    assert (logits_of(wrapped, tokens) - wanted).abs().max() < 1e-3


def test_a_replaced_forward_is_refused():
    model = build("llama", 6)
    block = model.model.layers[0]
    block.forward = block.forward
    with pytest.raises(UnsupportedModelError, match="forward of its"):
        wrap_model(model)


def test_subclasses_of_anyone_go_to_the_generic_tier(tokens):
    from transformers import LlamaForCausalLM

    class Louder(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
            output.logits = output.logits * 2
            return output

    plain = build("llama", 7)
    louder = Louder(plain.config).eval()
    louder.load_state_dict(plain.state_dict())
    wrapped = wrap_model(louder)
    assert (wrapped.tier, wrapped.architecture) == ("generic", "Louder")
    wanted = reference_logits(louder, tokens)
    assert (logits_of(wrapped, tokens) - wanted).abs().max() < 1e-3


def test_end_tokens_of_the_generation_config():
    model = build("llama", 8)
    assert wrap_model(model).eos_token_ids == frozenset()
    model.config.eos_token_id = 5
    model.generation_config.eos_token_id = [7, 9]
    assert wrap_model(model).eos_token_ids == frozenset({7, 9})
    model.generation_config.eos_token_id = None
    assert wrap_model(model).eos_token_ids == frozenset({5})
