"""In bf16 the native tier rounds at matrix products only; and the real SmolLM2 in all tiers."""

from __future__ import annotations

import random

import pytest
import torch

from paged_driver import Driver, logits_of
from pagedllm.models import load_model
from tiny_families import build


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "granite", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_low_precision_is_nearer_to_fp32_than_transformers_own(tmp_path, name, dtype):
    seed = random.randrange(2**31)
    print("seed", seed)
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 320) for _ in range(100)]
    model = build(name, seed).to(dtype)
    model.save_pretrained(tmp_path)
    stored, wide = (
        type(model).from_pretrained(tmp_path, dtype=d, attn_implementation="eager")
        for d in (dtype, torch.float32)
    )
    ids = torch.tensor([tokens])
    with torch.no_grad():
        theirs = stored(input_ids=ids, use_cache=False).logits[0].float()
        exact = wide(input_ids=ids, use_cache=False).logits[0]
    for attention in ("auto", "reference"):  # compiled where it can be, and in torch
        loaded = load_model(str(tmp_path), model_impl="native", dtype=dtype, attention=attention)
        assert (logits_of(loaded, tokens) - exact).norm() < (theirs - exact).norm()


@pytest.fixture(scope="module")
def france(smollm2_path):
    """The prompt's length, and 64 greedy tokens of transformers in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2_path)("The capital of France is").input_ids
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=64,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.log_softmax(torch.stack(out.logits)[:, 0], dim=-1)
    return ids, out.sequences[0].tolist(), logprobs


@pytest.mark.parametrize(
    ("tier", "dtype"), [("native", "float32"), ("generic", "float32"), ("native", "bfloat16")]
)
def test_smollm2_answers_as_in_fp32(france, smollm2_path, tier, dtype):
    ids, answer, logprobs = france
    model = load_model(str(smollm2_path), model_impl=tier, dtype=dtype)
    driver = Driver(model, random.Random(0), page_size=16, num_pages=20)
    sequence = driver.add(ids, 64)
    driver.run([4])
    assert sequence.tokens == answer
    if dtype == "float32":
        assert (torch.stack(sequence.logprobs) - logprobs).abs().max() < 1e-3
