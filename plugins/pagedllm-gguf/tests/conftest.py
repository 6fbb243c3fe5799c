"""Small GGUF files with random weights, written by llama.cpp's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS += [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "he", "ll"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def write(path, weight_type=gguf.GGMLQuantizationType.Q8_0, *, tokenizer=True, more=()):
    """Write a Llama of two layers and a byte vocabulary; ``more`` are metadata to add."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_merges(["h e", "l l"])
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [1] * (len(TOKENS) - 3))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
    for name, value in more:
        writer.add_uint16(name, value)
    rng = np.random.default_rng(7)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        kind = weight_type if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def write_gguf():
    return write


@pytest.fixture(scope="session")
def q8(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf")
