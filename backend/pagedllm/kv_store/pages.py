"""Pages as bytes: out of an engine's memory, and into it.

Owner: :mod:`pagedllm.kv_store`. Pages are read and written in the engine's thread, between
two steps, so nothing is written while it is read. Invariants: a page is copied before it can be
given to another sequence; a page from the store is published only once all its layers have
been written; the pool's books add up whatever happens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

import torch

from pagedllm.response_cache.keys import engine_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedllm.cache.pages import PagePool
    from pagedllm.config import Config
    from pagedllm.engine.engine import Engine
    from pagedllm.engine.requests import RequestState
    from pagedllm.hookspecs import ResolvedModel
    from pagedllm.response_cache.store import BoundedStore
    from pagedllm.types import ModelInfo
    from pagedllm_kernels.types import LayerCache

logger = logging.getLogger(__name__)


class PageExchange:
    """One engine's pages and the store beside them.

    Args:
        pool: the engine's.
        layers: the pages' memory, a cache per layer.
        store: takes what was computed.
        identity: of :func:`identity_of`.
        post: runs a function in the engine's thread before its next step.
    """

    def __init__(
        self,
        pool: PagePool,
        layers: Sequence[LayerCache],
        store: BoundedStore,
        identity: str,
        post: Callable[[Callable[[Engine], None]], None],
    ) -> None:
        self.pool = pool
        self._tensors = _tensors(layers)
        self._store = store
        self._identity = identity
        self._post = post
        self._new: list[tuple[int, bytes]] = []
        self._awaited: list[tuple[RequestState, list[int]]] = []
        self.num_loaded = 0
        pool.listener = self._note

    def key(self, digest: bytes) -> str:
        """Return what a page of this hash is called in the store."""
        return f"{self._identity}:{digest.hex()}"

    def _note(self, page: int, digest: bytes) -> None:
        # In the step. Its pages are copied after it, all at once.
        if not self._new:
            self._post(self.save)
        self._new.append((page, digest))

    def save(self, _engine: Engine) -> None:
        """Copy pages that have been filled since the last time, and give them to the store."""
        # The beginnings of prefixes come first, and are worth most.
        new, self._new = self._new[: self._store.room], []
        if not new:
            return
        try:
            contents = _read(self._tensors, [page for page, _ in new])
        except Exception:
            logger.exception("Pages could not be copied for the KV store")
            return
        for (_, digest), content in zip(new, contents, strict=True):
            self._store.put(self.key(digest), content)

    def load(
        self, engine: Engine, state: RequestState, wanted: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        """Publish pages of one prefix, from its first page on, as far as there is room.

        Args:
            engine: whose pool it is.
            state: of the request that wants them, and is about to be queued.
            wanted: hash and contents of each page; no contents for those that are in the pool
                already, as far as is known.
        """
        self.save(engine)  # what takes room here might be waiting to be copied
        # What was loaded for requests that have not begun is not evicted for one behind them.
        self._awaited = [(s, pages) for s, pages in self._awaited if not _has_begun(s)]
        awaited = {page for _, pages in self._awaited for page in pages}
        held: list[int] = []
        new: list[tuple[int, bytes, bytes]] = []
        try:
            for digest, content in wanted:
                known = self.pool.lookup(digest)
                if known is not None:
                    self.pool.retain(known)
                    held.append(known)
                elif content is not None and self._has_room(awaited):
                    held.append(self.pool.allocate())
                    new.append((held[-1], digest, content))
                else:
                    break
            if new:
                _write(self._tensors, [page for page, _, _ in new], [each for *_, each in new])
            self._awaited.append((state, held))
            self.num_loaded += len(new)
            self.pool.listener = None  # the store has them
            for page, digest, _ in new:
                self.pool.publish(page, digest)
        except Exception:
            logger.exception("Pages of the KV store could not be used")
        finally:
            self.pool.listener = self._note
            # The last one first: under LRU the start of a prefix then outlives its end.
            for page in reversed(held):
                self.pool.release(page)

    def _has_room(self, awaited: set[int]) -> bool:
        return self.pool.num_available > sum(not self.pool.references(page) for page in awaited)


def _has_begun(state: RequestState) -> bool:
    return state.finished or any(each.sequence.first_scheduled_time for each in state.outputs)


def identity_of(
    config: Config, resolved: ResolvedModel, info: ModelInfo, layers: Sequence[LayerCache]
) -> str:
    """Digest all that a page's contents depend on beside its tokens."""
    facts = [info.page_size, *([str(t.dtype), list(t.shape[1:])] for t in _tensors(layers))]
    digest = hashlib.sha256(engine_identity(config, resolved, info, None))
    digest.update(json.dumps(facts).encode())
    return digest.hexdigest()[:32]


def _tensors(layers: Sequence[LayerCache]) -> list[torch.Tensor]:
    """Each [pages, ...]."""
    return [each for layer in layers for each in (layer.key, layer.value)]


def _read(tensors: Sequence[torch.Tensor], pages: Sequence[int]) -> list[bytes]:
    """Return the contents of each page: its part of each tensor, one after the other."""
    index = torch.tensor(pages, device=tensors[0].device)
    # Not each[index]: torch's threads come together for that, which takes long on a busy machine.
    parts = [t.index_select(0, index).reshape(len(pages), -1).view(torch.uint8) for t in tensors]
    return [row.tobytes() for row in torch.cat(parts, dim=1).cpu().numpy()]


def _write(
    tensors: Sequence[torch.Tensor], pages: Sequence[int], contents: Sequence[bytes]
) -> None:
    """Do the reverse. Raises ValueError, and writes nothing, when a page is of another size."""
    sizes = [each[0].numel() * each.element_size() for each in tensors]
    if any(len(content) != sum(sizes) for content in contents):
        raise ValueError(f"a page has {sum(sizes)} bytes, not {[len(c) for c in contents]}")
    index = torch.tensor(pages, device=tensors[0].device)
    rows = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    parts = rows.view(len(pages), -1).split(sizes, dim=1)
    for each, part in zip(tensors, parts, strict=True):
        values = part.contiguous().view(each.dtype).view(len(pages), *each.shape[1:])
        each.index_copy_(0, index, values.to(each.device))
