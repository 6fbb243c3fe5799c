"""What cannot be run correctly is refused by name, with the reason, before it answers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedllm.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagedllm.models import load_model, wrap_model
from tiny_families import build


def folder_of(path, config, **changes):
    """A checkpoint with this configuration; the weights are never reached."""
    path.mkdir(exist_ok=True)
    if isinstance(config, dict):
        values = config
    else:
        values = json.loads(config.to_json_string())
    (path / "config.json").write_text(json.dumps({**values, **changes}))
    save_file({"unused": torch.zeros(1)}, path / "model.safetensors")
    return str(path)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

REFUSED = {
    "encoder-decoder": (transformers.T5Config(), "T5ForConditionalGeneration", "encoder-decoder"),
    "bart": (transformers.BartConfig(), "BartForCausalLM", "encoder-decoder"),
    "state": (transformers.MambaConfig(), "MambaForCausalLM", "linear_attention|recurrent state"),
    "rwkv": (transformers.RwkvConfig(), "RwkvForCausalLM", "recurrent state"),
    "hybrid": (transformers.JambaConfig(), "JambaForCausalLM", "linear_attention|recurrent"),
    "alibi": (transformers.BloomConfig(), "BloomForCausalLM", "ALiBi"),
    "alibi-mpt": (transformers.MptConfig(), "MptForCausalLM", "ALiBi"),
    "alibi-falcon": (transformers.FalconConfig(alibi=True), "FalconForCausalLM", "ALiBi"),
    "own-attention": (transformers.FalconConfig(), "FalconForCausalLM", "attention interface"),
    "chunked": (transformers.Llama4TextConfig(), "Llama4ForCausalLM", "chunked_attention"),
    "multimodal": (transformers.Gemma3Config(), "Gemma3ForConditionalGeneration", "multimodal"),
    "multimodal-llama4": (
        transformers.Llama4Config(),
        "Llama4ForConditionalGeneration",
        "multimodal",
    ),
    "mla": (transformers.DeepseekV3Config(), "DeepseekV3ForCausalLM", "MLA"),
    "mla-v2": (transformers.DeepseekV2Config(), "DeepseekV2ForCausalLM", "MLA"),
    "shared-keys": (transformers.Gemma3nTextConfig(), "Gemma3nForCausalLM", "share"),
    "bidirectional": (
        transformers.Gemma3TextConfig(use_bidirectional_attention=True),
        "Gemma3ForCausalLM",
        "bidirectional",
    ),
    "cross-attention": (
        transformers.GPT2Config(add_cross_attention=True),
        "GPT2LMHeadModel",
        "encoder",
    ),
    "no-decoder": (transformers.ViTConfig(), "ViTForImageClassification", "not a decoder-only"),
    "no-head": (transformers.LlamaConfig(), "LlamaModel", "LlamaForCausalLM"),
    "classifier": (
        transformers.MistralConfig(),
        "MistralForSequenceClassification",
        "MistralForCausalLM",
    ),
    "masked": (transformers.BertConfig(), "BertForMaskedLM", "BertLMHeadModel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_classes_that_are_refused_before_their_weights_are_read(name, tmp_path):
    config, architecture, reason = REFUSED[name]
    path = folder_of(tmp_path / "m", config, architectures=[architecture])
    for tier in ("auto", "generic", "native"):
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            load_model(path, model_impl=tier)
        assert architecture in str(caught.value)


def test_a_causal_flag_that_is_off_makes_any_model_bidirectional(tmp_path):
    config = transformers.LlamaConfig(**SMALL, is_causal=False)
    path = folder_of(tmp_path / "m", config, architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*bidirectional"):
        load_model(path)


# --- found out by running the class itself ------------------------------------------------


def test_bert_is_bidirectional():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    with pytest.raises(UnsupportedModelError, match=r"BertLMHeadModel.*bidirectional"):
        wrap_model(transformers.BertLMHeadModel(config))


def test_doge_changes_its_mask_and_diffllama_attends_twice():
    common = {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 99}
    doge = transformers.DogeForCausalLM(transformers.DogeConfig(**SMALL, **common))
    with pytest.raises(UnsupportedModelError, match=r"DogeForCausalLM.*mask"):
        wrap_model(doge)
    diff = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL, **common))
    with pytest.raises(UnsupportedModelError, match=r"DiffLlamaForCausalLM.*twice"):
        wrap_model(diff)


class _Shifted(transformers.LlamaForCausalLM):
    """Mixes each token with its neighbour outside of attention, as token shift does."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        mixed = embedded + embedded.roll(1, dims=1)
        return super().forward(inputs_embeds=mixed, position_ids=position_ids, **kwargs)


class _NoPositions(transformers.LlamaForCausalLM):
    """Counts positions by itself."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


class _Deaf(transformers.LlamaForCausalLM):
    """Keeps what it is given to itself."""

    def forward(self, input_ids, position_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep
        )


class _Pinned(transformers.LlamaForCausalLM):
    """Runs its first layer only."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = self.model.layers[:1]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (_Shifted, "mixes tokens"),
        (_NoPositions, "order of a batch's rows"),
        (_Deaf, "keyword arguments"),
        (_Pinned, "1 of its 2 layers"),
    ],
)
def test_classes_of_anyone_that_do_something_else(cls, reason):
    torch.manual_seed(0)
    model = cls(transformers.LlamaConfig(**SMALL, vocab_size=99, intermediate_size=48))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        wrap_model(model)
    assert cls.__name__ in str(caught.value)


def test_attention_of_anyone_that_computes_something_else(monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.eager_attention_forward

    def biased(module, query, key, value, attention_mask, scaling, **kwargs):
        distance = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None]
        mask = attention_mask + 0.5 * distance
        return original(module, query, key, value, mask, scaling, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, vocab_size=99, intermediate_size=48)
    )
    with pytest.raises(UnsupportedModelError, match="not a softmax of scaled products"):
        wrap_model(model, model_impl="generic")


# --- weights ------------------------------------------------------------------------------


def test_missing_weights_are_not_filled_with_random_numbers(tmp_path):
    build("llama", 0).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    for tier in ("auto", "native", "generic"):
        with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj"):
            load_model(str(tmp_path), model_impl=tier)


def test_weights_that_the_native_decoder_has_no_use_for(tmp_path):
    build("llama", 0).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.0.self_attn.extra.weight": torch.zeros(3)}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"native.*self_attn\.extra"):
        load_model(str(tmp_path), model_impl="native")


def test_quantised_weights_that_cannot_be_read_here(tmp_path):
    build("llama", 0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tier in ("auto", "native"):
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*quantised with gptq"):
            load_model(str(tmp_path), model_impl=tier)


@pytest.mark.parametrize("method", ["exl2", "modelopt", "mlx"])
def test_quantised_weights_of_a_method_that_transformers_does_not_know(tmp_path, method):
    """It would take the numbers as they are, and answer wrongly."""
    build("llama", 0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=rf"quantised with {method},.*not know"):
        load_model(str(tmp_path))


def test_scales_that_nothing_applies(tmp_path):
    """Weights quantised without a word of it in the configuration."""
    build("llama", 0).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.tensor(0.01)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"quantised.*up_proj\.weight_scale"):
        load_model(str(tmp_path))


# --- folders ------------------------------------------------------------------------------


def test_a_model_type_that_transformers_does_not_know(tmp_path):
    path = folder_of(tmp_path / "m", {"model_type": "tomorrow-llm", "architectures": ["X"]})
    with pytest.raises(UnsupportedModelError, match=r"'tomorrow-llm'.*newer transformers"):
        load_model(path)
    path = folder_of(tmp_path / "m", {"hidden_size": 3})
    with pytest.raises(UnsupportedModelError, match="no model_type"):
        load_model(path)


def test_a_configuration_that_is_not_valid(tmp_path):
    path = folder_of(tmp_path / "m", {"model_type": "llama", "hidden_size": "wide"})
    with pytest.raises(UnsupportedModelError, match=r"config\.json is not valid.*hidden_size"):
        load_model(path)


def test_folders_without_what_a_model_needs(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match=r"config\.json cannot be read"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotFoundError, match="no JSON object"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFoundError, match="has no weights"):
        load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFoundError, match=r"pickled \(pytorch_model\.bin\).*convert"):
        load_model(str(tmp_path))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"1 of the 2 .*model-2\.safetensors"):
        load_model(str(tmp_path))


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no folder"):
        load_model(str(tmp_path / "nothing"))
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_model(str(tmp_path / "weights.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"no folder no-one/no-model; .*resolve_model"):
        load_model("no-one/no-model")


def test_a_damaged_weight_file(tmp_path):
    build("llama", 0).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for tier in ("auto", "generic"):
        with pytest.raises(ModelNotFoundError, match=r"model\.safetensors.*damaged"):
            load_model(str(tmp_path), model_impl=tier)


# --- settings -----------------------------------------------------------------------------


def test_settings_with_wrong_values(tmp_path):
    build("llama", 0).save_pretrained(tmp_path)
    path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"model_impl is 'fast'.*auto, native, generic"):
        load_model(path, model_impl="fast")
    with pytest.raises(ConfigError, match=r"dtype: 'int8'.*float32"):
        load_model(path, dtype="int8")
    with pytest.raises(ConfigError, match=r"'flash'.*reference"):
        load_model(path, attention="flash")


def test_the_native_tier_is_not_replaced_when_asked_for():
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*native.*auto"):
        wrap_model(build("gpt2", 0), model_impl="native")
