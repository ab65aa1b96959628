"""Named tensors <-> the shards of the flat tensor in which they lie. Pure functions over a `FlatLayout`: no process group, no model.

`flatten` and `unflatten` are for tensors; `flatten_state` and `unflatten_state` for what an optimizer remembers of each, of which some is
shaped like the tensor and some is a number. Each is the inverse of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.errors import LayoutError
from farstep.state.flat import FlatLayout
from farstep.state.known import NUMBERS
from farstep.state.optim_entries import copied
from farstep.state.same import same

__all__ = ["flatten", "flatten_shard", "flatten_state", "unflatten", "unflatten_state"]

State = Mapping[str, Any]
"""What is remembered of one parameter, by key."""


def flatten(layout: FlatLayout, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """All shards of the flat tensor. Padding is zero.

    Every tensor of the layout is to be there, by any of its names. Raises LayoutError where one is missing, unknown, or has another shape or dtype.
    """
    given = _given(layout, tensors)
    _check_names(layout, given)
    return [_shard(layout, given, shard) for shard in range(layout.shard_count)]


def flatten_shard(
    layout: FlatLayout, tensors: Mapping[str, Tensor], shard: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """One of them. Tensors of which nothing lies in this shard may be left out; `dtype` is wanted where that leaves none to tell it by."""
    _check_number(layout, shard)
    given = _given(layout, tensors)
    _check_names(layout, given, [name for name in layout.names if layout.boxes(name, shard)])
    if not given and dtype is None:
        raise LayoutError(
            f"no tensor lies in shard {shard} of {layout.shard_count}, which is padding alone, and none was given: say what dtype it has"
        )
    _check_alike({**given, **({} if dtype is None else {f"shard {shard}": torch.empty(0, dtype=dtype)})})
    return _shard(layout, given, shard, dtype)


def unflatten(layout: FlatLayout, shards: Sequence[Tensor], *, aliases: bool = False) -> dict[str, Tensor]:
    """The tensors, in memory of their own, from all shards.

    A tensor with several names is given by the one that the layout lists, and by the others too, the same tensor, if `aliases`.
    """
    _check_count(layout, len(shards))
    found = {name: _tensor(layout, shards, name) for name in layout.names}
    if aliases:
        found |= {alias: found[name] for alias, name in layout.aliases.items()}
    return found


def flatten_state(layout: FlatLayout, states: Mapping[str, State]) -> list[dict[str, Any]]:
    """What an optimizer of the flat parameter remembers on each shard, from what is remembered of each tensor.

    State that has its tensor's shape is laid out as the tensors are, under the same key. Anything else has to be equal for all tensors, since the flat
    parameter has it once. All but frozen tensors have the same keys, or none has any: zeros are put in place of frozen ones
    alone, which no optimizer looks at, and which have none.
    """
    given = _given(layout, states)
    _check_names(layout, given, [])
    for name in layout.frozen:
        if given.get(name):
            raise LayoutError(
                f"{name!r} has the state {', '.join(map(repr, given[name]))} and is frozen in this layout: leave its state out, or do not name it in `frozen`"
            )
    known = [name for name in layout.names if given.get(name)]
    if not known:
        return [{} for _ in range(layout.shard_count)]
    keys = list(given[known[0]])
    for name in layout.names:
        absent = [key for key in keys if key not in (given.get(name) or ())]
        if absent and name not in layout.frozen:
            raise LayoutError(
                f"{name!r} has no state {', '.join(map(repr, absent))}, and {known[0]!r}, which lies in the same flat parameter, has: give state for "
                f"all of them, or name in `frozen` those that never have any"
            )
        more = [key for key in given.get(name) or () if key not in keys]
        if more:
            raise LayoutError(
                f"{name!r} has the state {', '.join(map(repr, more))}, and {known[0]!r}, which lies in the same flat parameter, does not"
            )
    flat: list[dict[str, Any]] = [{} for _ in range(layout.shard_count)]
    for key in keys:
        values = {name: given[name][key] for name in known}
        if _is_shaped(layout, key, values):
            for state, tensor in zip(flat, _flat_key(layout, key, values), strict=True):
                state[key] = tensor
        else:
            value = _common(key, values)
            for state in flat:
                state[key] = copied(value)  # an optimizer counts its steps in place
    return flat


def unflatten_state(layout: FlatLayout, states: Sequence[State]) -> dict[str, dict[str, Any]]:
    """What is remembered of each tensor, from what an optimizer of the flat parameter remembers on each shard.

    Frozen tensors are left out. Anything but tensors of the shard's length has to be equal on all shards.
    """
    _check_count(layout, len(states))
    found: dict[str, dict[str, Any]] = {
        name: {} for name in layout.names if name not in layout.frozen and any(states)
    }
    for key in dict.fromkeys(key for state in states for key in state):
        absent = [shard for shard, state in enumerate(states) if key not in state]
        if absent:
            raise LayoutError(f"the state {key!r} is missing on shard {absent[0]} of {layout.shard_count}")
        values = {f"shard {shard}": state[key] for shard, state in enumerate(states)}
        if all(_has_shape(value, (layout.shard_numel,)) for value in values.values()):
            for name in found:
                found[name][key] = _tensor(layout, list(values.values()), name)
        else:
            value = _common(key, values)
            for name in found:
                found[name][key] = copied(value)
    return found


def _flat_key(layout: FlatLayout, key: str, values: dict[str, Any]) -> list[Tensor]:
    for name, value in values.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != layout.shape(name):
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise LayoutError(
                f"the state {key!r} of {name!r} is of {what}, and that of others in the same flat parameter has its tensor's shape, which here is "
                f"{layout.shape(name)}: what is neither shaped like its parameter nor common to all cannot be laid end to end"
            )
    model = next(iter(values.values()))
    zeros = {
        name: torch.zeros(layout.shape(name), dtype=model.dtype, device=model.device)
        for name in layout.names
        if name not in values
    }
    try:
        return flatten(layout, {**values, **zeros})
    except LayoutError as exc:
        raise LayoutError(f"the state {key!r}: {exc}") from None


def _shard(
    layout: FlatLayout, tensors: Mapping[str, Tensor], shard: int, dtype: torch.dtype | None = None
) -> Tensor:
    model = next(iter(tensors.values()), None)
    flat = torch.zeros(
        layout.shard_numel,
        dtype=model.dtype if model is not None else dtype,
        device=model.device if model is not None else None,
    )
    for name, tensor in tensors.items():
        for box, view in zip(layout.boxes(name, shard), layout.views(name, flat, shard), strict=True):
            view.copy_(tensor.detach()[box.slices])
    return flat


def _tensor(layout: FlatLayout, shards: Sequence[Tensor], name: str) -> Tensor:
    shape, order = layout.shape(name), layout.order(name)
    _check_alike({f"shard {i}": each for i, each in enumerate(shards)})
    # Dense, and in the memory order that the tensor has in the flat one.
    tensor = torch.empty([shape[d] for d in order], dtype=shards[0].dtype, device=shards[0].device)
    tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    for shard, flat in enumerate(shards):
        for box, view in zip(
            layout.boxes(name, shard), layout.views(name, flat.detach(), shard), strict=True
        ):
            tensor[box.slices].copy_(view)
    return tensor


def _given(layout: FlatLayout, values: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that the layout lists. A tied tensor may be there under several names, if it is the same."""
    found: dict[str, Any] = {}
    first: dict[str, str] = {}
    for given, value in values.items():
        name = layout.aliases.get(given, given)
        if name in found and not same(found[name], value):
            raise LayoutError(
                f"{first[name]!r} and {given!r} are names of one tensor, and what was given for them is not the same"
            )
        found.setdefault(name, value)
        first.setdefault(name, given)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if name in layout.names and tuple(tensor.shape) != layout.shape(name):
            raise LayoutError(
                f"{name!r} has the shape {layout.shape(name)} in this flat tensor, and a tensor of shape {tuple(tensor.shape)} was given"
            )
    _check_alike(tensors)
    return found


def _check_names(layout: FlatLayout, given: Mapping[str, Any], wanted: Sequence[str] | None = None) -> None:
    unknown = [name for name in given if name not in layout.names]
    if unknown:
        raise LayoutError(
            f"there is no {', '.join(map(repr, unknown))} in this flat tensor; it has {', '.join(layout.names)}"
        )
    missing = [name for name in (layout.names if wanted is None else wanted) if name not in given]
    if missing:
        raise LayoutError(
            f"{', '.join(map(repr, missing))} of this flat tensor was not given: nothing is put in its place"
        )


def _check_alike(tensors: Mapping[str, Tensor]) -> None:
    first = next(iter(tensors), None)
    for name, tensor in tensors.items():
        assert first is not None
        if tensor.dtype != tensors[first].dtype:
            raise LayoutError(
                f"{first!r} is {tensors[first].dtype} and {name!r} {tensor.dtype}: a flat tensor has one dtype"
            )


def _check_count(layout: FlatLayout, count: int) -> None:
    if count != layout.shard_count:
        raise LayoutError(f"the flat tensor has {layout.shard_count} shards, and {count} were given")


def _check_number(layout: FlatLayout, shard: int) -> None:
    if not 0 <= shard < layout.shard_count:
        raise LayoutError(f"the flat tensor has {layout.shard_count} shards, and none is number {shard}")


def _common(key: str, values: Mapping[str, Any]) -> Any:
    """The one value that all have."""
    (first, value), *others = values.items()
    for name, other in others:
        if not same(value, other):
            raise LayoutError(
                f"the state {key!r} of {first!r} is {_shown(value)} and of {name!r} {_shown(other)}: a flat parameter has it once, so it has to be the same"
            )
    return value


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value.item()) if isinstance(value, Tensor) and value.numel() else repr(value)


def _is_shaped(layout: FlatLayout, key: str, values: Mapping[str, Any]) -> bool:
    """Whether a state is shaped like its tensors. One of a single number may be either, so others tell, or what torch's optimizers count in it."""
    if any(_has_shape(value, layout.shape(name)) for name, value in values.items()):
        return True
    scalars = all(isinstance(each, Tensor) and each.dim() == 0 for each in values.values())
    return scalars and key not in NUMBERS and all(layout.shape(name) == () for name in values)


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and value.dim() > 0
