"""``/v1/embeddings``: texts as vectors, of the model's own final states.

Owner: the server integration. Invariants: the order of the vectors is that of the inputs;
however many inputs there are, no more of them are in the engine at a time than a request
may have prompts.
"""

from __future__ import annotations

import base64
import struct
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pagedllm import EmbeddingOutput, PagedLLMError, RequestOutput
from pagedllm_server.errors import from_engine, invalid, shortened
from pagedllm_server.openai_common import check_model, note
from pagedllm_server.service import Limits
from pagedllm_server.sse import all_or_none, while_client_waits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import EmbeddingsRequest

MOST_INPUTS = 2048
"""OpenAI's limit, which clients cut their lists by."""


async def embed(server: Server, request: Request, body: EmbeddingsRequest) -> Response:
    """Answer an embeddings request."""
    check_model(server, body.model)
    note(body)
    given: Any = body.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise invalid(f"input: from 1 to {MOST_INPUTS} texts, not {len(inputs)}", "input")
    service = server.service
    width = min(len(inputs), service.options.max_client_batch_size)
    try:
        with service.admit(width):
            outputs = await while_client_waits(request, _all(server, body, inputs, width))
        made = [EmbeddingOutput.of(output, dimensions=body.dimensions) for output in outputs]
    except PagedLLMError as error:
        raise from_engine(error, {"prompt": "input"}) from error
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(each.embedding, body)}
        for index, each in enumerate(made)
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "model": service.model_name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _all(
    server: Server, body: EmbeddingsRequest, inputs: Sequence[str | list[int]], width: int
) -> list[RequestOutput]:
    service = server.service
    pooling = body.pooling or service.options.embedding_pooling
    timeout = body.timeout if body.timeout is not None else service.options.timeout
    started = time.monotonic()
    found: dict[int, RequestOutput] = {}
    left = iter(enumerate(inputs))

    async def work() -> None:
        for index, each in left:
            try:
                tokens = await service.tokenize(each) if isinstance(each, str) else each
                service.check_prompt(len(tokens), "input")
                left_s = None  # of the whole request's time
                if timeout is not None:
                    left_s = max(0.001, timeout - (time.monotonic() - started))
                limits = Limits(timeout=left_s, cache_salt=body.cache_salt or "")
                run = await service.start(tokens, None, limits, 0, pooling)
                found[index] = await run.finished()
            except PagedLLMError as error:
                if len(inputs) == 1:
                    raise
                wrong = from_engine(error, {"prompt": "input"})
                wrong.message = f"input[{index}]: {shortened(wrong.message, 400)}"
                raise wrong from error

    await all_or_none(work() for _ in range(width))
    return [found[index] for index in range(len(inputs))]


def _written(vector: Sequence[float], body: EmbeddingsRequest) -> list[float] | str:
    if body.encoding_format == "base64":  # of float32, little-endian
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return list(vector)
