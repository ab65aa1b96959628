"""An optimizer's own `load_state_dict` on all ranks or on none; and an optimizer that has another state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters.ranks import Group
from farstep.state.council import agree
from farstep.state.optim_roster import Composed, Seated

__all__ = ["holding", "load_directly", "own_names"]


def load_directly(optim: Optimizer, state: dict[str, Any], group: Group) -> None:
    """`optim.load_state_dict(state)`. If it fails on one rank, such as in a hook, all have what they had before, and raise."""
    is_torchs = type(optim).load_state_dict is Optimizer.load_state_dict
    before = [_Kept(each, copies=not is_torchs) for each in _parts(optim)]
    error: Exception | None = None
    try:
        optim.load_state_dict(state)
    except Exception as exc:
        error = exc
    try:
        agree(error, group, "loading the optimizer's state")
    except Exception:
        for each in before:
            each.put_back()
        raise


def holding(optim: Any, given: Mapping[str, Any]) -> Optimizer:
    """Another object of the optimizer's class, with the state and options of a state dict of its own: by number, or by the names it has."""
    if not isinstance(optim, Optimizer):
        raise TypeError("a state dict is that of one optimizer, and several were given")
    names = own_names(optim)
    parts = list(_parts(optim))
    if len(parts) != 1 or isinstance(parts[0], Seated):
        raise TypeError(
            f"the state of {type(optim).__name__} is read from itself: leave out optim_state_dict"
        )
    (part,) = parts
    parameters = [p for group in part.param_groups for p in group["params"]]
    by_key: dict[Any, Any] = {**dict(enumerate(parameters)), **(names or {})}
    strange = [key for key in given["state"] if key not in by_key]
    groups = given.get("param_groups") or part.param_groups
    if strange or [len(group["params"]) for group in groups] != [len(g["params"]) for g in part.param_groups]:
        raise StateMismatch(
            f"the state dict is not that of this {type(optim).__name__}"
            + (
                f": it has {strange[0]!r}, and the optimizer {len(parameters)} parameters"
                if strange
                else ", whose groups are others"
            )
        )
    found = type(part).__new__(type(part))
    found.__dict__.update(part.__dict__)
    found.state = defaultdict(dict, {by_key[key]: state for key, state in given["state"].items()})
    found.param_groups = [
        {**group, "params": list(own["params"])} for group, own in zip(groups, part.param_groups, strict=True)
    ]
    return found


def own_names(optim: Optimizer) -> Mapping[str, Any] | None:
    """The names that a named or keyed optimizer has for its parameters."""
    named = getattr(optim, "params", None) or getattr(optim, "named_parameters", None)
    return named if isinstance(named, Mapping) else None


def _parts(optim: Any) -> Iterator[Optimizer]:
    if isinstance(optim, Composed):
        for part in optim.optim_parts():
            yield from _parts(part)
    else:
        yield optim


class _Kept:
    """What an optimizer has. Torch's own `load_state_dict` puts other tensors in their place; that of other classes may write into these."""

    def __init__(self, optim: Optimizer, *, copies: bool) -> None:
        self._optim = optim
        self._state, self._groups = optim.state, optim.param_groups
        self._states = {
            key: dict(each) if isinstance(each, Mapping) else each for key, each in optim.state.items()
        }
        self._options = [dict(group) for group in optim.param_groups]
        tensors = [
            value
            for each in self._states.values()
            if copies and isinstance(each, dict)
            for value in each.values()
            if isinstance(value, Tensor)
        ]
        self._elements = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, elements in self._elements:
            tensor.copy_(elements)
        self._state.clear()
        self._state.update(self._states)
        for group, options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update(options)
        self._optim.state, self._optim.param_groups = self._state, self._groups
