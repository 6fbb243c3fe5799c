"""The conformance suites: sound plugins pass them, and each way of being broken fails."""

from __future__ import annotations

import pytest

from pagedllm import LLM, Config, resolve_model
from pagedllm.testing import (
    ExecutorSuite,
    KVStoreSuite,
    LogitsProcessorSuite,
    ModelProviderSuite,
    ResponseCacheSuite,
)
from plugin_site import installed

PLUGIN = """
    from pagedllm import hookimpl

    class InMemory:
        def __init__(self, config, *, timeout=60.0):
            self.timeout = timeout
            self.answers = {}
        def get(self, keys):
            return [self.answers.get(key) for key in keys]
        def put(self, key, answer):
            self.answers[key] = answer
        def close(self):
            self.answers.clear()

    @hookimpl
    def pagedllm_response_caches():
        return {"in-memory": "suited:InMemory"}

    @hookimpl
    def pagedllm_kv_stores():
        return {"in-memory": "suited:InMemory"}

    @hookimpl
    def pagedllm_logits_processors():
        return {"forbid": "suited:forbid", "theirs": "suited:theirs"}

    def forbid(token_ids):
        def process(generated, logits):
            logits[list(token_ids)] = float("-inf")
            return logits
        return process

    def theirs(penalty):
        from transformers import RepetitionPenaltyLogitsProcessor
        return RepetitionPenaltyLogitsProcessor(penalty)
"""


class TestSmolLM2(ModelProviderSuite):
    plugin = "smollm2"
    prompt = "The capital of France is"
    # The plugin's own tests have it, with a small file: the real one takes long to convert.
    test_two_processes_at_once = None

    @pytest.fixture
    def config(self):  # whose folder has been filled
        return Config()

    def test_an_engine_says_which_weights_it_has(self):
        with LLM("smollm2", num_pages=16, max_model_len=64) as llm:
            assert llm.revision == resolve_model("smollm2").revision is not None


class TestInlineExecutor(ExecutorSuite):
    executor = "inline"


class TestInlineExecutorAhead(ExecutorSuite):
    executor = "inline"
    settings = {"steps_in_flight": 2}  # noqa: RUF012


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("site"), suited=PLUGIN) as folder:
        yield folder


@pytest.mark.usefixtures("site")
class TestForbid(LogitsProcessorSuite):
    processor = "forbid"
    options = {"token_ids": [3, 4]}  # noqa: RUF012


@pytest.mark.usefixtures("site")
class TestTheirs(LogitsProcessorSuite):
    processor = "theirs"
    options = {"penalty": 1.5}  # noqa: RUF012


@pytest.mark.usefixtures("site")
class TestInMemory(ResponseCacheSuite):
    cache = "in-memory"
    shared = False


@pytest.mark.usefixtures("site")
class TestPagesInMemory(KVStoreSuite):
    kv_store = "in-memory"
    shared = False
