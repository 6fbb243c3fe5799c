"""Page bookkeeping: states, sharing, copy on write, prefix hits, eviction."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedllm.cache.manager import CacheManager
from pagedllm.cache.page_table import PageTable
from pagedllm.cache.pages import CacheIntegrityError, PagePool
from pagedllm.cache.prefix import extend_hashes


def counts(cache: CacheManager) -> tuple[int, int, int]:
    found = cache.pool.counts
    return found.used, found.cached, found.free


def filled(cache: CacheManager, tokens: list[int], salt: str = "") -> PageTable:
    """A table whose tokens have all been computed and published."""
    table = PageTable()
    assert cache.extend(table, 0, len(tokens)) is not None
    cache.publish(table, tokens, len(tokens), salt)
    return table


def test_pages_are_taken_on_demand_and_come_back() -> None:
    cache = CacheManager(4, 8, enable_prefix_caching=False)
    table = PageTable()
    change = cache.extend(table, 0, 9)
    assert change is not None
    assert len(change.page_ids) == 2
    assert counts(cache) == (2, 0, 2)
    change = cache.extend(table, 9, 16)
    assert change is not None
    assert change.page_ids == ()  # the second page has room for these
    cache.release(table)
    assert counts(cache) == (0, 0, 4)


def test_too_few_pages_change_nothing() -> None:
    cache = CacheManager(2, 4)
    table = PageTable()
    cache.extend(table, 0, 4)
    assert cache.extend(table, 4, 13) is None
    assert counts(cache) == (1, 0, 1)
    assert len(table.pages) == 1
    cache.check([table])


def test_equal_prefixes_share_pages_and_other_salts_do_not() -> None:
    cache = CacheManager(16, 4)
    tokens = list(range(10))
    first = filled(cache, tokens)
    second = PageTable()
    pages = cache.find_prefix(second, tokens, "")
    assert pages == first.pages[:2]  # two full pages; the half one is nobody else's
    assert cache.find_prefix(PageTable(), tokens, "another user") == []
    assert cache.find_prefix(PageTable(), [99, *tokens[1:]], "") == []
    assert cache.find_prefix(PageTable(), [*tokens[:4], 99, *tokens[5:]], "") == first.pages[:1]


def test_a_prefix_hit_leaves_a_token_to_compute() -> None:
    cache = CacheManager(16, 4)
    tokens = list(range(8))
    filled(cache, tokens)
    assert len(cache.find_prefix(PageTable(), tokens, "")) == 1


def test_released_pages_stay_cached_until_others_need_them() -> None:
    cache = CacheManager(4, 4)
    tokens = list(range(9))
    cache.release(filled(cache, tokens))
    assert counts(cache) == (0, 2, 2)
    again = PageTable()
    cache.adopt(again, cache.find_prefix(again, tokens, ""), published=True)
    assert counts(cache) == (2, 0, 2)
    cache.release(again)
    other = PageTable()
    assert cache.extend(other, 0, 12) is not None  # takes both free pages, evicts one
    assert counts(cache) == (3, 1, 0)
    # The start of the old prefix is worth more than its end, so it is still there.
    assert len(cache.find_prefix(PageTable(), tokens, "")) == 1
    cache.check([other])


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = CacheManager(3, 4)
    old, new = [1] * 5, [2] * 5
    for tokens in (old, new):
        table = filled(cache, tokens)
        cache.release(table)
    touched = PageTable()  # a hit makes the old one the recent one
    cache.adopt(touched, cache.find_prefix(touched, old, ""), published=True)
    cache.release(touched)
    for _ in range(2):
        cache.extend(PageTable(), 0, 4)
    assert cache.find_prefix(PageTable(), old, "") != []
    assert cache.find_prefix(PageTable(), new, "") == []


def test_a_shared_page_is_copied_by_whoever_writes_first() -> None:
    cache = CacheManager(8, 4)
    tokens = list(range(6))
    leader = filled(cache, tokens)
    follower = PageTable()
    cache.adopt(follower, leader.pages, published=False)
    shared = leader.pages[1]
    change = cache.extend(follower, 5, 6)
    assert change is not None
    assert change.copies == ((shared, follower.pages[1]),)
    assert follower.pages[1] != shared
    assert follower.pages[0] == leader.pages[0]
    assert cache.extend(leader, 6, 7).copies == ()  # type: ignore[union-attr]
    cache.check([leader, follower])


def test_a_published_page_is_never_written() -> None:
    cache = CacheManager(8, 4)
    tokens = list(range(8))
    leader = filled(cache, tokens)
    follower = PageTable()
    cache.adopt(follower, leader.pages, published=False)
    published = leader.pages[1]
    cache.release(leader)
    change = cache.extend(follower, 7, 8)
    assert change is not None
    assert change.copies == ((published, follower.pages[1]),)


def test_fragmentation_counts_each_page_once() -> None:
    cache = CacheManager(8, 4)
    leader = filled(cache, list(range(6)))
    follower = PageTable()
    cache.adopt(follower, leader.pages, published=False)
    stats = cache.stats([(leader, 6), (follower, 5)])
    assert stats.pages_used == 2
    assert stats.internal_fragmentation == pytest.approx(25.0)
    assert cache.stats([]).pages_free == 6


def test_forgetting_cached_pages_keeps_used_ones() -> None:
    cache = CacheManager(8, 4)
    cache.release(filled(cache, list(range(8))))
    kept = filled(cache, [7] * 8)
    assert cache.pool.forget_cached() == 2
    assert counts(cache) == (2, 0, 6)
    assert cache.find_prefix(PageTable(), [7] * 9, "") == kept.pages


def test_the_check_notices_a_lost_page() -> None:
    pool = PagePool(4)
    page = pool.allocate()
    pool.check([[page]])
    with pytest.raises(CacheIntegrityError, match=f"page {page} counts 1"):
        pool.check([])


@given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(1, 7), st.text(max_size=3))
def test_hashes_depend_on_every_earlier_token(tokens: list[int], size: int, salt: str) -> None:
    whole = extend_hashes([], tokens, size, salt)
    assert len(whole) == len(tokens) // size
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_hashes(grown, tokens[:end], size, salt)
    assert grown == whole
    for position in range(len(whole) * size):
        changed = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
        other = extend_hashes([], changed, size, salt)
        assert other[: position // size] == whole[: position // size]
        assert not set(other[position // size :]) & set(whole)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(3, 24), st.integers(1, 5), st.booleans())
def test_the_books_add_up_whatever_happens(
    seed: int, num_pages: int, page_size: int, caching: bool
) -> None:
    draw = random.Random(seed)
    cache = CacheManager(num_pages, page_size, enable_prefix_caching=caching)
    live: list[tuple[PageTable, list[int], int]] = []
    for _ in range(60):
        action = draw.choice(("start", "grow", "grow", "fork", "end"))
        if action == "start":
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 4 * page_size))]
            table = PageTable()
            pages = cache.find_prefix(table, tokens, "")
            cache.adopt(table, pages, published=True)
            live.append((table, tokens, len(pages) * page_size))
        elif action == "end" and live:
            cache.release(live.pop(draw.randrange(len(live)))[0])
        elif action == "fork" and live:
            table, tokens, computed = draw.choice(live)
            copy, shared = PageTable(), max(0, computed - 1)
            cache.adopt(copy, table.pages[: cache.pages_for(shared)], published=False)
            live.append((copy, list(tokens), shared))
        elif live:
            index = draw.randrange(len(live))
            table, tokens, computed = live[index]
            tokens.append(draw.randrange(2))
            before = list(table.pages)
            if cache.extend(table, computed, len(tokens)) is None:
                assert table.pages == before
            else:
                written = table.pages[computed // page_size :]
                assert all(cache.pool.references(page) == 1 for page in written)
                assert not any(cache.pool.is_published(page) for page in written)
                cache.publish(table, tokens, len(tokens), "")
                live[index] = (table, tokens, len(tokens))
        cache.check([table for table, _, _ in live])
    for table, _, _ in live:
        cache.release(table)
    found = cache.pool.counts
    assert found.used == 0
    assert found.free + found.cached == num_pages
