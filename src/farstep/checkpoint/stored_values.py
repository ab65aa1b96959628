"""Values out of a checkpoint with new memory for their tensors, which is not taken for what is not there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.checkpoint.items import Items
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.reading import Files, Wanted
from farstep.checkpoint.sources import fill, reading
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import PerRank, TensorAt
from farstep.checkpoint.writing import Progress
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state import Box

__all__ = ["memory_for", "read_values"]

_LOOKED_FOR_BYTES = 16 << 20
"""Of a tensor from this size on it is looked whether its files are as long as they should be, before memory is taken for it."""


def memory_for(
    storage: Storage, manifest: Manifest, tensor: str, device: torch.device | str = "cpu"
) -> Tensor:
    """New memory for all of a tensor. Raises DamagedCheckpoint for one that is not there, however large it is said to be."""
    info = manifest.tensors.get(tensor)
    if info is None:
        raise DamagedCheckpoint(f"{storage}: the manifest has no tensor {tensor!r}")
    if info.nbytes >= _LOOKED_FOR_BYTES and not isinstance(storage, Items):  # whose sizes are known
        _check_there(storage, manifest, tensor)
    try:
        return torch.empty(info.shape, dtype=info.dtype, device=device)
    except RuntimeError as exc:
        raise CheckpointError(
            f"{storage}: {tensor!r} takes {info.nbytes:,} bytes, for which there is no memory: {exc}"
        ) from exc


def _check_there(storage: Storage, manifest: Manifest, tensor: str) -> None:
    rows = manifest.rows_of(manifest.names.index(tensor))
    files, ends = manifest.boxes.file[rows], manifest.boxes.at[rows] + manifest.box_bytes[rows]
    with reading(storage), ExitStack() as stack:
        opened = Files(storage, manifest, stack)
        for number in np.unique(files).tolist():
            end = int(ends[files == number].max())
            if end and opened[number].read_into(end - 1, memoryview(bytearray(1))) != 1:
                raise DamagedCheckpoint(
                    f"{storage}: the file {manifest.files[number].name}, which has {tensor!r}, ends before byte {end:,}, to which that goes. Load another "
                    f"checkpoint"
                )


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
            if value.name not in made:
                made[value.name] = memory_for(storage, manifest, value.name)
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
