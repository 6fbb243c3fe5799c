"""Finds out whether the engine alone can do what a prepared call of ``generate`` asks.

Owner: the generate drop-in. Invariants: a call is simple when the engine's own sampling
parameters mean exactly what transformers' prepared processors and criteria do; anything else,
also one unknown argument of a known processor, is not. Simple calls run as a batch of
requests, without a line of Python between a row's tokens but the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pagedllm import LLM


@dataclass(slots=True)
class Plan:
    """What the engine is to do with every row."""

    max_tokens: int
    eos: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Of :class:`pagedllm.SamplingParams`."""


def plan(
    llm: LLM,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    *,
    do_sample: bool,
    prompt_length: int,
) -> Plan | None:
    """Translate a prepared call; None when it is not simple.

    Args:
        llm: the engine.
        processors: transformers' prepared logits processors, in order.
        criteria: its prepared stopping criteria.
        do_sample: whether tokens are drawn.
        prompt_length: of the padded prompts, in tokens.
    """
    found = _limits(criteria, prompt_length)
    if found is None:
        return None
    found.settings["temperature"] = 1.0 if do_sample else 0.0
    rank = -1
    for processor in processors:
        entry = _READERS.get(type(processor).__name__)
        if entry is None or not type(processor).__module__.startswith("transformers."):
            return None
        order, reader = entry
        # The engine has one order, transformers' own. A processor of the caller's may break it.
        warps = order >= _FIRST_WARPER and not do_sample
        if order <= rank or warps or not reader(processor, found, prompt_length):
            return None
        rank = order
    if found.settings.get("min_tokens"):
        # The engine keeps back every end token that it knows, also those that this call ignores.
        if not llm.model_info.eos_token_ids <= set(found.eos):
            return None
        found.settings["min_tokens"] = min(found.settings["min_tokens"], found.max_tokens)
    return found


def run(
    llm: LLM, found: Plan, prompts: Sequence[list[int]], input_ids: torch.Tensor, pad: int | None
) -> torch.Tensor:
    """Generate and return prompts and answers: int64 [B, L + longest answer].

    Args:
        llm: the engine.
        found: from :func:`plan`.
        prompts: each row's tokens without padding.
        input_ids: int64 [B, L], left-padded.
        pad: fills rows that ended before the longest.
    """
    import torch

    from pagedllm import SamplingParams

    # torch's own generator decides, so torch.manual_seed makes the answer repeatable.
    drawn = found.settings["temperature"] > 0
    seeds = torch.randint(2**62, (len(prompts),)).tolist() if drawn else [None] * len(prompts)
    common = SamplingParams(
        max_tokens=found.max_tokens, stop_token_ids=found.eos, ignore_eos=True, **found.settings
    )
    params = [common if seed is None else common.replace(seed=seed) for seed in seeds]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    longest = max(map(len, answers))
    fill = 0 if pad is None else pad  # without an end token all rows are equally long
    answer = torch.tensor([row + [fill] * (longest - len(row)) for row in answers])
    return torch.cat([input_ids, answer.to(input_ids)], dim=1)


def _limits(criteria: Sequence[Any], prompt_length: int) -> Plan | None:
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    found = None
    eos: tuple[int, ...] = ()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria and found is None:
            found = Plan(criterion.max_length - prompt_length)
        elif type(criterion) is EosTokenCriteria and not eos:
            eos = tuple(criterion.eos_token_id.reshape(-1).tolist())
        else:
            return None
    if found is None or found.max_tokens < 1:
        return None
    found.eos = eos
    return found


def _repetition(processor: Any, found: Plan, _: int) -> bool:
    found.settings["repetition_penalty"] = processor.penalty
    # An integer would leave real tokens of the prompt out; a tensor stands for the padding.
    return not isinstance(processor.prompt_ignore_length, int)


def _min_length(processor: Any, found: Plan, prompt_length: int) -> bool:
    return _at_least(processor, found, processor.min_length - prompt_length)


def _min_new_tokens(processor: Any, found: Plan, prompt_length: int) -> bool:
    same = bool(processor.prompt_length_to_skip == prompt_length)
    return same and _at_least(processor, found, processor.min_new_tokens)


def _at_least(processor: Any, found: Plan, number: int) -> bool:
    found.settings["min_tokens"] = max(found.settings.get("min_tokens", 0), number, 0)
    return set(processor.eos_token_id.reshape(-1).tolist()) == set(found.eos)


def _temperature(processor: Any, found: Plan, _: int) -> bool:
    found.settings["temperature"] = float(processor.temperature)
    return True


def _filter(field_name: str, attribute: str) -> Callable[[Any, Plan, int], bool]:
    def read(processor: Any, found: Plan, _: int) -> bool:
        value = getattr(processor, attribute)
        found.settings[field_name] = int(value) if field_name == "top_k" else float(value)
        keeps_one = getattr(processor, "min_tokens_to_keep", 1) == 1
        return value > 0 and keeps_one and processor.filter_value == -float("inf")

    return read


_READERS: dict[str, tuple[int, Callable[[Any, Plan, int], bool]]] = {
    "RepetitionPenaltyLogitsProcessor": (0, _repetition),
    "MinLengthLogitsProcessor": (1, _min_length),
    "MinNewTokensLengthLogitsProcessor": (2, _min_new_tokens),
    "TemperatureLogitsWarper": (3, _temperature),
    "TopKLogitsWarper": (4, _filter("top_k", "top_k")),
    "TopPLogitsWarper": (5, _filter("top_p", "top_p")),
    "MinPLogitsWarper": (6, _filter("min_p", "min_p")),
    "TypicalLogitsWarper": (7, _filter("typical_p", "mass")),
}
"""By class: its place in the engine's order, and what reads it."""
_FIRST_WARPER = 3
"""From here on processors change what is drawn, and mean nothing to greedy search here."""
