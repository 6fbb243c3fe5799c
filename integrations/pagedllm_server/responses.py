"""``/v1/responses``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedllm_server.errors import unsupported

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import ResponsesRequest


async def respond(server: Server, request: Request, body: ResponsesRequest) -> Response:
    """Refuse."""
    raise unsupported("input", "not yet")
