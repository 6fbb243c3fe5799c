"""Small tokenizers of the families in use, built on the spot, for the tests of text."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris, and it isn't far from here.",
    "def push(self, token_ids):\n\treturn [x ** 2 for x in token_ids]  # squares",
    "東京は日本の首都です。 中文字符也很重要。 한국어 텍스트도 있습니다.",
    "Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم שלום עולם नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumbs 🙂🙂🙂 naïve café Zoë e\u0301",
    "   spaces   and\n\n\nlines\t\ttabs  ",
]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>"])
    tokenizer.add_tokens(
        [AddedToken("<tool>", normalized=False), AddedToken("日本語!", normalized=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen: bytes merged to tokens, which may hold parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return _wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2, Mistral, Gemma: word pieces, bytes for the rest, no space at the start."""
    pieces = [("<unk>", 0.0)] + [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words = ["the", "The", "capital", "of", "France", "is", "Paris", "and", "it", "far", "here"]
    pieces += [("▁" + word, -2.0) for word in words] + [(word, -3.0) for word in words]
    pieces += [(c, -6.0) for c in "▁abcdefghijklmnopqrstuvwxyzTFPI.,!?'()[]{}\n東京é"]
    pieces += [("▁▁", -5.0), ("▁▁▁", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A $B",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>"))],
    )
    return _wrap(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5-like sentencepiece models: no bytes, the first space is dropped."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """As BERT: spaces come from the decoder, which joins ``##`` pieces and punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, show_progress=False, special_tokens=["[UNK]"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


FAMILIES = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
