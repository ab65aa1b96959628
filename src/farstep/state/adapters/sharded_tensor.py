"""ShardedTensor, torch's older sharded tensor: its metadata lists every rank's shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from farstep.errors import LayoutError
from farstep.state.adapters.ranks import Group, own_rank, ranks_within
from farstep.state.box import Box
from farstep.state.layout import Spread
from farstep.state.shards import Part, Shards

__all__ = ["like", "local_tensors", "part", "shards"]


def shards(value: ShardedTensor, group: Group, name: str) -> Shards:
    metadata = value.metadata()
    shape = tuple(metadata.size)
    held = [each for each in metadata.shards_metadata if 0 not in each.shard_sizes]
    global_ranks = np.array([_rank(each, name) for each in held], dtype=np.int64)
    spread = Spread(
        shape,
        metadata.tensor_properties.dtype,
        ranks_within(group, global_ranks, name, "process group"),
        np.array([each.shard_offsets for each in held], dtype=np.int64).reshape(-1, len(shape)),
        np.array([each.shard_sizes for each in held], dtype=np.int64).reshape(-1, len(shape)),
    )
    here = {tuple(each.metadata.shard_offsets): each.tensor.detach() for each in value.local_shards()}
    tensors = []
    for box in spread.boxes(own_rank(group)):
        tensor = here.get(box.offsets)
        if tensor is None or tuple(tensor.shape) != box.sizes:
            has = "no shard" if tensor is None else f"one of shape {tuple(tensor.shape)}"
            raise LayoutError(
                f"by its metadata rank {dist.get_rank()} holds {box} of {name!r}, and there is {has} there: "
                f"make the ShardedTensor anew with init_from_local_shards"
            )
        tensors.append(tensor)
    return Shards(spread, tensors)


def part(value: ShardedTensor, name: str) -> Part:
    metadata = value.metadata()
    held = [each for each in value.local_shards() if 0 not in each.metadata.shard_sizes]
    boxes = [Box(tuple(each.metadata.shard_offsets), tuple(each.metadata.shard_sizes)) for each in held]
    tensors = [each.tensor.detach() for each in held]
    return Part(tuple(metadata.size), metadata.tensor_properties.dtype, boxes, tensors)


def local_tensors(value: ShardedTensor) -> list[Tensor]:
    """One for each local shard, in their order."""
    return [each.tensor.detach() for each in value.local_shards()]


def like(value: ShardedTensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> ShardedTensor:
    """With the shards of `value`, and these local tensors, one for each of its local shards. All ranks give the same dtype."""
    old = value.metadata()
    local = value.local_shards()
    made = [
        Shard(tensor.detach().contiguous(), _within(each.metadata, old.size))
        for tensor, each in zip(tensors, local, strict=True)
    ]
    metadata = ShardedTensorMetadata(
        [_within(each, old.size) for each in old.shards_metadata],
        old.size,
        TensorProperties(dtype=dtype, requires_grad=False),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        made, metadata, process_group=value._process_group, sharding_spec=value.sharding_spec()
    )


def _rank(shard: ShardMetadata, name: str) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None:
        raise LayoutError(
            f"the shard of {name!r} at {shard.shard_offsets} is placed on {shard.placement}, which names no rank: "
            f"use placements like 'rank:0/cpu'"
        )
    return int(rank)


def _within(shard: ShardMetadata, size: Sequence[int]) -> ShardMetadata:
    """The same, but an empty shard of a chunk spec may begin beyond the tensor's end, which torch itself refuses when it is given."""
    offsets = [min(offset, end) for offset, end in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)
