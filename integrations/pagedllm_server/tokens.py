"""Tokens of an answer, one by one, with the text that each gave.

Owner: the server integration. Invariant: the texts of an answer's tokens, special ones
aside, join to its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pagedllm import CompletionOutput, Logprob


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool
    start: int
    """Where its text begins in the answer's."""
    end: int
    likeliest: Mapping[int, Logprob]
    """The alternatives that were asked for, and the token itself."""

    def native(self) -> dict[str, Any]:
        """In TGI's form."""
        return {
            "id": self.id,
            "text": self.text,
            "logprob": self.logprob,
            "special": self.special,
        }


def new_tokens(answer: CompletionOutput, seen: int, special: frozenset[int]) -> Iterator[Token]:
    """Yield an answer's tokens from number ``seen`` on.

    A special token's text is its name, though the answer's text leaves it out.
    """
    logprobs = answer.logprobs
    begin = answer.text_offsets[seen - 1] if seen else 0
    for index in range(seen, len(answer.token_ids)):
        token, end = answer.token_ids[index], answer.text_offsets[index]
        text = answer.text[begin:end]
        likeliest = logprobs[index] if logprobs is not None else {}
        own = likeliest.get(token)
        is_special = token in special
        if is_special and not text and own is not None and own.decoded_token is not None:
            text = own.decoded_token
        logprob = own.logprob if own is not None else None
        yield Token(token, text, logprob, is_special, begin, end, likeliest)
        begin = end


def new_text(answer: CompletionOutput, seen: int) -> str:
    """Return what an answer's text gained with its tokens from number ``seen`` on."""
    return answer.text[answer.text_offsets[seen - 1] if seen else 0 :]


def top(token: Token, number: int) -> list[tuple[int, Logprob]]:
    """The ``number`` likeliest tokens at a position, likeliest first."""
    ranked = sorted(token.likeliest.items(), key=lambda pair: pair[1].rank)
    return ranked[:number]
