"""Checkpoints as people have them: shards, dtypes, layouts, end tokens, code of their own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_driver import logits_of
from pagedllm.errors import UnsupportedModelError
from pagedllm.models import load_model
from tiny_families import build, build_clear

TIERS = ("native", "generic")
TOKENS = list(range(3, 40))


def reference_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]


def rewrite(folder, edit):
    """Change the tensors of a checkpoint in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(edit(tensors), path, metadata={"format": "pt"})


def reconfigure(folder, file="config.json", **changes):
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


@pytest.fixture
def seed():
    value = random.randrange(2**31)
    print("seed", value)
    return value


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sharded_weights(tmp_path, tier, name, seed):
    model = build_clear(name, seed, [TOKENS])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = load_model(str(tmp_path), model_impl=tier)
    assert (logits_of(loaded, TOKENS) - reference_logits(model)).abs().max() < 1e-3
    assert loaded.weight_bytes == sum(p.nbytes for p in model.parameters())


def test_quantised_weights_that_transformers_turns_into_plain_ones(tmp_path, seed):
    """Block-wise fp8, as DeepSeek's and Qwen's releases have it, on a device without fp8."""
    pytest.importorskip("accelerate", reason="transformers reads fp8 with accelerate only")
    block = 16
    model = build("llama", seed).to(torch.bfloat16)
    model.save_pretrained(tmp_path)

    def quantise(tensors):
        quantised = {}
        for name, weight in tensors.items():
            quantised[name] = weight
            if name.endswith("_proj.weight"):
                high, wide = (size // block for size in weight.shape)
                blocks = weight.float().view(high, block, wide, block)
                scales = blocks.abs().amax(dim=(1, 3)) / 448
                blocks = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
                quantised[name] = blocks.view(weight.shape)
                quantised[f"{name}_scale_inv"] = scales
        return quantised

    rewrite(tmp_path, quantise)
    reconfigure(
        tmp_path,
        quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]},
    )
    read = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    wanted = reference_logits(read)
    assert 0 < (wanted - reference_logits(model.float())).abs().max() < wanted.abs().max()
    for tier in ("auto", *TIERS):
        loaded = load_model(str(tmp_path), model_impl=tier, dtype="float32")
        assert loaded.tier == ("generic" if tier == "generic" else "native")
        assert (logits_of(loaded, TOKENS) - wanted).abs().max() < 1e-3
        assert loaded.weight_bytes == sum(p.nbytes for p in read.parameters())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_weights():
    """Shards are read one after the other, also where a mapped page counts as memory."""
    script = Path(__file__).parents[2] / "benchmarks/load_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), "--gigabytes", "0.3"],
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["shards"] >= 5
    for tier in TIERS:
        assert report["tiers"][tier]["weight_bytes"] > 250e6
        assert report["tiers"][tier]["ratio"] < 1.2, report


def test_experts_as_mixtral_publishes_them_and_merged(tmp_path, seed):
    model = build_clear("mixtral", seed, [TOKENS])
    wanted = reference_logits(model)
    model.save_pretrained(tmp_path)
    assert any(".w1." in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = load_model(str(tmp_path), model_impl="native")
    assert (logits_of(loaded, TOKENS) - wanted).abs().max() < 1e-3
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), model_impl="native")
    assert (logits_of(loaded, TOKENS) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("tier", TIERS)
def test_a_tied_head_may_be_absent_present_or_different(tmp_path, tier, seed):
    model = build("llama-tied", seed)
    model.save_pretrained(tmp_path)
    embedding = model.get_input_embeddings().weight.detach()
    wanted = reference_logits(model)
    tied = load_model(str(tmp_path), model_impl=tier)
    assert (logits_of(tied, TOKENS) - wanted).abs().max() < 1e-3

    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": embedding.clone()})
    twice = load_model(str(tmp_path), model_impl=tier)
    assert twice.weight_bytes == tied.weight_bytes
    assert (logits_of(twice, TOKENS) - wanted).abs().max() < 1e-3

    # Two different matrices are not tied, whatever the configuration says.
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": embedding.flip(0).contiguous()})
    apart = load_model(str(tmp_path), model_impl=tier)
    assert apart.weight_bytes == tied.weight_bytes + embedding.nbytes
    assert (logits_of(apart, TOKENS) - wanted.flip(1)).abs().max() < 1e-3


@pytest.mark.parametrize("tier", TIERS)
def test_the_dtype_of_the_checkpoint_is_the_default(tmp_path, tier, seed, caplog):
    model = build("llama", seed)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), model_impl=tier).dtype == torch.bfloat16
    assert load_model(str(tmp_path), model_impl=tier, dtype="float32").dtype == torch.float32
    assert load_model(str(tmp_path), model_impl=tier, dtype=torch.float16).dtype == torch.float16
    wide = load_model(str(tmp_path), model_impl=tier, dtype="fp32")
    # Converting the model itself would round its rotary frequencies as well.
    wanted = reference_logits(type(model).from_pretrained(tmp_path, dtype=torch.float32))
    assert (logits_of(wide, TOKENS) - wanted).abs().max() < 1e-3

    caplog.set_level("INFO")
    model.to(torch.float16).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), model_impl=tier).dtype == torch.float32
    assert "float16 is slow on a CPU" in caplog.text


def test_a_checkpoint_that_names_no_dtype_is_read_in_fp32(tmp_path, seed):
    build("llama", seed).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path)).dtype == torch.float32


@pytest.mark.parametrize("tier", TIERS)
def test_end_tokens(tmp_path, tier, seed):
    build("llama", seed).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert load_model(str(tmp_path), model_impl=tier).eos_token_ids == frozenset()
    reconfigure(tmp_path, eos_token_id=[4, 6])
    assert load_model(str(tmp_path), model_impl=tier).eos_token_ids == frozenset({4, 6})
    reconfigure(tmp_path, "generation_config.json", eos_token_id=9)
    assert load_model(str(tmp_path), model_impl=tier).eos_token_ids == frozenset({9})


def test_what_a_loaded_model_says_of_itself(tmp_path, seed):
    model = build("qwen3", seed)
    model.save_pretrained(tmp_path)
    for tier in TIERS:
        loaded = load_model(str(tmp_path), model_impl=tier)
        assert loaded.architecture == "Qwen3ForCausalLM"
        assert loaded.vocab_size == 320
        assert loaded.max_positions == 512
        assert loaded.device == torch.device("cpu")
        assert [(s.num_kv_heads, s.head_dim, s.value_dim) for s in loaded.layers] == [
            (2, 32, 32)
        ] * 3
        assert loaded.attention.name


def test_no_row_need_be_read_out(tmp_path, seed):
    from pagedllm.models.base import DeviceBatch
    from pagedllm_kernels import AttentionMetadata

    build("llama", seed).save_pretrained(tmp_path)
    for tier in TIERS:
        model = load_model(str(tmp_path), model_impl=tier)
        cache = [
            model.attention.allocate(
                2, 4, s.num_kv_heads, s.head_dim, s.value_dim, model.dtype, "cpu"
            )
            for s in model.layers
        ]
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, 3], dtype=torch.int32),
            context_lens=torch.tensor([3], dtype=torch.int32),
            page_table=torch.tensor([[1]], dtype=torch.int32),
            slot_mapping=torch.tensor([4, 5, 6]),
            max_query_len=3,
            max_context_len=3,
            page_size=4,
        )
        none = torch.zeros(0, dtype=torch.int64)
        batch = DeviceBatch(torch.tensor([1, 2, 3]), torch.arange(3), none, metadata)
        assert model.forward(batch, cache).shape == (0, 320)


def test_leftover_tensors_send_auto_to_the_generic_tier(tmp_path, seed, caplog):
    caplog.set_level("INFO")
    model = build("llama", seed)
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: {**t, "model.layers.0.extra.weight": torch.zeros(2)})
    loaded = load_model(str(tmp_path))
    assert loaded.tier == "generic"
    assert "extra.weight" in caplog.text
    # A buffer that old checkpoints carry means nothing.
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    )
    assert load_model(str(tmp_path)).tier == "native"


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OurConfig(LlamaConfig):
    model_type = "our-llama"

class OurForCausalLM(LlamaForCausalLM):
    config_class = OurConfig

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        output.logits = -output.logits
        return output
"""


def test_code_that_comes_with_a_model_runs_only_when_allowed(tmp_path, seed, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "ours"
    model = build("llama", seed)
    model.save_pretrained(folder)
    (folder / "ours.py").write_text(REMOTE)
    reconfigure(
        folder,
        model_type="our-llama",
        architectures=["OurForCausalLM"],
        auto_map={"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurForCausalLM"},
    )
    with pytest.raises(UnsupportedModelError, match="trust_remote_code=True"):
        load_model(str(folder))
    loaded = load_model(str(folder), trust_remote_code=True)
    assert (loaded.tier, loaded.architecture) == ("generic", "OurForCausalLM")
    assert (logits_of(loaded, TOKENS) + reference_logits(model)).abs().max() < 1e-3
    with pytest.raises(UnsupportedModelError, match="no native decoder"):
        load_model(str(folder), trust_remote_code=True, model_impl="native")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor is 0.5",
        ),
    ],
)
def test_features_without_a_native_decoder_run_in_the_generic_tier(
    tmp_path, seed, caplog, changes, reason
):
    caplog.set_level("INFO")
    model = build("llama", seed, **changes)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.tier == "generic"
    assert reason in caplog.text
    assert (logits_of(loaded, TOKENS) - reference_logits(model)).abs().max() < 1e-3
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path), model_impl="native")
