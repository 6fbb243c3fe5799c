"""Positions: scalings that depend on a sequence's length, and the end of what is known."""

from __future__ import annotations

import random

import pytest
import torch

from paged_driver import logits_of
from pagedllm.errors import RequestTooLongError
from pagedllm.models import load_model
from tiny_families import build

TIERS = ("native", "generic")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def save(tmp_path, name, **changes):
    seed = random.randrange(2**31)
    print("seed", seed)
    model = build(name, seed, **changes)
    model.save_pretrained(tmp_path)
    return model


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("tier", TIERS)
def test_longrope_is_right_up_to_its_original_length_and_refused_beyond(tmp_path, tier, caplog):
    model = save(
        tmp_path,
        "phi3",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=40,
        max_position_embeddings=160,
        sliding_window=None,
    )
    loaded = load_model(str(tmp_path), model_impl=tier)
    assert loaded.max_positions == 40
    assert "limited to 40 of 160 positions" in caplog.text
    tokens = [random.randrange(1, 320) for _ in range(41)]
    wanted = reference_logits(model, tokens[:40])
    assert (logits_of(loaded, tokens[:40]) - wanted).abs().max() < 1e-3
    with pytest.raises(RequestTooLongError, match=r"41 tokens.*reach 40.*max_model_len"):
        logits_of(loaded, tokens)


@pytest.mark.parametrize("tier", TIERS)
def test_dynamic_scaling_is_right_up_to_the_length_at_which_it_begins(tmp_path, tier):
    model = save(tmp_path, "llama", rope_parameters=DYNAMIC, max_position_embeddings=48)
    loaded = load_model(str(tmp_path), model_impl=tier)
    tokens = [random.randrange(1, 320) for _ in range(49)]
    wanted = reference_logits(model, tokens[:48])
    assert (logits_of(loaded, tokens[:48]) - wanted).abs().max() < 1e-3
    with pytest.raises(RequestTooLongError, match=r"49 tokens.*reach 48"):
        logits_of(loaded, tokens)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_end(tmp_path, name):
    key = "n_positions" if name == "gpt2" else "max_position_embeddings"
    model = save(tmp_path, name, **{key: 30})
    loaded = load_model(str(tmp_path))
    assert loaded.max_positions == 30
    tokens = [random.randrange(1, 320) for _ in range(31)]
    wanted = reference_logits(model, tokens[:30])
    assert (logits_of(loaded, tokens[:30]) - wanted).abs().max() < 1e-3
    with pytest.raises(RequestTooLongError, match=r"31 tokens.*reach 30"):
        logits_of(loaded, tokens)
