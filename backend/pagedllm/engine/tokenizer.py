"""Text to token ids: loading a tokenizer, prompts, chat templates, bad words.

Owner: the engine's front, in the caller's thread. Invariants: imports neither torch nor
transformers until a tokenizer is loaded; whatever a caller got wrong is one clear
ValidationError; no prompt is shortened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedllm.errors import ConfigError, ModelNotFoundError, ValidationError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub.

    Raises:
        ModelNotFoundError: there is none at that place.
        ConfigError: it is there and cannot be loaded.
    """
    from transformers import AutoTokenizer

    other = "name another with tokenizer=, or set skip_tokenizer_init=True and use token ids"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except Exception as error:
        reason = _first_line(error)
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of {path} runs code of its own: {reason}; set "
                "trust_remote_code=True if you trust it",
                "trust_remote_code",
            ) from error
        if isinstance(error, OSError) or "instantiate the backend tokenizer" in reason:
            raise ModelNotFoundError(f"no tokenizer in {path}: {reason}; {other}") from error
        raise ConfigError(
            f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {reason}; {other}",
            "tokenizer",
        ) from error
    # Without its files, some classes give a tokenizer that knows its special tokens alone.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ModelNotFoundError(f"no tokenizer in {path}: it has no vocabulary; {other}")
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Turn a prompt's text into token ids, with the special tokens the tokenizer adds.

    Raises:
        ValidationError: the text is empty, or is no valid Unicode.
    """
    if not text:
        raise ValidationError("the prompt is empty; give at least one character", "prompt")
    ids = _encode(tokenizer, text, "the prompt", special=True)
    if not ids:
        raise ValidationError(
            f"the tokenizer makes no tokens of the prompt {text[:40]!r}; give it other text",
            "prompt",
        )
    return ids


def bad_words_to_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[list[int]]:
    """Turn words that must not be generated into the token sequences to forbid.

    A word counts both as the start of a text and after a space, since most vocabularies
    spell the two with different tokens. Other spellings of it, in other tokens or inside a
    longer word, are not forbidden.

    Raises:
        ValidationError: a word is blank or no valid Unicode.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare:
            raise ValidationError(f"bad_words must hold words, not {word!r}", "bad_words")
        for spelling in (bare, " " + bare):
            ids = _encode(tokenizer, spelling, f"the bad word {word!r}", special=False)
            if ids:
                found[tuple(ids)] = None
    return [list(ids) for ids in found]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> list[int]:
    """Turn a conversation into the token ids of a prompt.

    Args:
        tokenizer: whose chat template is used.
        messages: dicts with ``role`` and ``content``; a content that is a list of
            ``{"type": "text", "text": ...}`` parts is joined with line breaks.
        tools: descriptions (JSON schema dicts, or functions) for templates that know tools.
        chat_template: a Jinja template in place of the tokenizer's own.
        add_generation_prompt: end with the opening of the assistant's answer.
        continue_final_message: leave the last message open, to be continued; needs
            ``add_generation_prompt=False``.
        kwargs: passed to the template.

    Raises:
        ValidationError: there is no template, a message is malformed, or the template
            refuses it.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ValidationError(
            "the model's tokenizer has no chat template; pass chat_template=, or format the "
            "prompt yourself and use generate",
            "chat_template",
        )
    if add_generation_prompt and continue_final_message:
        raise ValidationError(
            "continue_final_message needs add_generation_prompt=False: either the last message "
            "goes on or a new one begins",
            "continue_final_message",
        )
    conversation = _conversation(messages)
    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tools=None if tools is None else list(tools),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **kwargs,
        )
    except Exception as error:  # a template is code: it may raise anything
        raise ValidationError(
            f"the chat template cannot format these messages: {_first_line(error)}; check their "
            "roles, order and contents, or pass another chat_template=",
            "messages",
        ) from error
    ids = _encode(tokenizer, str(text), "the formatted chat", special=False)
    if not ids:
        raise ValidationError("the chat template makes an empty prompt of these messages")
    return ids


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the messages and copy them, each content a text or None."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValidationError(
            "messages must be a list of dicts such as {'role': 'user', 'content': 'Hello'}, not "
            f"{type(messages).__name__}",
            "messages",
        )
    if not messages:
        raise ValidationError("messages is empty; give at least one message", "messages")
    conversation = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValidationError(
                f"{where} must be a dict with 'role' and 'content', not {type(message).__name__}",
                "messages",
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValidationError(
                f"{where} needs a 'role' such as 'user', 'assistant' or 'system'", "messages"
            )
        if "content" not in message and not message.get("tool_calls"):
            raise ValidationError(f"{where} needs a 'content'", "messages")
        content = _content(message.get("content"), where)
        if content is None and not message.get("tool_calls"):
            raise ValidationError(f"{where}: 'content' is None; give a text", "messages")
        conversation.append({**message, "content": content})
    return conversation


def _content(content: object, where: str) -> str | None:
    """Return one message's content as text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValidationError(
            f"{where}: 'content' must be a text or a list of text parts, not "
            f"{type(content).__name__}",
            "messages",
        )
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValidationError(
                f"{where}: a part of 'content' is {kind!r}; only "
                "{'type': 'text', 'text': ...} parts can be used, since the model reads text",
                "messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, what: str, *, special: bool
) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"{what} is not valid Unicode text: {error.reason} at character {error.start}", "prompt"
        ) from error
    # verbose=False: no warning about model_max_length; the engine knows the true limit.
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return [int(token) for token in ids]


def _first_line(error: BaseException) -> str:
    """Return an exception's message, cut to one line."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
