"""Which path leads to what.

Owner: the server integration. Invariant: nothing here but paths, and what OpenAPI says.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of these functions.
import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from pagedllm_server import chat, completions, embeddings, responses, tgi
from pagedllm_server.errors import ApiError, from_pydantic, invalid, unsupported
from pagedllm_server.schemas_openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ResponsesRequest,
)
from pagedllm_server.schemas_tgi import (
    CompatGenerateRequest,
    GenerateRequest,
    TokenizeRequest,
    VertexRequest,
)

if TYPE_CHECKING:
    from pagedllm_server.app import Server

NATIVE_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"description": "no valid API key"},
    408: {"description": "the body did not come in time"},
    413: {"description": "the body is too large"},
    415: {"description": "the body is not JSON"},
    422: {"description": "something in the request is wrong"},
    424: {"description": "generating failed"},
    431: {"description": "the headers are too large"},
    429: {"description": "too much to do; see Retry-After"},
    503: {"description": "the model is not ready"},
}


MOST_CELLS = 4096
"""Of the page's map of the cache."""


def add_routes(app: FastAPI, server: "Server") -> None:
    """Add every route."""
    _add_probes(app, server)
    _add_native(app, server)
    _add_openai(app, server)


def _add_probes(app: FastAPI, server: "Server") -> None:
    async def health() -> Response:
        """Whether requests can be served; 503 with the reason while not."""
        problem = server.service.problem
        if problem is not None:
            body = {"error": problem, "error_type": "healthcheck"}
            return JSONResponse(body, 503, headers={"Retry-After": "5"})
        return JSONResponse({"status": "ok"})

    unready: dict[int | str, dict[str, Any]] = {503: {"description": "not yet, or no longer"}}
    for path in ("/", "/health", "/ping"):
        app.get(path, tags=["probes"], responses=unready)(health)

    @app.get("/metrics", tags=["probes"])
    async def metrics() -> Response:
        """Prometheus metrics."""
        server.metrics.stats = await server.service.stats()
        server.metrics.restarts = server.service.restarts
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/stats", tags=["probes"], responses=unready)
    async def stats() -> Response:
        """The engine at this moment, as JSON; the page's live view reads it."""
        return JSONResponse(await _stats(server))

    @app.get("/stats/pages", tags=["probes"], responses=unready)
    async def pages() -> Response:
        """The state of each page of the cache, for the page's map."""
        return JSONResponse(page_map(await server.service.page_states()))

    @app.get("/info", tags=["tgi"], responses=unready)
    async def info() -> Response:
        """The model and the server's limits."""
        return JSONResponse(tgi.info(server))


async def _stats(server: "Server") -> dict[str, Any]:
    found = await server.service.stats()
    body: dict[str, Any] = {
        "problem": server.service.problem,
        "restarts": server.service.restarts,
        "model": server.service.model_name,
        **server.metrics.recent(),
    }
    if found is None:
        return body
    cache = found.cache
    return body | {
        "running": found.running,
        "waiting": found.waiting,
        "preemptions": found.preemptions,
        "generated_tokens": found.generated_tokens,
        "computed_tokens": found.computed_tokens,
        "steps": found.steps,
        "pages": {
            "used": cache.pages_used,
            "cached": cache.pages_cached,
            "free": cache.pages_free,
            "size": cache.page_size,
        },
        "fragmentation_percent": cache.internal_fragmentation,
        "prefix_queries": cache.prefix_queries,
        "prefix_hits": cache.prefix_hits,
    }


def page_map(states: bytes) -> dict[str, Any]:
    """A digit per page: 0 free, 1 cached, 2 used by one sequence, 3 by several.

    With more pages than ``MOST_CELLS`` a digit is of several in a row, the largest of theirs.
    """
    each = max(1, -(-len(states) // MOST_CELLS))
    cells = (max(states[start : start + each]) for start in range(0, len(states), each))
    return {"pages": len(states), "pages_per_cell": each, "cells": "".join(map(str, cells))}


def _add_native(app: FastAPI, server: "Server") -> None:
    options: Any = {"tags": ["tgi"], "responses": NATIVE_ERRORS}

    @app.post("/", **options)
    async def compat(body: CompatGenerateRequest, request: Request) -> Response:
        """Generate, or stream when `stream` says so; answers are in a list of one."""
        return await _compat(server, request, body)

    @app.post("/generate", **options)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Generate, and answer when all is there."""
        return await tgi.generate(server, request, body)

    @app.post("/generate_stream", **options)
    async def generate_stream(body: GenerateRequest, request: Request) -> Response:
        """Generate, and send each token as an event."""
        return await tgi.generate_stream(server, request, body)

    @app.post("/invocations", **options)
    async def invocations(body: dict[str, Any], request: Request) -> Response:
        """Generate as SageMaker asks: a generate, chat or completion request."""
        return await _any_request(server, request, body)

    @app.post("/vertex", **options)
    async def vertex(body: VertexRequest, request: Request) -> Response:
        """Generate as Vertex AI asks: several such requests."""
        if body.parameters:
            raise unsupported("parameters", "give each instance its own")
        if any(isinstance(each, dict) and each.get("stream") for each in body.instances):
            raise unsupported("stream", "several instances cannot be streamed")
        if len(body.instances) > server.service.options.max_client_batch_size:
            raise invalid("instances: more than max_client_batch_size", "instances")
        found = [await _any_request(server, request, each) for each in body.instances]
        return JSONResponse({"predictions": [await tgi.read_one(each) for each in found]})

    @app.post("/tokenize", **options)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Cut a text into tokens."""
        if not body.inputs:
            raise invalid("inputs: the text is empty", "inputs")
        if any("\ud800" <= character <= "\udfff" for character in body.inputs):
            raise invalid("inputs: the text is no valid Unicode; it has half a pair", "inputs")
        special = body.add_special_tokens
        work = asyncio.to_thread(tgi.token_list, server, body.inputs, special=special)
        return JSONResponse(await work)

    @app.post("/chat_tokenize", **options)
    async def chat_tokenize(body: ChatRequest) -> Response:
        """Format a conversation, and cut it into tokens."""
        text = await chat.templated_text(server, body)
        work = asyncio.to_thread(tgi.token_list, server, text, special=False)
        return JSONResponse({"tokenize_response": await work, "templated_text": text})


async def _compat(server: "Server", request: Request, body: CompatGenerateRequest) -> Response:
    if body.stream:
        return await tgi.generate_stream(server, request, body)
    answer = await tgi.generate(server, request, body)
    headers = {k: v for k, v in answer.headers.items() if k.startswith("x-")}
    return JSONResponse([await tgi.read_one(answer)], headers=headers)


async def _any_request(server: "Server", request: Request, body: dict[str, Any]) -> Response:
    """Tell three kinds of request apart by the one field that each must have."""
    kinds: Any = {
        "inputs": (CompatGenerateRequest, _compat),
        "messages": (ChatRequest, chat.answer),
        "prompt": (CompletionRequest, completions.complete),
    }
    for field, (kind, handle) in kinds.items():
        if field in body:
            try:
                parsed = kind.model_validate(body)
            except ValidationError as error:
                raise from_pydantic(error.errors(include_url=False), kind.model_fields) from None
            response: Response = await handle(server, request, parsed)
            return response
    raise invalid("the body needs one of 'inputs', 'messages' and 'prompt'")


def _add_openai(app: FastAPI, server: "Server") -> None:
    options: Any = {"tags": ["openai"], "responses": NATIVE_ERRORS}

    @app.get("/v1/models", tags=["openai"])
    async def models() -> Response:
        """The names of the model."""
        return JSONResponse({"object": "list", "data": _models(server)})

    @app.get("/v1/models/{name:path}", tags=["openai"])
    async def model(name: str) -> Response:
        """One of them."""
        for each in _models(server):
            if each["id"] == name:
                return JSONResponse(each)
        raise ApiError(404, "validation", "there is no such model", code="model_not_found")

    @app.post("/v1/chat/completions", **options)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat.answer(server, request, body)

    @app.post("/v1/completions", **options)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await completions.complete(server, request, body)

    @app.post("/v1/responses", **options)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        return await responses.respond(server, request, body)

    @app.post("/v1/embeddings", **options)
    async def embed(body: EmbeddingsRequest, request: Request) -> Response:
        """Turn texts into vectors of the model's final states."""
        return await embeddings.embed(server, request, body)


def _models(server: "Server") -> list[dict[str, Any]]:
    service = server.service
    names = service.options.served_model_name or (service.config.model,)
    length = service.loaded.model_info.max_model_len if service.problem is None else None
    return [
        {
            "id": name,
            "object": "model",
            "created": server.created,
            "owned_by": "pagedllm",
            "root": service.config.model,
            "max_model_len": length,
        }
        for name in names
    ]
