"""What is to be known of an optimizer's state before any of it moves: found on each rank, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from farstep.errors import FarstepError, StateError
from farstep.state.adapters.ranks import Group, size_of
from farstep.state.council import everyones
from farstep.state.optim_entries import (
    Entry,
    Number,
    Odd,
    Shaped,
    copied,
    digest,
    ranks_named,
    union,
    unlike,
)
from farstep.state.optim_roster import Roster
from farstep.state.optim_seats import Seat

__all__ = ["Owned", "Schema", "options_of", "schema_of"]

NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class Owned:
    """A state of another shape on each rank: what the ranks have, by rank."""

    tensors: Mapping[int, Odd]


@dataclass
class Schema:
    """`state[name][key]` is what all ranks have together, `holders[name][key]` the ranks that have an odd one; `groups` are the
    options and names of each group.
    """

    state: dict[str, dict[str, Entry | Owned]]
    holders: dict[tuple[str, str], list[int]]
    groups: list[tuple[dict[str, Any], list[str]]]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def schema_of(
    roster: Roster | None, error: Exception | None, group: Group, *, kind: type[FarstepError] = StateError
) -> Schema:
    """Compare the ranks. Raises a `kind` where they have different states, with the names of parameter, state and ranks."""
    mine: dict[str, dict[str, Entry]] = {}
    groups: list[tuple[dict[str, Any], list[str]]] = []
    if roster is not None:
        try:
            mine = {name: found for name, seat in roster.seats.items() if (found := _described(roster, seat))}
        except Exception as exc:
            error = exc
        groups = [
            ({key: copied(value) for key, value in options_of(each.options).items()}, each.names)
            for each in roster.groups
        ]
    every = everyones((mine, groups), error, group, "reading the optimizer's state", kind=kind)
    assert roster is not None
    if every is None:
        everybody = list(range(size_of(group)))
        held = {
            (n, k): everybody
            for n, state in mine.items()
            for k, entry in state.items()
            if isinstance(entry, Odd)
        }
        return Schema({name: dict(state) for name, state in mine.items()}, held, groups)
    groups = _merged_groups([each for _, each in every], roster)
    merged: dict[str, dict[str, Entry | Owned]] = {}
    held = {}
    states = [state for state, _ in every]
    for name in union(states):
        merged[name] = {}
        for key in union(state.get(name, ()) for state in states):
            said = _of_holders([state.get(name, {}).get(key) for state in states], roster.seats[name])
            merged[name][key] = _merged(name, key, said, roster.seats[name])
            held[name, key] = [rank for rank, entry in enumerate(said) if isinstance(entry, Odd)]
    return Schema(merged, held, groups)


def _described(roster: Roster, seat: Seat) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for number in range(len(seat.keys)):
        state = roster.state_of(seat, number)
        for key, value in state.items():
            entry = _entry(seat, number, value)
            known = found.setdefault(key, entry)
            if known is not entry and known != entry:
                raise StateError(
                    f"the state {key!r} of parameter {seat.name!r} is {found[key]} for one of its local shards and {entry} for another"
                )
    return found


_shaped = cache(Shaped)  # one for each dtype: what is the same object is sent once


def _entry(seat: Seat, number: int, value: Any) -> Entry:
    if not isinstance(value, Tensor):
        return Number(value)
    if seat.is_like(number, value):
        return _shaped(value.dtype)
    if value.numel() == 1 and value.dim() == 0:
        return Number.of(value)
    local = value.to_local() if hasattr(value, "to_local") else value
    return Odd(tuple(local.shape), local.dtype, digest(local))


def _of_holders(said: Sequence[Entry | None], seat: Seat) -> Sequence[Entry | None]:
    """Without what ranks say that have nothing of a parameter: a state without elements is of any shape.

    In a flat parameter the state is that of all that lie in it, so every rank counts.
    """
    if seat.is_flat:
        return said
    holders = set(seat.spread.ranks.tolist())
    heard = [entry if rank in holders else None for rank, entry in enumerate(said)]
    return heard if any(entry is not None for entry in heard) else said


def _merged(name: str, key: str, said: Sequence[Entry | None], seat: Seat) -> Entry | Owned:
    holders = set(seat.spread.ranks.tolist())
    by_entry: dict[Entry | None, list[int]] = {}
    for rank, entry in enumerate(said):
        if entry is not None or rank in holders:
            by_entry.setdefault(entry, []).append(rank)
    entries = list(by_entry)
    if any(isinstance(e, Odd) for e in entries) and any(isinstance(e, Shaped) for e in entries):
        return _merged(name, key, [_odd(entry, seat, rank) for rank, entry in enumerate(said)], seat)
    if len(entries) == 1 and entries[0] is not None:
        return entries[0]
    if all(isinstance(entry, Odd) for entry in entries):
        return Owned({rank: entry for rank, entry in enumerate(said) if isinstance(entry, Odd)})
    words = "; ".join(
        f"{'absent' if entry is None else entry} on {ranks_named(ranks)}" for entry, ranks in by_entry.items()
    )
    raise StateError(
        f"the ranks have different states: {key!r} of parameter {name!r} is {words}. All ranks step together, or none does"
    )


def _odd(entry: Entry | None, seat: Seat, rank: int) -> Entry | None:
    """A state that is odd elsewhere, and on this rank only happens to be as long as what it has of the parameter."""
    if not isinstance(entry, Shaped):
        return entry
    here = seat.spread.sizes[seat.spread.ranks == rank]
    return Odd((int(here.prod(axis=1).sum()),), entry.dtype, "")


def _merged_groups(
    every: Sequence[Sequence[tuple[dict[str, Any], list[str]]]], roster: Roster
) -> list[tuple[dict[str, Any], list[str]]]:
    counts = {len(groups) for groups in every}
    if len(counts) > 1:
        words = ", ".join(f"{len(groups)} on rank {rank}" for rank, groups in enumerate(every))
        raise StateError(f"the ranks have different numbers of parameter groups: {words}")
    merged = []
    for number, parts in enumerate(zip(*every, strict=True)):
        options = parts[0][0]
        for rank, (theirs, _) in enumerate(parts):
            for key in union([options, theirs]):
                if key not in options or key not in theirs or unlike(options[key], theirs[key]):
                    raise StateError(
                        f"the ranks have different options: {key!r} of group {number} is {options.get(key, 'absent')} on rank 0 and "
                        f"{theirs.get(key, 'absent')} on rank {rank}"
                    )
        names = union(names for _, names in parts)
        for rank, (_, listed) in enumerate(parts):
            for name in set(names) - set(listed):  # one that has no shard of it need not know it
                if name not in roster.seats or rank in roster.seats[name].spread.ranks:
                    having = [other for other, (_, its) in enumerate(parts) if name in its]
                    raise StateError(
                        f"the ranks have different groups: parameter {name!r} is in group {number} on {ranks_named(having)} and not on "
                        f"rank {rank}"
                    )
        merged.append((options, names))
    return merged
