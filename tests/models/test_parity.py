"""Every promised architecture, in every tier, against transformers' own generate in fp32."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from paged_driver import Driver
from pagedllm import LLM, SamplingParams
from pagedllm.models import load_model
from tiny_families import FAMILIES, build, decided, routes_clearly

NEW_TOKENS = 64
# On a CPU "auto" may compile the native decoder; with the reference attention torch runs it.
CASES = [
    (name, tier, attention)
    for name, family in FAMILIES.items()
    for tier, attention in (("native", "auto"), ("native", "reference"), ("generic", "auto"))
    if family.native or tier == "generic"
]


@dataclass
class Oracle:
    folder: str
    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[torch.Tensor]
    """[64, V] per prompt."""
    seed: int


def _ask(model, prompts):
    """Greedy answers, prompts included, and the logprobs [64, V] at each of their steps."""
    answers, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers.append(out.sequences[0].tolist())
        logprobs.append(torch.log_softmax(torch.stack(out.logits)[:, 0].float(), dim=-1))
    return answers, logprobs


def _oracle(name: str, folder: str) -> Oracle:
    # Some random models repeat one token for ever, which would hide mistakes, and in some two
    # tokens or experts are so near that rounding decides between them: draw again.
    for _ in range(100):
        seed = random.randrange(2**31)
        model = build(name, seed)
        rng = random.Random(seed)
        prompts = [[rng.randrange(1, 320) for _ in range(n)] for n in (1, 5, 22, 47)]
        # The last shares its first 17 tokens with the one before it.
        prompts.append(prompts[3][:17] + [rng.randrange(1, 320) for _ in range(6)])
        answers, logprobs = _ask(model, prompts)
        varied = all(len(set(a[len(p) :])) > 4 for p, a in zip(prompts, answers))
        if varied and all(map(decided, logprobs)) and routes_clearly(model, answers):
            model.save_pretrained(folder)
            return Oracle(folder, prompts, answers, logprobs, seed)
    raise AssertionError(f"a hundred random models of {name} all repeat themselves or have ties")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = _oracle(name, str(tmp_path_factory.mktemp(name)))
        return made[name]

    return get


@pytest.mark.parametrize(("name", "tier", "attention"), CASES)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name, tier, attention, oracles):
    oracle = oracles(name)
    seed = random.randrange(2**31)
    print(f"model seed {oracle.seed}, driver seed {seed}")
    model = load_model(oracle.folder, dtype="float32", model_impl=tier, attention=attention)
    assert model.tier == tier
    rng = random.Random(seed)
    driver = Driver(model, rng, page_size=rng.choice([3, 4, 8]))
    running = [driver.add(prompt, NEW_TOKENS) for prompt in oracle.prompts[:4]]
    for _ in range(25):
        driver.step((1, 3, 7, 13))
    running.append(driver.add(oracle.prompts[4], NEW_TOKENS, prefix=running[3]))
    assert running[4].computed >= 15  # starts from pages that another sequence filled
    driver.preempt(running[2])
    driver.run()

    for sequence, answer, wanted in zip(running, oracle.answers, oracle.logprobs, strict=True):
        assert sequence.tokens == answer
        got = torch.stack(sequence.logprobs)
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_keeps_them_under_scarcity(name, oracles):
    """The same through the whole engine: odd chunks, preemption, a prefix hit, one batch."""
    oracle = oracles(name)
    print(f"model seed {oracle.seed}")
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        oracle.folder, dtype="float32", skip_tokenizer_init=True, page_size=4, num_pages=52,
        max_model_len=128, max_num_batched_tokens=11, max_batch_size=5, threads=1,
    ) as llm:  # fmt: skip
        outputs = llm.generate(oracle.prompts[:4], greedy)
        outputs += llm.generate([oracle.prompts[4]], greedy)
        stats = llm.stats()
    for output, answer in zip(outputs, oracle.answers, strict=True):
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == answer
    assert stats.preemptions > 0
    assert outputs[4].num_cached_tokens >= 16
    assert stats.cache.pages_used == 0


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.native])
def test_auto_takes_the_native_tier_for_families_that_have_one(name, oracles):
    assert load_model(oracles(name).folder).tier == "native"
