"""A tiny Llama of random weights behind SmolLM2's real tokenizer and chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def save_tiny_text(path: Path, tokenizer_of: Path, *, layers: int, positions: int) -> Path:
    """Save one whose likeliest token is a word, so that greedy answers are text.

    They are as long as was asked for: the end token is no word.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    seed = int(torch.randint(2**31, ()))
    print(f"{path.name} seed: {seed}")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
    # Special tokens, blanks and parts of characters: a logit of 0 is never the largest.
    others = [i for i, text in enumerate(texts) if not text.strip() or "\ufffd" in text]
    model.get_input_embeddings().weight.data[others] = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
