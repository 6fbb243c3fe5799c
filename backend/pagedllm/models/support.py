"""Which classes are refused before their weights are read, and why.

Owner: models. Invariants: a refusal names the class and the reason; a class that passes is
still probed (generic tier) or understood in full (native tier) before it serves anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_supported(config: Any, *, trust_remote_code: bool) -> str:
    """Return the class name of a configuration's model.

    Raises:
        UnsupportedModelError: it cannot be run correctly.
    """
    return (getattr(config, "architectures", None) or ["?"])[0]


def check_class(cls: type, config: Any) -> str:
    """Return a class's name.

    Raises:
        UnsupportedModelError: it cannot be run correctly.
    """
    return cls.__name__


def plain_model(model: PreTrainedModel) -> None:
    """Check that a live model computes what its class does, and nothing more."""
