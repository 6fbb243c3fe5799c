"""The generic tier with all its linear layers under compiled products, however small."""

from __future__ import annotations

import random

import pytest
import torch

from paged_driver import Driver, logits_of
from pagedllm.models import load_model, wrap_model
from pagedllm.models.linears import CompiledLinear
from tiny_families import FAMILIES, build, build_clear

NAMES = [name for name, family in FAMILIES.items() if not family.native] + ["llama-biased"]


@pytest.fixture(autouse=True)
def _everything(monkeypatch):
    monkeypatch.setattr("pagedllm_kernels.numba_cpu.products.LEAST_BYTES", 0)


@pytest.fixture
def tokens():
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    return [rng.randrange(1, 320) for _ in range(30)]


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def compiled(model):
    return [name for name, each in model.named_modules() if isinstance(each, CompiledLinear)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, own, tokens, tmp_path):
    model = build_clear(name, random.randrange(2**31), [tokens])
    wanted = reference_logits(model, tokens)
    if own:
        model.save_pretrained(tmp_path)
        loaded = load_model(str(tmp_path), model_impl="generic")
    else:
        loaded = wrap_model(model, model_impl="generic")
    assert compiled(loaded.model)
    assert not compiled(model)
    for chunk in (1, 7, 30):
        assert (logits_of(loaded, tokens, chunk) - wanted).abs().max() < 1e-3
    assert (reference_logits(model, tokens) - wanted).abs().max() < 1e-5


def test_layers_turned_for_gpt2_take_the_place_of_those_they_were_made_of(tokens, tmp_path):
    model = build("gpt2", random.randrange(2**31))
    size = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), model_impl="generic")
    assert loaded.weight_bytes == size
    assert any(name.endswith("c_attn") for name in compiled(loaded.model))
    # A caller's own stay as they are: turning them would change what the caller holds.
    shared = wrap_model(model, model_impl="generic")
    assert compiled(shared.model) == ["lm_head"]


def test_a_step_that_reads_nothing_out(tokens):
    driver = Driver(wrap_model(build("starcoder2", 1), model_impl="generic"), random.Random(0))
    driver.add(tokens, 1)
    driver.step([7])
    assert driver.running[0].computed == 7
    assert not driver.running[0].logprobs


@pytest.mark.parametrize("name", ["starcoder2", "llama-biased"])
def test_weights_and_biases_that_change_count(name, tokens):
    model = build_clear(name, random.randrange(2**31), [tokens])
    wrapped = wrap_model(model, model_impl="generic")
    before = logits_of(wrapped, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = reference_logits(model, tokens)
    assert (wanted - before).abs().max() > 1e-2
    assert (logits_of(wrapped, tokens) - wanted).abs().max() < 1e-3 * wanted.abs().max()


def test_hooks_and_new_parameters_of_the_callers_layers_reach_the_engine(tokens):
    model = build("starcoder2", random.randrange(2**31))
    wrapped = wrap_model(model, model_impl="generic")
    before = logits_of(wrapped, tokens)
    handle = model.lm_head.register_forward_hook(lambda layer, inputs, output: output * 2)
    assert (logits_of(wrapped, tokens) - 2 * before).abs().max() < 1e-4
    handle.remove()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert not logits_of(wrapped, tokens).any()


def test_other_kinds_of_attention_leave_layers_as_they_are(tokens):
    model = build("starcoder2", random.randrange(2**31))
    assert not compiled(wrap_model(model, model_impl="generic", attention="reference").model)
