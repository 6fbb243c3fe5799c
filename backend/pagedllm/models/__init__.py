"""Models on a paged cache: native and generic tiers behind one interface.

Owner: models. Invariant: importing this package does not import transformers.
"""

from __future__ import annotations

from pagedllm.models.registry import load_model, wrap_model

__all__ = ["load_model", "wrap_model"]
