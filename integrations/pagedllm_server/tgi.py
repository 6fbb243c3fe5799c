"""TGI's routes: ``/``, ``/generate``, ``/generate_stream``, ``/tokenize`` and their like.

Owner: the server integration. Invariants: field names, event forms and headers are those
that TGI's clients read; ``generated_text`` ends with the stop string, as TGI's does.
"""

from __future__ import annotations

import json
import math
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pagedllm import PagedLLMError, SamplingParams
from pagedllm.structured import StructuredOutput
from pagedllm_server.errors import ApiError, from_engine, invalid, naming, unsupported
from pagedllm_server.service import Limits
from pagedllm_server.sse import EventStream, event, while_client_waits
from pagedllm_server.timing import Timing
from pagedllm_server.tokens import new_tokens, top

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from pagedllm import CompletionOutput, RequestOutput
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_tgi import GenerateParameters, GenerateRequest, GrammarSpec
    from pagedllm_server.service import Run

NAMES = {
    "max_tokens": "max_new_tokens",
    "prompt": "inputs",
    "n": "best_of",
    "logprobs": "top_n_tokens",
    "structured_output": "grammar",
    "truncate_prompt_tokens": "truncate",
}
"""The engine's names for a request's parts, and TGI's."""


async def generate(server: Server, request: Request, body: GenerateRequest) -> Response:
    """Answer a prompt at once, with TGI's headers."""
    with naming(NAMES):
        return await _generate(server, request, body)


async def _generate(server: Server, request: Request, body: GenerateRequest) -> Response:
    timing = _timing(server, body)
    parameters = _parameters(body)
    params = sampling_params(server, parameters, stream=False)
    tokens = await _prompt(server, body, parameters)
    with server.service.admit():
        limits = _limits(parameters)
        run = await server.service.start(tokens, params, limits, len(body.inputs))
        timing.checked()
        output = await while_client_waits(request, run.finished())
    full = parameters.return_full_text or False
    # TGI's measure of best: log probability per token.
    answers = sorted(output.outputs, key=_mean_logprob, reverse=True)
    content: dict[str, Any] = {"generated_text": _text(body, answers[0], full)}
    if parameters.details or parameters.decoder_input_details:
        content["details"] = _details(server, output, answers[0], params, parameters)
        if len(answers) > 1:
            content["details"]["best_of_sequences"] = [
                _sequence(server, body, output, each, params, parameters) for each in answers[1:]
            ]
    return JSONResponse(content, headers=timing.of_answer([output]))


def _timing(server: Server, body: GenerateRequest) -> Timing:
    timing = Timing(server.device)
    timing.characters = len(body.inputs)
    return timing


async def generate_stream(server: Server, request: Request, body: GenerateRequest) -> Response:
    """Answer a prompt token by token."""
    del request  # the stream itself watches whether its client is there
    with naming(NAMES):
        return await _generate_stream(server, body)


async def _generate_stream(server: Server, body: GenerateRequest) -> Response:
    parameters = _parameters(body)
    params = sampling_params(server, parameters, stream=True)
    tokens = await _prompt(server, body, parameters)
    headers = _timing(server, body).of_stream()
    async with AsyncExitStack() as stack:
        stack.enter_context(server.service.admit())
        limits = _limits(parameters)
        run = await server.service.start(tokens, params, limits, len(body.inputs))
        stack.push_async_callback(run.aclose)
        pieces = _events(server, body, parameters, params, run)
        return EventStream(pieces, stack.pop_all().aclose, headers)


async def _events(
    server: Server,
    body: GenerateRequest,
    parameters: GenerateParameters,
    params: SamplingParams,
    run: Run,
) -> AsyncIterator[bytes]:
    seen = 0
    try:
        async for output in run.outputs():
            [answer] = output.outputs
            found = list(new_tokens(answer, seen, server.special_ids))
            seen += len(found)
            for position, token in enumerate(found, start=seen - len(found) + 1):
                last = answer.finished and position == len(answer.token_ids)
                payload: dict[str, Any] = {"index": position, "token": token.native()}
                if parameters.top_n_tokens:
                    payload["top_tokens"] = _top_tokens(server, token, parameters.top_n_tokens)
                payload["generated_text"] = None
                payload["details"] = None
                if last:
                    full = parameters.return_full_text or False
                    payload["generated_text"] = _text(body, answer, full)
                    payload["details"] = {
                        "finish_reason": finish_reason(answer),
                        "generated_tokens": len(answer.token_ids),
                        "seed": params.seed if not params.greedy else None,
                        "input_length": len(output.prompt_token_ids),
                    }
                yield event(payload)
    except (PagedLLMError, ApiError) as error:
        yield event(from_engine(error, NAMES).native())


def _limits(given: GenerateParameters) -> Limits:
    return Limits(timeout=given.timeout, ttft_target=given.ttft_target, e2e_target=given.e2e_target)


def _parameters(body: GenerateRequest) -> GenerateParameters:
    if body.parameters is None:
        return type(body)(inputs=body.inputs).parameters  # type: ignore[return-value]
    return body.parameters


async def _prompt(server: Server, body: GenerateRequest, given: GenerateParameters) -> list[int]:
    if not body.inputs:
        raise invalid("inputs: the prompt is empty; give at least one character", "inputs")
    tokens = await server.service.tokenize(body.inputs)
    if given.truncate is not None:
        tokens = tokens[-given.truncate :]
    server.service.check_prompt(len(tokens), "inputs")
    return tokens


def sampling_params(server: Server, given: GenerateParameters, *, stream: bool) -> SamplingParams:
    """Translate TGI's parameters, and check what goes together.

    Raises:
        ApiError: they contradict each other, or are not supported.
    """
    if given.watermark:
        raise unsupported("watermark", "answers are not watermarked here; leave it out")
    if given.adapter_id is not None:
        raise unsupported("adapter_id", "there are no adapters here; leave it out")
    warped = (given.temperature not in (None, 1.0), given.top_k, given.top_p, given.typical_p)
    sampling = given.do_sample or any(warped)
    best_of = given.best_of or 1
    if best_of > 1:
        if given.seed is not None:
            raise invalid(
                "best_of: several answers cannot share one seed; leave one out", "best_of"
            )
        if not sampling:
            raise invalid("best_of: above 1 needs sampling; set do_sample to true", "best_of")
        if stream:
            raise invalid("best_of: cannot be above 1 in a stream", "best_of")
    if stream and given.decoder_input_details:
        raise invalid(
            "decoder_input_details: a stream does not report the prompt's tokens",
            "decoder_input_details",
        )
    seed = given.seed
    if sampling and seed is None:
        seed = secrets.randbits(63)  # reported, so that the answer can be had again
    top_n = given.top_n_tokens or 0
    params = SamplingParams(
        n=best_of,
        temperature=(given.temperature or 1.0) if sampling else 0.0,
        top_p=given.top_p if given.top_p is not None else 1.0,
        top_k=given.top_k or 0,
        typical_p=given.typical_p if given.typical_p is not None else 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=seed,
        stop=given.stop,
        max_tokens=given.max_new_tokens,
        logprobs=top_n if stream or given.details or best_of > 1 or top_n else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
        include_stop_str_in_output=True,
        skip_special_tokens=True,
        structured_output=grammar(given.grammar),
    )
    server.service.check_params(params, NAMES)
    return params


def grammar(spec: GrammarSpec | None) -> StructuredOutput | None:
    """TGI's grammar as the engine's ``structured_output``."""
    if spec is None:
        return None
    if spec.type == "json_object" and spec.value is None:
        return StructuredOutput(json_object=True)
    if spec.value is None:
        raise invalid(f"grammar.value is missing; it is what the {spec.type} must match", "grammar")
    if spec.type == "regex":
        return StructuredOutput(regex=spec.value)
    value = spec.value
    if spec.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]  # {"name": ..., "schema": ...}
    return StructuredOutput(json_schema=value)


def finish_reason(answer: CompletionOutput) -> str:
    """TGI's word for why an answer ended."""
    if answer.finish_reason == "length":
        return "length"
    return "eos_token" if answer.stop_reason is None else "stop_sequence"


def _mean_logprob(answer: CompletionOutput) -> float:
    if answer.cumulative_logprob is None or not answer.token_ids:
        return -math.inf
    return answer.cumulative_logprob / len(answer.token_ids)


def _text(body: GenerateRequest, answer: CompletionOutput, full: bool) -> str:
    return body.inputs + answer.text if full else answer.text


def _top_tokens(server: Server, token: Any, number: int) -> list[dict[str, Any]]:
    return [
        {
            "id": other,
            "text": entry.decoded_token or "",
            "logprob": entry.logprob,
            "special": other in server.special_ids,
        }
        for other, entry in top(token, number)
    ]


def _details(
    server: Server,
    output: RequestOutput,
    answer: CompletionOutput,
    params: SamplingParams,
    given: GenerateParameters,
) -> dict[str, Any]:
    tokens = list(new_tokens(answer, 0, server.special_ids))
    details: dict[str, Any] = {
        "finish_reason": finish_reason(answer),
        "generated_tokens": len(answer.token_ids),
        "seed": params.seed if not params.greedy else None,
        "prefill": _prefill(server, output) if given.decoder_input_details else [],
        "tokens": [token.native() for token in tokens] if params.logprobs is not None else [],
    }
    if given.top_n_tokens:
        details["top_tokens"] = [_top_tokens(server, token, given.top_n_tokens) for token in tokens]
    return details


def _sequence(
    server: Server,
    body: GenerateRequest,
    output: RequestOutput,
    answer: CompletionOutput,
    params: SamplingParams,
    given: GenerateParameters,
) -> dict[str, Any]:
    text = _text(body, answer, given.return_full_text or False)
    return {"generated_text": text, **_details(server, output, answer, params, given)}


def _prefill(server: Server, output: RequestOutput) -> list[dict[str, Any]]:
    found = []
    logprobs = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids, logprobs, strict=True):
        logprob = entry[token].logprob if entry is not None and token in entry else None
        found.append({"id": token, "text": server.decode([token]), "logprob": logprob})
    return found


def token_list(server: Server, text: str, *, special: bool) -> list[dict[str, Any]]:
    """A text's tokens with where each begins and ends, as ``/tokenize`` gives them."""
    ids, places = server.offsets(text, special=special)
    return [
        {"id": token, "text": text[start:stop], "start": start, "stop": stop}
        for token, (start, stop) in zip(ids, places, strict=True)
    ]


def info(server: Server) -> dict[str, Any]:
    """What ``/info`` says."""
    llm, options = server.service.loaded, server.service.options
    model = llm.model_info
    return {
        "model_id": llm.config.model,
        "model_sha": llm.revision,
        "model_dtype": model.dtype,
        "model_device_type": model.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": options.max_concurrent_requests,
        "max_best_of": options.max_best_of,
        "max_stop_sequences": options.max_stop_sequences,
        "max_input_tokens": options.max_input_tokens or model.max_model_len - 1,
        "max_total_tokens": model.max_model_len,
        "validation_workers": 1,
        "max_client_batch_size": options.max_client_batch_size,
        "router": "pagedllm",
        "version": server.version,
        "sha": None,
        "docker_label": None,
        "architecture": model.architecture,
        "tier": model.tier,
        "attention_backend": model.attention_backend,
        "cache_tokens": model.num_pages * model.page_size,
    }


async def read_one(response: Response) -> Any:
    """The content of a response that is not a stream."""
    return json.loads(bytes(response.body))
