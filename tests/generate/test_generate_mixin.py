"""What transformers' own GenerationTesterMixin checks and the other files here do not.

docs/generate.md has the table that says which of its methods is held by which test.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig

import pagedllm
from generate_pairs import EOS, FAMILIES, PAD, VOCAB, Pair, build, check_caches_equal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore:.past_key_values.:FutureWarning"
)
DICTIONARY = {"return_dict_in_generate": True, "do_sample": False}


def _clear_prompts(pair: Pair, new_tokens: int) -> dict[str, torch.Tensor]:
    """Draw prompts whose greedy answers no rounding can change, and that do not end early."""
    for _ in range(50):
        prompts = pair.prompts()
        answer = pair.reference.generate(
            **prompts, max_new_tokens=new_tokens, output_logits=True, **DICTIONARY
        )
        best = torch.stack(answer.logits).topk(2).values
        margin = (best[..., 0] - best[..., 1]).min()
        if margin > 0.01 and not (answer.sequences[:, -new_tokens:] == EOS).any():
            return prompts
    raise AssertionError("no prompt is clear")


def _followed_by(prompts: dict[str, torch.Tensor], sequences: torch.Tensor) -> dict[str, Any]:
    longer = sequences.shape[1] - prompts["input_ids"].shape[1]
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, longer), value=1)
    return {"input_ids": sequences, "attention_mask": mask}


# -- the cache of an answer --------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token_id": list(range(0, 256, 6))},
        {"use_cache": False},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_a_dictionary_has_the_cache_that_the_original_has(
    pair: Pair, settings: dict[str, Any]
) -> None:
    found = pair.compare(lambda: {**pair.prompts(), "max_new_tokens": 8, **DICTIONARY, **settings})
    assert (found.past_key_values is None) == (settings.get("use_cache") is False)


def test_going_on_from_an_answer(pair: Pair) -> None:
    """All tokens again, or the last one alone with a mask for all: both take the cache up."""
    prompts = _clear_prompts(pair, 6)
    whole = pair.model.generate(**prompts, max_new_tokens=6, **DICTIONARY)
    begun = pair.model.generate(**prompts, max_new_tokens=4, **DICTIONARY)
    again = _followed_by(prompts, begun.sequences)
    for first in (0, begun.sequences.shape[1] - 1):
        before = len(pair.lines.lines)
        rest = pair.model.generate(
            again["input_ids"][:, first:],
            attention_mask=again["attention_mask"],
            past_key_values=copy.deepcopy(begun.past_key_values),
            max_new_tokens=2,
            **DICTIONARY,
        )
        assert len(pair.lines.lines) == before + 1
        assert torch.equal(rest.sequences, whole.sequences[:, first:])
        check_caches_equal(rest.past_key_values, whole.past_key_values, prompts["attention_mask"])


def test_going_on_from_embeddings(pair: Pair) -> None:
    ids = _clear_prompts(pair, 5)["input_ids"][-1:]  # the one without padding
    embed = pair.model.get_input_embeddings()
    whole = pair.model.generate(ids, max_new_tokens=5, **DICTIONARY)
    begun = pair.model.generate(inputs_embeds=embed(ids), max_new_tokens=3, **DICTIONARY)
    rest = pair.model.generate(
        inputs_embeds=torch.cat([embed(ids), embed(begun.sequences)], dim=1),
        past_key_values=begun.past_key_values,
        max_new_tokens=2,
        **DICTIONARY,
    )
    found = torch.cat([ids, begun.sequences, rest.sequences], dim=1)
    assert torch.equal(found, whole.sequences)
    check_caches_equal(rest.past_key_values, whole.past_key_values, None)


def test_other_embeddings_give_other_scores(pair: Pair) -> None:
    ids = pair.prompts(rows=2)["input_ids"]
    own = pair.model.get_input_embeddings()(ids)
    settings = {**DICTIONARY, "output_scores": True, "max_new_tokens": 4, "min_new_tokens": 4}
    answers = [
        pair.model.generate(ids, inputs_embeds=embeds, **settings)
        for embeds in (own, torch.rand_like(own))
    ]
    for one, other in zip(answers[0].scores, answers[1].scores, strict=True):
        assert not torch.allclose(one, other)


def test_a_cache_is_made_when_someone_looks_at_it(llama: Pair) -> None:
    def answer() -> Any:
        return llama.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **DICTIONARY)

    cache = answer().past_key_values
    assert isinstance(cache, DynamicCache)
    assert "layers" not in vars(cache)
    assert cache.get_seq_length() == 6
    assert type(cache) is DynamicCache
    for copied in (copy.deepcopy(answer()), pickle.loads(pickle.dumps(answer()))):
        assert type(copied.past_key_values) is DynamicCache
        check_caches_equal(copied.past_key_values, cache, None)
    assert not hasattr(answer().past_key_values, "no_such_thing")


def test_a_cache_is_of_the_weights_that_answered_or_not_at_all() -> None:
    ids = torch.tensor([[1, 2, 3]])
    call = {"max_new_tokens": 4, **DICTIONARY}
    for check_weights in (True, False):
        model = build("llama", 21)
        with pagedllm.accelerate(model, num_pages=64, check_weights=check_weights):
            seen, unseen = model.generate(ids, **call), model.generate(ids, **call)
            before = type(model).generate(model, ids, **call)
            assert len(seen.past_key_values) == 2
            with torch.no_grad():
                model.model.layers[0].self_attn.v_proj.weight.mul_(-2.0)
            with pytest.raises(pagedllm.ValidationError, match="changed since; look at it before"):
                unseen.past_key_values.get_seq_length()
            check_caches_equal(seen.past_key_values, before.past_key_values, None)
            after = type(model).generate(model, ids, **call)
            again = model.generate(ids, **call)
            check_caches_equal(again.past_key_values, after.past_key_values, None)


def test_a_cache_outlives_its_model_and_does_not_keep_it() -> None:
    model = build("llama", 22)
    with pagedllm.accelerate(model, num_pages=64):
        answers = [
            model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **DICTIONARY)
            for _ in range(2)
        ]
    assert answers[0].past_key_values.get_seq_length() == 6
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
    assert answers[0].past_key_values.get_seq_length() == 6
    with pytest.raises(pagedllm.ValidationError, match="is gone; look at it before"):
        answers[1].past_key_values.get_seq_length()


def test_threads_that_look_at_one_cache_see_one(llama: Pair) -> None:
    for _ in range(5):
        answer = llama.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **DICTIONARY)
        together = threading.Barrier(4)

        def look(cache: Any, together: threading.Barrier) -> Any:
            together.wait(60)
            return cache.layers

        with ThreadPoolExecutor(4) as pool:
            caches, barriers = [answer.past_key_values] * 4, [together] * 4
            first, *others = pool.map(look, caches, barriers)
        assert all(layers is first for layers in others)


# -- padding, processors, tokens ---------------------------------------------------


def test_padding_on_the_left_changes_nothing(pair: Pair) -> None:
    ids = _clear_prompts(pair, 5)["input_ids"][-1:]
    padded = torch.cat([torch.full((1, 32), PAD), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 32).long()[None]
    settings = {**DICTIONARY, "max_new_tokens": 5, "output_logits": True}
    plain = pair.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    moved = pair.model.generate(padded, attention_mask=mask, **settings)
    assert torch.equal(moved.sequences[:, 32:], plain.sequences)
    torch.testing.assert_close(moved.logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_guidance_away_from_a_negative_prompt(pair: Pair) -> None:
    pair.compare(
        lambda: {
            **pair.prompts(rows=2), "guidance_scale": 1.5, "max_new_tokens": 6,
            "negative_prompt_ids": torch.tensor([[7, 8, 9], [9, 8, 7]]),
            "negative_prompt_attention_mask": torch.tensor([[1, 1, 1], [1, 1, 1]]),
        }
    )  # fmt: skip


def test_no_processor_leaves_logits_and_any_changes_scores(pair: Pair) -> None:
    settings = {**DICTIONARY, "output_scores": True, "output_logits": True, "max_new_tokens": 4}
    plain = pair.model.generate(**pair.prompts(), **settings, eos_token_id=None)
    torch.testing.assert_close(plain.logits, plain.scores, rtol=0, atol=0)
    changed = pair.model.generate(**pair.prompts(), **settings, bad_words_ids=[[0], [1]])
    for logits, scores in zip(changed.logits, changed.scores, strict=True):
        assert logits[:, :2].isfinite().all()
        assert scores[:, :2].isinf().all()


def test_transition_scores_add_up_to_those_of_the_beams(pair: Pair) -> None:
    found = pair.compare(
        lambda: {
            **pair.prompts(rows=2), "max_new_tokens": 5, "num_beams": 4, "output_scores": True,
            "num_return_sequences": 2, "length_penalty": 0.0, "eos_token_id": None, **DICTIONARY,
        }
    )  # fmt: skip
    steps = pair.model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(steps.sum(dim=1), found.sequences_scores, rtol=1e-4, atol=1e-4)


def test_the_first_token_without_a_prompt(pair: Pair) -> None:
    for config in (GenerationConfig(bos_token_id=50), GenerationConfig(bos_token_id=None)):
        config.max_new_tokens = 3
        pair.compare(lambda config=config: {"generation_config": config})


def test_types_of_tokens_fall_back() -> None:
    with Pair.of(build("gpt2", 4), random.Random(4)) as gpt2:
        gpt2.compare(
            lambda: {
                "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4,
                "token_type_ids": torch.zeros(1, 3, dtype=torch.long),
            },
            falls_back=True,
        )  # fmt: skip


# -- ways of decoding that are not the engine's ------------------------------------


def _error(function: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one the original decides
        function()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    "settings",
    [
        {"dola_layers": "low"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 2.0},
        {"num_beams": 2, "force_words_ids": [[16, 17]]},
        {"cache_implementation": "quantized", "cache_config": {"nbits": 4}},
        {"cache_implementation": "quantized", "cache_config": {"backend": "none such"}},
        {"cache_implementation": "none such"},
        {"inputs": torch.tensor([[1, 2]])},
        {"input_ids": None, "attention_mask": None, "bos_token_id": None},
        {"do_samples": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_what_the_original_refuses_is_refused_alike(llama: Pair, settings: dict[str, Any]) -> None:
    """Methods that moved to the Hub want trust_remote_code; caches want their packages."""
    if settings.get("cache_config") == {"nbits": 4}:
        _needs_no("optimum.quanto")
    calls = [
        lambda model=model: model.generate(**{**llama.prompts(), **settings}, max_new_tokens=3)
        for model in (llama.reference, llama.model)
    ]
    assert _error(calls[1]) == _error(calls[0])


def _needs_no(package: str) -> None:
    import importlib.util

    try:
        present = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        present = False
    if present:
        pytest.skip(f"{package} is installed: there is no error to compare")


def test_a_folder_with_a_decoding_method_falls_back(llama: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text("def generate(model, **kwargs):\n    return 'decoded'\n")
    before = len(llama.lines.lines)
    found = llama.model.generate(
        torch.tensor([[1, 2]]), custom_generate=str(tmp_path), trust_remote_code=True
    )
    assert found == "decoded"
    assert "custom_generate" in llama.lines.lines[before]


def test_compiling_is_the_originals_and_only_for_an_answer_that_shows_it() -> None:
    """A static cache in the answer is the original's, compiled; without, the engine is as good."""
    compiled = CompileConfig(backend="eager", fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True  # or processors are left out
    with Pair.of(build("llama", 9), random.Random(9)) as llama:
        prompts = _clear_prompts(llama, 4)
        call = {**prompts, "max_new_tokens": 4, "compile_config": compiled}
        plain = llama.model.generate(**call, **DICTIONARY)
        static = llama.model.generate(**call, cache_implementation="static")
        assert not llama.lines.lines
        assert not hasattr(llama.model, "_compiled_call")
        shown = llama.model.generate(**call, cache_implementation="static", **DICTIONARY)
        assert len(llama.lines.lines) == 1
        assert llama.model._compiled_call is not None
        assert shown.past_key_values.is_compileable
        assert torch.equal(shown.sequences, plain.sequences)
        assert torch.equal(static, plain.sequences)
        llama.compare(lambda: {**llama.prompts(), "max_new_tokens": 4})  # on the engine again


# -- the model's own attention -----------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_whichever_attention_the_model_was_loaded_with(family: str) -> None:
    model: PreTrainedModel = build(family, 11)
    model.set_attn_implementation("eager")
    with Pair.of(model, random.Random(11)) as pair:
        assert model.config._attn_implementation == "eager"
        assert pair.reference.config.vocab_size == VOCAB
        pair.compare(lambda: {**pair.prompts(), "max_new_tokens": 6, "output_scores": True,
                              **DICTIONARY})  # fmt: skip
