"""What is to be known of an optimizer's state before any of it moves: found on each rank, and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from farstep.errors import FarstepError, StateError
from farstep.state.adapters.ranks import Group, size_of
from farstep.state.council import Settings, agree, everyones
from farstep.state.optim_describing import described
from farstep.state.optim_elsewhere import seat_elsewhere
from farstep.state.optim_entries import (
    Entry,
    Nested,
    Number,
    Odd,
    Shaped,
    copied,
    put_together,
    ranks_named,
    taken_apart,
    union,
)
from farstep.state.optim_roster import Roster
from farstep.state.optim_seats import Seat
from farstep.state.same import differing

__all__ = ["Owned", "Schema", "options_of", "schema_of"]

NOT_OPTIONS = ("params", "param_names")

State = Mapping[str, Mapping[str, Entry]]
"""What one rank has, by parameter and key."""
Options = tuple[dict[str, Any], list[str]]
"""Those of one group, and the names of its parameters."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A state of another shape on each rank: what the ranks have, by rank."""

    tensors: Mapping[int, Odd]


@dataclass
class Schema:
    """`state[name][key]` is what all ranks have together, `holders[name, key]` the ranks that have an odd one; `groups` are the
    options and names of each group.
    """

    state: dict[str, dict[str, Entry | Owned]]
    holders: dict[tuple[str, str], list[int]]
    groups: list[Options]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def schema_of(
    roster: Roster | None,
    error: Exception | None,
    group: Group,
    *,
    settings: Settings | None = None,
    kind: type[FarstepError] = StateError,
) -> Schema:
    """Compare the ranks. Raises a `kind` where they have different states, with the names of parameter, state and ranks."""
    mine: dict[str, dict[str, Entry]] = {}
    groups: list[Options] = []
    if roster is not None:
        try:
            mine = described(roster, alone=size_of(group) == 1)
            groups = [
                ({key: copied(value) for key, value in options_of(each.options).items()}, each.names)
                for each in roster.groups
            ]
        except Exception as exc:
            error = exc
    doing = "reading the optimizer's state"
    every = everyones((mine, groups), error, group, doing, settings=settings, kind=kind)
    assert roster is not None
    if every is None:
        return _schema(roster, [mine] * size_of(group), groups)
    schema: Schema | None = None
    try:
        stepped = [union(names for _, names in each) for _, each in every]
        seat_elsewhere(roster, stepped, group, doing, kind)
        schema = _schema(
            roster, [state for state, _ in every], _merged_groups([each for _, each in every], roster)
        )
    except Exception as exc:
        error = exc
    agree(error, group, doing, kind=kind)
    assert schema is not None
    return schema


def _schema(roster: Roster, states: Sequence[State], groups: list[Options]) -> Schema:
    comparison = _Comparison(roster, states)
    return Schema(comparison.merged(), comparison.holders, groups)


class _Comparison:
    """The states of all ranks, by rank."""

    def __init__(self, roster: Roster, states: Sequence[State]) -> None:
        self._roster, self._states = roster, states
        self.holders: dict[tuple[str, str], list[int]] = {}

    def merged(self) -> dict[str, dict[str, Entry | Owned]]:
        first = self._states[0]
        if all(state is first for state in self._states):
            return {
                name: {
                    key: entry if _is_plain(entry) else self._one(name, key) for key, entry in state.items()
                }
                for name, state in first.items()
            }
        return {
            name: {key: self._one(name, key) for key in union(state.get(name, ()) for state in self._states)}
            for name in union(self._states)
        }

    def _one(self, name: str, key: str) -> Entry | Owned:
        seat = self._roster.seats[name]
        said = _of_holders([state.get(name, {}).get(key) for state in self._states], seat)
        if any(isinstance(entry, Odd) for entry in said) and any(isinstance(entry, Shaped) for entry in said):
            said = [_odd(entry, seat, rank) for rank, entry in enumerate(said)]
        by_entry: dict[Entry | None, list[int]] = {}
        holders = set(seat.spread.ranks.tolist())
        for rank, entry in enumerate(said):
            if entry is not None or rank in holders:
                by_entry.setdefault(entry, []).append(rank)
        entries = list(by_entry)
        self.holders[name, key] = [r for r, entry in enumerate(said) if isinstance(entry, Odd | Nested)]
        if all(isinstance(entry, Shaped) for entry in entries):
            return self._shaped(seat, key, by_entry)
        if len(entries) == 1 and isinstance(entries[0], Number):
            return entries[0]
        if (
            len(entries) == 1
            and isinstance(entries[0], Odd | Nested)
            and self._is_common(seat, key, entries[0])
        ):
            return entries[0]
        if all(isinstance(entry, Odd) for entry in entries):
            return Owned({rank: entry for rank, entry in enumerate(said) if isinstance(entry, Odd)})
        if all(isinstance(entry, Nested) for entry in entries):
            raise StateError(
                f"{key!r} of parameter {seat.name!r} has tensors in a list or dict, and they belong to the part of the parameter that each rank has: "
                f"{_words(by_entry)}. Such a state is read where all ranks have the same, under DDP for example"
            )
        raise StateError(
            f"the ranks have different states: {key!r} of parameter {name!r} is {_words(by_entry)}. All ranks step together, or none does"
        )

    def _shaped(self, seat: Seat, key: str, by_entry: Mapping[Any, list[int]]) -> Shaped:
        dtypes: dict[torch.dtype, list[int]] = {}
        for entry, ranks in by_entry.items():
            dtypes.setdefault(entry.dtype, []).extend(ranks)
        if len(dtypes) > 1:
            raise StateError(
                f"the ranks have different states: {key!r} of parameter {seat.name!r} is {_words(dtypes)}. All ranks step together, or none does"
            )
        (entry, ranks), *others = by_entry.items()
        if entry.elements and not others and self._part_count(seat, ranks) > 1:
            raise StateError(
                f"{key!r} of parameter {seat.name!r} is the same on all ranks and as long as the part that each has of the parameter, so that "
                f"nobody can tell whether it is shaped like the parameter or is a table. Read it on another number of ranks, or keep tables "
                f"apart from the optimizer's state"
            )
        return Shaped(entry.dtype)

    def _is_common(self, seat: Seat, key: str, entry: Odd | Nested) -> bool:
        """Whether what all have the same is one value. On one rank alone it may be that of its part, unless other parameters have it too."""
        if any(each.is_part for each in ([entry] if isinstance(entry, Odd) else entry.tensors)):
            return False
        if not seat.is_line or self._part_count(seat, self.holders[seat.name, key]) > 1:
            return True
        return len(self._names_of[key, entry]) > 1

    @cached_property
    def _names_of(self) -> dict[tuple[str, Entry], set[str]]:
        """The parameters that have the same under the same key, on any rank."""
        found: dict[tuple[str, Entry], set[str]] = defaultdict(set)
        for state in self._states:
            for name, entries in state.items():
                for key, entry in entries.items():
                    if isinstance(entry, Odd | Nested):
                        found[key, entry].add(name)
        return found

    def _part_count(self, seat: Seat, ranks: Sequence[int]) -> int:
        """How many different parts of the parameter these ranks have. What lies in a flat parameter is not told apart."""
        if seat.is_flat:
            return len(ranks)
        return len({tuple(seat.spread.boxes(rank)) for rank in ranks})


def _is_plain(entry: Entry) -> bool:
    """Whether it is what it is, if all ranks say the same."""
    return isinstance(entry, Number) or (isinstance(entry, Shaped) and not entry.elements)


def _words(by_entry: Mapping[Any, Sequence[int]]) -> str:
    return "; ".join(
        f"{'absent' if entry is None else entry} on {ranks_named(ranks)}" for entry, ranks in by_entry.items()
    )


def _of_holders(said: Sequence[Entry | None], seat: Seat) -> Sequence[Entry | None]:
    """Without what ranks say that have nothing of a parameter: a state without elements is of any shape.

    In a flat parameter the state is that of all that lie in it, so every rank counts.
    """
    if seat.is_flat:
        return said
    holders = set(seat.spread.ranks.tolist())
    heard = [entry if rank in holders else None for rank, entry in enumerate(said)]
    return heard if any(entry is not None for entry in heard) else said


def _odd(entry: Entry | None, seat: Seat, rank: int) -> Entry | None:
    """A state that is odd elsewhere, and on this rank only happens to be as long as what it has of the parameter."""
    if not isinstance(entry, Shaped):
        return entry
    here = seat.spread.sizes[seat.spread.ranks == rank]
    return Odd((int(here.prod(axis=1).sum()),), entry.dtype, entry.elements)


def _merged_groups(every: Sequence[Sequence[Options]], roster: Roster) -> list[Options]:
    merged = []
    for number, parts in enumerate(_matched(every, roster)):
        first = min(parts)
        options = parts[first][0]
        for rank, (theirs, _) in parts.items():
            for key in differing(options, theirs):
                raise StateError(
                    f"the ranks have different options: {key!r} of group {number} is {_exactly(options.get(key, 'absent'))} on rank {first} "
                    f"and {_exactly(theirs.get(key, 'absent'))} on rank {rank}"
                )
        names = union(names for _, names in parts.values())
        for rank in range(len(every)):
            listed = parts[rank][1] if rank in parts else ()
            for name in set(names) - set(listed):  # one that has no shard of it need not know it
                if name not in roster.seats or rank in roster.seats[name].spread.ranks:
                    having = [other for other, (_, its) in parts.items() if name in its]
                    raise StateError(
                        f"the ranks have different groups: parameter {name!r} is in group {number} on {ranks_named(having)} and not on "
                        f"rank {rank}"
                    )
        merged.append((options, names))
    return merged


def _matched(every: Sequence[Sequence[Options]], roster: Roster) -> list[dict[int, Options]]:
    """Each group of all ranks, by rank.

    Groups are matched by their place. Where ranks have parameters of their own, they may have groups of their own: then groups belong
    together that have a parameter in common.
    """
    counts = {len(groups) for groups in every}
    by_place = [dict(enumerate(parts)) for parts in zip(*every, strict=False)]
    has_own = any(name in roster.partial for groups in every for _, names in groups for name in names)
    if has_own and (len(counts) > 1 or any(_has_unlike(parts) for parts in by_place)):
        return _matched_by_names(every)
    if len(counts) > 1:
        words = ", ".join(f"{len(groups)} on rank {rank}" for rank, groups in enumerate(every))
        raise StateError(f"the ranks have different numbers of parameter groups: {words}")
    return by_place


def _has_unlike(parts: Mapping[int, Options]) -> bool:
    return any(differing(parts[0][0], options) for options, _ in parts.values())


def _matched_by_names(every: Sequence[Sequence[Options]]) -> list[dict[int, Options]]:
    found: list[dict[int, Options]] = []
    place: dict[str, int] = {}
    for rank, groups in enumerate(every):
        for options, names in groups:
            places = sorted({place[name] for name in names if name in place})
            if not names:
                continue
            if not places:
                places = [len(found)]
                found.append({})
            if len(places) > 1 or rank in found[places[0]]:
                raise StateError(
                    f"the ranks have different groups: rank {rank} has {', '.join(map(repr, names[:5]))} in one group, and others do not"
                )
            found[places[0]][rank] = options, names
            place.update(dict.fromkeys(names, places[0]))
    return found


def _exactly(value: Any) -> str:
    """With all digits, which tensors do not print."""
    frame, tensors = taken_apart(value)
    text = repr(put_together(frame, [each.tolist() for each in tensors]))
    return text if len(text) < 200 else f"{text[:200]}..."
