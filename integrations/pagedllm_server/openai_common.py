"""What OpenAI's routes share: parameters, usage, log probabilities, model names.

Owner: the server integration. Invariant: a field is refused by name or has an effect.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pagedllm import SamplingParams
from pagedllm_server.errors import ApiError, invalid, shortened, unsupported
from pagedllm_server.service import Limits
from pagedllm_server.tokens import top

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pagedllm import RequestOutput
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import Generating, ResponseFormat, Sampling
    from pagedllm_server.schemas_tgi import Strict
    from pagedllm_server.tokens import Token

logger = logging.getLogger(__name__)

COMPATIBLE = ("dummy", "tgi", "default")
"""Model names that TGI's clients send, whatever the model is."""

_DIRECT = (
    "top_p",
    "seed",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
)


def names(body: Sampling) -> dict[str, str]:
    """The engine's names for a request's parts, and those that this request gave them."""
    found = dict(body.NAMES)
    for name, own in body.INSTEAD.items():
        if getattr(body, own) is not None:
            found[name] = own
    return found


def check_fields(server: Server, body: Sampling) -> None:
    """Refuse fields that ask for what there is not, and models that are not here."""
    for name, harmless in body.ONLY.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            accepted = f" (accepted: {', '.join(map(repr, harmless))})" if harmless else ""
            raise unsupported(name, f"this server does not support it; leave it out{accepted}")
    check_model(server, body.model)
    note(body)


def note(body: Strict) -> None:
    """Log what a client says of whom it asks for."""
    noted = {
        name: shortened(value)
        for name in ("user", "safety_identifier", "prompt_cache_key")
        if isinstance(value := getattr(body, name, None), str)
    }
    if noted:
        logger.info("request with %s", ", ".join(f"{k}={v}" for k, v in noted.items()))


def check_model(server: Server, name: str | None) -> None:
    """Refuse a model's name that is none of the served ones, where those were given."""
    names = server.service.options.served_model_name
    if not names or name is None or name in names or name in COMPATIBLE:
        return
    if name == server.service.config.model:
        return
    raise ApiError(
        404,
        "validation",
        f"there is no model {shortened(name)!r} here; ask for {' or '.join(names)}",
        param="model",
        code="model_not_found",
    )


def sampling_params(
    server: Server,
    body: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_output: Any = None,
    **more: Any,
) -> SamplingParams:
    """Translate the shared fields.

    Raises:
        ApiError: the server's limits do not allow them.
        ValidationError: the engine does not.
    """
    values: dict[str, Any] = {
        name: value for name in _DIRECT if (value := getattr(body, name, None)) is not None
    }
    temperature = 1.0 if body.temperature is None else body.temperature
    values |= more
    if isinstance(body, _generating()):
        values["stop"] = body.stops()
        if body.structured_outputs is not None:
            if structured_output is not None:
                raise invalid("structured_outputs and response_format: give one", "response_format")
            structured_output = body.structured_outputs
    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_output=structured_output,
        **values,
    )
    server.service.check_params(params, names(body))
    return params


def _generating() -> type[Generating]:
    from pagedllm_server.schemas_openai import Generating

    return Generating


def limits(body: Sampling) -> Limits:
    """When a request is wanted."""
    return Limits(
        timeout=body.timeout,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        ttft_target=body.ttft_target,
        e2e_target=body.e2e_target,
    )


def structure(form: ResponseFormat | None) -> dict[str, Any] | None:
    """A response format as the engine's ``structured_output``.

    Takes OpenAI's ``json_object`` and ``json_schema``, and TGI's ``json``, ``regex`` and the
    form into which its client rewrites a schema, ``{"type": "json_object", "value": ...}``.
    """
    if form is None or form.type == "text":
        return None
    if form.type == "json_schema":
        given = form.json_schema if form.json_schema is not None else form.value
        if not isinstance(given, dict):
            raise invalid("response_format.json_schema is missing", "response_format")
        return {"json_schema": given.get("schema", given)}
    if form.json_schema is not None:
        raise invalid(
            "response_format.json_schema: goes with type 'json_schema'", "response_format"
        )
    if form.type in ("json_object", "json"):
        return {"json_object": True} if form.value is None else {"json_schema": form.value}
    if not isinstance(form.value, str) or not form.value:
        raise invalid(f"response_format.value: the {form.type} as text", "response_format")
    return {form.type: form.value}


def usage(outputs: Iterable[RequestOutput], reasoning: int | None = None) -> dict[str, Any]:
    """Tokens of prompts and answers."""
    found = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in found)
    completion = sum(len(a.token_ids) for output in found for a in output.outputs)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in found)
        },
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def chat_logprobs(tokens: Sequence[Token], number: int) -> dict[str, Any]:
    """Tokens in the form of a chat's ``logprobs``."""

    def entry(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = []
    for token in tokens:
        own = token.likeliest.get(token.id)
        text = own.decoded_token if own is not None else None
        alternatives = [entry(o.decoded_token or "", o.logprob) for _, o in top(token, number)]
        content.append({**entry(text or token.text, token.logprob), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token], number: int, offset: int) -> dict[str, Any]:
    """Tokens in the form of a completion's ``logprobs``."""
    alternatives: list[Mapping[str, float | None]] = [
        {o.decoded_token or "": _finite(o.logprob) for _, o in top(token, number)}
        for token in tokens
    ]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": alternatives if number else None,
        "text_offset": [offset + token.start for token in tokens],
    }


def _finite(logprob: float | None) -> float | None:
    """JSON has no minus infinity; OpenAI writes -9999 for it."""
    return logprob if logprob is None or logprob > -9999.0 else -9999.0
