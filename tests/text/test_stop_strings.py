"""Stop strings end the text where they begin, however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm import SamplingParams
from pagedllm.engine.text import OutputText, StopStrings, TokenDecoder
from text_tokenizers import byte_fallback, byte_level

BYTE_LEVEL = byte_level()


def naive(text, stops, include, first=0):
    """The whole text, looked at again after every character from the ``first`` on."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and end > first:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def pieces_of(text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@settings(max_examples=600, deadline=None)
@given(
    text=st.text("abc\n", max_size=30),
    stops=st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    include=st.booleans(),
)
def test_any_text_in_any_pieces(text, stops, cuts, include):
    final, stop = naive(text, stops, include)
    matcher = StopStrings(stops, include)
    given_out, found = "", None
    pushed = ""
    for piece in pieces_of(text, cuts):
        pushed += piece
        new, found = matcher.push(piece)
        given_out += new
        assert final.startswith(given_out), "a part of a stop string leaked"
        if found is not None:
            break
        held = pushed[len(given_out) :]
        beginnings = [pushed[i:] for i in range(len(pushed))]
        longest = next(
            (b for b in beginnings if any(s.startswith(b) and s != b for s in stops)), ""
        )
        assert held == longest, "held back too much or too little"
    if found is None:
        given_out += matcher.finish()
    assert (given_out, found) == (final, stop)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    first=st.integers(0, 20),
)
def test_only_a_stop_string_that_ends_late_enough_counts(text, stops, first):
    final, stop = naive(text, stops, False, first)
    matcher = StopStrings(stops)
    given_out, found = matcher.push(text[:first], check=False)
    assert found is None
    new, found = matcher.push(text[first:])
    given_out += new + ("" if found else matcher.finish())
    assert found == stop
    # What was given out while stop strings did not count cannot be taken back.
    assert given_out == max(final, given_out, key=len)
    assert text.startswith(given_out)


def feed_all(writer, token_ids, ends=False):
    text, stop = "", None
    for index, token in enumerate(token_ids):
        new, stop = writer.feed(token, ends and index == len(token_ids) - 1)
        text += new
        if stop is not None:
            return text, stop, index + 1
    if not ends:
        new, stop = writer.finish()
        text += new
    return text, stop, len(token_ids)


def output_text(**params):
    prompt = ids("The capital of France is")
    return OutputText(TokenDecoder(BYTE_LEVEL), prompt, SamplingParams(max_tokens=None, **params))


def ids(text):
    return BYTE_LEVEL(text, add_special_tokens=False)["input_ids"]


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it():
    tokens = ids(" Paris.\n\nUser: and Rome?")
    text, stop, used = feed_all(output_text(stop=["\nUser:", "Rome"]), tokens)
    assert (text, stop) == (" Paris.\n", "\nUser:")
    assert used < len(tokens)
    kept = output_text(stop=["\nUser:"], include_stop_str_in_output=True)
    assert feed_all(kept, tokens)[0] == " Paris.\n\nUser:"


def test_text_after_the_stop_string_in_the_same_token_is_dropped():
    tokenizer = byte_fallback()
    words = tokenizer.convert_tokens_to_ids(["▁capital", "▁here"])
    writer = OutputText(TokenDecoder(tokenizer), [], SamplingParams(stop=["pit"]))
    assert feed_all(writer, words) == ("ca", "pit", 1)


def test_a_stop_string_of_characters_in_several_tokens():
    text, stop, _ = feed_all(output_text(stop=["🤿"]), ids("dive 🤿 deep"))
    assert (text, stop) == ("dive ", "🤿")


def test_held_back_text_comes_out_at_the_end():
    writer = output_text(stop=["END OF TEXT"])
    assert feed_all(writer, ids("almost END OF TEX"))[:2] == ("almost END OF TEX", None)


def test_half_a_character_comes_out_broken_at_the_end():
    tokens = ids("dive 🤿")
    assert feed_all(output_text(), tokens[:-1])[0].rstrip("\ufffd") == "dive "


def test_stop_strings_wait_for_min_tokens():
    tokens = ids("a. b. c. d.")
    for minimum in range(len(tokens) + 1):
        text, stop, used = feed_all(output_text(stop=["."], min_tokens=minimum), tokens)
        assert stop == "."
        assert used >= minimum
        assert text + "." == BYTE_LEVEL.decode(tokens[:used])
    whole, stop, used = feed_all(output_text(stop=["."], min_tokens=len(tokens) + 1), tokens)
    assert (whole, stop, used) == ("a. b. c. d.", None, len(tokens))


@pytest.mark.parametrize("special", [True, False])
def test_the_token_that_ends_the_text_is_left_out_unless_asked_for(special):
    last = BYTE_LEVEL.eos_token_id if special else BYTE_LEVEL.convert_tokens_to_ids("<tool>")
    word = BYTE_LEVEL.convert_ids_to_tokens(last)
    tokens = [*ids(" Paris"), last]
    assert feed_all(output_text(), tokens, ends=True)[0] == " Paris"
    asked = output_text(include_stop_str_in_output=True)
    assert feed_all(asked, tokens, ends=True)[0] == (" Paris" if special else " Paris" + word)
    asked = output_text(include_stop_str_in_output=True, skip_special_tokens=False)
    assert feed_all(asked, tokens, ends=True)[0] == " Paris" + word
    # The same token in the middle of the text, as with ignore_eos, is text like any other.
    passed = feed_all(output_text(skip_special_tokens=False), [*tokens, *ids(" Rome")])
    assert passed[0] == f" Paris{word} Rome"


def test_the_end_token_releases_what_was_held_back():
    tokens = [*ids(" Paris."), BYTE_LEVEL.eos_token_id]
    assert feed_all(output_text(stop=[".\n"]), tokens, ends=True)[:2] == (" Paris.", None)


def test_without_a_tokenizer_there_is_no_text():
    writer = OutputText(None, [1, 2], SamplingParams())
    assert [writer.feed(5), writer.feed(6), writer.finish()] == [("", None)] * 3
    assert OutputText(None, [1], SamplingParams()).feed(2, ends=True) == ("", None)
