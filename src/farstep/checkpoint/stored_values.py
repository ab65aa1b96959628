"""Values out of a checkpoint with new memory for their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.reading import read_into, reads_for
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
    verify: bool = True,
    progress: Progress | None = None,
) -> Any:
    """What `decode` gave, its tensors read."""
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
            return {key: built(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(built(each) for each in value)
        return value

    found = built(saved)
    wanted = {name: (name, [Box.whole(tensor.shape)], [tensor]) for name, tensor in made.items()}
    read_into(storage, manifest, reads_for(manifest, wanted), verify=verify, progress=progress, threads=storage.threads)  # fmt: skip
    return found
