"""The compiled step against the same decoder in torch, for every architecture it covers."""

from __future__ import annotations

import random

import pytest
import torch

from paged_driver import Driver, logits_of
from pagedllm.models import load_model
from pagedllm.models.compiled import CompiledModel, why_not
from pagedllm.models.decoder import NativeModel
from pagedllm.models.quantizing import Quantizer
from pagedllm_kernels import reference
from pagedllm_kernels.int8_pages import quantize_rows
from pagedllm_kernels.numba_cpu.attention import NumbaAttention
from pagedllm_kernels.numba_cpu.decoder import FEW_ROWS, SPLIT_ROWS
from tiny_families import FAMILIES, build, decided, routes_clearly

NATIVE = [name for name, family in FAMILIES.items() if family.native]
# Its usual width of 40 is no multiple of a vector's, which leaves it to torch.
WIDTHS = {"qwen3-moe": {"moe_intermediate_size": 48}}
# With all experts for each token rounding sends none to another of two that are alike.
ALL_EXPERTS = {"mixtral": {"num_experts_per_tok": 5}}


@pytest.fixture(scope="module")
def attention():
    return NumbaAttention(2)


@pytest.fixture
def seed():
    value = random.randrange(2**31)
    print("seed", value)
    return value


def both(name, folder, seed, dtype, attention, **changes):
    """The decoder in torch with reference kernels, and compiled."""
    build(name, seed, **WIDTHS.get(name, {}), **changes).save_pretrained(folder)
    kwargs = {"dtype": dtype, "model_impl": "native"}
    plain = load_model(str(folder), attention="reference", **kwargs)
    spec, weights = plain.spec, plain.weights
    return plain, CompiledModel(NativeModel(spec, weights, attention, plain.eos_token_ids))


def answers_of(model, seed, cache_dtype=None):
    """What it writes after some prompts in steps of any size, one of them computed twice."""
    rng = random.Random(seed)
    driver = Driver(model, rng, page_size=rng.choice([3, 4, 16]), cache_dtype=cache_dtype)
    lengths, new, steps = ((1, 5, 22, 47), 40, 15) if cache_dtype is None else ((1, 14), 8, 5)
    prompts = [[rng.randrange(1, 320) for _ in range(n)] for n in lengths]
    running = [driver.add(prompt, new) for prompt in prompts]
    for _ in range(steps):
        driver.step((1, 3, 7, 40))
    driver.preempt(running[-2])
    driver.run()
    return running


@pytest.fixture
def nearest(monkeypatch):
    """How near to the middle of two steps the numbers came that int8 pages were given.

    One that is as near as fp32's own errors is rounded up here and down there.
    """
    found = []

    def write_rows(pages, at, rows):
        numbers, scales = quantize_rows(rows)
        found.append(0.5 - float((rows / scales - numbers).abs().nan_to_num().max()))
        return write(pages, at, rows)

    write = reference.write_rows
    monkeypatch.setattr(reference, "write_rows", write_rows)
    return found


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("name", NATIVE)
def test_tokens_and_logprobs_are_those_of_the_torch_decoder(
    name, cache_dtype, tmp_path, seed, attention, nearest
):
    for attempt in range(seed, seed + 100):
        models = both(name, tmp_path, attempt, "float32", attention)
        wanted = answers_of(models[0], attempt, cache_dtype)
        near, nearest[:] = min(nearest, default=1.0), []
        if near < 1e-4:
            continue
        routed = build(name, attempt, **WIDTHS.get(name, {}))
        if all(decided(torch.stack(answer.logprobs)) for answer in wanted) and routes_clearly(
            routed, [answer.tokens for answer in wanted]
        ):
            break
    got = answers_of(models[1], attempt, cache_dtype)
    for plain, compiled in zip(wanted, got, strict=True):
        assert compiled.tokens == plain.tokens
        difference = torch.stack(compiled.logprobs) - torch.stack(plain.logprobs)
        assert difference.abs().max() < 1e-3


@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "olmo2", "granite", "qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, SPLIT_ROWS, FEW_ROWS + 2, 60])
def test_low_precision_is_as_near_to_fp32_as_the_torch_decoder(
    name, dtype, chunk, tmp_path, seed, attention
):
    plain, compiled = both(name, tmp_path, seed, dtype, attention, **ALL_EXPERTS.get(name, {}))
    exact = load_model(
        str(tmp_path), dtype=torch.float32, model_impl="native", attention="reference"
    )
    # fp32 arithmetic on the weights as they were rounded.
    exact = NativeModel(exact.spec, widened(plain.weights), exact.attention, frozenset())
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 320) for _ in range(120)]
    wanted = logits_of(exact, tokens)
    errors = [
        (logits_of(model, tokens, chunk) - wanted).norm() / wanted.norm()
        for model in (plain, compiled)
    ]
    assert errors[1] < 1.3 * errors[0] + 1e-4, errors
    if chunk < SPLIT_ROWS and name != "mixtral":
        assert errors[1] < errors[0], errors


def widened(weights):
    """The same weights in fp32."""
    from dataclasses import fields, replace

    def wide(thing):
        changes = {
            f.name: v.float()
            for f in fields(thing)
            if isinstance(v := getattr(thing, f.name), torch.Tensor)
        }
        return replace(thing, **changes)

    return replace(wide(weights), layers=tuple(wide(layer) for layer in weights.layers))


def test_a_long_prompt_in_one_step_and_in_pieces(tmp_path, seed, attention):
    plain, compiled = both(
        "llama", tmp_path, seed, "float32", attention, max_position_embeddings=1200
    )
    # Long enough to be split among threads, in all layers, when few rows see it.
    tokens = [random.Random(seed).randrange(1, 320) for _ in range(1100)]
    wanted = logits_of(plain, tokens, 1100)
    for chunk in (1100, 250, 33, 3):
        error = (logits_of(compiled, tokens, chunk) - wanted).norm() / wanted.norm()
        assert error < 1e-5


def test_steps_that_read_nothing_out(tmp_path, seed, attention):
    _, compiled = both("llama", tmp_path, seed, "float32", attention)
    driver = Driver(compiled, random.Random(seed))
    driver.add([5] * 40, 1)
    driver.step([7])
    assert driver.running[0].computed == 7
    assert not driver.running[0].logprobs


def test_weights_that_change_in_place_count(tmp_path, seed, attention):
    plain, compiled = both("llama-biased", tmp_path, seed, "float32", attention)
    assert compiled.weights is plain.weights
    tokens = [random.Random(seed).randrange(1, 320) for _ in range(20)]
    before = logits_of(compiled, tokens)
    with torch.no_grad():
        plain.weights.layers[0].mlp_norm.mul_(3.0)
        plain.weights.layers[1].qkv_bias.add_(0.5)
        plain.weights.layers[2].down.mul_(2.0)
    wanted = logits_of(plain, tokens)
    assert (wanted - before).abs().max() > 1e-2
    assert (logits_of(compiled, tokens) - wanted).norm() / wanted.norm() < 1e-5


def test_what_is_not_covered_says_why(tmp_path, seed, attention):
    build("qwen3-moe", seed).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), model_impl="native", attention="reference")
    assert "attention is reference" in why_not(model)
    model.attention = attention
    assert why_not(model) == "its width 40 is no multiple of 16"
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM cannot be compiled.*width 40"):
        CompiledModel(model)


def test_quantised_experts_run_in_torch(tmp_path, seed, attention):
    build("mixtral", seed).save_pretrained(tmp_path)
    kwargs = {"model_impl": "native", "quantizer": Quantizer("int8")}
    model = load_model(str(tmp_path), attention=attention, **kwargs)
    assert why_not(model) == "its experts are quantised"
    assert type(model) is NativeModel


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_experts_get_their_rows_however_they_fall(name, threads, tmp_path, seed):
    """One expert for all, none for some, few rows and many, and more threads than tasks."""
    attention = NumbaAttention(threads)
    plain, compiled = both(name, tmp_path, seed, "float32", attention)
    rng = random.Random(seed)
    for length, alike in ((1, False), (2, True), (9, True), (60, False), (130, True)):
        tokens = [7 if alike else rng.randrange(1, 320) for _ in range(length)]
        if not routes_clearly(build(name, seed, **WIDTHS.get(name, {})), [tokens]):
            continue
        wanted = logits_of(plain, tokens, length)
        error = (logits_of(compiled, tokens, length) - wanted).norm() / wanted.norm()
        assert error < 1e-5
