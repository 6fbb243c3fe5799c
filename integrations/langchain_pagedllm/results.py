"""The engine's outputs in LangChain's terms.

Owner: the LangChain integration. Invariant: nothing the engine reports is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedllm import CompletionOutput, RequestOutput


def usage_metadata(output: RequestOutput) -> UsageMetadata:
    """What a request used; with ``n`` answers, all of them together."""
    inputs = len(output.prompt_token_ids)
    outputs = sum(len(answer.token_ids) for answer in output.outputs)
    return UsageMetadata(
        input_tokens=inputs,
        output_tokens=outputs,
        total_tokens=inputs + outputs,
        input_token_details=InputTokenDetails(cache_read=output.num_cached_tokens),
    )


def token_usage(outputs: Iterable[RequestOutput]) -> dict[str, int]:
    """What requests used, as LLMs report it."""
    found = [usage_metadata(output) for output in outputs]
    usage = {
        "prompt_tokens": sum(each["input_tokens"] for each in found),
        "completion_tokens": sum(each["output_tokens"] for each in found),
        "cached_tokens": sum(each["input_token_details"].get("cache_read", 0) for each in found),
    }
    return usage | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}


def logprobs_content(answer: CompletionOutput, last: int | None = None) -> list[dict[str, Any]]:
    """Log probabilities as OpenAI's API has them, of all tokens or the last few."""
    tokens = list(answer.token_ids)
    entries = list(answer.logprobs or ())
    start = len(tokens) - last if last is not None else 0
    found = []
    for token, entry in zip(tokens[start:], entries[start:], strict=True):
        own = entry[token]
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        found.append(
            {
                "token": own.decoded_token,
                "token_id": token,
                "logprob": own.logprob,
                "top_logprobs": [
                    {"token": other.decoded_token, "token_id": i, "logprob": other.logprob}
                    for i, other in ranked
                ],
            }
        )
    return found
