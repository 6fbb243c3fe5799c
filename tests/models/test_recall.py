"""What transformers made of a folder is kept for the next start, and only while it is true."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from pagedllm import LLM, SamplingParams
from pagedllm._recall import Recall, RecalledTokenizer, _makers, recalled_tokenizer
from pagedllm.engine.tokenizer import load_tokenizer
from pagedllm.models import load_model
from pagedllm.models.known import Known
from text_tokenizers import byte_fallback, byte_level
from tiny_families import FAMILIES, build

NATIVE = [name for name, family in FAMILIES.items() if family.native]
START = """
import sys
from pagedllm import LLM, SamplingParams
with LLM(sys.argv[1], attention_backend="reference", max_model_len=128) as llm:
    (out,) = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))
    print("transformers" in sys.modules, list(out.prompt_token_ids), out.outputs[0].token_ids)
    print(out.outputs[0].text.encode())
    print(type(llm.tokenizer).__module__.split(".")[0], len(llm.tokenizer))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own, but for the compiled kernels."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "pagedllm" / "loads"


@pytest.fixture
def folder(tmp_path, tiny_with_text):
    return shutil.copytree(tiny_with_text, tmp_path / "model")


def _load(folder):
    return load_model(str(folder), attention="reference")


def test_the_second_start_says_the_same_without_transformers(folder):
    runs = [
        subprocess.run(
            [sys.executable, "-c", START, str(folder)], capture_output=True, text=True, check=False
        )
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    (first, *said), (second, *said_again) = (run.stdout.splitlines() for run in runs)
    assert first.startswith("True ")
    assert second.startswith("False ")
    assert first.removeprefix("True ") == second.removeprefix("False ")
    assert said == said_again
    assert said[1].startswith("transformers ")


@pytest.mark.parametrize("name", NATIVE)
def test_a_recalled_model_is_the_one_that_was_read(name, tmp_path, cache):
    build(name, random.randrange(2**31)).save_pretrained(tmp_path)
    read = _load(tmp_path)
    assert len(list(cache.iterdir())) == 1
    known = Known.recalled(Recall(tmp_path))
    assert known is not None
    assert known.spec == read.spec
    assert hash(known.spec) == hash(read.spec)
    assert known.eos_token_ids == read.eos_token_ids
    recalled = _load(tmp_path)
    assert (recalled.spec, recalled.dtype) == (read.spec, read.dtype)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_recalled_tokenizer_reads_texts_as_its_original(make, tmp_path):
    make().save_pretrained(tmp_path)
    original = recalled_tokenizer(str(tmp_path), lambda: load_tokenizer(tmp_path), fresh=False)
    assert not isinstance(original, RecalledTokenizer)
    recalled = recalled_tokenizer(str(tmp_path), lambda: load_tokenizer(tmp_path), fresh=False)
    assert isinstance(recalled, RecalledTokenizer)
    alphabet = "abc déf \n\t<s></s>\u4f60\U0001f600 12,.'"
    for length in (1, 3, 20, 200):
        text = "".join(random.choices(alphabet, k=length))
        for special in (True, False):
            options = {"add_special_tokens": special, "verbose": False}
            assert recalled(text, **options)["input_ids"] == original(text, **options)["input_ids"]
    assert recalled.eos_token_id == original.eos_token_id
    assert recalled.name_or_path == original.name_or_path
    # Whatever else it is asked, the original answers.
    assert recalled.get_vocab() == original.get_vocab()
    assert type(recalled.whole()) is type(original)


def test_a_tokenizer_that_reads_otherwise_than_its_file_is_not_recalled(tmp_path, cache):
    byte_level().save_pretrained(tmp_path)

    class Shouting:
        def __init__(self):
            self.real = load_tokenizer(tmp_path)
            self.backend_tokenizer = self.real.backend_tokenizer
            self.eos_token_id = self.real.eos_token_id

        def __call__(self, text, **options):
            return self.real(text.upper(), **options)

    for _ in range(2):
        got = recalled_tokenizer(str(tmp_path), Shouting, fresh=False)
        assert isinstance(got, Shouting)
    assert not cache.exists()


def test_a_changed_file_is_read_again(folder):
    before = _load(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = before.spec.norm_eps * 2
    (folder / "config.json").write_text(json.dumps(config))
    assert Recall(folder).get("model") is None
    assert _load(folder).spec.norm_eps == before.spec.norm_eps * 2
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert _load(folder).eos_token_ids == {5, 7}
    assert _load(folder).eos_token_ids == {5, 7}


@pytest.mark.parametrize("damage", ["", "{}", '{"spec": {"ropes": 3}}'])
def test_a_damaged_memory_is_made_anew(damage, folder, cache):
    params = SamplingParams(max_tokens=4, temperature=0)
    wanted = _answer(folder, params)
    files = sorted(cache.iterdir())
    assert len(files) == 2
    whole = [file.read_text() for file in files]
    for file in files:
        file.write_text(damage)
    assert _answer(folder, params) == wanted
    assert [file.read_text() for file in files] == whole


def _answer(folder, params):
    with LLM(str(folder), attention_backend="reference", max_model_len=64) as llm:
        return llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_cache_that_is_no_folder_stops_nothing(folder, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("in the way")
    assert _load(folder).spec == _load(folder).spec
    assert cache.read_text() == "in the way"


def test_libraries_that_are_not_installed_but_on_the_path_stop_nothing(folder, cache, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("pagedllm._recall.version", missing)
    _makers.cache_clear()
    try:
        assert _load(folder).spec == _load(folder).spec
    finally:
        _makers.cache_clear()
    assert len(list(cache.iterdir())) == 1


def test_what_comes_with_code_is_asked_each_time(folder, cache):
    load_model(str(folder), attention="reference", trust_remote_code=True)
    (folder / "modeling_own.py").write_text("raise SystemExit")
    _load(folder)
    assert not cache.exists()


def test_those_used_longest_ago_go_first(folder, cache, monkeypatch):
    monkeypatch.setattr("pagedllm._recall._MOST_KEPT", 2)
    for number in range(6):
        (folder / "notes.txt").write_text(str(number))
        _load(folder)
    assert len(list(cache.iterdir())) == 4
    assert Recall(folder).get("model") is not None
