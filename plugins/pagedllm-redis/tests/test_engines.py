"""Engines that share a Redis, and what they do when it is gone, slow or closed to them."""

from __future__ import annotations

import logging
import signal
import time

import pytest

from pagedllm import LLM, ConfigError, SamplingParams
from pagedllm_redis import cache as redis_cache

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "Once upon a time"


def setting(server, **options):
    # A slow machine must not look like a slow Redis here.
    return {"name": "redis", "url": server.url, "timeout": 60, **options}


def once(llm, prompt=PROMPT, params=GREEDY):
    return llm.generate(prompt, params)[0]


def stored(llm):
    """Wait until the first answer is in Redis."""
    while not llm.stats().response_cache.stored:
        time.sleep(0.01)


def warnings_of(caplog):
    return [r.message for r in caplog.records if "response cache" in r.message]


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_second_of_two_equal_requests_comes_from_redis(server, tiny_with_text, engine):
    with LLM(str(tiny_with_text), engine=engine, response_cache=setting(server)) as llm:
        first, second = once(llm), once(llm)
        assert (first.from_response_cache, second.from_response_cache) == (False, True)
        assert second.outputs == first.outputs
    with LLM(str(tiny_with_text), response_cache=setting(server)) as another:
        third = once(another)
        assert third.from_response_cache
        assert third.outputs == first.outputs
        streamed = list(another.stream(PROMPT, GREEDY))
        assert "".join(o.outputs[0].text_delta for o in streamed) == first.outputs[0].text
        assert another.stats().generated_tokens == 0


def test_langchain_shares_them_too(server, tiny_with_text):
    from langchain_pagedllm import PagedLLM

    with LLM(str(tiny_with_text), response_cache=setting(server)) as llm:
        first = once(llm)
        stored(llm)
    options = {"response_cache": setting(server)}
    with PagedLLM(
        model_id=str(tiny_with_text), temperature=0, max_tokens=8, engine_config=options
    ) as chain:
        assert chain.invoke(PROMPT) == first.outputs[0].text
        assert "".join(chain.stream(PROMPT)) == first.outputs[0].text
        assert chain.engine.stats().generated_tokens == 0


def test_without_the_server_every_request_is_answered_and_one_warning_said(
    server, tiny_with_text, caplog
):
    with LLM(str(tiny_with_text), response_cache=setting(server)) as llm:
        first = once(llm)
        stored(llm)  # until then it is answered from memory
        server.stop()
        for _ in range(3):
            again = once(llm)
            assert not again.from_response_cache
            assert again.outputs == first.outputs
        assert llm.stats().response_cache.down
    assert len(warnings_of(caplog)) == 1


def test_engines_start_without_the_server(tiny_with_text, caplog):
    nowhere = {"name": "redis", "url": "redis://127.0.0.1:1/0"}
    with LLM(str(tiny_with_text), response_cache=nowhere) as llm:
        outputs = llm.generate([[i, 5, 6] for i in range(9, 19)], GREEDY)
        assert all(output.outputs[0].finish_reason for output in outputs)
    assert len(warnings_of(caplog)) == 1


def test_a_server_that_hangs_delays_requests_by_its_time_out_and_no_more(
    start_redis, tiny_with_text, caplog
):
    server = start_redis()
    frozen = setting(server, timeout=0.05)
    with LLM(str(tiny_with_text), response_cache=frozen) as llm:
        server.process.send_signal(signal.SIGSTOP)
        try:
            outputs = llm.generate([[i, 5, 6] for i in range(9, 19)], GREEDY)
            assert all(output.outputs[0].finish_reason for output in outputs)
            assert llm.stats().response_cache.down
        finally:
            server.process.send_signal(signal.SIGCONT)
    [warning] = warnings_of(caplog)
    assert "imeout" in warning or "no answer in 50 ms" in warning


def test_a_wrong_password_is_an_outage_that_does_not_repeat_it(start_redis, tiny_with_text, caplog):
    server = start_redis("--requirepass", "right-word")
    caplog.set_level(logging.DEBUG)
    wrong = server.url.replace("//", "//:wrong-word@")
    with LLM(str(tiny_with_text), response_cache=setting(server, url=wrong)) as llm:
        assert once(llm).finished
    [warning] = warnings_of(caplog)
    assert "Authentication" in warning
    assert "wrong-word" not in caplog.text
    right = server.url.replace("//", "//:right-word@")
    with LLM(str(tiny_with_text), response_cache=setting(server, url=right)) as llm:
        once(llm)
        assert once(llm).from_response_cache


def test_wrong_options_name_the_setting(tiny_with_text):
    with pytest.raises(ConfigError, match="response_cache: ttl must be a number"):
        LLM(str(tiny_with_text), response_cache={"name": "redis", "ttl": "1h"})
    with pytest.raises(ConfigError, match=r"response_cache: .*tll"):
        LLM(str(tiny_with_text), response_cache={"name": "redis", "tll": 5})
    assert redis_cache.DEFAULT_URL.startswith("redis://127.0.0.1")
