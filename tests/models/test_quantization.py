"""Models in 8 and 4 bits: compiled and in torch, in both tiers, by plugins, and what is kept."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from paged_driver import Driver, logits_of
from pagedllm import LLM, ConfigError, SamplingParams
from pagedllm.models import load_model
from pagedllm.models.compiled import CompiledModel
from pagedllm.models.decoder import NativeModel
from pagedllm.models.quantizing import Quantizer
from pagedllm_kernels.quantized import QuantizedWeight
from plugin_site import installed
from tiny_families import build

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def seed():
    value = random.randrange(2**31)
    print("seed", value)
    return value


def load(folder, method, **settings):
    skip = settings.pop("skip", ())
    return load_model(str(folder), quantizer=Quantizer(method, skip), **settings)


def widened(model):
    """The decoder in torch whose fp32 weights are what the model's stand for."""

    def wide(thing):
        changes = {}
        for field in fields(thing):
            value = getattr(thing, field.name)
            if isinstance(value, QuantizedWeight):
                changes[field.name] = value.dequantize(torch.float32)
            elif isinstance(value, torch.Tensor):
                changes[field.name] = value.float()
        return replace(thing, **changes)

    weights = replace(wide(model.weights), layers=tuple(map(wide, model.weights.layers)))
    backend = load_model.__globals__["_attention"]("reference", model.device, torch.float32)
    return NativeModel(model.spec, weights, backend, frozenset())


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "olmo2", "granite", "qwen3"])
def test_the_compiled_step_gives_the_tokens_of_the_widened_weights(name, method, tmp_path, seed):
    build(name, seed).save_pretrained(tmp_path)
    compiled = load(tmp_path, method, dtype="float32")
    assert isinstance(compiled, CompiledModel)
    exact = widened(compiled)
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 320) for _ in range(60)]
    wanted = logits_of(exact, tokens)
    got = logits_of(compiled, tokens, 1)
    # One row at a time only the weights are rounded; activations keep 16 bits.
    assert (got - wanted).norm() < 3e-3 * wanted.norm()
    for chunk in (3, 60):
        got = logits_of(compiled, tokens, chunk)
        assert (got - wanted).norm() < 0.3 * wanted.norm()
    prompt = tokens[:20]
    answers = []
    for model in (compiled, exact):
        driver = Driver(model, random.Random(seed))
        answer = driver.add(prompt, 10)
        driver.run(chunks=(1,))
        answers.append(answer)
    for mine, theirs, before in zip(*(a.tokens[20:] for a in answers), answers[1].logprobs):
        if mine != theirs:  # only where the two likeliest are a tie
            top = before.topk(2).values
            assert top[0] - top[1] < 0.05
            break


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_torch_computes_with_the_same_weights(name, method, tmp_path, seed):
    # All experts for each token: rounding could send one to another of two that are alike.
    experts = {"num_experts_per_tok": 5} if name == "mixtral" else {}
    build(name, seed, **experts).save_pretrained(tmp_path)
    kept = load(tmp_path, method, dtype="float32", attention="reference")
    assert isinstance(kept, NativeModel)
    tokens = [random.Random(seed).randrange(1, 320) for _ in range(30)]
    wanted = logits_of(widened(kept), tokens)
    assert (logits_of(kept, tokens) - wanted).norm() < 1e-4 * wanted.norm()
    plain = load_model(str(tmp_path), dtype="float32", attention="reference")
    assert (logits_of(plain, tokens) - wanted).norm() > 1e-3 * wanted.norm()
    assert kept.weight_bytes < 0.45 * plain.weight_bytes


def test_what_is_skipped_keeps_its_dtype(tmp_path, seed):
    build("llama", seed).save_pretrained(tmp_path)
    skip = ("lm_head", "layers.1.*", "down_proj", "k_proj")
    weights = load(tmp_path, "int8", dtype="bfloat16", skip=skip).weights
    assert isinstance(weights.head, torch.Tensor)
    kinds = {
        (i, f): isinstance(getattr(layer, f), QuantizedWeight)
        for i, layer in enumerate(weights.layers)
        for f in ("qkv", "o", "gate_up", "down")
    }
    assert kinds == {(i, f): i != 1 and f in ("o", "gate_up") for i, f in kinds}
    with pytest.raises(ConfigError, match="quantization_skip: 'upp_proj' names no matrix"):
        load(tmp_path, "int8", skip=("up_proj", "upp_proj"))


def test_some_layers_quantised_and_some_not_in_one_compiled_step(tmp_path, seed):
    build("llama", seed).save_pretrained(tmp_path)
    mixed = load(tmp_path, "int8", dtype="float32", skip=("layers.0.*", "lm_head"))
    assert isinstance(mixed, CompiledModel)
    tokens = [random.Random(seed).randrange(1, 320) for _ in range(30)]
    wanted = logits_of(widened(mixed), tokens)
    assert (logits_of(mixed, tokens, 1) - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_the_generic_tier(name, tmp_path, seed):
    build(name, seed).save_pretrained(tmp_path)
    tokens = [random.Random(seed).randrange(1, 300) for _ in range(20)]
    wanted = logits_of(load_model(str(tmp_path), dtype="float32"), tokens)
    errors = []
    for method in ("int8", "int4"):
        model = load(tmp_path, method, dtype="float32")
        assert model.tier == "generic"
        errors.append(float((logits_of(model, tokens) - wanted).norm() / wanted.norm()))
    assert 1e-4 < errors[0] < 0.2
    assert 1.5 * errors[0] < errors[1] < 2


PLUGIN = """
    from pagedllm import hookimpl

    @hookimpl
    def pagedllm_quantizers():
        names = ("ternary", "rows", "wrong", "broken")
        return {name: f"rounders:{name}" for name in names}

    def ternary(weight):
        scale = weight.float().abs().mean()
        return ((weight.float() / scale).round().clamp(-1, 1) * scale).to(weight.dtype)

    def rows(weight):
        scale = weight.abs().amax(dim=1, keepdim=True).float() / 127
        return (weight.float() / scale).round().char(), scale

    def wrong(weight):
        return weight[1:]

    def broken(weight):
        raise ZeroDivisionError("the plugin's own mistake")
"""


def test_a_plugin_quantises(tmp_path, seed):
    folder = tmp_path / "model"
    build("llama", seed).save_pretrained(folder)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "num_pages": 50}
    with installed(tmp_path, rounders=PLUGIN):
        answers = {}
        for method in (None, "rows", "ternary"):
            with LLM(str(folder), quantization=method, **settings) as llm:
                answers[method] = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
        assert answers["ternary"] != answers[None]
        for method, words in (
            ("wrong", "quantization: 'wrong' returned a tensor of shape"),
            ("broken", "quantization: 'broken' of the plugin rounders.*own mistake"),
            ("row", "quantization: no plugin registers 'row'.*rows"),
        ):
            with pytest.raises(ConfigError, match=words):
                LLM(str(folder), quantization=method, **settings)


def test_a_model_that_the_caller_holds_is_not_quantised():
    with pytest.raises(ConfigError, match=r"quantization: .* load it from its folder"):
        LLM.from_model(build("llama", 1), quantization="int8")


def test_the_real_model_stays_close_to_sixteen_bits(smollm2_path):
    text = "The tide comes in twice a day because the moon pulls the water towards it. " * 3
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(smollm2_path)(text)["input_ids"]
    plain = load_model(str(smollm2_path), dtype="bfloat16")
    wanted = torch.log_softmax(logits_of(plain, tokens, len(tokens)), -1)
    sizes = {}
    for method, bound in (("int8", 0.03), ("int4", 0.4)):
        model = load(smollm2_path, method, dtype="bfloat16")
        sizes[method] = model.weight_bytes / plain.weight_bytes
        for chunk in (len(tokens), 1) if method == "int8" else (len(tokens),):
            got = torch.log_softmax(logits_of(model, tokens, chunk), -1)
            divergence = (wanted.exp() * (wanted - got)).sum(-1).mean()
            assert divergence < bound
            bound /= 2
    assert sizes["int8"] < 0.51
    assert sizes["int4"] < 0.4
