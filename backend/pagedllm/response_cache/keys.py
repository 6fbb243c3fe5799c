"""What makes two requests equal: everything that their answers depend on, as one key.

Owner: :mod:`pagedllm.response_cache`. Invariants: equal keys mean equal answers, up to the
rounding of a batch's arithmetic; a key says nothing of the prompt, which is hashed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from typing import TYPE_CHECKING, Any

import pagedllm

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from pagedllm.config import Config
    from pagedllm.hookspecs import ResolvedModel
    from pagedllm.types import ModelInfo, Request

_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Suffixes of what a model's behaviour can depend on in its folder."""


def is_cacheable(request: Request) -> bool:
    """Whether this request's answer would be the same another time.

    Unseeded draws are not, and what logits processors do is not known; the intake's own, which
    stands for ``structured_output``, follows from that.
    """
    params = request.params
    num_own = 0 if params.structured_output is None else 1
    repeatable = params.greedy or params.seed is not None
    return repeatable and len(params.logits_processors) == num_own and not request.driven


def engine_identity(
    config: Config,
    resolved: ResolvedModel,
    info: ModelInfo,
    tokenizer: PreTrainedTokenizerBase | None,
) -> bytes:
    """Digest what an engine's answers depend on beside the request.

    A model whose revision is not known is identified by its files' contents, which takes
    about as long as reading them.
    """
    model = [resolved.name, resolved.revision]
    if resolved.revision is None:
        model = ["files", fingerprint(resolved.path)]
    words = "none" if tokenizer is None else "own"
    if tokenizer is not None and config.tokenizer is not None:
        words = _tokenizer_digest(tokenizer)
    facts = [
        pagedllm.__version__,
        model,
        info.dtype,
        config.kv_cache_dtype,
        config.quantization,
        list(config.quantization_skip),
        info.attention_backend,
        info.tier,
        info.device.partition(":")[0],
        words,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def request_key(identity: bytes, request: Request, max_tokens: int) -> str:
    """Return a request's key for an engine of this identity.

    Args:
        identity: of :func:`engine_identity`.
        request: one that :func:`is_cacheable`.
        max_tokens: what it may generate on this engine.
    """
    params = {
        field.name: getattr(request.params, field.name)
        for field in dataclasses.fields(request.params)
        if field.name != "logits_processors"
    }
    facts = [
        params,
        max_tokens,
        sorted(request.eos_token_ids),
        request.bad_words_ids,
        request.cache_salt,
    ]
    digest = hashlib.sha256(identity)
    text = json.dumps(facts, sort_keys=True, default=_plain).encode()
    digest.update(len(text).to_bytes(8, "little") + text)
    digest.update(array("q", request.prompt_token_ids).tobytes())
    return f"{identity.hex()[:12]}:{digest.hexdigest()}"


def _plain(value: Any) -> Any:
    """Structured output as plain data; anything else that is not plain is a TypeError."""
    return dataclasses.asdict(value)


def fingerprint(folder: Path) -> str:
    """Digest the contents of a model folder's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(path.name.encode() + b"\0" + content)
    return digest.hexdigest()


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    text = (
        json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
        if backend is None
        else backend.to_str()
    )
    return hashlib.sha256(text.encode()).hexdigest()
