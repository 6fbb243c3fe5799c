"""What every response cache, and every store of pages, must do.

Owner: plugins; public.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from pagedllm import LLM, Config, ConfigError, SamplingParams
from pagedllm._named import make
from pagedllm.testing.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagedllm.hookspecs import ResponseCache

KEYS = ["a", "A", "a:1", "a:10", "a.1", "a-1", "1:" + "f0" * 39]
"""As the engine's may look: at most 80 letters, digits, ``:``, ``.`` and ``-``."""


class _StoreSuite:
    """What is asked of any store of bytes by key."""

    hook: str
    setting: str
    shared = True
    """Whether a store made elsewhere from the same options has the same answers."""

    @property
    def name(self) -> str:
        """What the setting says."""
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """What the configuration gives with the name, with a timeout that no machine exceeds."""
        return {}

    def make(self, options: dict[str, Any]) -> ResponseCache:
        """Make a store as an engine does."""
        spec = {"name": self.name, **options}
        config = Config()
        store: ResponseCache = make(self.hook, self.setting, spec, config, config)
        return store

    @pytest.fixture
    def store(self, options: dict[str, Any]) -> Iterator[ResponseCache]:
        """An empty store."""
        store = self.make(options)
        yield store
        store.close()

    def test_options_that_it_does_not_know_are_refused(self, options: dict[str, Any]) -> None:
        """A misspelt option must not be dropped in silence."""
        try:
            self.make({**options, "no_such_option": 1})
        except ConfigError as error:
            message = str(error)
        else:
            raise AssertionError("no_such_option=1 was accepted: name each in the signature")
        assert "no_such_option" in message, f"the error does not name the option: {message}"

    def test_it_has_a_timeout(self, store: ResponseCache) -> None:
        """Without one, a store that is slow would hold requests up for ever."""
        seconds = store.timeout
        assert isinstance(seconds, (int, float)) and seconds > 0, f"timeout is {seconds!r}"

    def test_what_is_not_there_is_none(self, store: ResponseCache) -> None:
        """One for each key that was asked for."""
        found = list(store.get(KEYS))
        assert found == [None] * len(KEYS), f"an empty store gave {found}"

    def test_answers_come_back_as_they_were(self, store: ResponseCache) -> None:
        """Any bytes; a large answer whole or not at all."""
        whole = bytes(range(256))
        store.put("whole", whole)
        [found] = store.get(["whole"])
        assert found == whole, f"{len(whole)} bytes were put, and {found!r:.80} came back"
        large = whole * 8192  # 2 MiB
        store.put("large", large)
        [found] = store.get(["large"])
        assert found is None or found == large, "a large answer was cut"

    def test_keys_are_told_apart(self, store: ResponseCache) -> None:
        """Whatever they begin with and however they are written; in the order of the question."""
        for number, key in enumerate(KEYS):
            store.put(key, b"%d" % number)
        asked = [*KEYS[::-1], "missing", KEYS[0]]
        wanted = [*(b"%d" % number for number in reversed(range(len(KEYS)))), None, b"0"]
        found = list(store.get(asked))
        assert found == wanted, f"asked for {asked}, found {found}"

    def test_the_last_answer_of_a_key_counts(self, store: ResponseCache) -> None:
        """A new one takes the place of the old."""
        store.put("key", b"old")
        store.put("key", b"new")
        [found] = store.get(["key"])
        assert found == b"new", f"b'new' was put last, and {found!r} is there"

    def test_it_is_called_in_another_thread(self, store: ResponseCache) -> None:
        """An engine makes it in one thread and calls it in another."""
        with ThreadPoolExecutor(1) as thread:
            try:
                thread.submit(store.put, "key", b"answer").result()
                [found] = thread.submit(store.get, ["key"]).result()
            except Exception as error:
                raise AssertionError(
                    f"a thread that did not make it cannot use it: {type(error).__name__}: {error}"
                ) from error
        assert found == b"answer", f"another thread put b'answer' and found {found!r}"

    def test_engines_share_it(self, store: ResponseCache, options: dict[str, Any]) -> None:
        """What one stores another one finds."""
        if not self.shared:
            pytest.skip("this store is one engine's own, as `shared` says")
        other = self.make(options)
        other.put("key", b"answer")
        other.close()
        [found] = store.get(["key"])
        assert found == b"answer", (
            f"another store of these options put b'answer', here is {found!r}"
        )


class ResponseCacheSuite(_StoreSuite):
    """Checks of what ``pagedllm_response_caches`` registers under :attr:`cache`.

    The plugin has to be installed. Each check finds an empty store, so give each one its own,
    by overriding the fixture :meth:`options`.
    """

    cache: str
    """What ``Config(response_cache=...)`` says."""
    hook = "pagedllm_response_caches"
    setting = "response_cache"

    @property
    def name(self) -> str:
        """What the setting says."""
        return self.cache

    def test_an_engine_answers_from_it(self, options: dict[str, Any], tmp_path: Path) -> None:
        """The second of two equal requests, with the same tokens."""
        folder = tiny_model(tmp_path / "model")
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        spec = {"name": self.cache, **options}
        answers = []
        with LLM(str(folder), threads=1, response_cache=spec) as llm:
            for _ in range(1 if self.shared else 2):
                answers.append(llm.generate("Once", params, use_tqdm=False)[0].outputs[0])
            stats = llm.stats().response_cache
        if self.shared:
            with LLM(str(folder), threads=1, response_cache=spec) as llm:
                answers.append(llm.generate("Once", params, use_tqdm=False)[0].outputs[0])
                stats = llm.stats().response_cache
        assert stats is not None and stats.hits == 1, f"the second answer was computed: {stats}"
        first, second = ([*answer.token_ids, answer.text] for answer in answers)
        assert first == second, f"computed {first}, from the store {second}"


class KVStoreSuite(_StoreSuite):
    """Checks of what ``pagedllm_kv_stores`` registers under :attr:`kv_store`.

    The plugin has to be installed. Each check finds an empty store, so give each one its own,
    by overriding the fixture :meth:`options`.
    """

    kv_store: str
    """What ``Config(kv_store=...)`` says."""
    hook = "pagedllm_kv_stores"
    setting = "kv_store"

    @property
    def name(self) -> str:
        """What the setting says."""
        return self.kv_store

    def test_an_engine_goes_on_from_it(self, options: dict[str, Any], tmp_path: Path) -> None:
        """A prompt that another engine has computed is not computed again."""
        if not self.shared:
            pytest.skip("this store is one engine's own, as `shared` says")
        folder = tiny_model(tmp_path / "model")
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompt = [3 + number % 50 for number in range(70)]
        spec = {"name": self.name, **options}
        answers, cached = [], 0
        for _ in range(2):
            with LLM(str(folder), threads=1, page_size=16, kv_store=spec) as llm:
                [output] = llm.generate(prompt, params, use_tqdm=False)
                answers.append(output.outputs[0].token_ids)
                cached = output.num_cached_tokens
        assert cached == 64, f"{cached} of the prompt's 64 tokens in full pages were found"
        assert answers[0] == answers[1], f"computed {answers[0]}, from the store {answers[1]}"
