"""The Hub as a source of models, against a local server that speaks its API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import preloaded

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "merges.txt": b"m",
    "tokenizer.model": b"t",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the weights once more",
    "pytorch_model.bin": b"pickled",
    "modeling_custom.py": b"code",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "README.md": b"readme",
}
SHARDS = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    ).encode(),
    "model-1-of-2.safetensors": b"1",
    "model-2-of-2.safetensors": b"2",
}
REPOSITORIES = {
    "org/whole": FILES,
    "org/shards": SHARDS,
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickled"},
    "org/gguf": {"model.gguf": b"g"},
    "org/empty": {},
    "org/adapter": {"adapter_model.safetensors": b"a"},
}
ERRORS = {
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/forbidden": (403, ""),
    "org/busy": (429, ""),
    "org/down": (503, ""),
}


SIZES = {}
"""What the Hub says of a file's size, where that is not its length."""


def lfs(body):
    return {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1} | {
        "oid": hashlib.sha256(body).hexdigest()
    }


class Hub(BaseHTTPRequestHandler):
    """The four routes that huggingface_hub asks: a model, its tree, a file's head and body."""

    def do_GET(self):
        self.server.asked.append(self.path)
        time.sleep(self.server.delay)
        path = unquote(urlparse(self.path).path)
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if self.server.refuses:
            return self.refuse(503, "")
        if repository in ERRORS:
            return self.refuse(*ERRORS[repository])
        if repository not in REPOSITORIES:
            return self.refuse(404, "RepoNotFound")
        files = REPOSITORIES[repository]
        if rest[:1] in (["revision"], ["tree"], ["resolve"]) and rest[1] not in (SHA, "main", "v1"):
            return self.refuse(404, "RevisionNotFound")
        if api and rest[:1] == ["tree"]:
            return self.answer_json(
                [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(body),
                        "oid": hashlib.sha1(body).hexdigest(),
                        **({"lfs": lfs(body)} if name.endswith(".safetensors") else {}),
                    }
                    for name, body in files.items()
                ]
            )
        if api:
            siblings = [
                {
                    "rfilename": name,
                    "size": SIZES.get(name, len(body)),
                    "blobId": hashlib.sha1(body).hexdigest(),
                    **({"lfs": lfs(body)} if name.endswith(".safetensors") else {}),
                }
                for name, body in files.items()
            ]
            return self.answer_json({"id": repository, "sha": SHA, "siblings": siblings})
        body = files["/".join(rest[2:])]
        name = rest[-1]
        tag = (
            lfs(body)["sha256"] if name.endswith(".safetensors") else hashlib.sha1(body).hexdigest()
        )
        if name in self.server.damaged:
            body = bytes(len(body))
        return self.answer_file(body, tag)

    def answer_file(self, body, tag):
        """A file, or the part of it that is asked for; cut short as often as ``cuts`` says."""
        start = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        part = body[start:]
        headers = {"ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if self.command == "GET" and self.server.busy > 0:
            self.server.busy -= 1
            self.refuse(429, "")
            return
        if self.command == "GET":
            self.server.bodies.append(self.path)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if self.command == "GET" and len(part) > 1000 and self.server.cuts > 0:
            self.server.cuts -= 1
            self.answer(part, headers, 206 if start else 200, sent=len(part) // 2)
            self.close_connection = True
            return
        if self.command == "GET" and len(part) > 1000 and self.server.stalls:
            self.answer(part, headers, sent=len(part) // 2)
            self.rfile.read(1)  # until the other side hangs up
            return
        self.answer(part, headers, 206 if start else 200)

    do_HEAD = do_GET

    def answer_json(self, value):
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, code):
        self.answer(b"", {"X-Error-Code": code} if code else {}, status)

    def answer(self, body, headers, status=200, sent=None):
        self.send_response(status)
        for name, value in {"X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """Call ``resolve`` on names in a fresh process, since the Hub's address is read once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.delay, server.damaged, server.cuts = [], 0.0, set(), 0
    server.refuses, server.stalls, server.busy, server.bodies = False, False, 0, []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    class Client:
        asked = server.asked
        state = server
        cache = tmp_path / "cache"

        def resolve(self, *calls, offline=False, **settings):
            run = self.begin(*calls, offline=offline, **settings)
            out, self.stderr = run.communicate(timeout=120)
            assert run.returncode == 0, self.stderr
            return [json.loads(line) for line in out.splitlines()]

        def begin(self, *calls, offline=False, **settings):
            """Start what ``resolve`` waits for."""
            code = """
                import json, sys
                import pagedllm
                calls, settings = json.loads(sys.argv[1])
                config = pagedllm.Config(**settings)
                for call in calls:
                    try:
                        model = pagedllm.resolve_model(*call, config=config)
                        print(json.dumps([str(model.path), model.revision, model.name]))
                    except pagedllm.PagedLLMError as error:
                        print(json.dumps(str(error)))
            """
            calls = [[call] if isinstance(call, str) else call for call in calls]
            environment = os.environ | {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_OFFLINE": str(int(offline)),
                "HF_HUB_DISABLE_XET": "1",
            }
            arguments = json.dumps([calls, {"download_dir": str(self.cache), **settings}])
            return subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code), arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    yield Client()
    server.shutdown()
    thread.join()
    server.server_close()


def names_in(folder):
    return {str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file()}


def test_safetensors_configuration_and_tokenizer_are_all_that_is_downloaded(hub):
    [[path, revision, name]] = hub.resolve("org/whole")
    assert names_in(path) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
        "tokenizer.model",
        "model.safetensors",
    }
    assert (revision, name) == (SHA, "org/whole")
    assert Path(path).is_relative_to(hub.cache)
    assert not any("pytorch_model.bin" in asked for asked in hub.asked)
    assert "\r" not in hub.stderr  # no progress bars where no terminal is


def test_code_comes_only_when_it_is_trusted_and_its_commit_is_named(hub):
    [message] = hub.resolve(["org/whole", "v1"], trust_remote_code=True)
    assert f"revision='{SHA}'" in message
    assert "'v1' stands for" in message
    assert not hub.cache.exists()
    [[path, *_]] = hub.resolve(["org/whole", SHA], trust_remote_code=True)
    assert "modeling_custom.py" in names_in(path)
    [[path, *_]] = hub.resolve("org/shards", trust_remote_code=True)  # has no code
    assert "config.json" in names_in(path)


def test_code_in_the_cache_is_not_trusted_without_its_commit_either(hub):
    hub.resolve(["org/whole", SHA], trust_remote_code=True)
    hub.resolve("org/whole")  # so that the cache knows what main stands for
    for offline in (True, False):
        if not offline:
            hub.state.refuses = True
        [message] = hub.resolve("org/whole", offline=offline, trust_remote_code=True)
        assert f"revision='{SHA}'" in message
        [[path, *_]] = hub.resolve(["org/whole", SHA], offline=offline, trust_remote_code=True)
        assert "modeling_custom.py" in names_in(path)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("model.safetensors", 10**14, "100000.0 GB of weights and cpu has"),
        ("tokenizer.json", 10**15, "takes 1000000.0 GB to download"),
    ],
)
def test_what_cannot_fit_is_refused_before_any_download(hub, monkeypatch, name, size, expected):
    monkeypatch.setitem(SIZES, name, size)
    [message] = hub.resolve("org/whole", device="cpu")
    assert expected in message
    assert not any("/resolve/" in asked for asked in hub.asked)


def test_weights_with_another_hash_are_deleted_and_come_again(hub):
    hub.state.damaged.add("model.safetensors")
    [message] = hub.resolve("org/whole")
    assert "'model.safetensors'" in message
    assert "SHA-256" in message
    assert not list(hub.cache.rglob("*.safetensors"))
    hub.state.damaged.clear()
    [[path, *_]] = hub.resolve("org/whole")
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_interrupted_download_goes_on_where_it_stopped(hub, monkeypatch):
    body = bytes(range(256)) * 4000
    monkeypatch.setitem(FILES, "model.safetensors", body)
    hub.state.cuts = 2
    [[path, *_]] = hub.resolve("org/whole")
    assert hub.state.cuts == 0
    assert (Path(path) / "model.safetensors").read_bytes() == body


def test_what_a_process_that_was_killed_had_whole_is_not_fetched_again(hub, monkeypatch):
    body = bytes(range(256)) * 4000
    monkeypatch.setitem(SHARDS, "model-2-of-2.safetensors", body)
    hub.state.stalls = True
    with hub.begin("org/shards") as process:
        deadline = time.monotonic() + 100
        while not list(hub.cache.rglob("model-1-*")) or not list(hub.cache.rglob("*.incomplete")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    hub.state.stalls = False
    hub.state.bodies.clear()
    [[path, *_]] = hub.resolve("org/shards")
    assert (Path(path) / "model-2-of-2.safetensors").read_bytes() == body
    assert not any("model-1" in asked for asked in hub.state.bodies)
    assert any("model-2" in asked for asked in hub.state.bodies)


def test_hub_that_is_busy_during_a_download_is_asked_again(hub, monkeypatch):
    hub.state.busy = 2
    [[path, *_]] = hub.resolve("org/whole")
    assert hub.state.busy == 0
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_slow_hub_and_nothing_in_the_cache(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    hub.state.delay = 3
    [message] = hub.resolve("org/whole")
    assert "'org/whole' is not in the cache and the Hub cannot be reached" in message


def test_slow_hub_is_given_up_for_the_copy_in_the_cache(hub, monkeypatch):
    [[path, *_]] = hub.resolve("org/whole")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    hub.state.delay = 3
    started = time.monotonic()
    assert hub.resolve("org/whole") == [[path, SHA, "org/whole"]]
    assert time.monotonic() - started < 60
    assert "cannot be reached" in hub.stderr


def test_each_failure_says_what_to_do(hub):
    expected = {
        "org/missing": ["no model 'org/missing'", "Check the name"],
        "org/private": ["no model 'org/private'", "hf auth login"],
        "org/gated": ["gated", "Accept its terms", "hf auth login"],
        "org/forbidden": ["refuses access", "hf auth login"],
        "org/busy": ["429", "Wait"],
        "org/down": ["503", "Try again later"],
        "org/pickled": ["pytorch_model.bin", "pickled", "safetensors"],
        "org/gguf": ["no safetensors", "GGUF", "plugin"],
        "org/empty": ["no safetensors"],
        "org/adapter": ["config.json"],
        "org/in valid": ["no name for the Hub"],
    }
    messages = hub.resolve(*expected, ["org/whole", "no-such-branch"])
    for name, message in zip([*expected, "revision"], messages, strict=True):
        assert isinstance(message, str), name
        assert "\n" not in message
        for part in expected.get(name, ["no revision 'no-such-branch'"]):
            assert part in message, (name, message)
    assert "Traceback" not in hub.stderr


def test_what_is_in_the_cache_works_offline_and_when_the_hub_is_down(hub, monkeypatch):
    [[path, *_]] = hub.resolve("org/whole")
    before = len(hub.asked)
    assert hub.resolve("org/whole", offline=True) == [[path, SHA, "org/whole"]]
    assert len(hub.asked) == before
    assert hub.stderr == ""
    monkeypatch.setitem(ERRORS, "org/whole", (503, ""))
    assert hub.resolve("org/whole") == [[path, SHA, "org/whole"]]
    assert "Using the copy of org/whole in the cache. The Hub answered 503" in hub.stderr


def test_offline_and_not_in_the_cache(hub):
    [message] = hub.resolve("org/whole", offline=True)
    assert "HF_HUB_OFFLINE" in message
    assert "hf download org/whole" in message
    assert hub.asked == []


def test_snapshot_without_all_its_shards_is_refused_by_name(hub):
    [[path, *_]] = hub.resolve("org/shards")
    assert {"model-1-of-2.safetensors", "model-2-of-2.safetensors"} < names_in(path)
    (Path(path) / "model-2-of-2.safetensors").unlink()
    [message] = hub.resolve("org/shards", offline=True)
    assert "hf download org/shards" in message
    [[again, *_]] = hub.resolve("org/shards")  # a network mends it
    assert "model-2-of-2.safetensors" in names_in(again)


def test_the_page_about_it_runs(smollm2_path, tmp_path):
    page = Path(__file__).parents[2] / "docs/models.md"
    [snippet] = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    run = preloaded.run(["-c", snippet], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "LlamaForCausalLM"
