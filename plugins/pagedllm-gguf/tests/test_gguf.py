"""GGUF files: the right tokens, converted once whatever happens meanwhile, clear refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import pytest
import torch

import pagedllm
from pagedllm import (
    LLM,
    Config,
    ConfigError,
    ModelNotFoundError,
    SamplingParams,
    UnsupportedModelError,
)
from pagedllm_gguf import convert

Q = gguf.GGMLQuantizationType
PROMPTS = [[40, 41, 42, 50, 60, 3, 9], [5], [99, 98, 97, 10, 20]]
CONVERT = """
import sys
from pathlib import Path
from pagedllm_gguf.convert import converted_folder
print(converted_folder(Path(sys.argv[1]), "auto", sys.argv[2]))
"""


def start_conversion(path, root):
    command = [sys.executable, "-c", CONVERT, str(path), str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def oracle(path, max_tokens):
    """Greedy tokens of transformers on the same file, unpacked, in fp32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=2,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.F16, Q.F32], ids=lambda kind: kind.name)
def test_tokens_are_those_of_transformers_on_the_same_file(write_gguf, tmp_path, kind):
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(str(path), dtype="float32", download_dir=str(tmp_path)) as llm:
        outputs = llm.generate(PROMPTS, greedy)
    assert [list(output.outputs[0].token_ids) for output in outputs] == oracle(path, 24)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Q.Q4_0, "bfloat16"), (Q.F16, "float16"), (Q.F32, "float32")]
)
def test_auto_keeps_what_the_file_has(write_gguf, tmp_path, kind, dtype):
    from safetensors import safe_open

    path = write_gguf(tmp_path / "tiny.gguf", kind)
    folder = convert.converted_folder(path, "auto", str(tmp_path))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        stored = weights.get_tensor("model.layers.1.mlp.down_proj.weight")
    assert stored.dtype == getattr(torch, dtype)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    exact = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(stored, exact.to(stored.dtype))


def test_text_and_chat_come_from_the_file(q8, tmp_path):
    with LLM(str(q8), download_dir=str(tmp_path)) as llm:
        assert llm.tokenizer.decode(llm.tokenize("hello")).endswith("hello")
        ids = llm.apply_chat_template([{"role": "user", "content": "hell"}])
        assert llm.tokenizer.decode(ids) == "<|im_start|>hell<|im_end|>"
        assert 2 in llm.model_info.eos_token_ids


def test_a_file_without_a_tokenizer_takes_token_ids(write_gguf, tmp_path, caplog):
    path = write_gguf(tmp_path / "bare.gguf", tokenizer=False)
    with LLM(str(path), download_dir=str(tmp_path), skip_tokenizer_init=True) as llm:
        [output] = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=3))
        assert len(output.outputs[0].token_ids) == 3
    assert "bare.gguf has no tokenizer" in caplog.text


# -- conversions ------------------------------------------------------------------------------


def test_a_file_that_changes_is_converted_anew(q8, tmp_path):
    path = shutil.copy(q8, tmp_path / "a.gguf")
    config = Config(download_dir=str(tmp_path / "cache"))
    first = pagedllm.resolve_model(str(path), config=config)
    assert pagedllm.resolve_model(str(path), config=config).path == first.path
    assert first.path.parent == tmp_path / "cache" / "gguf"
    os.utime(path, ns=(1, 1))
    assert pagedllm.resolve_model(str(path), config=config).path != first.path


def test_xdg_cache_home_is_where_it_goes_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert convert.cache_root() == tmp_path / "pagedllm" / "gguf"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert convert.cache_root() == Path.home() / ".cache" / "pagedllm" / "gguf"


def test_two_processes_convert_once(q8, tmp_path):
    processes = [start_conversion(q8, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    notices = "".join(stderr for _, stderr in outputs)
    assert notices.count("Converting tiny-q8_0.gguf to bfloat16") == 1
    assert "it/s" not in notices  # no progress bars where no terminal is
    assert not list((tmp_path / "gguf").glob(".*partial-*"))


def test_a_killed_conversion_leaves_nothing_broken(q8, tmp_path):
    victim = start_conversion(q8, tmp_path)
    while not list((tmp_path / "gguf").glob(".*partial-*")):
        assert victim.poll() is None
        time.sleep(0.01)
    victim.kill()
    victim.communicate()
    (left,) = (tmp_path / "gguf").glob(".*partial-*")
    (left / "model.safetensors").write_bytes(b"half a fi")
    folder = convert.converted_folder(q8, "auto", str(tmp_path))
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert not list((tmp_path / "gguf").glob(".*partial-*"))
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o644


# -- what is refused --------------------------------------------------------------------------


def refused(path, tmp_path, kind=ModelNotFoundError):
    with pytest.raises(kind) as caught:
        pagedllm.resolve_model(str(path), config=Config(download_dir=str(tmp_path / "cache")))
    assert "\n" not in str(caught.value)
    root = tmp_path / "cache" / "gguf"
    left = [p.name for p in root.iterdir() if "lock" not in p.name] if root.is_dir() else []
    assert left == []
    return str(caught.value)


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "picture.gguf"
    path.write_bytes(b"\x89PNG and so on")
    assert "is no GGUF file: it begins with b'\\x89PNG'" in refused(path, tmp_path)


@pytest.mark.parametrize("part", [0.001, 0.2, 0.9, 0.999])
def test_a_file_that_ends_too_early(q8, tmp_path, part):
    whole = q8.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: max(4, int(len(whole) * part))])
    assert "is damaged or ends too early" in refused(path, tmp_path)


def test_an_architecture_that_transformers_does_not_know(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "nonesuch")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refused(path, tmp_path, UnsupportedModelError)
    assert "'nonesuch'" in message
    assert "odd.gguf" in message


def test_one_of_several_parts(write_gguf, tmp_path):
    path = write_gguf(tmp_path / "part.gguf", more=[("split.count", 3)])
    assert "one of 3 parts" in refused(path, tmp_path, UnsupportedModelError)


def test_a_disk_without_room(q8, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = refused(q8, tmp_path)
    assert "MB are free" in message
    assert "download_dir" in message


def test_a_folder_that_cannot_be_made(q8, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFoundError, match="download_dir"):
        convert.converted_folder(q8, "auto", str(tmp_path / "file"))


def test_names_that_lead_nowhere(q8):
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        pagedllm.resolve_model("not/there/x.gguf")
    with pytest.raises(ConfigError, match="revision"):
        pagedllm.resolve_model(str(q8), "main")


# -- the Hub --------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as one file needs."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    content = b""
    asked: ClassVar[list] = []

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        self.asked.append(self.path)
        code = {"gated": "GatedRepo", "gone": "RepoNotFound"}.get(self.path.split("/")[1])
        found = self.path.endswith("/tiny-q8_0.gguf")
        if code is None and "/v9/" in self.path:
            code = "RevisionNotFound"
        if code is None and not found:
            code = "EntryNotFound"
        if code is not None:
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.send_header("ETag", '"' + "a" * 64 + '"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if body:
            self.wfile.write(self.content)


FROM_HUB = """
import sys
import pagedllm
config = pagedllm.Config(download_dir=sys.argv[2])
try:
    found = pagedllm.resolve_model(sys.argv[1], sys.argv[3] or None, config)
    print(found.path, found.revision)
except pagedllm.PagedLLMError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def hub(q8):
    Hub.content = q8.read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def from_hub(hub, name, folder, revision="", offline=False):
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "1" if offline else "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FROM_HUB, name, str(folder), revision]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout.strip()


def test_a_file_on_the_hub_is_downloaded_once(hub, tmp_path):
    name = "org/tiny:tiny-q8_0.gguf"
    assert "HF_HUB_OFFLINE is set" in from_hub(hub, name, tmp_path, offline=True)
    first = from_hub(hub, name, tmp_path)
    folder, revision = first.split()
    assert (Path(folder) / "model.safetensors").is_file()
    assert revision == f"{Hub.COMMIT}-{convert.CONVERTER_VERSION}"
    Hub.asked.clear()
    assert from_hub(hub, name, tmp_path, offline=True) == first
    assert Hub.asked == []


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("gated/tiny:tiny-q8_0.gguf", "", "is gated. Accept its terms"),
        ("gone/tiny:tiny-q8_0.gguf", "", "The Hub has no 'gone/tiny'"),
        ("org/tiny:tiny-q8_0.gguf", "v9", "no revision 'v9'"),
        ("org/tiny:other.gguf", "", "has no file 'other.gguf'"),
    ],
)
def test_what_the_hub_refuses_is_said(hub, tmp_path, name, revision, message):
    said = from_hub(hub, name, tmp_path, revision)
    assert said.startswith("ModelNotFoundError")
    assert message in said
    assert "\n" not in said
