"""A model small enough to be made in a test.

Owner: plugins; public. Invariant: equal arguments make equal weights, whatever ran before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_model(folder: Path, *, seed: int = 0, max_positions: int = 256) -> Path:
    """Save a Llama of random weights, with a tokenizer whose tokens are bytes.

    It has 257 tokens (the last ends an answer), two layers and fp32 weights: 0.1 MB. What it
    writes is noise, but the same noise every time.

    Args:
        folder: where to; made if it is not there.
        seed: of the weights.
        max_positions: longest sequence.

    Returns:
        the folder, in the Hugging Face layout.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    end = "<|end|>"
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, end: len(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    wrapped.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(letters) + 1, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_positions,
        bos_token_id=None, eos_token_id=len(letters),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.25)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
