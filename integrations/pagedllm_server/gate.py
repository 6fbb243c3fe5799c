"""What happens to every request before a route sees it, and after.

Owner: the server integration; a plain ASGI middleware, so that streams pass unbuffered.
Invariants: keys are compared in constant time and never logged; no more of a body is read
than the limit; an exception that no route expected becomes a 500 in the route's own form.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from pagedllm_server.connection import MOST_HEAD, is_late
from pagedllm_server.errors import ApiError, headers_too_large
from pagedllm_server.logs import Keys, new_id, request_id
from pagedllm_server.metrics import Asked, asked
from pagedllm_server.sse import ClientGoneError
from pagedllm_server.tracing import Origin, origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pagedllm_server.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ping", "/metrics")
GENERATING = (
    *("/", "/generate", "/generate_stream", "/invocations", "/vertex"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
)
"""Paths whose requests TGI's counters count."""
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Request ids, keys, the payload's limit, the access log."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        payload_limit: int,
        client_timeout: float,
        access_log: bool,
        metrics: Metrics,
    ) -> None:
        self.app = app
        self.metrics = metrics
        # Digests have one length, so comparing them takes one time, whatever was sent.
        self.keys = [_digest(key) for key in keys]
        self._hide = Keys(keys).hide
        self.payload_limit = payload_limit
        self.client_timeout = client_timeout
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        identity = given if _SAFE_ID.fullmatch(given) else new_id("req")
        token = request_id.set(identity)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        origin.set(Origin(path, _carrier(headers)))
        asked.set(request := Asked())
        started, status = time.perf_counter(), 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", identity.encode("latin-1"))
                message["headers"] = [*message.get("headers", ()), own]
            await send(message)

        try:
            self._check(path, headers, scope)
            await self.app(scope, self._bounded(receive, scope), reply)
        except ClientGoneError:
            status = 499  # as nginx logs it; nobody is there to read an answer
        except ApiError as error:
            await refuse(error, path, reply)
        except Exception as error:
            logger.exception("unexpected error in %s", self._shown(path))
            if not status:
                internal = ApiError(
                    500,
                    "incomplete_generation",
                    f"{type(error).__name__} in the server; see its log",
                )
                await refuse(internal, path, reply)
        finally:
            generating = scope["method"] == "POST" and path in GENERATING
            if generating and status >= 400 and status != 401 and not request.runs:
                self.metrics.turned_away(status)  # a run counts itself
            if self.access_log and (path not in OPEN_PATHS or status >= 400):
                self._log(scope, path, status, time.perf_counter() - started)
            request_id.reset(token)

    def _check(self, path: str, headers: dict[bytes, bytes], scope: Scope) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path", b"")) + len(scope["query_string"]) > MOST_HEAD:
            raise headers_too_large(MOST_HEAD)
        if headers.get(b"upgrade", b"").lower() == b"websocket":
            raise ApiError(400, "validation", "there are no WebSockets here; ask over HTTP")
        # The page's own files hold nothing secret, and a browser cannot send a key for them.
        open_path = path in OPEN_PATHS or path == "/ui" or path.startswith("/ui/")
        if self.keys and not open_path and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            found = _digest(key.strip())
            known = [hmac.compare_digest(found, other) for other in self.keys]
            if scheme.lower() != b"bearer" or not any(known):
                raise ApiError(
                    401,
                    "unauthorized",
                    "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.payload_limit:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            "validation",
            f"the body is larger than this server's payload_limit, {self.payload_limit} bytes",
            code="payload_too_large",
        )

    def _bounded(self, receive: Receive, scope: Scope) -> Receive:
        """Count a body whose length was not announced, and give up one that does not come."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request":
                if message.get("more_body") and is_late(scope):
                    raise HTTPException(
                        408,
                        f"the body was not there within client_timeout, {self.client_timeout:g} s",
                        {"Connection": "close"},
                    )
                size += len(message.get("body", b""))
                if size > self.payload_limit:
                    raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _shown(self, path: str) -> str:
        """A path as one line of a log, whatever the client put into it."""
        return ascii(self._hide(path)[:200])[1:-1]  # a part of a key would not be known as one

    def _log(self, scope: Scope, path: str, status: int, seconds: float) -> None:
        client = scope.get("client")
        shown = self._shown(path)
        extra = {
            "method": scope["method"],
            "path": shown,
            "status": status,
            "seconds": round(seconds, 6),
            "client": client[0] if client else "-",
        }
        logger.info("%s %s %d %.3f s", scope["method"], shown, status, seconds, extra=extra)


def _carrier(headers: dict[bytes, bytes]) -> dict[str, str]:
    names = ("traceparent", "tracestate")
    found = ((name, headers.get(name.encode(), b"").decode("latin-1")) for name in names)
    return {name: value for name, value in found if value}


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


async def refuse(error: ApiError, path: str, send: Send) -> None:
    """Send an error as the whole answer."""
    body = json.dumps(error.body(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.lower().encode(), v.encode("latin-1")) for k, v in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
