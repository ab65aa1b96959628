"""Putting state in place: whether all of it is there, and into which tensors it goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.optim import fast
from farstep.optim.fitting import State, local_shards, twin_of
from farstep.optim.fresh import needed_keys
from farstep.optim.groups import copied

__all__ = ["KeyCheck", "put", "refuse_keys", "rehearse", "untangled"]


class KeyCheck:
    """Whether the pieces of state are those which the class of a group's optimizer has. Asks the class once for each kind of parameter."""

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._options = options
        self._needed: dict[Any, frozenset[str] | None] = {}

    def __call__(self, name: str, parameter: torch.Tensor, state: State) -> None:
        known = self._known_of(parameter)
        if known is not None:
            needed, more = known
            refuse_keys(name, needed - state.keys(), state.keys() - needed - more)

    def known(self, name: str, parameter: torch.Tensor, state: State) -> State:
        """The pieces that the class knows. Those that it cannot step without must be there all the same."""
        known = self._known_of(parameter)
        if known is None:
            return state
        needed, more = known
        refuse_keys(name, needed - state.keys(), ())
        return {key: value for key, value in state.items() if key in needed or key in more}

    def _known_of(self, parameter: torch.Tensor) -> tuple[frozenset[str], frozenset[str]] | None:
        """What it cannot step without, and what it may have beside that. None where nobody knows."""
        if type(self._optimizer) is torch.optim.SGD:
            return frozenset(), frozenset(
                {"momentum_buffer"}
            )  # made late, and kept when it is no longer used
        needed = self._needed_by(parameter)
        return None if needed is None else (needed, frozenset())

    def _needed_by(self, parameter: torch.Tensor) -> frozenset[str] | None:
        kind = parameter.dim(), parameter.dtype, parameter.device
        if kind not in self._needed:
            self._needed[kind] = needed_keys(self._optimizer, self._options, parameter)
        return self._needed[kind]


def refuse_keys(name: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    found = {"lacks": sorted(missing), "has unexpected": sorted(unexpected)}
    said = [f"{what} {', '.join(map(repr, keys))}" for what, keys in found.items() if keys]
    if said:
        raise StateMismatch(
            f"the state of parameter {name!r} {' and '.join(said)}: it was saved by another optimizer class, or with other options; "
            f"nothing has been loaded"
        )


def untangled(new: State, old: Mapping[str, Any], live: set[int]) -> State:
    """Tensors of this optimizer that are to be another parameter's are copied, since they may be overwritten first."""
    return {
        key: copied(value) if id(value) in live and value is not old.get(key) else value
        for key, value in new.items()
    }


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


def rehearse(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Load into another object of the class first: what it refuses, it refuses before anything has been changed."""
    try:
        twin = twin_of(optimizer)
    except Exception:
        return  # it cannot be copied; what could be checked has been
    twin.load_state_dict(packed if fast.is_torchs(optimizer) else copied(packed))
