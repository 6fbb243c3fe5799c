"""Pages from a plugin's store: the same answers, less computed, and no request lost to it."""

from __future__ import annotations

import importlib
import logging
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import pagedllm
from generate_pairs import build
from pagedllm import LLM, Config, ConfigError, SamplingParams
from pagedllm.engine.requests import RequestState
from plugin_site import installed

PLUGIN = """
    import threading
    from pathlib import Path
    from pagedllm import hookimpl

    pages, calls = {}, []
    state = {"fail": None, "change": None}
    gate, waiting = threading.Event(), threading.Event()

    class Shelf:
        def __init__(self, config, *, timeout=30.0):
            self.timeout = timeout

        def get(self, keys):
            calls.append(len(keys))
            if not gate.is_set():
                waiting.set()
                gate.wait()
            if state["fail"]:
                raise state["fail"]
            found = [pages.get(key) for key in keys]
            return found if state["change"] is None else state["change"](found)

        def put(self, key, page):
            if state["fail"]:
                raise state["fail"]
            pages[key] = page

        def close(self):
            pass

    class Folder:
        timeout = 30.0

        def __init__(self, config, *, path):
            self.path = Path(path)
            self.path.mkdir(exist_ok=True)

        def get(self, keys):
            files = [self.path / key.replace(":", "-") for key in keys]
            return [file.read_bytes() if file.exists() else None for file in files]

        def put(self, key, page):
            (self.path / key.replace(":", "-")).write_bytes(page)

        def close(self):
            pass

    class NoPages:
        def __init__(self, config, load):
            from pagedllm.executors.inline import InlineExecutor
            self._inner = InlineExecutor(config, load)
            self.max_steps_in_flight = 1
            for name in ("start", "submit", "collect", "health", "close"):
                setattr(self, name, getattr(self._inner, name))

    @hookimpl
    def pagedllm_kv_stores():
        return {"shelf": "pageshelf:Shelf", "folder": "pageshelf:Folder"}

    @hookimpl
    def pagedllm_create_executor(name, config, load):
        return NoPages(config, load) if name == "no-pages" else None
"""
# The penalty keeps small models from saying one token over and over.
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, repetition_penalty=2.0)
PAGE = 4
rng = random.Random(5)
PREFIX = [rng.randrange(256) for _ in range(5 * PAGE)]
PROMPTS = [PREFIX + [rng.randrange(256) for _ in range(3)] for _ in range(3)]
# The last token is always computed, and with it the page that it alone would fill up.
FULL_PAGES = 5


@pytest.fixture(scope="module", autouse=True)
def _plugin(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("site"), pageshelf=PLUGIN):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model for each tier, of fixed weights: no answer hangs on rounding that changes."""
    made = {}
    for tier, family, seed in (("native", "llama", 21), ("generic", "gpt2", 21)):
        made[tier] = tmp_path_factory.mktemp(tier)
        build(family, seed).save_pretrained(made[tier])
    return made


@pytest.fixture
def shelf():
    module = importlib.import_module("pageshelf")
    module.pages.clear()
    module.calls.clear()
    module.state.update(fail=None, change=None)
    module.gate.set()
    module.waiting.clear()
    yield module
    module.gate.set()


def _llm(folder, **settings):
    common = {"threads": 1, "page_size": PAGE, "num_pages": 64, "skip_tokenizer_init": True}
    return LLM(str(folder), **{**common, "dtype": "float32", **settings})


def _answers(llm, prompts=PROMPTS):
    """Tokens of each, one after the other, and how many tokens of the prompt were cached."""
    outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in outputs], [
        output.num_cached_tokens for output in outputs
    ]


def _check_books(llm):
    """Between two steps: every page is where the books say."""
    llm._loop.call(lambda engine: engine.scheduler.check())


@pytest.fixture(scope="module")
def plain(folders):
    """What each tier answers without a store."""
    found = {}
    for tier, folder in folders.items():
        with _llm(folder, model_impl=tier) as llm:
            found[tier] = _answers(llm)[0]
    return found


@pytest.mark.parametrize(
    ("tier", "second"), [("native", "thread"), ("generic", "thread"), ("native", "process")]
)
def test_another_engine_goes_on_from_what_one_has_computed(folders, plain, tmp_path, tier, second):
    pages = tmp_path / "pages"
    settings = {"model_impl": tier, "kv_store": {"name": "folder", "path": str(pages)}}
    with _llm(folders[tier], **settings) as llm:
        tokens, cached = _answers(llm)
        assert tokens == plain[tier]
        assert cached == [0, FULL_PAGES * PAGE, FULL_PAGES * PAGE]
        assert llm.stats().kv_store.hits == 0
    num_stored = len(list(pages.iterdir()))
    with _llm(folders[tier], engine=second, **settings) as llm:
        tokens, cached = _answers(llm, PROMPTS[1:2])
        assert (tokens, cached) == (plain[tier][1:2], [FULL_PAGES * PAGE])
        assert len(set(tokens[0])) > 2
        stats = llm.stats()
        assert stats.kv_store.lookups == 1
        assert stats.kv_store.hits == FULL_PAGES
        assert not stats.kv_store.down
        rest = len(PROMPTS[1]) - FULL_PAGES * PAGE
        assert stats.computed_tokens == rest + GREEDY.max_tokens - 1
        _answers(llm, [[250] * (2 * PAGE)])  # it stores, too, wherever it is
    assert len(list(pages.iterdir())) > num_stored


@pytest.mark.parametrize("tier", ["native", "generic"])
def test_what_is_loaded_gives_the_scores_of_what_is_computed(folders, shelf, tier):
    params = GREEDY.replace(logprobs=5)
    scores = []
    for spec in (None, "shelf", "shelf"):
        with _llm(folders[tier], model_impl=tier, kv_store=spec) as llm:
            [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
            scores.append(
                {(at, token): entry.logprob for at, row in enumerate(output.outputs[0].logprobs)
                 for token, entry in row.items()}
            )  # fmt: skip
    assert output.num_cached_tokens == FULL_PAGES * PAGE
    for found in scores[1:]:
        assert found == pytest.approx(scores[0], abs=1e-4)


def test_without_a_store_nobody_listens(folders):
    with _llm(folders["native"]) as llm:
        assert llm._loop.call(lambda engine: engine.scheduler.cache.pool.listener) is None
        assert llm.stats().kv_store is None
        assert not [t for t in threading.enumerate() if t.name.startswith("pagedllm-kv")]


def test_steps_in_flight_and_a_batch_at_once(folders, plain, shelf):
    """Pages are copied before a step that is submitted ahead could give them to another."""
    prompts = [*PROMPTS, *[[100 + row] * 9 for row in range(12)]]
    for cached in (0, FULL_PAGES * PAGE):
        settings = {"steps_in_flight": 2, "num_pages": 24, "max_batch_size": 4}
        with _llm(folders["native"], kv_store="shelf", **settings) as llm:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [each.outputs[0].token_ids for each in outputs[:3]] == plain["native"]
            assert outputs[0].num_cached_tokens == cached
            _check_books(llm)


def test_closing_gives_the_pages_memory_back(folders, shelf):
    llm = _llm(folders["native"], kv_store="shelf")
    _answers(llm, PROMPTS[:1])
    tensor = weakref.ref(llm._loop._pages._tensors[0])
    assert tensor() is not None
    llm.close()
    llm.close()
    assert tensor() is None
    assert len(shelf.pages) >= FULL_PAGES


def test_sixteen_bits_and_answers_are_kept_too(folders, shelf):
    """A conversation's next turn begins with the answer of the last one."""
    for dtype in ("bfloat16", "float32"):
        shelf.pages.clear()
        with _llm(folders["native"], dtype=dtype, kv_store="shelf") as llm:
            [[answer], _] = _answers(llm, PROMPTS[:1])
            longer = [*PROMPTS[0], *answer, 1, 2]
        with _llm(folders["native"], dtype=dtype, kv_store="shelf") as llm:
            [_, [cached]] = _answers(llm, [longer])
        # The answer's last token was drawn and never computed.
        assert cached == (len(PROMPTS[0]) + len(answer) - 1) // PAGE * PAGE


def test_what_differs_is_not_shared(folders, shelf):
    with _llm(folders["native"], kv_store="shelf") as llm:
        _answers(llm, PROMPTS[:1])
    for folder, settings in (
        (folders["native"], {"dtype": "bfloat16"}),
        (folders["native"], {"kv_cache_dtype": "int8"}),
        (folders["native"], {"page_size": 2 * PAGE}),
        (folders["native"], {"model_impl": "generic"}),
        (folders["native"], {"attention_backend": "reference"}),
        (folders["generic"], {}),
    ):
        with _llm(folder, kv_store="shelf", **settings) as llm:
            assert _answers(llm, PROMPTS[:1])[1] == [0], settings
    with _llm(folders["native"], kv_store="shelf") as llm:
        salted = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, cache_salt="other")
        assert salted[0].num_cached_tokens == 0
        assert _answers(llm, PROMPTS[:1])[1] == [FULL_PAGES * PAGE]


def test_a_prompt_whose_scores_are_wanted_is_computed(folders, shelf):
    with _llm(folders["native"], kv_store="shelf") as llm:
        _answers(llm, PROMPTS[:1])
        num_lookups = len(shelf.calls)
        scored = llm.generate(PROMPTS[0], GREEDY.replace(prompt_logprobs=1), use_tqdm=False)
        short = llm.generate(PREFIX[:PAGE], GREEDY, use_tqdm=False)
        assert len(scored[0].prompt_logprobs) == len(PROMPTS[0])
        assert len(short[0].outputs[0].token_ids) == GREEDY.max_tokens
        assert len(shelf.calls) == num_lookups


def test_pages_that_are_not_there_any_more_leave_a_gap(folders, plain, shelf):
    with _llm(folders["native"], kv_store="shelf") as llm:
        _answers(llm, PROMPTS[:1])
    third = list(shelf.pages)[2]
    del shelf.pages[third]
    with _llm(folders["native"], kv_store="shelf") as llm:
        assert _answers(llm, PROMPTS[:1]) == (plain["native"][:1], [2 * PAGE])
        assert llm.stats().kv_store.hits == 2
        _check_books(llm)
    assert third in shelf.pages  # computed again, and put again


def test_a_pool_that_is_full_evicts_no_more_than_it_needs(folders, shelf):
    """The prompt's own first pages, which nobody holds, are not what goes."""
    with _llm(folders["native"], kv_store="shelf") as llm:
        _answers(llm, PROMPTS[:1])
    others = [[200 + row] * (3 * PAGE) for row in range(2)]
    with _llm(folders["native"], kv_store="shelf", num_pages=12) as llm:
        _answers(llm, [PREFIX[: 2 * PAGE + 1], *others])
        assert llm.stats().cache.pages_free < FULL_PAGES - 2  # the prefix's own are the oldest
        assert _answers(llm, PROMPTS[:1])[1] == [FULL_PAGES * PAGE]
        assert llm.stats().kv_store.hits == FULL_PAGES  # two of them before
        _check_books(llm)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: [each and each[:-1] for each in found],
        lambda found: [each and each[:-1] + bytes([each[-1] ^ 1]) for each in found],
        lambda found: [each and b"" for each in found],
        lambda found: [each and each + each for each in found],
        lambda found: found[:-1],
        lambda found: [each and "text" for each in found],
        lambda found: None,
    ],
    ids=["short", "altered", "empty", "long", "too few", "text", "none"],
)
def test_what_is_wrong_costs_a_warning_and_nothing_else(folders, plain, shelf, caplog, change):
    with _llm(folders["native"], kv_store="shelf") as llm:
        _answers(llm, PROMPTS[:1])
    shelf.state["change"] = change
    with (
        caplog.at_level(logging.WARNING, "pagedllm"),
        _llm(folders["native"], kv_store="shelf") as llm,
    ):
        assert _answers(llm)[0] == plain["native"]
        _check_books(llm)
        assert llm.stats().kv_store.hits == 0
    assert len(caplog.records) == 1
    assert "KV store 'shelf'" in caplog.text


def test_a_page_of_another_size_is_not_written(folders, plain, shelf, caplog):
    """Whole as its digest says, and yet not a page of this engine: a bug, which must not spread."""
    with _llm(folders["native"], kv_store="shelf") as llm:
        exchange = llm._loop._pages
        state = RequestState(_request(llm), None, lambda _: None)
        digest = llm._loop._hashes(state.request)[0]
        llm._loop.call(lambda engine: exchange.load(engine, state, [(digest, b"short")]))
        _check_books(llm)
        assert "a page has" in caplog.text
        assert _answers(llm)[0] == plain["native"]


def _request(llm):
    return llm._intake.request(PROMPTS[0], GREEDY)


@pytest.mark.parametrize("timeout", [30.0, 0.05], ids=["down", "slow"])
def test_a_store_that_is_down_or_slow_costs_a_warning_and_nothing_else(
    folders, plain, shelf, caplog, timeout
):
    if timeout < 1:
        shelf.gate.clear()
    else:
        shelf.state["fail"] = ConnectionError("no such host")
    spec = {"name": "shelf", "timeout": timeout}
    with (
        caplog.at_level(logging.WARNING, "pagedllm"),
        _llm(folders["native"], kv_store=spec) as llm,
    ):
        assert _answers(llm)[0] == plain["native"]
        assert llm.stats().kv_store.down
        _check_books(llm)
        shelf.gate.set()
    assert len(caplog.records) == 1
    assert ("no answer in 50 ms" if timeout < 1 else "no such host") in caplog.text


def test_a_request_is_aborted_while_its_pages_are_looked_for(folders, shelf):
    with _llm(folders["native"], kv_store="shelf") as llm:
        shelf.gate.clear()
        stream = llm.stream(PROMPTS[0], GREEDY, request_id="mine")
        assert shelf.waiting.wait(60)
        with pytest.raises(pagedllm.EngineError, match="'mine' is in use"):
            llm.stream(PROMPTS[0], GREEDY, request_id="mine")
        llm.abort("mine")
        assert list(stream)[-1].outputs[0].finish_reason == "abort"
        shelf.gate.set()
        assert len(_answers(llm)[0]) == 3
        assert llm.stats().cache.pages_used == 0


def test_an_engine_closes_while_a_request_waits_for_its_pages(folders, shelf):
    llm = _llm(folders["native"], kv_store={"name": "shelf", "timeout": 0.3})
    with ThreadPoolExecutor() as threads:
        shelf.gate.clear()
        answer = threads.submit(llm.generate, PROMPTS[0], GREEDY, use_tqdm=False)
        assert shelf.waiting.wait(60)
        llm.close()
        with pytest.raises(pagedllm.EngineClosedError):
            answer.result(60)


def test_many_at_once_in_a_pool_that_is_too_small(folders, shelf):
    """Whatever comes and goes meanwhile, answers are those of an engine without a store."""
    draw = random.Random(3)
    prompts = [
        PREFIX[: draw.randrange(1, 20)] + [draw.randrange(256) for _ in range(draw.randrange(1, 9))]
        for _ in range(40)
    ]
    with _llm(folders["native"], num_pages=200) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    for attempt in range(2):
        with _llm(folders["native"], kv_store="shelf", num_pages=20) as llm:
            with ThreadPoolExecutor(8) as threads:
                asked = threads.map(lambda p: _answers(llm, [p])[0][0], prompts)
                assert list(asked) == expected
            _check_books(llm)
            assert llm.stats().kv_store.hits > 0 or attempt == 0


def test_what_cannot_have_one_says_so(folders):
    with pytest.raises(ConfigError, match=r"^kv_store: no plugin registers 'shelv'.*shelf"):
        _llm(folders["native"], kv_store="shelv")
    with pytest.raises(ConfigError, match="kv_store: needs enable_prefix_caching"):
        _llm(folders["native"], kv_store="shelf", enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"kv_store.*'no-pages'"):
        _llm(folders["native"], kv_store="shelf", executor="no-pages")
    with pytest.raises(ConfigError, match="kv_store: nothing tells a loaded"):
        LLM.from_model(build("llama", 1), kv_store="shelf")
    assert not [t for t in threading.enumerate() if t.name.startswith("pagedllm-kv")]
    assert Config(kv_store={"name": "folder", "path": "x"}).to_yaml().count("folder") == 1
