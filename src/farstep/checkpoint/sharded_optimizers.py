"""`load_sharded_optimizer_state_dict`, by torch's contract: an optimizer's state in the form that the model's own tensors have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest, TensorInfo
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import Wanted
from farstep.checkpoint.sources import fill, opened_by_all
from farstep.checkpoint.storage import Storage, storage_of
from farstep.checkpoint.stored_values import memory_for
from farstep.checkpoint.tree import PerRank, TensorAt, children, decode, is_container
from farstep.dist import operation
from farstep.errors import CheckpointError, CheckpointMismatch
from farstep.state import Box, Shards, like, local_tensors, shards_of
from farstep.state.adapters.meta import device_of
from farstep.state.adapters.ranks import own_rank
from farstep.state.optim_names import cleaned

__all__ = ["load_sharded_optimizer_state_dict"]


@operation("load_sharded_optimizer_state_dict")
def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: Any,
    planner: Any = None,
) -> dict[str, Any]:
    """The state that a checkpoint has under `optimizer_key`, at its top: `{optimizer_key: {"state": ..., "param_groups": ...}}`. All ranks call it.

    A state that is shaped like its parameter comes as `model_state_dict` has that: a DTensor on the same mesh with the same placements, a ShardedTensor with
    the same shards, a plain tensor. Each rank allocates and reads its own part alone. Where a ShardedTensor's shards are ShardedTensors themselves, it
    is a ShardedTensor like the inner one, as torch has it. Tensors of one element, or of other shapes than their parameter's, come whole. Parameters that the
    model does not have are left out.

    `storage_reader` is a path, a Storage, or one of torch's readers of files, whose path is read. The checkpoint is DCP's or ours. `planner` is there for
    torch's signature: a DefaultLoadPlanner has nothing to decide here, and any other is refused.

    Raises CheckpointMismatch for a key that the checkpoint does not have.
    """
    _check_planner(planner)
    ranks = Ranks()
    storage, manifest = opened_by_all(_storage(storage_reader), ranks, True)
    doing = f"loading {optimizer_key!r} from {storage}"
    result: dict[str, Any] = {}
    with ranks.all_or_none(doing):
        making = _Making(model_state_dict, storage, manifest)
        result = {optimizer_key: making.built(_node(manifest, storage, optimizer_key), optimizer_key)}
        making.check(optimizer_key)
        fill(storage, manifest, making.wanted, ranks=ranks.count)
    return result


def _check_planner(planner: Any) -> None:
    if planner is None:
        return
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    if type(planner) is not DefaultLoadPlanner:
        raise CheckpointError(
            f"a {type(planner).__qualname__} is not asked what to read here, so it is refused rather than passed over: give no planner"
        )


def _storage(reader: Any) -> Storage:
    if isinstance(reader, str | os.PathLike | Storage):
        return storage_of(reader)
    path = getattr(reader, "path", None)
    if isinstance(path, str | os.PathLike):
        return storage_of(path)
    raise CheckpointError(
        f"a {type(reader).__qualname__} has no path that could be read from: give a path, a farstep Storage or a FileSystemReader"
    )


def _node(manifest: Manifest, storage: Storage, key: str) -> Any:
    there = dict(children(manifest.tree)) if is_container(manifest.tree) else {}
    node = there.get(key)
    if node is None or not is_container(node):
        raise CheckpointMismatch(
            f"{storage} has no {key!r} at its top: it has {', '.join(repr(each) for each in there) or 'nothing'}"
        )
    return node


class _Making:
    """`wanted` is what is to be read into what was made."""

    def __init__(self, model: Mapping[str, Any], storage: Storage, manifest: Manifest) -> None:
        self._model, self._storage, self._manifest = model, storage, manifest
        self.wanted: Wanted = {}
        self._taken = 0
        self._left: list[str] = []

    def built(self, node: Any, key: str) -> dict[str, Any]:
        saved = decode(node, key)
        result = {name: self._whole(each) for name, each in saved.items() if name != "state"}
        if "state" in saved:
            result["state"] = self._state(saved["state"])
        return result

    def check(self, key: str) -> None:
        if self._left and not self._taken:
            numbers = ". They go by numbers: load_optimizer takes those" if self._left[0].isdigit() else ""
            raise CheckpointMismatch(
                f"{key!r} has the state of {self._left[0]!r} and {len(self._left) - 1} others, of which the model has none{numbers}"
            )

    def _state(self, saved: Any) -> dict[str, Any]:
        if not isinstance(saved, dict):
            raise CheckpointMismatch(
                f"the state is a {type(saved).__name__}, and not a dict by the names of parameters"
            )
        found: dict[str, Any] = {}
        for name, values in saved.items():
            parameter = self._model.get(str(name))
            if parameter is None:
                parameter = self._model.get(cleaned(str(name), self._model.__contains__))
            if parameter is None:
                self._left.append(str(name))
                continue
            self._taken += 1
            entries = values if isinstance(values, dict) else {}
            found[name] = {key: self._entry(each, parameter) for key, each in entries.items()}
        return found

    def _entry(self, value: Any, parameter: Any) -> Any:
        if not isinstance(value, TensorAt):
            return self._whole(value)
        info = self._manifest.tensors[value.name]
        box, inner = _innermost(parameter, value.name)
        if Box.whole(info.shape).numel == 1 or tuple(parameter.shape) != info.shape:
            return self._whole(value, parameter)
        return self._like(value.name, info, box, inner)

    def _like(self, name: str, info: TensorInfo, box: Box, parameter: Any) -> Any:
        """Like a tensor that is this box of the whole."""
        device = _device(parameter)
        memory = [
            torch.empty_like(t, dtype=info.dtype, device=device, requires_grad=False)
            for t in local_tensors(parameter)
        ]
        made = like(parameter, memory, dtype=info.dtype)
        if hasattr(parameter, "local_shards"):  # which ranks they are on elsewhere is of no matter
            boxes = [Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in parameter.local_shards()]  # fmt: skip
            tensors = memory
        else:
            shards: Shards = shards_of(made, name=name)
            boxes, tensors = shards.spread.boxes(own_rank(None)), shards.tensors
        offsets = [tuple(a + b for a, b in zip(box.offsets, each.offsets, strict=True)) for each in boxes]
        placed = [Box(o, each.sizes) for o, each in zip(offsets, boxes, strict=True)]
        self.wanted[name] = name, placed, tensors
        return made

    def _whole(self, value: Any, beside: Tensor | None = None) -> Any:
        if isinstance(value, TensorAt):
            made = memory_for(self._storage, self._manifest, value.name, _device(beside))
            self.wanted[value.name] = value.name, [Box.whole(made.shape)], [made]
            return made
        if isinstance(value, PerRank):
            return self._whole(value.value, beside)
        if isinstance(value, dict):
            return {key: self._whole(each, beside) for key, each in value.items()}
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(self._whole(each, beside) for each in value)
        return value


def _innermost(parameter: Any, name: str) -> tuple[Box, Any]:
    """A ShardedTensor whose one shard is a ShardedTensor: that, and which box of the whole it is."""
    box = Box.whole(parameter.shape)
    if hasattr(parameter, "local_shards"):
        shards = parameter.local_shards()
        inside = [each.tensor for each in shards]
        if any(hasattr(each, "placements") or hasattr(each, "local_shards") for each in inside):
            if len(shards) != 1 or hasattr(inside[0], "placements"):
                raise CheckpointMismatch(
                    f"the model's tensor for {name!r} is a ShardedTensor of several sharded tensors, or of a DTensor: give it as a DTensor on one mesh"
                )
            metadata = shards[0].metadata
            return Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)), inside[0]
    return box, parameter


def _device(beside: Any) -> torch.device:
    """Where what belongs to a parameter gets memory: beside it, or, if it is on the meta device, where it is to be."""
    if beside is None:
        return torch.device("cpu")
    tensors = local_tensors(beside) if hasattr(beside, "local_shards") else [beside]
    return (device_of(tensors[0]) if tensors else None) or torch.device("cpu")
