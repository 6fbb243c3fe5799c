"""Every exception that pagedllm raises on purpose.

Owner: the public API. Invariants: all derive from :class:`PagedLLMError`; each message is
one line that names what is wrong and what to change. Those that report a wrong value are
also ``ValueError``s, so code that knows nothing of pagedllm can catch them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedllm.outputs import RequestOutput


class PagedLLMError(Exception):
    """Base of pagedllm's own exceptions."""


class ConfigError(PagedLLMError, ValueError):
    """A setting is unknown, has a wrong value, or cannot be had on this machine."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        """The setting at fault, where there is one."""


class ValidationError(PagedLLMError, ValueError):
    """A request or its :class:`~pagedllm.SamplingParams` cannot be served as it stands."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        """The parameter at fault, where there is one."""


class RequestTooLongError(ValidationError):
    """The prompt, or the prompt and what it may generate, can never fit."""


class ModelNotFoundError(PagedLLMError, OSError):
    """No such model, or its files are not all there."""


class UnsupportedModelError(PagedLLMError):
    """The model's class cannot be run correctly, and the message says why."""


class EngineError(PagedLLMError):
    """A step failed; ``__cause__`` is the original exception. The engine goes on serving."""

    outputs: Sequence[RequestOutput] = ()
    """From ``LLM.generate``: the output of every prompt, failed or not."""


class EngineClosedError(EngineError):
    """The engine was closed, so it takes no requests."""


class RequestAbortedError(PagedLLMError):
    """The request was aborted before it finished."""
