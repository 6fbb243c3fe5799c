"""Lines of the log: what is in them, and what never is."""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

import pytest

from pagedllm_server.logs import make_handler

KEYS = ("plain-key-1", "plain-key-1-and-more", 'with"quotes\\and/slashes', "schlüssel", "a b+c")


def written(message, *arguments, keys=KEYS, as_json, exception=None):
    handler = make_handler(keys, as_json=as_json)
    info = (type(exception), exception, None) if exception else None
    record = logging.LogRecord("house", logging.INFO, "f.py", 1, message, arguments, info)
    record.path = arguments[0] if arguments else ""
    assert handler.filter(record)
    return handler.format(record)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("spelled", [str, quote, ascii, repr, json.dumps])
def test_a_key_is_hidden_however_it_is_spelled(as_json, key, spelled):
    line = written("asked for %s now", f"/v1/{spelled(key)}?x", as_json=as_json)
    text = line if not as_json else json.loads(line)["message"]
    assert "***" in text
    assert "asked for /v1/" in text
    assert text.endswith("?x now")
    for known in KEYS:
        for spelling in (known, quote(known), ascii(known)[1:-1], json.dumps(known)[1:-1]):
            assert spelling not in line


@pytest.mark.parametrize("as_json", [False, True])
def test_nor_does_an_exception_tell_it(as_json):
    try:
        raise LookupError(f"no {KEYS[0]} here")
    except LookupError as error:
        line = written("it failed", as_json=as_json, exception=error)
    assert "LookupError: no *** here" in line
    assert "plain" not in line


def test_a_key_that_is_a_word_of_json_leaves_it_json():
    line = written("the level is %s", "low", keys=('"', "level"), as_json=True)
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("INFO", "the *** is low")


@pytest.mark.parametrize("as_json", [False, True])
def test_without_keys_lines_are_as_they_are(as_json):
    line = written("nothing of %s is *** hidden", "it", keys=(), as_json=as_json)
    assert "nothing of it is *** hidden" in line
