"""Names for the contents of full pages, so that equal prefixes find each other.

Owner: :class:`~pagedllm.cache.manager.CacheManager`. Invariant: a page's hash covers its
own tokens and, through its parent's hash, every token before them and the salt; two pages
with one hash therefore hold the same keys and values. Sixteen bytes of BLAKE2b make an
accidental or provoked collision, which would mix up two users' texts, out of reach.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Return the hash that the first page of a sequence chains from."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full page that follows the page named ``parent``."""
    digest = blake2b(parent, digest_size=_DIGEST_BYTES)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], page_size: int, salt: str
) -> list[bytes]:
    """Append the hashes of all pages that ``token_ids`` fill and ``hashes`` lacks.

    Args:
        hashes: hashes of the first pages of the same tokens; grown in place.
        token_ids: the sequence's known tokens.
        page_size: tokens in a page.
        salt: separates users who must not share pages.

    Returns:
        ``hashes``.
    """
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(len(hashes) * page_size, len(token_ids) - page_size + 1, page_size):
        parent = chain_hash(parent, token_ids[start : start + page_size])
        hashes.append(parent)
    return hashes
