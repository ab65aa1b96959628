"""A state by names, as an ordinary optimizer's `load_state_dict` takes it: by number, each rank's part, in the form in which it steps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters.ranks import Group
from farstep.state.exchange import BUDGET_BYTES, respread
from farstep.state.optim_entries import copied
from farstep.state.optim_forms import are_numbers, numbers_named
from farstep.state.optim_given import given_alone
from farstep.state.optim_loading import Loading, load
from farstep.state.optim_moving import Options
from farstep.state.optim_names import Translation
from farstep.state.optim_roster import Composed, Seated, roster_of
from farstep.state.optim_staging import transfers
from farstep.state.stateful import has_stateful

__all__ = ["for_load"]


@torch.no_grad()
def for_load(
    model: nn.Module,
    groups: Callable[[], list[dict[str, Any]]],
    optim: Optimizer | None,
    state: Any,
    *,
    from_rank0: bool = False,
    alone: bool = False,
    strict: bool = True,
    with_empty: bool = False,
    group: Group = None,
) -> tuple[dict[str, Any], bool]:
    """The state dict, with the optimizer's own groups where the state has none, and whether it has some.

    `groups()` are those of the optimizer, which may not be there yet; it is not changed.

    If `from_rank0`, the first rank alone has the state; if `alone`, this rank has all of it, and asks no other. Parameters of which a rank has no
    elements get state only if `with_empty`.
    """
    stand_in: Optimizer = _Carrier([])
    error: Exception | None = None
    try:
        stand_in = _stand_in(groups(), optim)
    except Exception as exc:  # the other ranks wait to hear of it
        if alone:
            raise
        error = exc
    if alone:
        has_groups = _load_alone(model, stand_in, state, strict, group)
    else:
        has_groups = load(
            model,
            stand_in,
            state,
            strict=strict,
            broadcast_from_rank0=from_rank0,
            options=Options(group),
            error=error,
            is_complete=True,
            with_empty=with_empty,
        )
    return _packed(stand_in, with_empty), has_groups


class _Carrier(Optimizer):
    """Holds state for an optimizer of which only the groups are known."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups or [{"params": []}], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        raise NotImplementedError("this holds the state of an optimizer that is somewhere else")


def _stand_in(groups: list[dict[str, Any]], optim: Optimizer | None) -> Optimizer:
    """Takes the state in place of the optimizer that shall have it: of its class, since that knows what fits."""
    if isinstance(optim, Seated):
        raise TypeError(
            f"{type(optim).__name__} takes a state by names as it is: give it to load_optim_state_dict(model, optim, state), or to its own load_state_dict"
        )
    while isinstance(optim, Composed):
        parts = list(optim.optim_parts())
        optim = parts[0] if len(parts) == 1 else None
    if optim is None or isinstance(getattr(type(optim), "state", None), property):
        return _Carrier(groups)
    found = type(optim).__new__(type(optim))
    found.__dict__.update(optim.__dict__)
    found.state = defaultdict(dict, {p: _with_own_objects(state) for p, state in optim.state.items()})
    found.param_groups = groups
    return found


def _with_own_objects(state: Any) -> Any:
    """A parameter's state with copies of the objects that load themselves, so that those of the optimizer stay as they are."""
    if not isinstance(state, Mapping):
        return state
    return {key: copied(value) if has_stateful(value) else value for key, value in state.items()}


def _load_alone(model: nn.Module, stand_in: Optimizer, state: Any, strict: bool, group: Group) -> bool:
    """As `load`, of a state that every rank has whole, so that nothing has to be said or sent."""
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"a whole state is wanted on each rank, and this one was given {type(state).__name__}: scatter_full_optim_state_dict is for one that only rank 0 has"
        )
    roster = roster_of(model, stand_in, group)
    names = Translation(roster)
    named = numbers_named(state, roster.order, roster.check_is_whole)
    given = given_alone(named, names, names.is_known, group)
    loading = Loading(roster, given, group, by_order=are_numbers(state, named))
    loading.prepare(strict, is_complete=True)
    for here, there in transfers(loading.sources, loading.targets, loading.cast, BUDGET_BYTES):
        respread(here, there, group, check=False, same_host=False)
    loading.finish()
    loading.commit()
    return given.groups is not None


def _packed(optimizer: Optimizer, with_empty: bool) -> dict[str, Any]:
    """What its `state_dict` would be, without what users may have hooked to that."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = iter(range(len(parameters)))
    return {
        "state": {
            n: dict(optimizer.state[p])
            for n, p in enumerate(parameters)
            if optimizer.state.get(p) and (with_empty or p.numel())
        },
        "param_groups": [
            {**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups
        ],
    }
