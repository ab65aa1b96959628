"""A ShardedOptimizer's state by parameter name: read as each rank has it or whole, and loaded from any layout.

Both are respreadings, for which farstep.state has everything: how ranks tell each other what they have, and the copies between. Here is what an optimizer over
shadows adds: its class's own state_dict and load_state_dict, and what it refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from farstep.errors import LayoutError, OptimError, RankLost, StateError, StateMismatch
from farstep.optim import fast
from farstep.optim.elementwise import ELEMENTWISE
from farstep.optim.fitting import is_known, misfit_of_kind, twin_of
from farstep.optim.loading import KeyCheck, restore_extras
from farstep.optim.members import Local, Member
from farstep.optim.sharded_seats import seat_of
from farstep.optim.state_dicts import Plan, by_its_names, options_and_states, plan_load
from farstep.state import Shards, Spread
from farstep.state.adapters.ranks import own_rank, size_of
from farstep.state.council import agree
from farstep.state.known import is_extra
from farstep.state.optim_entries import Number, copied, label
from farstep.state.optim_given import Given, Owned, given_to
from farstep.state.optim_moving import Options, move
from farstep.state.optim_profile import Profile
from farstep.state.optim_reading import read_roster
from farstep.state.optim_roster import Roster, SeatGroup
from farstep.state.optim_seats import Seat

if TYPE_CHECKING:
    from farstep.optim.sharded import ShardedOptimizer

__all__ = ["prepare", "read"]

LOADING = "loading the optimizer's state"


def read(
    optimizer: ShardedOptimizer,
    full: bool,
    rank0_only: bool,
    cpu_offload: bool,
    error: Exception | None = None,
) -> dict[str, Any]:
    """`error` is what keeps this rank from it: then all raise."""
    roster = None
    if error is None:
        try:
            _refuse_local(optimizer)
            roster = _Held(optimizer)
        except Exception as exc:
            error = exc
    with _as_optim_errors(OptimError):
        return read_roster(
            roster,
            error,
            full=full,
            rank0_only=rank0_only,
            cpu_offload=cpu_offload,
            options=Options(optimizer.process_group),
            profile=Profile(None),
            kind=OptimError,
        )


class _Held(Roster):
    """The state of each shadow of each parameter, through the class's own state_dict."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__([optimizer], {}, set(optimizer.named_params))
        with optimizer._showing_all():
            saved = optimizer._inner.state_dict()
        others = saved.keys() - {"state", "param_groups"}
        if others:
            raise OptimError(
                f"{type(optimizer._inner).__name__} keeps {', '.join(sorted(map(str, others)))} in its state_dict, which belongs to no parameter, so it cannot "
                f"be saved by parameter names"
            )
        indices = itertools.count()
        self._held: dict[str, list[Mapping[str, Any]]] = {}
        for members, options in zip(optimizer._members, optimizer.param_groups, strict=True):
            self.groups.append(SeatGroup(optimizer, options))
            for member in members:
                held = [saved["state"].get(next(indices), {}) for _ in member.shadows]
                _refuse_odd(member, held)
                self._held[member.name] = held
                self.seats[member.name] = seat_of(member, member.form)
                self.groups[-1].seats.append(self.seats[member.name])

    def state_of(self, seat: Seat, number: int) -> Mapping[str, Any]:
        return self._held[seat.name][number]


def _refuse_local(optimizer: ShardedOptimizer) -> None:
    if any(isinstance(member, Local) for members in optimizer._members for member in members):
        raise OptimError(
            'with shard="local" nobody here knows where the parts lie in the whole; the model does: farstep.state.optim_state_dict(model, optimizer) '
            "and load_optim_state_dict(model, optimizer, state)"
        )


def _refuse_odd(member: Member, held: list[Mapping[str, Any]]) -> None:
    """A state of another shape than a part of a parameter has."""
    if member.takes_any_shape:
        return
    for shadow, state in zip(member.shadows, held, strict=True):
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shadow.shape:
                raise OptimError(
                    f"the state {key!r} of parameter {member.name!r} has shape {tuple(value.shape)} for a part of shape {tuple(shadow.shape)}, so "
                    f"nobody knows what it is of the whole"
                )


# -- loading ----------------------------------------------------------------------------------------------


def prepare(
    optimizer: ShardedOptimizer,
    state: Any,
    strict: bool,
    broadcast_from_rank0: bool,
    error: Exception | None = None,
) -> Callable[[], None]:
    """Everything that can fail, on all ranks together. What is returned puts the state in place. `error` is what keeps this rank from it."""
    group = optimizer.process_group
    if error is None and (own_rank(group) == 0 or not broadcast_from_rank0):
        try:
            _refuse_local(optimizer)
            state = _understood(state)
        except Exception as exc:
            error = exc
    with _as_optim_errors(StateMismatch, "; nothing has been loaded"):
        given = given_to(state, str, broadcast_from_rank0, error, group, LOADING, kind=OptimError)
        loading = _Loading(optimizer, given)
        try:
            loading.plan(strict)
        except Exception as exc:
            error = exc
        move(loading.sources, loading.targets, error, Options(group), Profile(None), LOADING, kind=OptimError)
    twin = None
    try:
        twin = loading.loaded()
    except Exception as exc:
        error = exc
    agree(error, group, LOADING, kind=OptimError)
    assert twin is not None

    def commit() -> None:
        optimizer._inner.__dict__.update(twin.__dict__)
        optimizer._adopt_all()

    return commit


def _understood(given: Any) -> list[Mapping[str, Any]]:
    """The state dicts that this rank was given, by names."""
    parts = []
    for each in [given] if isinstance(given, Mapping) else list(given or ()):
        if not isinstance(each, Mapping) or "state" not in each or "param_groups" not in each:
            raise StateMismatch(
                'this is no state dict by names of parameters, with "state" and "param_groups"; nothing has been loaded. Where only the first rank has one, '
                "say broadcast_from_rank0=True"
            )
        each = by_its_names(each)
        options_and_states(each)
        parts.append(each)
    return parts


class _Loading:
    def __init__(self, optimizer: ShardedOptimizer, given: Given) -> None:
        self._optimizer, self._given = optimizer, given
        self._ranks = range(size_of(optimizer.process_group))
        self._plan = Plan([], {}, set())
        self._states: dict[str, list[dict[str, Any]]] = {}
        """Of each of a parameter's shadows."""
        self.sources: dict[str, Shards] = {}
        self.targets: dict[str, Shards] = {}

    def plan(self, strict: bool) -> None:
        """Fresh memory for the state of this rank's shadows, once it is known to fit."""
        optimizer = self._optimizer
        state = {name: entries for name, entries in self._given.state.items() if entries}
        parts = {"state": state, "param_groups": self._given.groups}
        self._plan = plan_load(optimizer._make, optimizer.defaults, optimizer.param_groups, parts, strict)
        for members, options in zip(optimizer._members, self._plan.options, strict=True):
            check = KeyCheck(optimizer._inner, options)
            for member in members:
                entries = self._plan.states.get(member.name)
                if entries and strict:
                    if member.shadows:
                        old = optimizer._inner.state.get(member.shadows[0]) or {}
                        check(member.name, member.parameter, entries, old.keys())
                elif entries:
                    entries = check.known(member.name, member.parameter, entries)
                if entries:
                    mine = self._states[member.name] = [{} for _ in member.shadows]
                    for key, entry in entries.items():
                        for its, value in zip(mine, self._values(member, key, entry), strict=True):
                            its[key] = value
                elif member.name in self._plan.states:
                    self._plan.kept.add(member.name)  # of another class's state nothing was left

    def _values(self, member: Member, key: str, entry: Any) -> list[Any]:
        """For each shadow: a number, or memory that is to be filled."""
        inner = self._optimizer._inner
        if isinstance(entry, Number):
            is_tensor = entry.dtype is not None
            self._refuse(member, key, misfit_of_kind(inner, key, _like(()) if is_tensor else entry.value))
            if (
                is_tensor
                and is_known(inner)
                and key not in fast.NUMBERS
                and not is_extra(inner, key)
                and member.shape
            ):
                self._refuse(member, key, f"is {entry.value!r}")
            return [_number(entry) for _ in member.shadows]
        if isinstance(entry, Owned):
            self._refuse(member, key, "differs between the ranks that saved it, and is of another shape")
        shape, dtype = entry.spread.shape, entry.spread.dtype
        self._refuse(member, key, misfit_of_kind(inner, key, _like(shape)))
        text = label(member.name, key)
        if shape == member.shape:
            made = [torch.empty_like(s, dtype=dtype, requires_grad=False) for s in member.shadows]
            self.targets[text] = member.shards(made, dtype)
        elif member.takes_any_shape and (type(inner) not in ELEMENTWISE or is_extra(inner, key)):
            made = [torch.empty(shape, dtype=dtype, device=s.device) for s in member.shadows]
            holders = self._ranks if member.owner is None else [member.owner]
            self.targets[text] = Shards(Spread.whole(shape, dtype, holders), made)
        else:
            self._refuse(member, key, f"has shape {shape}")
        self.sources[text] = Shards(entry.spread, self._given.tensors.get(text, []))
        return made

    def _refuse(self, member: Member, key: str, wrong: str | None) -> None:
        if wrong:
            raise StateMismatch(
                f"the state {key!r} of parameter {member.name!r} {wrong}, which does not fit the parameter's, {member.shape}; nothing has been loaded"
            )

    def loaded(self) -> Any:
        """Another object of the inner optimizer's class that has loaded all this."""
        optimizer = self._optimizer
        inner = optimizer._inner
        indices = itertools.count()
        state: dict[int, Any] = {}
        groups = []
        with optimizer._showing_all():
            for members, options in zip(optimizer._members, self._plan.options, strict=True):
                places = []
                for member in members:
                    for position, shadow in enumerate(member.shadows):
                        index = next(indices)
                        places.append(index)
                        if member.name in self._plan.kept:
                            if shadow in inner.state:
                                state[index] = inner.state[shadow]
                        elif member.name in self._states:
                            state[index] = self._states[member.name][position]
                groups.append({**options, "params": places})
            twin = twin_of(inner)
            twin.load_state_dict(
                {"state": state if fast.is_torchs(inner) else copied(state), "param_groups": groups}
            )
            restore_extras(twin, state)
        return twin


def _like(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _number(entry: Number) -> Any:
    return copied(entry.value) if entry.dtype is None else torch.tensor(entry.value, dtype=entry.dtype)


@contextmanager
def _as_optim_errors(of_layout: type[OptimError], ending: str = "") -> Iterator[None]:
    """What farstep.state finds wrong, as errors of an optimizer."""
    try:
        yield
    except LayoutError as exc:
        raise of_layout(f"{exc}{ending}") from exc
    except RankLost:
        raise
    except StateError as exc:
        raise OptimError(str(exc)) from exc
