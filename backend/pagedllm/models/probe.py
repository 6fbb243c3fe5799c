"""Proves, on the loaded model itself, that the generic tier computes what the class does.

Owner: models. Two forwards of a few tokens. In the first, every attention call is computed
by the class's own eager function on its own mask and compared with paged attention's
formula; the mask's pattern is evaluated far beyond the tokens at hand, so a window or a
chunk shows whatever its size. In the second the tokens come in another order with their
positions, as rows of different sequences do in a packed step: the logits must follow.
Invariant: a class that fails is refused with the reason, so no model is served on trust.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedllm.errors import UnsupportedModelError
from pagedllm.models.base import LayerShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

STEP = "pagedllm_step"
"""The keyword that carries our data through the model to its attention calls."""
PROBE = "pagedllm_probe"
"""The probe's name among transformers' attention implementations; masks are built for it."""

_TOKENS = 9
# Positions at which a mask is evaluated: beyond any window or chunk in use.
_FAR = 1 << 21
# What attention calls may be given: what paged attention computes, and what changes nothing.
_KEYWORDS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"}) | frozenset(
    {"cache_position", "dropout", "output_attentions", "output_router_logits", "position_ids"}
    | {"use_cache"}
)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What one attention layer was seen to do."""

    index: int
    """Place among the model's attention layers, in the order they run."""
    shape: LayerShape
    window: int | None
    """Of the class's own mask."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a model was seen to do."""

    layers: dict[int, ProbedLayer]
    """By the module's ``layer_idx``."""
    vocab_size: int


def probe(model: PreTrainedModel, forward_names: frozenset[str]) -> Probed:
    """Run the two forwards and compare.

    Args:
        model: in eval mode; its attention implementation is changed to ``PROBE``.
        forward_names: parameters of its forward.

    Raises:
        UnsupportedModelError: paged attention would not compute what the class computes.
    """
    _register()
    model.set_attn_implementation(PROBE)
    device = next(model.parameters()).device
    vocab = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (_TOKENS,), generator=generator).to(device)
    order = torch.randperm(len(ids), generator=generator).to(device)
    keep = torch.tensor([0, 2, len(ids) - 1], device=device)
    positions = torch.arange(len(ids), device=device)

    first = _Recorder()
    logits = _run(model, ids, positions, first)
    last = _Reordered(first.layers, order)
    extra = {"logits_to_keep": keep} if "logits_to_keep" in forward_names else {}
    moved = _run(model, ids[order], order, last, **extra)
    if not extra:
        moved = moved[keep]
    _check_count(model, first.layers)
    wanted = logits[order[keep]]
    error = float((moved - wanted).norm() / wanted.norm().clamp_min(1e-6))
    if not error <= _TOLERANCE.get(model.dtype, 0.1):
        raise UnsupportedModelError(
            "its logits depend on the order of a batch's rows, not only on their positions "
            f"(relative error {error:.1e}): it mixes tokens outside of attention"
        )
    return Probed(first.layers, logits.shape[-1])


def _run(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, step: Any, **extra: Any
) -> torch.Tensor:
    """Return float32 logits [T, V] of one packed forward."""
    try:
        with torch.no_grad():
            output = model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                **{STEP: step},
                **extra,
            )
        logits: torch.Tensor = output.logits[0].float()
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"its forward fails on packed rows: {type(error).__name__}: {reason}"
        ) from error
    return logits


def _check_count(model: PreTrainedModel, layers: dict[int, ProbedLayer]) -> None:
    config = model.config.get_text_config(decoder=True)
    expected = getattr(config, "num_hidden_layers", len(layers))
    if len(layers) != expected:
        raise UnsupportedModelError(
            f"{len(layers)} of its {expected} layers called attention: the others keep a "
            "state that has no pages"
        )


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, _mask)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Hand an attention call of the model to the recorder that runs it."""
    step = keywords.pop(STEP, None)
    if step is None:
        raise UnsupportedModelError("it does not pass keyword arguments on to its attention")
    return step.attend(module, query, key, value, attention_mask, keywords), None


def _mask(*args: Any, **keywords: Any) -> torch.Tensor | None:
    """Build the mask that eager attention would get, with its pattern attached."""
    from transformers.masking_utils import eager_mask

    mask: torch.Tensor | None = eager_mask(*args, **keywords)
    if mask is not None:
        mask.pagedllm_window = _pattern(keywords.get("mask_function"))  # type: ignore[attr-defined]
    return mask


def _pattern(sees: Callable[..., Any] | None) -> int | str | None:
    """Return a mask function's window, None for all of the past, or a text: what else it is."""
    if sees is None:
        return "it builds a mask of its own"
    zero = torch.zeros(1, dtype=torch.int64)
    counts = []
    for query in (_FAR - 1, _FAR // 2 + 7):
        keys = torch.arange(_FAR)
        try:
            seen = torch.as_tensor(sees(zero, zero, torch.tensor([query]), keys))
        except (IndexError, RuntimeError, TypeError, ValueError):
            return "its mask depends on the input"
        seen = seen.broadcast_to(keys.shape)
        if bool(seen[query + 1 :].any()):
            return "its attention is bidirectional"
        count = int(seen.sum())
        if not bool(seen[query + 1 - count : query + 1].all()):
            return "its mask is neither causal nor a sliding window"
        counts.append((count, query + 1))
    (count, everything), (other, other_everything) = counts
    if count == everything and other == other_everything:
        return None
    if count != other:
        return "its attention is chunked"
    return count


class _Recorder:
    """Runs each attention call as the class would and compares paged attention with it."""

    def __init__(self) -> None:
        self.layers: dict[int, ProbedLayer] = {}
        self._keys: list[torch.Tensor] = []

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """Return [1, T, Hq, Dv] of query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
        layer = self._layer(module, query, key, value, mask, keywords)
        original = _eager(module)
        q, k, v = query.float(), key.float(), value.float()
        wanted, _ = original(module, q, k, v, mask if mask is None else mask.float(), **keywords)
        rows = torch.arange(query.shape[2], device=query.device)
        ours = _formula(q, k, v, rows, layer.window, keywords)
        error = float((ours - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        if not error < 1e-3:
            raise UnsupportedModelError(
                f"its attention is not a softmax of scaled products (relative error {error:.1e})"
            )
        self.layers[module.layer_idx] = layer
        self._keys.append(key)
        output: torch.Tensor = wanted.to(query.dtype)
        return output

    def _layer(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> ProbedLayer:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise UnsupportedModelError("its attention modules have no layer_idx")
        if index in self.layers:
            raise UnsupportedModelError(f"its layer {index} calls attention twice")
        if any(key.data_ptr() == other.data_ptr() for other in self._keys):
            raise UnsupportedModelError(f"its layer {index} shares another layer's keys")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(
                f"its attention sees {key.shape[2]} keys for {query.shape[2]} tokens"
            )
        if key.shape[3] != value.shape[3]:
            raise UnsupportedModelError(
                f"its keys have {key.shape[3]} entries and its values {value.shape[3]}"
            )
        if keywords.get("dropout"):
            raise UnsupportedModelError("it applies dropout to attention")
        if mask is None:
            raise UnsupportedModelError("it builds no causal mask: its attention is bidirectional")
        window = getattr(mask, "pagedllm_window", "it changes the attention mask in its layers")
        if isinstance(window, str):
            raise UnsupportedModelError(window)
        asked = keywords.get("sliding_window")
        if asked is not None and window is not None and asked != window:
            raise UnsupportedModelError(
                f"its attention asks for a window of {asked} and its mask has one of {window}"
            )
        check_keywords(keywords)
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return ProbedLayer(len(self.layers), shape, window)


class _Reordered:
    """Runs attention by position for tokens that come in any order."""

    def __init__(self, layers: dict[int, ProbedLayer], positions: torch.Tensor) -> None:
        self._layers = layers
        self._positions = positions

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """Return [1, T, Hq, Dv]; see :meth:`_Recorder.attend`."""
        q, k, v = query.float(), key.float(), value.float()
        window = self._layers[module.layer_idx].window
        return _formula(q, k, v, self._positions, window, keywords).to(query.dtype)


def _eager(module: Any) -> Callable[..., Any]:
    """Return the attention function that the class uses when none is set."""
    source = sys.modules[type(module).__module__]
    function = getattr(source, "eager_attention_forward", None)
    if function is None:
        raise UnsupportedModelError("it has no eager attention to compare with")
    return function  # type: ignore[no-any-return]


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    keywords: dict[str, Any],
) -> torch.Tensor:
    """Compute what paged attention computes, for one sequence in fp32.

    Args:
        query: [1, Hq, T, D].
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        positions: int64 [T].
        window: see :class:`AttentionBackend`.
        keywords: the call's; ``scaling``, ``softcap`` and ``s_aux`` are used.

    Returns:
        [1, T, Hq, Dv].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * attention_scale(query, keywords)
    softcap = keywords.get("softcap")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = positions[None, :] > positions[:, None]
    if window is not None:
        hidden = hidden | (positions[None, :] <= positions[:, None] - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    sinks = keywords.get("s_aux")
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()


def check_keywords(keywords: dict[str, Any]) -> None:
    """Raise when an attention call asks for something that paged attention does not do.

    Raises:
        UnsupportedModelError: names the keyword arguments.
    """
    unknown = [k for k, v in keywords.items() if v is not None and k not in _KEYWORDS]
    if unknown == ["is_causal"] and keywords["is_causal"] is True:
        return
    if unknown:
        raise UnsupportedModelError(f"it calls attention with {', '.join(unknown)}")


def attention_scale(query: torch.Tensor, keywords: dict[str, Any]) -> float:
    """Return the factor on the scores that an attention call asks for; ``query`` is [..., D]."""
    scaling = keywords.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
