"""Answers of a given form."""

from __future__ import annotations

from pagedllm.structured.spec import StructuredOutput

__all__ = ["StructuredOutput"]
