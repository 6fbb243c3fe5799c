"""From a constraint to the tokens that may come next: one vocabulary's view of it.

Owner: the engine's intake, which compiles in the caller's thread, and the worker, which asks
for masks in the step. Invariants: whatever is wrong with a constraint is a ValidationError at
intake and takes bounded time, since llguidance limits what a grammar may cost; a sequence's
state follows from its output tokens alone, so it survives a preemption and answers of one
request do not share it.
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pagedllm.errors import EngineError, ValidationError
from pagedllm.structured.bounds import check_choices, check_grammar, check_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from pagedllm.structured.spec import StructuredOutput

_CACHED_GRAMMARS = 64
_WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{1,20}"}
"""Between the parts of JSON any layout a person would use, but not without end: small models
love to go on with blanks for ever."""


class Grammar:
    """A compiled constraint; a logits processor, as far as a request is concerned.

    Args:
        compiler: where it comes from.
        spec: what it stands for.

    Raises:
        ValidationError: the constraint is invalid, cannot be satisfied, or is too costly.
    """

    def __init__(self, compiler: GrammarCompiler, spec: StructuredOutput) -> None:
        self._compiler = compiler
        self._spec = spec
        self._matcher = compiler.matcher(spec)

    def for_sequence(self) -> GrammarMask:
        """The state of one sequence, which has no output yet."""
        return GrammarMask(self._matcher.deep_copy())

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        """Not how a grammar is applied: the sampler asks for masks, see :class:`GrammarMask`."""
        raise EngineError("a Grammar is applied by the sampler, and is not called")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as the constraint and the way to its vocabulary."""
        return _compile, (*self._compiler.source, self._spec)


class GrammarMask:
    """Which tokens may come next in one sequence."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_read = 0

    def fill(self, output: NDArray[np.int64], mask: NDArray[np.int32]) -> None:
        """Say which tokens may come next.

        Args:
            output: int64 [n], the sequence's output so far; only ever longer than before.
            mask: int32 [>= ceil(V / 32)], zeros; bit i of word j is token 32 j + i.

        Raises:
            EngineError: the output broke the constraint (another logits processor forced a
                token), or going on costs more than the limits allow.
        """
        new = output[self._num_read :].tolist()
        self._num_read = len(output)
        matcher = self._matcher
        # Past its end a sequence may be asked once more, by a step that was under way.
        if new and not matcher.is_stopped() and not matcher.consume_tokens(new):
            raise EngineError(f"structured_output: {_reason(matcher.get_error())}")
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise EngineError(f"structured_output: {_reason(matcher.get_error())}")


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Any thread may use it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: of the model's logits.
        eos_token_ids: tokens that end an answer.

    Raises:
        ValidationError: llguidance is not installed, or the tokenizer is not a fast one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        if not self.eos_token_ids:
            raise _error("the model has no end token, and a constrained answer needs one to end")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _error(
                f"the tokenizer {type(tokenizer).__name__} is not a fast one, whose vocabulary "
                "could be read; use a model with a tokenizer.json"
            )
        # A copy without padding and truncation, and with all added tokens.
        clean = type(backend).from_str(backend.to_str())
        clean.no_padding()
        clean.no_truncation()
        self._text = clean.to_str()
        self._path = Path(str(tokenizer.name_or_path)) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizer = _build_tokenizer(self._text, vocab_size, self.eos_token_ids)
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(maxsize=_CACHED_GRAMMARS)(self._compile)

    @functools.cached_property
    def source(self) -> tuple[str, int, tuple[int, ...]]:
        """What another process needs to build the same compiler.

        The vocabulary's file, when it says the same as the tokenizer in use: it is megabytes.
        """
        text = self._text
        if self._path.is_file() and _read(str(self._path)) == text:
            text = str(self._path)
        return text, self._vocab_size, self.eos_token_ids

    def grammar(self, spec: StructuredOutput) -> Grammar:
        """Compile a constraint. Raises ValidationError."""
        return Grammar(self, spec)

    def matcher(self, spec: StructuredOutput) -> Any:
        """Return llguidance's matcher at the start of the constraint, to be copied."""
        with self._lock:
            return self._compiled(spec)

    def _compile(self, spec: StructuredOutput) -> Any:
        guidance = load_llguidance()
        limits = guidance.LLParserLimits(verbose_errors=False)
        matcher = guidance.LLMatcher(
            self._tokenizer, _definition(guidance.LLMatcher, spec), log_level=0, limits=limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # some limits show in the first mask only
        if matcher.is_error():
            raise _error(f"the {spec.kind} cannot be used: {_reason(matcher.get_error())}")
        return matcher


def load_llguidance() -> Any:
    """Import llguidance. Raises ValidationError that says how to install it."""
    try:
        import llguidance
    except ImportError:
        raise _error(
            "constrained decoding needs llguidance; install it with pip install "
            "'pagedllm[structured]'"
        ) from None
    return llguidance


@functools.lru_cache(maxsize=4)
def _build_tokenizer(text: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    """A vocabulary as llguidance sees it; takes about a second, so it is kept."""
    guidance = load_llguidance()
    try:
        return guidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (ValueError, RuntimeError) as error:
        raise _error(f"the model's tokenizer cannot be used: {_reason(str(error))}") from error


def _read(path: str) -> str:
    """A tokenizer.json as llguidance takes it: without padding and truncation."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


@functools.lru_cache(maxsize=4)
def _compiler(source: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarCompiler:
    from tokenizers import Tokenizer

    text = source if source.startswith("{") else _read(source)
    # Of a tokenizer it takes these two, and transformers need not be imported for them.
    tokenizer: Any = SimpleNamespace(backend_tokenizer=Tokenizer.from_str(text), name_or_path="")
    return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)


def _compile(
    source: str, vocab_size: int, eos_token_ids: tuple[int, ...], spec: StructuredOutput
) -> Grammar:
    return _compiler(source, vocab_size, eos_token_ids).grammar(spec)


def _definition(matcher: Any, spec: StructuredOutput) -> str:
    """Say a constraint in llguidance's own terms."""
    if spec.json_schema is not None or spec.json_object:
        schema = closed(json.loads(spec.json_schema or '{"type": "object"}'))
        return str(matcher.grammar_from_json_schema(schema, _WHITESPACE))
    if spec.regex is not None:
        return str(matcher.grammar_from_regex(spec.regex))
    if spec.choice:
        check_choices(spec.choice)
        quoted = " | ".join(json.dumps(text) for text in spec.choice)
        return str(matcher.grammar_from_lark(f"start: {quoted}"))
    check_grammar(spec.grammar or "")
    return str(matcher.grammar_from_lark(spec.grammar))


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    """A JSON schema as the right side of a rule in a Lark grammar, laid out as usual here.

    Args:
        schema: the schema, a mapping.
        lenient: whether keywords that no grammar can hold are passed over.
    """
    options = {**_WHITESPACE, "lenient": lenient}
    return "%json " + json.dumps({**closed(schema), "x-guidance": options})


def closed(schema: Any) -> Any:
    """Forbid properties that a schema neither names nor allows.

    JSON Schema permits them by default, and a model that is held to a schema then invents
    some; hardly an author means that. A schema that joins others with ``allOf`` stays as it
    is, since each of those would forbid what the others name.

    Raises:
        ValidationError: it is nested too deeply.
    """
    check_schema(schema)
    return schema if _joins(schema) else _close(schema)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    joins = isinstance(parts, list) and len(parts) > 1 - ("properties" in schema)
    return joins or any(map(_joins, schema.values()))


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _close(part) for name, part in value.items()}
        elif key in _SCHEMAS:
            found[key] = _close(value)
    if isinstance(schema.get("properties"), dict) and not _OPENERS & set(schema):
        found["additionalProperties"] = False
    return found


_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"}
_OPENERS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"}


def _reason(message: str) -> str:
    """The first line of llguidance's message."""
    if "NoExtensionBias" in message:  # its word for an empty mask
        return "no token continues it towards a text that satisfies it"
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return f"{lines[0]} {errors[0]}" if errors else (lines[0] if lines else "unknown error")


def _error(message: str) -> ValidationError:
    return ValidationError(f"structured_output: {message}", "structured_output")
