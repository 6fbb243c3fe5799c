"""Config: one definition behind keywords, YAML and flags; errors that say what to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import random
import string
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import yaml

from pagedllm._kinds import Boolean, Integer, Many, Named, Number, Size, Text
from pagedllm._options import options_of
from pagedllm.config import SECTIONS, Config
from pagedllm.errors import ConfigError, PagedLLMError

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = options_of(Config)
# Values that a check of several fields together refuses.
UNAVAILABLE = {"quantization_skip", "tensor_parallel_size", "pipeline_parallel_size"}


def _value(name: str, draw: random.Random):
    """A valid value that is not the default."""
    kind = OPTIONS[name].kind
    default = getattr(Config(), name)
    if isinstance(kind, Boolean):
        return not default
    if isinstance(kind, Integer):
        return draw.randint(2, 500)
    if isinstance(kind, Number):
        return round(draw.uniform(0.01, 0.89), 3)
    if isinstance(kind, Size):
        return draw.randint(1, 2**34)
    if isinstance(kind, Text):
        others = [choice for choice in kind.choices if choice != default]
        return draw.choice(others) if others else _word(draw)
    if isinstance(kind, Named):
        return {"name": _word(draw), _word(draw): draw.randint(1, 9)}
    assert isinstance(kind, Many)
    if isinstance(kind.item, Named):
        return _word(draw), {"name": _word(draw), _word(draw): draw.randint(1, 9)}
    return tuple(_word(draw) for _ in range(3))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=8))


def _parse(*flags: str) -> Config:
    parser = argparse.ArgumentParser()
    Config.add_cli_arguments(parser)
    return Config.from_cli(parser.parse_args(flags))


def _flags(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        if OPTIONS[name].kind.separator is None:
            return [part for each in value for part in _flags(name, each)]
        return [flag, ",".join(value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - UNAVAILABLE))
def test_a_setting_is_the_same_from_keyword_yaml_and_flag(name: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    value = _value(name, random.Random(seed))
    plain = list(value) if isinstance(value, tuple) else value
    by_keyword = Config(**{name: value})
    assert getattr(by_keyword, name) == value
    assert by_keyword != Config()

    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(yaml.safe_dump({OPTIONS[name].section: {name: plain}}))
    flat.write_text(yaml.safe_dump({name: plain}))
    assert Config.from_yaml(nested) == by_keyword
    assert Config.from_yaml(flat) == by_keyword
    assert _parse(*_flags(name, value)) == by_keyword
    assert _parse("--config", str(nested)) == by_keyword
    for alias in OPTIONS[name].aliases:
        assert Config(**{alias: value}) == by_keyword
        assert Config.from_dict({OPTIONS[name].section: {alias: plain}}) == by_keyword
        assert _parse(*_flags(alias, value)) == by_keyword


def test_flags_override_the_file_and_only_where_given(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {model: some/model}\n"
        "cache:\n  block_size: 32\n  enable_prefix_caching: no\n"
        "scheduler: {max_num_seqs: 7}\ndistributed:\n"
    )
    config = _parse("--config", str(file), "--max-num-seqs", "9", "--enable-prefix-caching")
    assert config == Config("some/model", page_size=32, max_batch_size=9)
    # A flag equal to the default still overrides.
    assert _parse("--config", str(file), "--page-size", "16").page_size == 16


def test_the_model_may_be_positional_and_nothing_else() -> None:
    assert Config("x").model == "x"
    with pytest.raises(TypeError):
        Config("x", "main")


def test_aliases_people_know() -> None:
    config = Config(max_num_seqs=3, block_size=8, num_gpu_blocks_override=11)
    assert (config.max_batch_size, config.page_size, config.num_pages) == (3, 8, 11)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_batchsize": 1}, ["max_batchsize", "1", "max_batch_size"]),
        ({"enable_prefix_cache": True}, ["enable_prefix_cache", "enable_prefix_caching"]),
        ({"dtype": "bfloat61"}, ["dtype", "bfloat61", "did you mean 'bfloat16'"]),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype", "fp8", "auto, int8"]),
        ({"kv_cache_dtyp": "int8"}, ["kv_cache_dtyp", "did you mean 'kv_cache_dtype'"]),
        ({"scheduling_policy": "prio"}, ["scheduling_policy", "prio", "priority"]),
        ({"device": "cuda:one"}, ["device", "cuda:one", "cuda:N"]),
        ({"page_size": 0}, ["page_size", "at least 1", "0"]),
        ({"page_size": 16.0}, ["page_size", "whole number", "16.0"]),
        ({"page_size": "16"}, ["page_size", "'16'"]),
        ({"max_batch_size": True}, ["max_batch_size", "True"]),
        ({"page_size": None}, ["page_size", "None"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5", "up to 1"]),
        ({"gpu_memory_utilization": float("nan")}, ["gpu_memory_utilization", "nan"]),
        ({"batch_timeout_ms": float("inf")}, ["batch_timeout_ms", "inf"]),
        ({"enable_prefix_caching": 1}, ["enable_prefix_caching", "true or false", "1"]),
        ({"revision": 1234567}, ["revision", "text", "1234567"]),
        ({"model": ""}, ["model", "not empty"]),
        ({"kv_cache_memory": "2 gigs"}, ["kv_cache_memory", "2GiB", "2 gigs"]),
        ({"kv_cache_memory": 0}, ["kv_cache_memory", "above 0"]),
        ({"kv_cache_memory": "1GiB", "num_pages": 4}, ["kv_cache_memory", "num_pages"]),
        ({"tensor_parallel_size": 2}, ["tensor_parallel_size", "2", "set it to 1"]),
        ({"pipeline_parallel_size": 3}, ["pipeline_parallel_size", "3", "set it to 1"]),
        ({"quantization_skip": ["lm_head"]}, ["quantization_skip", "set quantization"]),
        ({"max_num_seqs": 3, "max_batch_size": 3}, ["max_num_seqs", "max_batch_size", "twice"]),
        ({"plugins_allow": ["a"], "plugins_block": ["a"]}, ["plugins_block", "'a'"]),
    ],
)
def test_wrong_keywords_name_key_value_and_remedy(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert isinstance(caught.value, (ValueError, PagedLLMError))
    assert caught.value.parameter in {*values, *(n for n in OPTIONS if n in message)}
    with pytest.raises(ConfigError):
        Config().replace(**values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cache: {pagesize: 3}", ["section 'cache'", "pagesize", "page_size"]),
        ("cache: {page_size: 0}", ["section 'cache'", "page_size", "0"]),
        ("model: {page_size: 8}", ["page_size", "section 'cache'", "'model'"]),
        ("cach: {page_size: 8}", ["cach", "did you mean 'cache"]),
        ("cache: [page_size]", ["section 'cache'", "page_size"]),
        ("page_size: 8\ncache: {page_size: 8}", ["page_size", "twice"]),
        ("page_size: 8\npage_size: 9", ["page_size", "twice"]),
        ("cache: {block_size: 8, page_size: 8}", ["block_size", "page_size", "twice"]),
        ("- page_size", ["name: value"]),
        ("1: 2", ["name: value"]),
        ("a: [", ["YAML"]),
        ("quantization_skip: [lm_head]", ["set quantization"]),
    ],
)
def test_wrong_yaml_names_file_section_key_and_remedy(
    text: str, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(file)
    for word in ["mine.yaml", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        Config.from_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError):
        Config.from_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\xfe\xff")
    with pytest.raises(ConfigError, match="YAML"):
        Config.from_yaml(tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert Config.from_yaml(tmp_path / "empty.yaml") == Config()


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    file = tmp_path / "evil.yaml"
    file.write_text("model: !!python/object/apply:os.system ['true']")
    with pytest.raises(ConfigError):
        Config.from_yaml(file)


def test_round_trips_of_random_configs() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(20):
        names = draw.sample(sorted(set(OPTIONS) - UNAVAILABLE - {"num_pages", "token"}), 12)
        config = Config(**{name: _value(name, draw) for name in names})
        assert Config.from_dict(config.to_dict()) == config
        assert Config.from_dict(yaml.safe_load(config.to_yaml())) == config
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(config.replace()) == hash(config)
        assert config.replace(max_num_seqs=501).max_batch_size == 501
        assert set(yaml.safe_load(config.to_yaml())) == set(SECTIONS)


def test_the_token_shows_nowhere_and_is_not_lost() -> None:
    config = Config(token="hf_secret")
    for text in (repr(config), str(config), config.to_yaml(), str(config.to_dict())):
        assert "hf_secret" not in text
    assert config.resolve().token == "hf_secret"
    assert pickle.loads(pickle.dumps(config)).token == "hf_secret"
    assert config.to_dict(secrets=True)["token"] == "hf_secret"
    with pytest.raises(ConfigError) as caught:
        Config(token=["hf_secret"])
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("2GiB", 2**31),
        ("1.5 gib", 3 * 2**29),
        ("512MB", 512 * 10**6),
        ("7", 7),
        (np.int64(9), 9),
    ],
)
def test_sizes(given: object, stored: int) -> None:
    config = Config(kv_cache_memory=given)
    assert config.kv_cache_memory == config.kv_cache_bytes == stored
    assert Config().kv_cache_bytes is None


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("BF16", "bfloat16"),
        ("torch.float32", "float32"),
        (torch.bfloat16, "bfloat16"),
    ],
)
def test_spellings_of_dtype(given: object, stored: str) -> None:
    assert Config(dtype=given).dtype == stored


def test_spellings_of_device_and_path(tmp_path: Path) -> None:
    assert Config(device=torch.device("cuda", 1)).device == "cuda:1"
    assert Config(device="GPU").device == "cuda"
    assert Config(tmp_path, download_dir=tmp_path / "d").download_dir == str(tmp_path / "d")
    assert type(Config(page_size=np.int32(8)).page_size) is int
    assert Config(enable_prefix_caching=np.bool_(False)).enable_prefix_caching is False


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 3
    with pytest.raises((AttributeError, TypeError)):
        config.pagesize = 3


def test_resolve_completes_and_keeps() -> None:
    config = Config(device="cpu", max_batch_size=3000).resolve()
    assert config.device == "cpu"
    assert config.threads >= 1
    assert isinstance(config.seed, int)
    # A step must have room for a token of every running sequence.
    assert config.max_num_batched_tokens == 3000
    assert Config(device="cpu").resolve().max_num_batched_tokens == 2048
    assert config.resolve() == config
    given = Config(device="cpu", threads=1, seed=5, max_num_batched_tokens=7)
    assert given.resolve() == given
    assert Config(device="cpu").resolve().seed != Config(device="cpu").resolve().seed
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert Config().resolve().device == expected


def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        Config(device="cuda:99").resolve()


def test_configuring_does_not_import_torch() -> None:
    code = (
        "import sys; from pagedllm import Config, SamplingParams; "
        "Config(device='cpu').resolve(); SamplingParams(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
