"""An optimizer's own `load_state_dict` on all ranks or on none; and an optimizer that has another state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters.ranks import Group
from farstep.state.council import agree
from farstep.state.optim_entries import copied
from farstep.state.optim_roster import Composed, Seated

__all__ = ["holding", "load_directly", "own_names"]


def load_directly(optim: Optimizer, state: dict[str, Any], group: Group) -> None:
    """`optim.load_state_dict(state)`. If it fails on one rank, such as in a hook, all have what they had before, and raise."""
    before = [_Kept(each) for each in _parts(optim)]
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
    """What an optimizer has. Torch's own `load_state_dict` puts other tensors in their place; other classes may write into these."""

    def __init__(self, optim: Optimizer) -> None:
        self._optim = optim
        keep = copied if type(optim).load_state_dict is not Optimizer.load_state_dict else lambda value: value
        self._state, self._groups = optim.state, optim.param_groups
        self._states = {
            key: {k: keep(v) for k, v in each.items()} if isinstance(each, Mapping) else each
            for key, each in optim.state.items()
        }
        self._options = [dict(group) for group in optim.param_groups]

    def put_back(self) -> None:
        self._state.clear()
        self._state.update(self._states)
        for group, options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update(options)
        self._optim.state, self._optim.param_groups = self._state, self._groups
