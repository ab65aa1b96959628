"""Values out of a checkpoint with new memory for their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.reading import Wanted
from farstep.checkpoint.sources import fill
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import PerRank, TensorAt
from farstep.checkpoint.writing import Progress
from farstep.errors import DamagedCheckpoint
from farstep.state import Box

__all__ = ["read_values"]


def read_values(
    storage: Storage,
    manifest: Manifest,
    saved: Any,
    *,
    names: Callable[[str], bool] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Any:
    """What `decode` gave, its tensors read. Those whose names are not wanted are left out."""
    made: dict[str, Tensor] = {}

    def built(value: Any) -> Any:
        if isinstance(value, TensorAt):
            info = manifest.tensors.get(value.name)
            if info is None:
                raise DamagedCheckpoint(f"{storage}: the manifest has no tensor {value.name!r}")
            if value.name not in made:
                made[value.name] = torch.empty(info.shape, dtype=info.dtype)
            return made[value.name]
        if isinstance(value, PerRank):
            return built(value.value)
        if isinstance(value, dict):
            return {key: built(each) for key, each in value.items() if is_wanted(each)}
        if isinstance(value, list | tuple):
            return type(value)(built(each) for each in value if is_wanted(each))
        return value

    def is_wanted(value: Any) -> bool:
        return names is None or not isinstance(value, TensorAt) or names(value.name)

    found = built(saved)
    wanted: Wanted = {name: (name, [Box.whole(tensor.shape)], [tensor]) for name, tensor in made.items()}
    fill(storage, manifest, wanted, verify=verify, progress=progress)
    return found
