"""Every error that a client can get, in TGI's form and in OpenAI's.

Owner: the server integration. Invariants: one line that says what is wrong and, where that
helps, what to change; nothing of a request's own text beyond a short quotation.
"""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pagedllm import (
    EngineClosedError,
    EngineError,
    PagedLLMError,
    RequestTooLongError,
    ValidationError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    424: "generation_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


TOOLS = re.compile(r"tools|tool_choice")
"""Parameters that are wrong with TGI's ``tool_error``.

Its ``missing_template_variable`` never comes: a template without tools has them described."""
LONGEST = 500
"""Characters of a message."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        kind: TGI's ``error_type``.
        message: one line for a person.
        param: the field at fault, if there is one.
        code: OpenAI's ``code``, for programs.
        headers: more headers, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def native(self) -> dict[str, Any]:
        """The body on TGI's routes."""
        return {"error": self.message, "error_type": self.kind}

    def openai(self) -> dict[str, Any]:
        """The body on OpenAI's routes."""
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body(self, path: str) -> dict[str, Any]:
        """The body for the route at ``path``."""
        return self.openai() if path.startswith("/v1/") else self.native()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Something in the request cannot be served as it stands."""
    kind = "tool_error" if TOOLS.fullmatch(re.split(r"\W", param or "")[0]) else "validation"
    return ApiError(422, kind, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """A field that this server does not act on, and so does not accept."""
    return invalid(f"{param}: {why}", param, "unsupported_parameter")


def timed_out(seconds: float, tokens: int) -> ApiError:
    """The request's own deadline passed."""
    return ApiError(
        424,
        "generation",
        f"the request's timeout of {seconds:g} s passed after {tokens} tokens; "
        f"raise timeout or ask for fewer tokens",
        param="timeout",
        code="timeout",
    )


def overloaded(message: str, retry_after: int) -> ApiError:
    """Too much to do already."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, "overloaded", message, code="overloaded", headers=headers)


def headers_too_large(limit: int) -> ApiError:
    """More than a request's line and headers may have."""
    return ApiError(
        431,
        "validation",
        f"the request's line and headers are larger than {limit} bytes",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


def not_ready(reason: str) -> ApiError:
    """The engine cannot serve now."""
    return ApiError(503, "healthcheck", reason, code="not_ready", headers={"Retry-After": "5"})


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Turn exceptions of pagedllm into answers with the route's own names."""
    try:
        yield
    except PagedLLMError as error:
        raise from_engine(error, names) from error


def from_engine(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Turn one of pagedllm's own exceptions into an answer.

    Args:
        error: what the engine raised.
        names: the route's names for the engine's parameters, where they differ; an empty one
            for what it does not have.
    """
    if isinstance(error, ApiError):
        return error
    text = " ".join(str(error).split())
    if len(text) > LONGEST:  # it quotes what it is about
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    if isinstance(error, ValidationError):
        param = _own_name(error, names or {})
        code = None
        if isinstance(error, RequestTooLongError):
            code = "context_length_exceeded"
            text = text.replace(", or to None for", ", or to null for")
        wrong = invalid(_in_own_words(text, error.parameter, names or {}), param, code)
        raised = error.parameter == "messages" and error.__cause__ is not None
        if raised or error.parameter == "chat_template":
            wrong.kind = "template_error"
            wrong.message = re.sub(
                r"pass (another )?chat_template=", r"start with \1--chat-template", wrong.message
            )
        return wrong
    if isinstance(error, EngineClosedError):
        return not_ready(text)
    if isinstance(error, EngineError):
        return ApiError(424, "generation", text, code="engine_error")
    return ApiError(500, "incomplete_generation", f"{type(error).__name__}: {text}")


def _own_name(error: ValidationError, names: Mapping[str, str]) -> str | None:
    param = error.parameter
    return param if param is None else names.get(param) or param


def _in_own_words(text: str, param: str | None, names: Mapping[str, str]) -> str:
    """Write the route's names for the engine's, and the field's own where it is not named."""
    for name, own in names.items():
        if "_" in name:  # the others are ordinary words, too
            if not own:
                text = text.replace(f", set {name}", "")
            text = re.sub(rf"\b{name}\b", own or name, text)
    own = names.get(param or "", "")
    if not own or re.search(rf"\b{re.escape(own)}\b", text):
        return text
    return f"{own}: {text.removeprefix(f'{param}: ')}"


def from_pydantic(errors: Sequence[Mapping[str, Any]], known: Iterable[str] = ()) -> ApiError:
    """Say what the first thing is that is wrong with a body.

    Args:
        errors: pydantic's list, which holds more than one where a union was tried.
        known: names of fields, to suggest the nearest for an unknown one.
    """
    # A union reports each of its members; the error that lies deepest is of the one meant.
    first = max(errors, key=lambda error: len(error["loc"]))
    place = [str(part) for part in first["loc"] if part != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "not JSON")
        return invalid(f"the body is not valid JSON: {reason}", code="invalid_json")
    name = _path(place)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(place[-1], list(known), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return unsupported(shortened(name), f"there is no such field here{hint}")
    if kind in ("model_attributes_type", "dict_type", "model_type") and not place:
        return invalid("the body must be a JSON object", code="invalid_json")
    if kind == "missing":
        return invalid(f"{name} is missing", name)
    message = str(first["msg"]).removeprefix("Value error, ")
    return invalid(f"{shortened(name)}: {message[:1].lower()}{message[1:]}", name)


def _path(place: Sequence[str]) -> str:
    """``messages[0].content`` from pydantic's location, without its names of union members."""
    text = ""
    for part in place:
        if part.isdigit():
            text += f"[{part}]"
        elif part[:1].islower() and "[" not in part and part not in ("str", "int", "float"):
            text += f".{part}" if text else part
    return text or "body"


def shortened(text: str, limit: int = 80) -> str:
    """Quote no more than this much of what a client sent, and nothing unprintable."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return shown.encode("ascii", "backslashreplace").decode()
