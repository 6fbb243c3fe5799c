"""Text that streams out token by token is the text that decoding everything at once gives."""

from __future__ import annotations

import random
import time
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.engine.text import IncrementalDetokenizer, TokenDecoder
from text_tokenizers import CORPUS, FAMILIES

TOKENIZERS = {name: build() for name, build in FAMILIES.items()}
BROKEN = "\ufffd"
HARD = [
    " Paris",
    "Paris",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🙂",
    "東京は日本の首都です。中文",
    "a\u0301\u0327b 𝒳𝒴 ﷽ ",
    "   leading and trailing   ",
    "\n\n\tmixed \r\n lines",
    "don't , stop . now !",
    "x" * 300,
    "𠜎𠜱𠝹" * 30,
    "日本語!<tool>日本語!",
]


def pieces_of(tokenizer, prompt, output, skip=True):
    """Push one token at a time; return every piece, the released rest last."""
    detokenizer = IncrementalDetokenizer(TokenDecoder(tokenizer), prompt, skip)
    return [detokenizer.push([token]) for token in output] + [detokenizer.finish()]


def decoded(tokenizer, ids, skip=True):
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def expected(tokenizer, prompt, output, skip=True):
    whole, start = decoded(tokenizer, [*prompt, *output], skip), decoded(tokenizer, prompt, skip)
    return whole[len(start) :]


def complete(tokenizer, prompt, skip=True):
    """The prompt without last tokens that leave a character incomplete."""
    while decoded(tokenizer, prompt, skip).endswith(BROKEN):
        prompt = prompt[:-1]
    return prompt


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", HARD + CORPUS)
@pytest.mark.parametrize("prompt_text", ["", "The capital of France is", "🙂🙂", "日本語 中文"])
def test_every_text_comes_out_as_decoding_it_whole_gives(name, text, prompt_text):
    tokenizer = TOKENIZERS[name]
    prompt, output = plain_ids(tokenizer, prompt_text), plain_ids(tokenizer, text)
    pieces = pieces_of(tokenizer, prompt, output)
    assert "".join(pieces) == expected(tokenizer, prompt, output)
    assert not any(BROKEN in piece for piece in pieces), "half a character was given out"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_any_unicode_text_cut_into_prompt_and_output(name, text, cut):
    tokenizer = TOKENIZERS[name]
    ids = plain_ids(tokenizer, text)
    prompt = complete(tokenizer, ids[:cut])
    output = ids[len(prompt) :]
    assert "".join(pieces_of(tokenizer, prompt, output)) == expected(tokenizer, prompt, output)


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "wordpiece"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_tokens_special_ones_among_them(name, skip, data):
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, len(tokenizer) + 5)  # ids without a token give no text
    prompt = complete(tokenizer, data.draw(st.lists(token, max_size=12)), skip)
    output = data.draw(st.lists(token, max_size=150))
    pieces = pieces_of(tokenizer, prompt, output, skip)
    assert "".join(pieces) == expected(tokenizer, prompt, output, skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_bytes_of_a_byte_fallback_vocabulary(data):
    """A run of byte tokens with an invalid byte in it is decoded as broken bytes altogether;
    streamed, the characters complete before that byte have been given out, and stay."""
    tokenizer = TOKENIZERS["byte_fallback"]
    byte = st.integers(1, 256) | st.sampled_from([1 + b for b in b"\xe2\x82\xac\xf0\x9f\x98\x80"])
    word = st.integers(257, 300)
    runs = st.lists(st.lists(byte, max_size=40) | st.lists(word, max_size=3), max_size=6)
    output = [token for run in data.draw(runs) for token in run]
    prompt = plain_ids(tokenizer, "The capital")

    def is_byte(token):
        return token <= 256

    text = ""
    for bytes_run, run in groupby(output, is_byte):
        tokens = list(run)
        if not bytes_run:
            text += "".join(tokenizer.convert_ids_to_tokens(tokens)).replace("▁", " ")
            continue
        values = bytes(token - 1 for token in tokens)
        try:
            text += values.decode()
        except UnicodeDecodeError as error:
            text += values[: error.start].decode() + BROKEN * (len(values) - error.start)
    assert "".join(pieces_of(tokenizer, prompt, output)) == text


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_real_tokenizer_on_random_tokens(smollm2_tokenizer, data):
    token = st.integers(0, len(smollm2_tokenizer) - 1)
    skip = data.draw(st.booleans())
    prompt = complete(smollm2_tokenizer, data.draw(st.lists(token, max_size=10)), skip)
    output = data.draw(st.lists(token, max_size=60))
    pieces = pieces_of(smollm2_tokenizer, prompt, output, skip)
    assert "".join(pieces) == expected(smollm2_tokenizer, prompt, output, skip)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path):
    from pagedllm.engine.tokenizer import load_tokenizer

    return load_tokenizer(smollm2_path)


def test_the_space_before_the_first_word_is_kept(smollm2_tokenizer):
    prompt = plain_ids(smollm2_tokenizer, "The capital of France is")
    output = plain_ids(smollm2_tokenizer, " Paris.")
    assert "".join(pieces_of(smollm2_tokenizer, prompt, output)) == " Paris."
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt = plain_ids(tokenizer, "The capital of France is")
    paris = tokenizer.convert_tokens_to_ids("▁Paris")
    assert "".join(pieces_of(tokenizer, prompt, [paris])) == " Paris"
    assert "".join(pieces_of(tokenizer, [], [paris])) == "Paris"
    # A prompt that ends in special tokens: the words before them are the context.
    marked = [*prompt, *[tokenizer.convert_tokens_to_ids("<|user|>")] * 20]
    assert "".join(pieces_of(tokenizer, marked, [paris])) == " Paris"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_character_appears_with_its_last_byte_and_not_later(name):
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        vocabulary = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        symbols = vocabulary("🤿")[0][0]  # one symbol per byte
        tokens = [tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]
    else:
        tokens = [1 + byte for byte in "🤿".encode()]
    assert len(tokens) == 4
    pieces = pieces_of(tokenizer, plain_ids(tokenizer, "The"), tokens * 3)
    assert pieces == ["", "", "", "🤿"] * 3 + [""]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("before", ["", "€"])
def test_bytes_that_can_be_no_character_are_held_for_a_bounded_time(name, before):
    tokenizer = TOKENIZERS[name]
    broken = tokenizer.convert_tokens_to_ids("ÿ" if name == "byte_level" else "<0xFF>")
    start = plain_ids(tokenizer, before) if before else []
    detokenizer = IncrementalDetokenizer(
        TokenDecoder(tokenizer), plain_ids(tokenizer, "The capital")
    )
    given_out = detokenizer.push(start)
    already = len(given_out)
    for number in range(1, 400):
        given_out += detokenizer.push([broken])
        assert number - 4 <= len(given_out) - already <= number
    given_out += detokenizer.finish()
    assert given_out.endswith(BROKEN * 399)
    assert given_out[:-399] == decoded(tokenizer, [*plain_ids(tokenizer, "The"), *start])[3:]


def test_special_tokens_are_left_out_or_kept_as_asked(smollm2_tokenizer):
    prompt = smollm2_tokenizer.encode("<|im_start|>assistant\n")
    output = plain_ids(smollm2_tokenizer, "Hello<|im_end|>\n<|im_start|>user")
    assert "".join(pieces_of(smollm2_tokenizer, prompt, output)) == "Hello\nuser"
    kept = "".join(pieces_of(smollm2_tokenizer, prompt, output, skip=False))
    assert kept == "Hello<|im_end|>\n<|im_start|>user"


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "The", "0", "🤿🤿"])
def test_a_prompt_that_ends_within_a_character_gets_the_whole_one(before, cut):
    tokenizer = TOKENIZERS["byte_fallback"]
    character = [1 + byte for byte in "🤿".encode()]
    prompt = [*plain_ids(tokenizer, before), *character[:cut]]
    output = [*character[cut:], *plain_ids(tokenizer, "0 here")[1:]]
    assert "".join(pieces_of(tokenizer, prompt, output)) == "🤿0 here"


def test_a_prompt_of_many_byte_tokens_is_not_repeated():
    tokenizer = TOKENIZERS["byte_fallback"]
    characters = [1 + byte for byte in ("€" * 30).encode()]
    output = [*characters[:3], *plain_ids(tokenizer, "in x")]
    text = "".join(pieces_of(tokenizer, characters, output))
    assert text == expected(tokenizer, characters, output) == "€ in x"


def test_a_tokenizer_without_a_tokenizers_backend():
    """Tokenizers in plain Python are decoded through their own ``decode``."""
    fast = TOKENIZERS["byte_level"]

    class Plain:
        all_special_ids = fast.all_special_ids

        def decode(self, ids, **options):
            return fast.decode(ids, **options)

    output = [*plain_ids(fast, "naïve 🙂 café"), fast.eos_token_id]
    assert "".join(pieces_of(Plain(), [], output)) == "naïve 🙂 café"
    assert "".join(pieces_of(Plain(), [], output, skip=False)) == "naïve 🙂 café</s>"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_the_same_late_in_a_long_output(name):
    """Decoded tokens are counted, not seconds, which depend on the machine's mood."""
    tokenizer = TOKENIZERS[name]
    decoder = TokenDecoder(tokenizer)
    decode, cost = decoder.decode, 0

    def counting(ids):
        nonlocal cost
        cost += len(ids)
        return decode(ids)

    decoder.decode = counting
    seed = time.time_ns()
    print("seed", seed)
    choose = random.Random(seed)
    usual = [plain_ids(tokenizer, text) for text in CORPUS]
    detokenizer = IncrementalDetokenizer(decoder, [])
    counts = []
    while len(counts) < 4000:
        for token in choose.choice(usual):
            before = cost
            detokenizer.push([token])
            counts.append(cost - before)
    assert max(counts) <= 80
    assert sum(counts) <= 12 * len(counts)
