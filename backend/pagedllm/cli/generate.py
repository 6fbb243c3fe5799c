"""``pagedllm generate``: prompts in, continuations out.

Owner: the command line. Invariant: standard output carries answers only.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedllm.cli.common import (
    UsageError,
    add_sampling_flags,
    load_llm,
    note,
    read_file,
    sampling_from,
)
from pagedllm.config import Config
from pagedllm.errors import EngineError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pagedllm.llm import LLM
    from pagedllm.outputs import CompletionOutput, RequestOutput
    from pagedllm.sampling_params import SamplingParams

DEFAULTS = {"max_tokens": 256}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="none: all of standard input is one prompt"
    )
    parser.add_argument(
        "--file", metavar="FILE", help="a prompt per line instead; - is standard input"
    )
    parser.add_argument("--stream", action="store_true", help="show the text as it comes")
    parser.add_argument(
        "--json", action="store_true", help="a JSON object per prompt, or per piece with --stream"
    )
    parser.add_argument(
        "--stats", action="store_true", help="report the speed on standard error at the end"
    )
    add_sampling_flags(parser, **DEFAULTS)
    # One --seed: the requests' own, which does not depend on how they are batched.
    Config.add_cli_arguments(parser, exclude=("seed",))


def run(options: argparse.Namespace) -> int:
    """Generate, print, and return the exit status."""
    params = sampling_from(options, **DEFAULTS)
    config = Config.from_cli(options)
    prompts = _prompts(options)
    if options.stream and params.n > 1 and not options.json:
        raise UsageError("--stream shows one answer at a time; leave out --n or add --json")
    with load_llm(config) as llm:
        started = time.perf_counter()
        if options.stream:
            outputs = _stream(llm, prompts, params, as_json=options.json)
        else:
            try:
                outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
            except EngineError as error:  # one prompt's failure is not the others'
                _print_all(prompts, error.outputs, as_json=options.json)
                raise
            _print_all(prompts, outputs, as_json=options.json)
        elapsed = time.perf_counter() - started
    if options.stats or (len(prompts) > 1 and sys.stderr.isatty()):
        tokens = sum(len(answer.token_ids) for each in outputs for answer in each.outputs)
        note(
            f"{len(prompts)} prompt{'s' * (len(prompts) > 1)}, {tokens} tokens in {elapsed:.2f} s: "
            f"{tokens / elapsed:.1f} tokens/s"
        )
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.file is not None:
        if options.prompts:
            raise UsageError("prompts are given both as arguments and with --file; keep one")
        text = sys.stdin.read() if options.file == "-" else read_file(Path(options.file))
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            if not line:
                raise UsageError(f"--file {options.file}: line {number} is empty; remove it")
        if not lines:
            raise UsageError(f"--file {options.file}: no prompts in it")
        return lines
    if options.prompts:
        return list(options.prompts)
    if sys.stdin.isatty():
        raise UsageError("no prompt; give one as an argument, with --file or on standard input")
    return [sys.stdin.read().removesuffix("\n")]


def _stream(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, *, as_json: bool
) -> list[RequestOutput]:
    """Generate one prompt after the other, printing each piece at once."""
    finished = []
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1 and not as_json:
            print(_title(index, prompt))
        for output in llm.stream(prompt, params):
            for answer in output.outputs:
                if as_json:
                    print(json.dumps(_piece(index, answer)), flush=True)
                else:
                    print(answer.text_delta, end="", flush=True)
        finished.append(output)
        if not as_json:
            print()
    return finished


def _print_all(prompts: Sequence[str], outputs: Sequence[RequestOutput], *, as_json: bool) -> None:
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=False)):
        if as_json:
            print(json.dumps(_as_dict(prompt, output), ensure_ascii=False))
            continue
        if len(prompts) > 1:
            print(_title(index, prompt))
        for answer in output.outputs:
            if len(output.outputs) > 1:
                print(f"--- answer {answer.index + 1} of {len(output.outputs)}")
            print(answer.text)


def _title(index: int, prompt: str) -> str:
    shown = " ".join(prompt.split())
    return f"=== {index + 1}: {shown if len(shown) <= 70 else shown[:67] + '...'}"


def _piece(index: int, answer: CompletionOutput) -> dict[str, Any]:
    return {
        "prompt_index": index,
        "index": answer.index,
        "text": answer.text_delta,
        "token_ids": list(answer.new_token_ids),
        "finish_reason": answer.finish_reason,
    }


def _as_dict(prompt: str, output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            | ({"logprobs": _logprobs(answer)} if answer.logprobs is not None else {})
            for answer in output.outputs
        ],
        "error": None if output.error is None else str(output.error),
        "ttft_s": metrics and metrics.ttft,
        "e2e_s": metrics and metrics.e2e_time,
    }


def _logprobs(answer: CompletionOutput) -> list[list[dict[str, Any]]]:
    return [
        [
            {"id": token, "token": it.decoded_token, "logprob": it.logprob, "rank": it.rank}
            for token, it in position.items()
        ]
        for position in answer.logprobs or ()
    ]
