"""How families of models write tool calls, and which of them a chat template is made for.

Owner: ``structured``. Invariants: data alone; the parser reads every format leniently (what is
listed here as one object may come as a list, and so on), the grammar writes it one way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write tool calls as text."""

    name: str
    begin: str = ""
    """What opens a call, or a list of calls; empty: the answer begins with the call itself."""
    end: str = ""
    """What closes it; empty: nothing does."""
    padding: str = ""
    """Between the call and its ``begin`` and ``end``."""
    as_list: bool = False
    """Whether calls stand in one JSON list between one ``begin`` and ``end``."""
    separator: str = "\n"
    """Between calls, or between their ``begin`` and ``end`` pairs."""
    arguments_key: str = "arguments"
    name_end: str = ""
    """Where a call is a bare name, then this, then the arguments: no JSON object around them."""
    instructions: str = ""
    """For a model whose template does not know tools: how to call one, said in a prompt."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are single special tokens in some vocabularies."""
        return tuple(text for text in (self.begin, self.end, self.name_end) if text)


HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    padding="\n",
    instructions=(
        "For each function call return a JSON object with the function's name and arguments "
        "within <tool_call></tool_call> tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <arguments-json-object>}\n</tool_call>'
    ),
)
"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, and whoever learned from them."""

SMOLLM = ToolFormat(
    "smollm",
    "<tool_call>",
    "</tool_call>",
    as_list=True,
    separator=", ",
    instructions=(
        "To call functions, answer with a JSON list of calls within <tool_call></tool_call> "
        'tags and nothing else:\n<tool_call>[{"name": "function_name", "arguments": '
        '{"argument": "value"}}]</tool_call>'
    ),
)
"""SmolLM2, whose template knows no tools: its model card puts them into the system prompt."""

LLAMA3 = ToolFormat(
    "llama3",
    separator="; ",
    arguments_key="parameters",
    instructions=(
        "To call a function, answer with nothing but a JSON object:\n"
        '{"name": function name, "parameters": dictionary of argument name and its value}'
    ),
)
"""Llama 3.1 and later: a bare object, perhaps after ``<|python_tag|>``."""

MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", as_list=True, separator=", ")
"""Mistral's v2 and v3 tokenizers."""

MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", separator="", name_end="[ARGS]")
"""Mistral's tokenizers from v11 on."""

GEMMA = ToolFormat(
    "gemma",
    arguments_key="parameters",
    instructions=(
        "If you decide to invoke a function, you MUST answer with nothing but\n"
        '{"name": function name, "parameters": dictionary of argument name and its value}'
    ),
)
"""Gemma 2 and 3, whose templates know no tools; also reads fenced ``tool_code`` blocks."""

FORMATS = {f.name: f for f in (HERMES, SMOLLM, LLAMA3, MISTRAL, MISTRAL_ARGS, GEMMA)}


def detect(template: str) -> ToolFormat:
    """Tell from a chat template which format its model was taught; Hermes' when nothing does."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or '"parameters": dictionary of argument' in template:
        return LLAMA3
    if "<start_of_turn>" in template:
        return GEMMA
    if "SmolLM" in template:
        return SMOLLM
    return LLAMA3 if "<|start_header_id|>" in template else HERMES


def knows_tools(template: str) -> bool:
    """Whether a template does something with ``tools``."""
    return re.search(r"\btools\b", _code(template)) is not None


def knows_tool_calls(template: str) -> bool:
    """Whether a template can show an assistant's earlier calls."""
    return "tool_calls" in _code(template)


def thinks(template: str) -> bool:
    """Whether the model behind a template is one that may reason first."""
    return THINK in template or END_THINK in template


def _code(template: str) -> str:
    """What stands within Jinja's braces."""
    return "\n".join(re.findall(r"\{[{%].*?[%}]\}", template, re.DOTALL))
