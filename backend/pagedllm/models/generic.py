"""The generic tier: a transformers model as it is, on packed rows with paged attention.

Owner: models. Invariants: the class's own code computes everything but attention; no mask
is built and no cache of transformers is used; nothing is served that :mod:`probe` did not
find to be right. A model of the caller's is not changed: a copy of its module tree shares
its parameters.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pagedllm.errors import UnsupportedModelError
from pagedllm.models.limits import check_length, position_limit
from pagedllm.models.linears import compile_linears
from pagedllm.models.probe import STEP, attention_scale, check_keywords, probe
from pagedllm.models.quantizing import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from pagedllm.models.base import DeviceBatch, LayerShape
    from pagedllm.models.probe import ProbedLayer
    from pagedllm_kernels.types import AttentionBackend, AttentionMetadata, LayerCache

NAME = "pagedllm"
"""Our name among transformers' attention implementations. No mask function goes with it:
transformers then builds no mask."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What an attention call needs, carried through the model's forward."""

    attention: AttentionBackend
    cache: Sequence[LayerCache]
    metadata: AttentionMetadata
    layers: dict[int, ProbedLayer]


class GenericModel:
    """A :class:`~pagedllm.models.base.PagedModel` that runs a transformers class."""

    tier = "generic"

    def __init__(
        self,
        model: PreTrainedModel,
        attention: AttentionBackend,
        eos_token_ids: frozenset[int],
        *,
        own: bool = True,
    ) -> None:
        """Probe a model and take it over.

        Args:
            model: the engine's alone; see :func:`shared_copy` for one that is not.
            attention: writes and reads the pages.
            eos_token_ids: of its generation config.
            own: whether its parameters, too, are the engine's alone.

        Raises:
            UnsupportedModelError: the probe found it to differ.
        """
        names = frozenset(inspect.signature(model.forward).parameters)
        if "position_ids" not in names:
            raise UnsupportedModelError("its forward takes no position_ids")
        model.eval()
        _register()
        probed = probe(model, names)
        model.set_attn_implementation(NAME)
        compile_linears(model, attention, own=own)
        parameters = list(model.parameters())
        self.model = model
        self.attention = attention
        self.eos_token_ids = eos_token_ids
        self.architecture = type(model).__name__
        self.vocab_size = probed.vocab_size
        self.max_positions = position_limit(model.config.get_text_config(decoder=True))
        self.dtype = model.dtype
        self.device = parameters[0].device
        self.weight_bytes = sum({p.data_ptr(): p.nbytes for p in parameters}.values())
        self.weight_bytes += sum(
            m.weight.nbytes for m in model.modules() if isinstance(m, QuantizedLinear)
        )
        self.layers: Sequence[LayerShape] = tuple(p.shape for p in probed.layers.values())
        self._probed = probed.layers
        self._keeps = "logits_to_keep" in names

    @torch.no_grad()
    def forward(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        extra = {"logits_to_keep": batch.logit_indices} if self._keeps else {}
        logits: torch.Tensor = self._call(self.model, batch, cache, **extra).logits[0]
        return (logits if self._keeps else logits[batch.logit_indices]).float()

    @torch.no_grad()
    def states(self, batch: DeviceBatch, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step; see :class:`~pagedllm.models.base.PagedModel`."""
        output = self._call(self.model.base_model, batch, cache)
        if getattr(output, "last_hidden_state", None) is None:
            raise UnsupportedModelError(f"{self.architecture} does not hand out its last states")
        states: torch.Tensor = output.last_hidden_state[0]
        return states.float()

    def _call(
        self, model: Any, batch: DeviceBatch, cache: Sequence[LayerCache], **extra: Any
    ) -> Any:
        check_length(batch, self.max_positions)
        step = _Step(self.attention, cache, batch.attention, self._probed)
        return model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **{STEP: step},
            **extra,
        )


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _paged_attention)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Answer an attention call of a transformers model from the pages of its layer.

    Args:
        module: its ``layer_idx`` names the layer.
        query: [1, Hq, T, D].
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        attention_mask: None, since no mask function is registered.
        keywords: ``scaling``, ``softcap`` and ``s_aux`` are honoured.

    Returns:
        [1, T, Hq, Dv] and no weights.
    """
    step: _Step = keywords.pop(STEP)
    layer = step.layers[module.layer_idx]
    check_keywords(keywords)
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} made an attention mask")
    output = step.attention.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.cache[layer.index],
        step.metadata,
        scale=attention_scale(query, keywords),
        window=layer.window,
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
    )
    return output[None], None


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's module tree; parameters and buffers stay the caller's own, shared.

    The copy has its own configuration and its own training flag, so that setting the
    attention implementation on it changes nothing for the caller.

    Raises:
        UnsupportedModelError: a module's forward was replaced on the instance (offloading
            hooks do that), so that a copy would call into the original.
    """
    configs: dict[int, Any] = {}
    memo: dict[int, torch.nn.Module] = {}

    def clone(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in memo:
            return memo[id(module)]
        if "forward" in vars(module):
            raise UnsupportedModelError(
                f"the forward of its {type(module).__name__} was replaced, as offloading does; "
                "load it on one device without hooks"
            )
        twin = copy.copy(module)
        memo[id(module)] = twin
        for name, held in vars(module).items():
            if hasattr(held, "_attn_implementation"):
                vars(twin)[name] = copy.deepcopy(held, configs)
        twin._modules = {
            name: None if child is None else clone(child) for name, child in module._modules.items()
        }
        return twin

    return cast("PreTrainedModel", clone(model))
