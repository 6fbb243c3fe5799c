"""What surrounds the tokens: warnings, errors, streams, fallbacks, handles, threads."""

from __future__ import annotations

import asyncio
import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import pagedllm
from generate_pairs import EOS, Pair, build, run

if TYPE_CHECKING:
    from collections.abc import Callable

# -- lengths, warnings, errors -----------------------------------------------------


def _outcome(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives or raises, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = function().tolist()
        except Exception as error:
            result = (type(error), str(error))
    return result, [str(entry.message) for entry in caught]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_length": 12},
        {"max_length": 3},
        {"max_length": 12, "max_new_tokens": 5},
        {"max_new_tokens": 4, "min_length": 60},
        {"max_new_tokens": 4, "min_new_tokens": 9},
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 3, "temprature": 0.5},
        {"max_new_tokens": 3, "labels": torch.tensor([1])},
        {"max_new_tokens": 3, "num_return_sequences": 2},
        {"max_new_tokens": 3, "do_sample": True, "temperature": 0.0},
        {"max_new_tokens": 3, "stop_strings": ["a"]},
        {"max_new_tokens": 3, "num_beams": 2, "num_return_sequences": 3},
        {"max_new_tokens": 3, "temperature": 0.5},
        {"max_time": 0.0, "max_new_tokens": 50},
    ],
    ids=str,
)
def test_lengths_warnings_and_errors_are_the_same(llama: Pair, settings: dict[str, Any]) -> None:
    prompts = llama.prompts()
    expected = _outcome(lambda: llama.reference.generate(**prompts, **settings))
    found = _outcome(lambda: llama.model.generate(**prompts, **settings))
    assert found == expected


def test_a_typo_is_named(llama: Pair) -> None:
    with pytest.raises(ValueError, match="temprature"):
        llama.model.generate(torch.tensor([[1, 2]]), temprature=0.3)


def test_arguments_win_over_configs_which_stay_as_they_are(llama: Pair) -> None:
    own = GenerationConfig(max_new_tokens=3, repetition_penalty=1.5, eos_token_id=EOS)
    before = own.to_dict()
    for model in (llama.reference, llama.model):
        model.generation_config.max_new_tokens = 7
    try:
        for call in (
            {},
            {"generation_config": own},
            {"generation_config": own, "max_new_tokens": 5},
        ):
            llama.compare(lambda call=call: {**llama.prompts(), **call})
    finally:
        for model in (llama.reference, llama.model):
            model.generation_config.max_new_tokens = None
    assert own.to_dict() == before


def test_it_looks_like_the_original(llama: Pair) -> None:
    assert inspect.signature(llama.model.generate) == inspect.signature(llama.reference.generate)
    assert llama.model.generate.__name__ == "generate"
    assert llama.model.generate.__self__ is llama.model
    assert llama.model.generate.__doc__ == llama.reference.generate.__doc__


# -- streamers ---------------------------------------------------------------------


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("settings", [{}, {"prompt_lookup_num_tokens": 2}], ids=["runs", "falls"])
def test_a_streamer_gets_the_same_events(llama: Pair, settings: dict[str, Any]) -> None:
    prompts = llama.prompts(rows=1)
    recorders = []
    for model in (llama.reference, llama.model):
        recorders.append(_Recorder())
        model.generate(**prompts, max_new_tokens=6, streamer=recorders[-1], **settings)
    assert recorders[1].events == recorders[0].events
    assert recorders[1].events[-1] == "end"


def test_the_prompt_is_streamed_once_when_a_call_falls_back_late(llama: Pair) -> None:
    recorder = _Recorder()
    ids = torch.tensor([[5, 6, 7]])
    llama.model.generate(ids, max_new_tokens=400, max_length=None, streamer=recorder)
    assert recorder.events[0] == [[5, 6, 7]]
    assert sum(event == [[5, 6, 7]] for event in recorder.events) == 1


def test_text_streamer(llama: Pair, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
    shown = []
    for model in (llama.reference, llama.model):
        model.generate(**inputs, max_new_tokens=12, streamer=TextStreamer(tokenizer))
        shown.append(capsys.readouterr().out)
    assert shown[1] == shown[0]
    assert shown[0].startswith("Once")


def test_text_iterator_streamer(llama: Pair, tokenizer: Any) -> None:
    inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    thread = threading.Thread(
        target=llama.model.generate, kwargs={**inputs, "max_new_tokens": 12, "streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = llama.reference.generate(**inputs, max_new_tokens=12)
    assert text == tokenizer.decode(expected[0])


def test_async_text_iterator_streamer(llama: Pair, tokenizer: Any) -> None:
    inputs = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)

    async def collect() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer)
        call = asyncio.to_thread(
            llama.model.generate, **inputs, max_new_tokens=12, streamer=streamer
        )
        task = asyncio.create_task(call)
        text = "".join([piece async for piece in streamer])
        await task
        return text

    expected = llama.reference.generate(**inputs, max_new_tokens=12)
    assert asyncio.run(collect()) == tokenizer.decode(expected[0])


# -- what the engine does not do ---------------------------------------------------

_FALLS_BACK: dict[str, Callable[[Pair], dict[str, Any]]] = {
    "inputs_embeds": lambda p: {
        "inputs_embeds": p.reference.get_input_embeddings()(torch.tensor([[1, 2, 3]]))
    },
    "embeds_in_beams": lambda p: {
        "inputs_embeds": p.reference.get_input_embeddings()(torch.tensor([[1, 2, 3]])),
        "num_beams": 2,
    },
    "embeds_and_tokens": lambda p: {
        "inputs_embeds": p.reference.get_input_embeddings()(torch.tensor([[1, 2, 3]])),
        "input_ids": torch.tensor([[1, 2, 3]]),
    },
    "embeds_until_a_length": lambda p: {
        "inputs_embeds": p.reference.get_input_embeddings()(torch.tensor([[1, 2, 3]])),
        "max_new_tokens": None, "max_length": 9, "min_length": 7,
    },
    "embeds_in_a_static_cache": lambda p: {
        "inputs_embeds": p.reference.get_input_embeddings()(torch.tensor([[1, 2, 3]])),
        "cache_implementation": "static", "return_dict_in_generate": True,
    },
    "static_cache_in_the_answer": lambda p: {
        **p.prompts(), "cache_implementation": "static", "return_dict_in_generate": True,
        "output_scores": True,
    },
    "assisted": lambda p: {"input_ids": torch.tensor([[1, 2]]), "assistant_model": p.reference},
    "assisted_draws": lambda p: {
        "input_ids": torch.tensor([[1, 2]]), "assistant_model": p.reference, "do_sample": True
    },
    "prompt_lookup": lambda p: {
        "input_ids": torch.tensor([[1, 2, 1]]), "prompt_lookup_num_tokens": 2
    },
    "attentions": lambda p: {
        **p.prompts(), "output_attentions": True, "return_dict_in_generate": True
    },
    "hidden_states": lambda p: {
        **p.prompts(), "output_hidden_states": True, "return_dict_in_generate": True
    },
    "hidden_states_of_draws": lambda p: {
        **p.prompts(), "output_hidden_states": True, "return_dict_in_generate": True,
        "do_sample": True, "num_return_sequences": 2, "use_cache": False,
    },
    "hidden_states_of_beams": lambda p: {
        **p.prompts(), "output_hidden_states": True, "return_dict_in_generate": True,
        "num_beams": 2, "output_scores": True,
    },
    "hole_in_mask": lambda p: {
        "input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.tensor([[1, 0, 1, 1]])
    },
    "right_padding": lambda p: {
        "input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])
    },
    "positions": lambda p: {
        "input_ids": torch.tensor([[1, 2, 3]]), "position_ids": torch.tensor([[3, 4, 5]])
    },
    "too_many_rows": lambda p: {
        "input_ids": torch.tensor([[1, 2, 3]]), "num_beams": 70, "max_new_tokens": 3
    },
    "custom_generate": lambda p: {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "custom_generate": lambda model, input_ids, **_: input_ids + 1,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", _FALLS_BACK)
def test_what_cannot_run_falls_back_with_one_line(pair: Pair, name: str) -> None:
    make = _FALLS_BACK[name]
    pair.compare(lambda: {"max_new_tokens": 6, **make(pair)}, falls_back=True)


def test_what_is_longer_than_the_model_allows_falls_back(llama: Pair) -> None:
    call = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 280}
    llama.compare(lambda: call, falls_back=True)


def test_training_mode_is_noticed(llama: Pair) -> None:
    llama.model.train()
    try:
        before = len(llama.lines.lines)
        found = llama.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
        assert "training mode" in llama.lines.lines[before]
    finally:
        llama.model.eval()
    assert found.shape == (1, 7)
    llama.compare(lambda: {**llama.prompts(), "max_new_tokens": 4})


def test_a_hook_is_noticed(llama: Pair) -> None:
    seen = []
    layer = llama.model.model.layers[0]
    # A bias that a hook adds changes the answer: the engine must not run without it.
    hook = layer.register_forward_hook(lambda *_: seen.append(1))
    try:
        llama.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
    finally:
        hook.remove()
    assert len(seen) >= 4


def test_strict_raises_and_says_why() -> None:
    model = build("llama", 1)
    with pagedllm.accelerate(model, strict=True, num_pages=64):
        with pytest.raises(pagedllm.ValidationError, match="inputs_embeds"):
            model.generate(inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=2)
        assert model.generate(torch.tensor([[1]]), max_new_tokens=2).shape == (1, 3)


def test_a_model_that_the_engine_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)).eval()
    ids = torch.tensor([[1, 2, 3]])
    expected = model.generate(ids, max_new_tokens=4, pad_token_id=0)
    with pagedllm.accelerate(model) as handle:
        assert "ALiBi" in (handle.fallback_reason or "")
        assert "ALiBi" in caplog.text
        assert torch.equal(model.generate(ids, max_new_tokens=4, pad_token_id=0), expected)
    with pytest.raises(pagedllm.UnsupportedModelError, match="ALiBi"):
        pagedllm.accelerate(model, strict=True)
    assert "generate" not in vars(model)


def test_a_processor_that_raises_does_not_hurt_the_next_call(llama: Pair) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        llama.model.generate(
            **llama.prompts(), max_new_tokens=4, logits_processor=LogitsProcessorList([broken])
        )
    llama.compare(lambda: {**llama.prompts(), "max_new_tokens": 4, "num_beams": 2})
    assert llama.handle.llm.stats().cache.pages_used == 0


def test_a_processor_out_of_order_is_honoured(llama: Pair) -> None:
    def call() -> dict[str, Any]:
        return {
            **llama.prompts(), "max_new_tokens": 6, "do_sample": True, "top_k": 5,
            "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.2)]),
            "output_scores": True, "return_dict_in_generate": True,
        }  # fmt: skip

    llama.compare(call, seed=llama.random.randrange(2**31))


def test_an_empty_list_of_criteria_is_fine(llama: Pair) -> None:
    llama.compare(lambda: {**llama.prompts(), "stopping_criteria": StoppingCriteriaList()})


# -- custom_generate ---------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}, {"return_dict_in_generate": True}],
    ids=str,
)
def test_custom_generate(settings: dict[str, Any]) -> None:
    model = build("qwen3", 5)
    ids = torch.tensor([[256, 256, 5, 6], [1, 2, 3, 4]])
    mask = (ids != 256).long()
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, **settings}
    expected = run(model, call, 0)
    found = run(model, {**call, "custom_generate": pagedllm.generate}, 0)
    if settings.get("return_dict_in_generate"):
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)
    assert "generate" not in vars(model)


def test_custom_generate_on_an_accelerated_model(llama: Pair) -> None:
    prompts = llama.prompts()
    expected = llama.reference.generate(**prompts, max_new_tokens=5)
    found = llama.model.generate(**prompts, max_new_tokens=5, custom_generate=pagedllm.generate)
    assert torch.equal(found, expected)


# -- the handle --------------------------------------------------------------------


def test_closing_restores_exactly_and_frees_the_thread() -> None:
    model = build("llama", 2)
    before = set(vars(model))
    names = {thread.name for thread in threading.enumerate()}
    handle = pagedllm.accelerate(model, num_pages=32)
    old = model.generate
    assert "pagedllm-engine" in {thread.name for thread in threading.enumerate()} - names or names
    handle.close()
    handle.close()
    assert set(vars(model)) == before
    assert model.generate.__func__ is type(model).generate
    # Who kept the old method gets the model's own.
    assert old(torch.tensor([[1, 2]]), max_new_tokens=2).shape == (1, 4)


def test_closing_puts_back_a_generate_that_was_not_the_class_own() -> None:
    model = build("llama", 2)
    calls = []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return type(model).generate(model, *args, **kwargs)

    model.generate = patched
    with pagedllm.accelerate(model, num_pages=32):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
        assert not calls
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, prompt_lookup_num_tokens=2)
        assert calls
    assert model.generate is patched


def test_twice_is_refused(llama: Pair) -> None:
    with pytest.raises(pagedllm.ConfigError, match="accelerated already"):
        pagedllm.accelerate(llama.model)


def test_a_wrong_setting_is_named() -> None:
    model = build("llama", 2)
    with pytest.raises(pagedllm.ConfigError, match="page_size"):
        pagedllm.accelerate(model, page_sise=3)
    assert "generate" not in vars(model)


def test_copies_are_models_of_their_own() -> None:
    model = build("llama", 6)
    ids = torch.tensor([[1, 2, 3]])
    with pagedllm.accelerate(model, num_pages=64):
        before = model.generate(ids, max_new_tokens=3)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twins = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ]
        for twin in twins:
            with torch.no_grad():
                twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
            expected = type(twin).generate(twin, ids, max_new_tokens=3)
            assert torch.equal(twin.generate(ids, max_new_tokens=3), expected)
            assert not torch.equal(expected, before)
        assert torch.equal(model.generate(ids, max_new_tokens=3), before)


def test_saving_and_loading(llama: Pair, tmp_path: Any) -> None:
    llama.model.save_pretrained(tmp_path)
    again = type(llama.model).from_pretrained(tmp_path)
    for name, tensor in llama.reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_dropping_the_model_frees_everything() -> None:
    code = """
import gc, threading, weakref, torch, sys
sys.path.insert(0, sys.argv[1])
from generate_pairs import build
import pagedllm
for family in ("llama", "gpt2"):
    model = build(family, 3)
    pagedllm.accelerate(model, num_pages=32)
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    weight = weakref.ref(model.get_input_embeddings().weight)
    del model
    gc.collect()
    assert weight() is None
    assert threading.active_count() == 1, threading.enumerate()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1])],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- threads -----------------------------------------------------------------------


def test_many_threads_share_the_engine(llama: Pair) -> None:
    calls = []
    for index in range(12):
        extra: dict[str, Any] = [{}, {"num_beams": 3}, {"repetition_penalty": 1.3},
                                 {"no_repeat_ngram_size": 2}][index % 4]  # fmt: skip
        calls.append({**llama.prompts(), "max_new_tokens": 8, **extra})
    expected = [llama.reference.generate(**call) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda call: llama.model.generate(**call), calls))
    equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert sum(equal) >= len(equal) - 1, "more than rounding can explain"
    assert llama.handle.llm.stats().cache.pages_used == 0


def test_driven_rows_wait_for_room_and_give_it_back() -> None:
    model = build("llama", 4)
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20, num_beams=3)
    with pagedllm.accelerate(model, num_pages=40, page_size=4, max_model_len=64) as handle:
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(
                    lambda _: model.generate(
                        torch.tensor([[1, 2, 3]]), max_new_tokens=20, num_beams=3
                    ),
                    range(8),
                )
            )
        assert handle.llm.stats().cache.pages_used == 0
    assert all(torch.equal(row, expected) for row in found)


def test_what_is_no_model_is_refused(llama: Pair) -> None:
    wrapped: Any = torch.nn.Sequential(llama.reference)
    for function in (pagedllm.accelerate, lambda m: pagedllm.generate(m, None, None, None, None)):
        with pytest.raises(pagedllm.ConfigError, match="Sequential"):
            function(wrapped)


def test_a_call_within_a_call_that_changed_the_weights_does_not_hang() -> None:
    model = build("llama", 9)
    ids = torch.tensor([[1, 2, 3]])
    found = []

    def meddle(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 4:
            with torch.no_grad():
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
            found.append(model.generate(ids, max_new_tokens=3))
            found.append(type(model).generate(model, ids, max_new_tokens=3))
        return scores

    with pagedllm.accelerate(model, num_pages=64):
        model.generate(ids, max_new_tokens=3, logits_processor=LogitsProcessorList([meddle]))
        assert torch.equal(found[0], found[1])
        assert torch.equal(model.generate(ids, max_new_tokens=3), found[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_gets_an_engine_of_its_own() -> None:
    code = """
import os, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from generate_pairs import build
import pagedllm
model = build("llama", 3)
ids = torch.tensor([[1, 2, 3]])
with pagedllm.accelerate(model, num_pages=32):
    expected = model.generate(ids, max_new_tokens=5)
    child = os.fork()
    equal = torch.equal(model.generate(ids, max_new_tokens=5), expected)
    if child == 0:
        sys.exit(0 if equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1])],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
