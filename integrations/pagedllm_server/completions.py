"""``/v1/completions``: prompts to continue, as text.

Owner: the server integration. Invariant: choices are numbered prompt by prompt,
``index = prompt * n + answer``, streamed or not.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from pagedllm import PagedLLMError
from pagedllm_server.errors import ApiError, from_engine, invalid, naming
from pagedllm_server.logs import new_id
from pagedllm_server.openai_common import (
    check_fields,
    completion_logprobs,
    limits,
    names,
    sampling_params,
    structure,
    usage,
)
from pagedllm_server.sse import DONE, EventStream, all_or_none, event, while_client_waits
from pagedllm_server.timing import Timing
from pagedllm_server.tokens import new_text, new_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.requests import Request

    from pagedllm import CompletionOutput, RequestOutput, SamplingParams
    from pagedllm_server.app import Server
    from pagedllm_server.schemas_openai import CompletionRequest
    from pagedllm_server.service import Run

Prompts = list[tuple[str, list[int]]]
"""Of each prompt its text, empty where token ids were given and no echo asked for, and ids."""

WAITING_EVENTS = 64
"""Events of several prompts that may wait for a slow reader before their producers do."""


async def complete(server: Server, request: Request, body: CompletionRequest) -> Response:
    """Answer a completion request."""
    with naming(names(body)):
        return await _complete(server, request, body)


async def _complete(server: Server, request: Request, body: CompletionRequest) -> Response:
    check_fields(server, body)
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise invalid(f"best_of: {best_of} is less than n, {n}", "best_of")
    timing = Timing(server.device)
    if body.stream and best_of > n:
        raise invalid("best_of: a stream cannot be of the best answers", "best_of")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only with stream", "stream_options")
    ranked = 0 if best_of > n else None
    params = sampling_params(
        server,
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs if body.logprobs is not None else ranked,
        structured_output=structure(body.response_format),
        n=best_of,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else None,
    )
    prompts = await _prompts(server, body)
    timing.characters = sum(len(text) for text, _ in prompts)
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": server.service.model_name,
    }
    async with AsyncExitStack() as stack:
        stack.enter_context(server.service.admit(len(prompts)))
        runs: list[Run] = []
        for text, tokens in prompts:
            runs.append(await server.service.start(tokens, params, limits(body), len(text)))
            stack.push_async_callback(runs[-1].aclose)
        timing.checked()
        if body.stream:
            pieces = _chunks(server, body, prompts, runs, head)
            return EventStream(pieces, stack.pop_all().aclose, timing.of_stream())
        outputs = await while_client_waits(request, all_or_none(run.finished() for run in runs))
    choices = []
    for number, output in enumerate(outputs):
        answers = list(output.outputs)
        if best_of > n:
            answers.sort(key=lambda a: a.cumulative_logprob or 0.0, reverse=True)
        for position, answer in enumerate(answers[:n]):
            choice = _choice(server, body, prompts[number], output, answer, params)
            choices.append({"index": number * n + position, **choice})
    content = {**head, "choices": choices, "usage": usage(outputs)}
    return JSONResponse(content, headers=timing.of_answer(outputs))


async def _prompts(server: Server, body: CompletionRequest) -> Prompts:
    given: Any = body.prompt
    many = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not many:
        raise invalid("prompt: the list is empty; give at least one prompt", "prompt")
    found: Prompts = []
    for each in many:
        if isinstance(each, str):
            tokens = await server.service.tokenize(each)
            found.append((each, tokens))
        else:
            if body.echo and all(0 <= t < server.vocab_size for t in each):
                found.append((server.decode(each), each))
            else:
                found.append(("", each))
        server.service.check_prompt(len(found[-1][1]), "prompt")
    return found


def _choice(
    server: Server,
    body: CompletionRequest,
    prompt: tuple[str, list[int]],
    output: RequestOutput,
    answer: CompletionOutput,
    params: SamplingParams,
) -> dict[str, Any]:
    echoed = prompt[0] if body.echo else ""
    logprobs = None
    if body.logprobs is not None:
        tokens = list(new_tokens(answer, 0, server.special_ids))
        logprobs = completion_logprobs(tokens, body.logprobs, len(echoed))
        if body.echo:
            logprobs = _with_prompt(server, output, logprobs, body.logprobs)
    return {
        "text": echoed + answer.text,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _with_prompt(
    server: Server, output: RequestOutput, answer: dict[str, Any], number: int
) -> dict[str, Any]:
    """Put the prompt's tokens before the answer's."""
    texts, values, tops, offsets, offset = [], [], [], [], 0
    known = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids, known, strict=True):
        text = server.decode([token])
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        values.append(entry[token].logprob if entry is not None else None)
        likeliest = sorted(entry.values(), key=lambda o: o.rank)[:number] if entry else []
        tops.append({o.decoded_token or "": o.logprob for o in likeliest} if entry else None)
    return {
        "tokens": texts + answer["tokens"],
        "token_logprobs": values + answer["token_logprobs"],
        "top_logprobs": tops + answer["top_logprobs"] if number else None,
        "text_offset": offsets + answer["text_offset"],
    }


async def _chunks(
    server: Server,
    body: CompletionRequest,
    prompts: Prompts,
    runs: Sequence[Run],
    head: dict[str, Any],
) -> AsyncIterator[bytes]:
    n = body.n or 1
    counted = body.stream_options is not None and body.stream_options.include_usage
    always = body.stream_options is not None and body.stream_options.continuous_usage_stats
    last: dict[int, RequestOutput] = {}
    seen: dict[tuple[int, int], int] = {}
    try:
        async for number, output in _merged(runs):
            last[number] = output
            for answer in output.outputs:
                key = (number, answer.index)
                first, done = key not in seen, seen.get(key, 0)
                if not first and done == len(answer.token_ids) and not answer.finished:
                    continue
                if seen.get(key) == -1:
                    continue  # finished earlier
                tokens = list(new_tokens(answer, done, server.special_ids))
                seen[key] = -1 if answer.finished else len(answer.token_ids)
                echoed = prompts[number][0] if body.echo and first else ""
                text = echoed + new_text(answer, done)
                logprobs = None
                if body.logprobs is not None:
                    shift = len(prompts[number][0]) if body.echo else 0
                    logprobs = completion_logprobs(tokens, body.logprobs, shift)
                choice = {
                    "index": number * n + answer.index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                }
                chunk: dict[str, Any] = {**head, "choices": [choice]}
                if counted or always:
                    chunk["usage"] = usage(last.values()) if always else None
                yield event(chunk)
        if counted:
            yield event({**head, "choices": [], "usage": usage(last.values())})
    except (PagedLLMError, ApiError) as error:
        yield event(from_engine(error, names(body)).openai())
    yield DONE


async def _merged(runs: Sequence[Run]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of several runs as they come, with the number of each one's run."""
    if len(runs) == 1:
        async for output in runs[0].outputs():
            yield 0, output
        return
    waiting: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(
        WAITING_EVENTS
    )

    async def pump(number: int, run: Run) -> None:
        try:
            async for output in run.outputs():
                await waiting.put((number, output))
            await waiting.put((number, None))
        except (PagedLLMError, ApiError) as error:
            await waiting.put((number, error))

    tasks = [asyncio.ensure_future(pump(number, run)) for number, run in enumerate(runs)]
    try:
        running = len(tasks)
        while running:
            number, found = await waiting.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield number, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
