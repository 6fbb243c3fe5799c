"""Tensors by name: from a folder of safetensors, or from a model in memory.

Owner: models. Invariants: a file's tensors are copied out of its mapping, so the file may
change or vanish afterwards; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pagedllm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel


class SafetensorsSource:
    """Reads tensors from the shards of a checkpoint, converting them on the way.

    Use as a context manager: the files are mapped while it is open.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._paths = tuple(files)
        self._dtype = dtype
        self._device = device
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        self.names: frozenset[str] = frozenset()

    def __enter__(self) -> SafetensorsSource:
        from safetensors import safe_open

        for path in self._paths:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(opened.keys(), opened))
        self.names = frozenset(self._files)
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, parts: Sequence[str]) -> torch.Tensor:
        """Return tensors one below the other; see :class:`TensorSource`."""
        shapes = [self._shape(name) for name in parts]
        merged = self._empty((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        self._fill(merged, parts)
        return merged

    def stack(self, rows: Sequence[Sequence[str]]) -> torch.Tensor:
        """Return rows of merged tensors; see :class:`TensorSource`."""
        shapes = [self._shape(name) for name in rows[0]]
        height = sum(shape[0] for shape in shapes)
        stacked = self._empty((len(rows), height, *shapes[0][1:]))
        for row, names in zip(stacked, rows):
            self._fill(row, names)
        return stacked

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, target: torch.Tensor, parts: Sequence[str]) -> None:
        begin = 0
        for name in parts:
            tensor = self._files[name].get_tensor(name)
            end = begin + tensor.shape[0]
            if target[begin:end].shape != tensor.shape:
                raise UnsupportedModelError(
                    f"{name} has the shape {tuple(tensor.shape)}, which does not fit beside "
                    f"{parts[0]}"
                )
            target[begin:end].copy_(tensor)
            begin = end


class ModuleSource:
    """Takes the parameters of a live transformers model, sharing their memory.

    Projections that the decoder wants merged are copied side by side once, and the model's
    own parameters become views of the merged tensor: both stay in step and the memory of
    one is used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Only the first name of a tied parameter is listed.
        self._parameters: Mapping[str, torch.nn.Parameter] = dict(model.named_parameters())
        self.names = frozenset(self._parameters)

    def read(self, parts: Sequence[str]) -> torch.Tensor:
        """Return tensors one below the other; see :class:`TensorSource`."""
        parameters = [self._parameters[name] for name in parts]
        # A model that was made in inference mode would break with a view of another kind.
        with torch.inference_mode(parameters[0].is_inference()):
            return self._merge(parameters)

    def _merge(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        if len(parameters) == 1:
            return parameters[0].detach()
        views = [parameter.detach() for parameter in parameters]
        merged = _adjacent(views)
        if merged is None:
            merged = torch.cat(views)
            begin = 0
            for parameter in parameters:
                end = begin + parameter.shape[0]
                parameter.data = merged[begin:end]
                begin = end
        return merged

    def stack(self, rows: Sequence[Sequence[str]]) -> torch.Tensor:
        """Return rows of merged tensors; see :class:`TensorSource`."""
        raise UnsupportedModelError(f"{rows[0][0]} is not merged with the other experts")


def _adjacent(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that contiguous views already are slices of, or None."""
    first = views[0]
    end = first.data_ptr()
    for view in views:
        if view.data_ptr() != end or not view.is_contiguous() or view.dtype != first.dtype:
            return None
        end += view.nbytes
    if end > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None
    return first.as_strided((sum(v.shape[0] for v in views), *first.shape[1:]), first.stride())
