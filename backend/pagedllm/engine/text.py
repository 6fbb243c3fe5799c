"""Token ids to text as they arrive: whole characters only, and nothing past a stop string.

Owner: the engine, one :class:`OutputText` per sequence. Invariants: text that was given out
is never taken back; a token costs a bounded number of decoded tokens, however long the
output; no part of a stop string is given out before it is certain not to be one.
"""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

    from pagedllm.sampling_params import SamplingParams

_BROKEN = "\ufffd"
"""What decoders write for bytes that are no character, or not yet one."""
_MAX_HELD = 4
"""A UTF-8 character has at most 4 bytes, and a token at least one: of this many tokens in a
row that end in broken bytes, only the last few bytes can still become a character."""
_CONTEXT = 10
"""Tokens of the prompt that the first output token is decoded after, at most."""
_MAX_WINDOW = 64
"""Tokens decoded together at most, which only a long run of invalid bytes reaches."""


class TokenDecoder:
    """A tokenizer's way back to text, prepared once and shared by all sequences.

    No clean-up of spaces is done beyond the tokenizer's own decoder: it would change text
    that has been given out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.decode: Callable[[Sequence[int]], str]
        """Token ids to text, special tokens included."""
        self.special_ids: frozenset[int]
        if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
            self.special_ids = frozenset(tokenizer.all_special_ids)
            self.decode = lambda ids: str(
                tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            )
            return
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.decode = lambda ids: backend.decode(ids, skip_special_tokens=False)


class IncrementalDetokenizer:
    """The text of one sequence's output, token by token.

    A token's text depends on its neighbours: bytes of a character may be spread over several,
    and many tokenizers drop a space at the start of a text. So tokens are decoded together
    with the few before them, the last of the prompt at first, and what is new is given out.

    Bytes that are no character yet are held back until they are, or until they cannot become
    one: at most ``_MAX_HELD`` tokens.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._decode = decoder.decode
        self._skipped = decoder.special_ids if skip_special_tokens else frozenset()
        self._window: list[int]
        """The tokens decoded together."""
        self._num_known: int
        """Tokens of the window that had been given out completely when it was last made."""
        self._given: str
        """The part of the window's text that is given out already."""
        self._begin(prompt_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is new and certain."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def finish(self) -> str:
        """Return what was held back; broken bytes stay U+FFFD."""
        return self._advance(self._decode(self._window))

    def _begin(self, prompt: Sequence[int]) -> None:
        """Make the prompt's last tokens the window, from the start of a character on.

        A last character that the prompt leaves incomplete counts as output.
        """
        tail = list(islice((t for t in reversed(prompt) if t not in self._skipped), _CONTEXT))
        tail.reverse()
        for num_open, start in product(range(_MAX_HELD), repeat=2):
            known = tail[start : max(len(tail) - num_open, 0)]
            text = self._decode(known)
            if (known or not start) and not text.startswith(_BROKEN) and not text.endswith(_BROKEN):
                self._window, self._num_known = tail[start:], len(known)
                whole = self._decode(self._window).rstrip(_BROKEN)
                self._given = whole if whole.startswith(text) else text
                return
        self._window, self._num_known = tail, len(tail)
        text = self._decode(tail)
        self._given = text[:-1] if text.endswith(_BROKEN) else text

    def _push(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._decode(window)
        if not text.endswith(_BROKEN):
            return self._advance(text)
        stuck = len(window) - self._num_known >= _MAX_HELD
        if stuck and not text.startswith(self._given):
            # The decoder gave up on characters that have been given out: do without them.
            self._restart(self._num_known)
            text, self._given = self._decode(self._window), ""
        certain = text[:-1] if stuck else text.rstrip(_BROKEN)
        new = ""
        if certain.startswith(self._given):
            new, self._given = certain[len(self._given) :], certain
        if len(self._window) > _MAX_WINDOW:
            num_held = len(text) - len(self._given)
            self._restart(-_MAX_HELD)
            text = self._decode(self._window)
            self._given = text[: max(len(text) - num_held, 0)]
        return new

    def _restart(self, start: int) -> None:
        """Make the window's tokens from ``start`` on the window, all of them new."""
        self._window = self._window[start:]
        self._num_known = 0

    def _advance(self, text: str) -> str:
        """Give out all of the window's ``text``, and make the tokens new in it the window."""
        start = self._num_known
        if text.startswith(self._given):
            new = text[len(self._given) :]
        else:  # bytes that came later made the decoder give up on characters given out
            new = self._decode(self._window[start:])
        # Tokens without text of their own are no context: the next would lose its space.
        if new:
            while not (text := self._decode(self._window[start:])) and start:
                start -= 1
            self._window = self._window[start:]
        else:
            del self._window[_MAX_WINDOW:]
        self._given = text
        self._num_known = len(self._window)
        return new


class StopStrings:
    """Finds stop strings in text that arrives in pieces.

    The first to be complete ends the text; of two that are complete at the same character,
    the longer. How the text is cut into pieces makes no difference. Text that might be the
    beginning of a stop string is held back: for each stop string, the Knuth-Morris-Pratt
    automaton (SIAM J. Comput. 6(2), 1977) knows how much of it the text now ends with.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._links = [_failure_links(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """Add text.

        Args:
            text: what comes next.
            check: whether a stop string that this text completes ends the output.

        Returns:
            The text that is certain to be output, and the stop string that ended it. After
            one, nothing more may be pushed.
        """
        if not self._stops:
            return text, None
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            stop = self._step(character)
            if stop is not None and check:
                self._held = ""
                return whole[: end if self._include else end - len(stop)], stop
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """Return what was held back: no stop string will be completed."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every automaton by a character; return the longest stop string complete."""
        found = None
        for i, stop in enumerate(self._stops):
            matched, links = self._matched[i], self._links[i]
            while matched and stop[matched] != character:
                matched = links[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                matched = links[matched - 1]
                if found is None or len(stop) > len(found):
                    found = stop
            self._matched[i] = matched
        return found


def _failure_links(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    links, length = [0], 0
    for character in pattern[1:]:
        while length and pattern[length] != character:
            length = links[length - 1]
        if pattern[length] == character:
            length += 1
        links.append(length)
    return links


class OutputText:
    """One sequence's output as text: detokenised, and ended at a stop string.

    Without a tokenizer the text is empty.
    """

    def __init__(
        self,
        decoder: TokenDecoder | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._params = params
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._num_tokens = 0
        self._detokenizer = (
            None
            if decoder is None
            else IncrementalDetokenizer(decoder, prompt_token_ids, params.skip_special_tokens)
        )

    def feed(self, token_id: int, ends: bool = False) -> tuple[str, str | None]:
        """Add an output token.

        Args:
            token_id: the token.
            ends: whether it is the end token or stop token that ends the sequence: its text
                is left out unless ``include_stop_str_in_output``.

        Returns:
            The new text, and the stop string that ended the output, if one did. After that,
            and after ``ends``, call neither this nor :meth:`finish` again.
        """
        self._num_tokens += 1
        if self._detokenizer is None:
            return "", None
        if ends:
            new = ""
            if self._params.include_stop_str_in_output:
                new = self._detokenizer.push((token_id,))
            return self._finish(new)
        check = self._num_tokens >= self._params.min_tokens
        return self._stops.push(self._detokenizer.push((token_id,)), check)

    def finish(self) -> tuple[str, str | None]:
        """Return the text held back, for an output that its length or its caller ended."""
        return ("", None) if self._detokenizer is None else self._finish("")

    def _finish(self, new: str) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        check = self._num_tokens >= self._params.min_tokens
        new, stop = self._stops.push(new + self._detokenizer.finish(), check)
        return (new, stop) if stop is not None else (new + self._stops.finish(), None)
