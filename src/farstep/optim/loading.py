"""Putting state in place: whether all of it is there, and into which tensors it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.optim import fast
from farstep.optim.fitting import State, local_shards, twin_of
from farstep.optim.groups import copied
from farstep.state.known import is_extra
from farstep.state.optim_pieces import KeyCheck, refuse_keys
from farstep.state.stateful import Load, has_stateful, loads_into

__all__ = [
    "KeyCheck",
    "ObjectLoads",
    "put",
    "refuse_keys",
    "rehearse",
    "restore_extras",
    "untangled",
]


def untangled(new: State, old: Mapping[str, Any], live: set[int]) -> State:
    """Tensors of this optimizer that are to be another parameter's are copied, since they may be overwritten first."""
    return {
        key: copied(value) if id(value) in live and value is not old.get(key) else value
        for key, value in new.items()
    }


class ObjectLoads:
    """The objects of one parameter's state that load themselves. `others` is the rest of the new state.

    `old` is the state that the optimizer's own `state_dict` gives now. Raises StateMismatch before anything is changed.
    """

    def __init__(self, name: str, old: Mapping[str, Any], new: State) -> None:
        self.values: State = {}
        self._loads: list[Load] = []
        for key, value in new.items():
            if has_stateful(old.get(key)):
                where = f"the state {key!r} of parameter {name!r}"
                self.values[key], loads = loads_into(old[key], value, where)
                self._loads += loads
        self.others = {key: value for key, value in new.items() if key not in self.values}

    def load(self, state: State | None) -> None:
        """Load them, and make them part of the state that the parameter has."""
        for load in self._loads:
            load()
        if state is not None:
            state.update(self.values)


def put(new: Any, old: Any) -> Any:
    """The tensor that was there, if it can take the new one's value; else a copy of that."""
    if new is old:
        return old
    pairs = [(new, old)]
    theirs, ours = local_shards(new), local_shards(old)
    if theirs is not None and ours is not None:
        pairs = list(zip(theirs, ours, strict=True))
    if all(map(_takes, (n for n, _ in pairs), (o for _, o in pairs))):
        with torch.no_grad():
            for n, o in pairs:
                o.copy_(n)
        return old
    return copied(new)


def _takes(new: Any, old: Any) -> bool:
    return (
        isinstance(new, torch.Tensor)
        and isinstance(old, torch.Tensor)
        and (new.shape, new.dtype, new.device, new.layout) == (old.shape, old.dtype, old.device, old.layout)
        and new.stride() == old.stride()
        and getattr(new, "placements", None) == getattr(old, "placements", None)
    )


def restore_extras(optimizer: Optimizer, states: Mapping[int, State]) -> None:
    """After the load of `states`, by number: undo what torch's load_state_dict did to extra
    pieces, which it casts to the parameters' dtypes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, given in states.items():
        extras = {key: value for key, value in given.items() if is_extra(optimizer, key)}
        if extras:
            optimizer.state[parameters[number]].update(extras)


def rehearse(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Load into another object of the class first: what it refuses, it refuses before anything has been changed."""
    try:
        twin = twin_of(optimizer)
    except Exception:
        return  # it cannot be copied; what could be checked has been
    twin.load_state_dict(packed if fast.is_torchs(optimizer) else copied(packed))
