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

    A file is mapped only while some of its tensors are read: pages of a mapping count as the
    process's memory, so whole files that stay mapped would double what loading takes.
    """

    def __init__(self, files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with _open(path) as opened:
                names = opened.keys()
                self._paths.update(dict.fromkeys(names, path))
                for name in names:
                    self._shapes[name] = tuple(opened.get_slice(name).get_shape())
        self.names = frozenset(self._paths)

    def read(self, parts: Sequence[str]) -> torch.Tensor:
        """Return tensors one below the other; see :class:`TensorSource`."""
        return self.stack([parts])[0]

    def stack(self, rows: Sequence[Sequence[str]]) -> torch.Tensor:
        """Return rows of merged tensors; see :class:`TensorSource`."""
        shapes = [self._shapes[name] for name in rows[0]]
        shape = (len(rows), sum(shape[0] for shape in shapes), *shapes[0][1:])
        stacked = torch.empty(shape, dtype=self._dtype, device=self._device)
        with contextlib.ExitStack() as stack:
            paths = {self._paths[name] for names in rows for name in names}
            files = {path: stack.enter_context(_open(path)) for path in paths}
            for row, names in zip(stacked, rows):
                self._fill(row, names, files)
        return stacked

    def _fill(self, target: torch.Tensor, parts: Sequence[str], files: Mapping[Path, Any]) -> None:
        begin = 0
        for name in parts:
            tensor = files[self._paths[name]].get_tensor(name)
            end = begin + tensor.shape[0]
            if target[begin:end].shape != tensor.shape:
                raise UnsupportedModelError(
                    f"{name} has the shape {tuple(tensor.shape)}, which does not fit beside "
                    f"{parts[0]}"
                )
            target[begin:end].copy_(tensor)
            begin = end


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt", device="cpu")


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
