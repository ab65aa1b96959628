"""Plain tensors: whole wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farstep.errors import LayoutError
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.box import Box
from farstep.state.layout import Spread
from farstep.state.shards import Part, Shards

__all__ = ["check_readable", "like", "local_tensors", "on_rank", "part", "replicated", "shards"]


def shards(value: Tensor, group: Group, name: str) -> Shards:
    """Every rank of the group has all of it."""
    return replicated(value, range(size_of(group)), group, name)


def replicated(value: Tensor, ranks: Sequence[int], group: Group = None, name: str = "the tensor") -> Shards:
    """These ranks of the group have all of it. On the others only its shape and dtype count, and it may be on the meta device."""
    _check(value, name)
    spread = Spread.whole(value.shape, value.dtype, ranks)
    here = own_rank(group) in ranks
    if here:
        check_readable(value, name)
    return Shards(spread, [value.detach()] if here else [])


def on_rank(value: Tensor, rank: int = 0, group: Group = None, name: str = "the tensor") -> Shards:
    """One rank of the group has all of it: where a full tensor is to be gathered to, or comes from."""
    if not 0 <= rank < size_of(group):
        raise LayoutError(f"{name!r} was to be on rank {rank} of a group that has {size_of(group)} ranks")
    return replicated(value, [rank], group, name)


def part(value: Tensor, name: str) -> Part:
    return Part(tuple(value.shape), value.dtype, [Box.whole(value.shape)], [value.detach()], is_whole=True)


def local_tensors(value: Tensor) -> list[Tensor]:
    return [value.detach()]


def like(value: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    (tensor,) = tensors
    return tensor


def check_readable(value: Tensor, name: str) -> None:
    """Raise LayoutError unless it has elements."""
    _check(value, name)
    if value.is_meta:
        raise LayoutError(
            f"{name!r} is on the meta device, so it has no elements: give a tensor that has memory"
        )
    if value.numel() and not _has_memory(value):
        raise LayoutError(
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__} without memory of its own: it wraps other "
            f"tensors, is fake, or has been freed. Give the plain tensors that it is made of, or a clone"
        )


def _has_memory(value: Tensor) -> bool:
    try:
        return value.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # what wraps other tensors has none
        return False


def _check(value: Tensor, name: str) -> None:
    if value.layout is not torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise LayoutError(
            f"{name!r} is a {kind} tensor, which has no boxes: make it dense (to_dense, dequantize) first"
        )
