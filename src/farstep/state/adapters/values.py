"""Any tensor a user has, by the adapter for its type."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from farstep.errors import LayoutError
from farstep.state.adapters import plain
from farstep.state.adapters.ranks import Group, own_rank
from farstep.state.layout import Layout, Spread
from farstep.state.shards import Shards

__all__ = ["kind_of", "layout_of", "like", "local_tensors", "shards_of"]


class _Adapter(Protocol):
    """What each adapter of a tensor type offers, at its module's top level."""

    def shards(self, value: Any, group: Group, name: str) -> Shards: ...

    def local_tensors(self, value: Any) -> list[Tensor]: ...

    def like(self, value: Any, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any: ...


# torch's module, its class, our adapter. Importing torch.distributed.tensor takes a second, so it is left to those who have such tensors.
_TYPES = (
    ("torch.distributed.tensor", "DTensor", "farstep.state.adapters.dtensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor", "farstep.state.adapters.sharded_tensor"),
)


def shards_of(value: Tensor | Shards, group: Group = None, *, name: str = "the tensor") -> Shards:
    """How a tensor is spread over the ranks of a group (by default all), and views of what this rank has of it.

    A plain tensor is taken to be on every rank; `on_rank` says otherwise. Nothing is communicated, and no data is touched. `name` is for errors.
    """
    if isinstance(value, Shards):
        value.check(name, own_rank(group))
        return value
    return _adapter(value, name).shards(value, group, name)


def layout_of(
    tensors: Mapping[str, Tensor | Shards], group: Group = None
) -> tuple[Layout, dict[str, list[Tensor]]]:
    """The same for many: what `plan` takes, and what `exchange` takes."""
    found = {name: shards_of(value, group, name=name) for name, value in tensors.items()}
    return Layout({name: each.spread for name, each in found.items()}), {
        name: each.tensors for name, each in found.items()
    }


def local_tensors(value: Tensor | Shards) -> list[Tensor]:
    """The tensors in which this rank keeps its part: memory that an elementwise operation, such as an optimizer's, can work on."""
    return value.tensors if isinstance(value, Shards) else _adapter(value, "the tensor").local_tensors(value)


def like(value: Tensor | Shards, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Any:
    """The inverse of `local_tensors`: a tensor of the type of `value`, spread as it is, that keeps its part in these tensors.

    They have the shapes of `local_tensors(value)`, and one dtype, which may be another: the state of an optimizer in its parameter's own form.
    Give `dtype` where some rank may have no tensors to tell it by; it is then that of `value`.
    """
    own = local_tensors(value)
    if [t.shape for t in tensors] != [t.shape for t in own]:
        raise LayoutError(
            f"tensors of the shapes {[tuple(t.shape) for t in tensors]} were given in place of {[tuple(t.shape) for t in own]}: give one of "
            f"the same shape for each of local_tensors(value)"
        )
    dtype = dtype or (tensors[0] if tensors else value).dtype
    if any(t.dtype != dtype for t in tensors):
        raise LayoutError(
            f"tensors of the dtypes {[t.dtype for t in tensors]} cannot be one tensor of {dtype}"
        )
    if not isinstance(value, Shards):
        return _adapter(value, "the tensor").like(value, tensors, dtype)
    old = value.spread
    return Shards(Spread(old.shape, dtype, old.ranks, old.offsets, old.sizes), tensors)


def kind_of(value: object) -> str | None:
    """ "DTensor", "ShardedTensor", "Tensor", or None for what is no tensor."""
    found = _type_of(value)
    return found[1] if found else "Tensor" if isinstance(value, Tensor) else None


def _adapter(value: object, name: str) -> _Adapter:
    found = _type_of(value)
    if found:
        return cast(_Adapter, import_module(found[2]))
    if isinstance(value, Tensor):
        return cast(_Adapter, plain)
    raise LayoutError(
        f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, which is no tensor: give a Tensor, DTensor, ShardedTensor or Shards"
    )


def _type_of(value: object) -> tuple[str, str, str] | None:
    for each in _TYPES:
        loaded = sys.modules.get(each[0])
        if loaded is not None and isinstance(value, getattr(loaded, each[1], ())):
            return each
    return None
