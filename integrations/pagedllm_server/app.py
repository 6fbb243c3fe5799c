"""The application: routes, and what they share.

Owner: the server integration. Invariants: an error of any kind leaves in the form of the
route it happened on; routes keep no state of their own.
"""

from __future__ import annotations

import copy
import threading
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import pagedllm
from pagedllm import PagedLLMError
from pagedllm_server import timing
from pagedllm_server.errors import ApiError, from_engine, from_pydantic, invalid
from pagedllm_server.gate import Gate
from pagedllm_server.routes import add_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from pagedllm import Config
    from pagedllm_server.metrics import Metrics
    from pagedllm_server.options import ServerOptions
    from pagedllm_server.service import Service


class Server:
    """What routes need of the model, and the service that runs requests."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service = service
        self.metrics = metrics
        self.version = pagedllm.__version__
        self.created = int(time.time())
        self._special: frozenset[int] | None = None
        self._copy: Any = None
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """Changes when the same request may give another answer."""
        model = self.service.loaded.model_info
        return f"pagedllm-{self.version}-{model.tier}-{model.dtype}"

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises ApiError (503) while there is no model."""
        return self.service.loaded.tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        if self._special is None:
            known = self.tokenizer.added_tokens_decoder
            self._special = frozenset(i for i, token in known.items() if token.special)
        return self._special

    @property
    def vocab_size(self) -> int:
        """Token ids end before this number."""
        return self.service.loaded.model_info.vocab_size

    @property
    def device(self) -> str:
        """Where the model runs."""
        return self.service.loaded.model_info.device

    def offsets(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """A text's token ids, and where in it each begins and ends; any thread may call it."""
        with self._lock:
            if self._copy is None:
                # The engine's own may be in use, and two threads cannot share one.
                self._copy = copy.deepcopy(self.tokenizer)
            found = self._copy(
                text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
            )
        return found["input_ids"], found["offset_mapping"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def create_app(service: Service, metrics: Metrics, options: ServerOptions) -> FastAPI:
    """Build the application.

    Args:
        service: the engine, ready or not.
        metrics: where everything is counted.
        options: the server's settings.

    Raises:
        ConfigError: an API key file cannot be read, or a plugin's routes cannot be added.
    """
    app = FastAPI(
        title="pagedllm",
        version=pagedllm.__version__,
        description="Text generation in TGI's protocol and in OpenAI's.",
        root_path=options.root_path,
        docs_url=None,  # its scripts come from elsewhere, and this server fetches nothing
        redoc_url=None,
    )
    server = Server(service, metrics)
    app.state.server = server
    add_routes(app, server)
    if options.ui:
        _add_page(app)
    if options.routes:
        _add_plugin_routes(app, server, options.routes)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RecursionError, _too_deep)
    for kind in (ApiError, PagedLLMError):
        app.add_exception_handler(kind, _known)
    app.add_middleware(
        Gate,
        keys=options.keys(),
        payload_limit=options.payload_limit,
        client_timeout=options.client_timeout,
        access_log=options.access_log,
        metrics=metrics,
    )
    if options.cors_allow_origin:  # the last one added is the outermost: the gate's errors, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_allow_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *timing.NAMES],
        )
    return app


def _add_page(app: FastAPI) -> None:
    folder = resources.files("pagedllm_server") / "ui"

    @app.get("/ui", include_in_schema=False)
    async def page() -> Response:
        return RedirectResponse("ui/")

    app.mount("/ui", StaticFiles(directory=str(folder), html=True), name="ui")


def _add_plugin_routes(app: FastAPI, server: Server, names: Sequence[str]) -> None:
    from pagedllm import ConfigError, plugin_registry

    config: Config = server.service.config
    known = plugin_registry("pagedllm_server_routes", config)
    for name in names:
        if name not in known:
            found = ", ".join(known) or "none is installed"
            raise ConfigError(f"routes: no plugin has routes named '{name}'; there are: {found}")
        known[name].load()(app, server.service)


def _reply(request: Request, error: ApiError) -> JSONResponse:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return JSONResponse(error.body(path), error.status, headers=error.headers)


async def _known(request: Request, error: Exception) -> Response:
    return _reply(request, from_engine(error))


async def _too_deep(request: Request, error: Exception) -> Response:
    """Whatever it was that walked through a body: a template, a schema, an encoder."""
    del error
    return _reply(request, invalid("something in the body is nested too deeply"))


async def _invalid(request: Request, error: Exception) -> Response:
    found: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else ()
    content_type = request.headers.get("content-type", "")
    if "json" not in content_type and request.method == "POST":
        sent = content_type.split(";")[0][:60] or "none"
        wrong = ApiError(
            415,
            "validation",
            f"the body's content type must be application/json; sent: {sent}",
            code="unsupported_media_type",
        )
        return _reply(request, wrong)
    return _reply(request, from_pydantic(found, _fields(request)))


def _fields(request: Request) -> list[str]:
    """Names of the fields that the route's body has."""
    from pydantic import BaseModel

    route = request.scope.get("route")
    field = getattr(route, "body_field", None)
    kind = getattr(getattr(field, "field_info", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        names = list(kind.model_fields)
        for inner in kind.model_fields.values():
            for each in getattr(inner.annotation, "__args__", ()):
                if isinstance(each, type) and issubclass(each, BaseModel):
                    names += each.model_fields
        return names
    return []


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = str(error.detail) if isinstance(error, HTTPException) else "unexpected error"
    headers = getattr(error, "headers", None)
    if status == 400:  # FastAPI could not make JSON of the body, and says no more
        detail, status = "the body is not JSON in valid UTF-8, or is nested too deeply", 422
    elif status == 404:
        detail = "there is no such route here; /openapi.json lists them"
    code = {408: "timeout", 413: "payload_too_large", 422: "invalid_json"}.get(status)
    return _reply(request, ApiError(status, "validation", detail, code=code, headers=headers))
