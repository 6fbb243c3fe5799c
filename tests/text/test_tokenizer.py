"""Prompts, conversations and bad words become token ids, or one clear error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from pagedllm.engine.tokenizer import (
    bad_words_to_ids,
    encode_prompt,
    load_tokenizer,
    render_chat,
)
from pagedllm.errors import ConfigError, ModelNotFoundError, ValidationError
from text_tokenizers import byte_fallback, byte_level

HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


def test_a_prompt_has_the_special_tokens_its_tokenizer_adds(smollm2):
    llama = byte_fallback()
    ids = encode_prompt(llama, "The capital")
    assert ids[0] == llama.bos_token_id
    assert llama.decode(ids[1:]) == "The capital"
    assert smollm2.decode(encode_prompt(smollm2, "The capital")) == "The capital"


def test_a_long_prompt_keeps_every_token_and_warns_of_nothing(smollm2_path, capfd):
    tokenizer = load_tokenizer(smollm2_path)
    tokenizer.model_max_length = 8
    text = "one two three " * 100
    assert tokenizer.decode(encode_prompt(tokenizer, text)) == text
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_file_that_asks_for_truncation_does_not_shorten_prompts(tmp_path, smollm2):
    smollm2.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    text = "one two three " * 10
    assert encode_prompt(load_tokenizer(tmp_path), text) == encode_prompt(smollm2, text)


@pytest.mark.parametrize(
    ("text", "says"), [("", "prompt is empty"), ("lone \ud83d surrogate", "not valid Unicode")]
)
def test_a_prompt_that_is_no_text_is_refused(smollm2, text, says):
    with pytest.raises(ValidationError, match=says) as caught:
        encode_prompt(smollm2, text)
    assert caught.value.parameter == "prompt"


def test_a_conversation_is_formatted_as_transformers_formats_it(smollm2):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello <|im_end|>"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Bye 🙂"},
    ]
    for chosen in (messages, messages[1:2]):
        assert render_chat(smollm2, chosen) == list(
            smollm2.apply_chat_template(chosen, add_generation_prompt=True, return_dict=False)
        )
    text = smollm2.decode(render_chat(smollm2, messages))
    assert text.endswith("<|im_start|>user\nBye 🙂<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_writes_the_beginning_token_itself():
    """It must not be there twice when the tokenizer would add it too."""
    llama = byte_fallback()
    ids = render_chat(llama, HELLO, chat_template="<s>" + PLAIN)
    assert ids.count(llama.bos_token_id) == 1


def test_continuing_the_last_message(smollm2):
    messages = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert smollm2.decode(render_chat(smollm2, messages, **options)).endswith("Good mor")
    with pytest.raises(ValidationError, match="add_generation_prompt=False"):
        render_chat(smollm2, messages, continue_final_message=True)


def test_text_parts_are_joined_and_other_parts_refused(smollm2):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    joined = render_chat(smollm2, [{"role": "user", "content": "Hello\nthere"}])
    assert render_chat(smollm2, [{"role": "user", "content": parts}]) == joined
    image = [{"type": "image_url", "image_url": {"url": "x.png"}}]
    with pytest.raises(ValidationError, match="'image_url'"):
        render_chat(smollm2, [{"role": "user", "content": image}])


def test_tools_and_other_options_reach_the_template():
    template = "{{ tools[0]['function']['name'] }} {{ mood }} {{ messages|length }}"
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    tokenizer = byte_level()
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "clock"}}]}
    ids = render_chat(tokenizer, [*HELLO, call], tools=[tool], chat_template=template, mood="calm")
    assert tokenizer.decode(ids) == "clock calm 2"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("Hello", "list of dicts"),
        ({"role": "user", "content": "x"}, "list of dicts"),
        (["Hello"], r"messages\[0\] must be a dict"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] needs a 'role'"),
        ([{"role": 1, "content": "x"}], r"messages\[0\] needs a 'role'"),
        ([{"role": "user"}], r"messages\[0\] needs a 'content'"),
        ([{"role": "user", "content": None}], "'content' is None"),
        ([{"role": "user", "content": 5}], "must be a text or a list of text parts, not int"),
        ([{"role": "user", "content": ["x"]}], "a part of 'content' is 'str'"),
        ([{"role": "user", "content": "\ud83d"}], "not valid Unicode"),
    ],
)
def test_malformed_messages_are_refused_by_place_and_reason(smollm2, messages, says):
    with pytest.raises(ValidationError, match=says):
        render_chat(smollm2, messages)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("", "empty prompt|no chat template"),
    ],
)
def test_a_template_that_fails_is_named_with_its_own_words(smollm2, template, says):
    with pytest.raises(ValidationError, match=says):
        render_chat(smollm2, HELLO, chat_template=template)


def test_a_tokenizer_without_a_template_says_what_to_do():
    with pytest.raises(ValidationError, match="pass chat_template=") as caught:
        render_chat(byte_level(), HELLO)
    assert caught.value.parameter == "chat_template"
    assert render_chat(byte_level(), HELLO, chat_template=PLAIN)


def test_bad_words_are_forbidden_with_and_without_a_space_before(smollm2):
    ids = bad_words_to_ids(smollm2, ["Paris", " hello "])
    assert [smollm2.decode(word) for word in ids] == ["Paris", " Paris", "hello", " hello"]
    llama = byte_fallback()
    assert [llama.convert_tokens_to_ids("▁Paris")] in bad_words_to_ids(llama, ["Paris"])
    assert not any(llama.bos_token_id in word for word in bad_words_to_ids(llama, ["Paris"]))
    with pytest.raises(ValidationError, match="bad_words"):
        bad_words_to_ids(smollm2, ["ok", "  "])


def test_loading_what_is_not_there_says_so(tmp_path, smollm2_path):
    with pytest.raises(ModelNotFoundError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    # Some classes make an empty tokenizer of nothing but the model's config.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ModelNotFoundError, match="no vocabulary"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ['{"version": "1.0', '{"model": 1}', ""])
def test_a_broken_tokenizer_file_is_named(tmp_path, smollm2_path, content):
    folder = tmp_path / "model"
    shutil.copytree(smollm2_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises((ConfigError, ModelNotFoundError)) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message


def test_a_tokenizer_with_code_of_its_own_needs_trust(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own-kind"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "OwnTokenizer",
                "auto_map": {"AutoTokenizer": ["own_code.OwnTokenizer", None]},
            }
        )
    )
    (tmp_path / "own_code.py").write_text("raise RuntimeError('ran code that nobody trusted')\n")
    with pytest.raises((ConfigError, ModelNotFoundError)) as caught:
        load_tokenizer(tmp_path)
    assert "nobody trusted" not in str(caught.value)


def test_the_text_modules_import_without_torch_or_transformers():
    code = (
        "import sys, pagedllm.engine.text\n"
        "print({'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
