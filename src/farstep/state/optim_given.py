"""A state that is to be loaded: what each rank was given of it, and what all have together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farstep.errors import FarstepError, StateError, StateMismatch
from farstep.state.adapters import part_of
from farstep.state.adapters.plain import check_readable
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.box import Box
from farstep.state.council import Settings, everyones, firsts
from farstep.state.layout import Spread
from farstep.state.optim_entries import Number, RankOwned, label, ranks_named, union
from farstep.state.optim_forms import is_nothing, no_state, parts_of
from farstep.state.optim_schema import options_of
from farstep.state.same import same
from farstep.state.samples import samples_of
from farstep.state.shards import Part, Shards

__all__ = ["Given", "Owned", "Whole", "given_alone", "given_to"]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a tensor, and a sample of each box. `is_whole`: a plain tensor, which is to be on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    samples: tuple[int, ...]
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class _OwnedPart:
    """What one rank has of a state that belongs to the parts of a parameter: rank that had it -> shape, dtype and a sample."""

    spread: Spread
    tensors: tuple[tuple[int, tuple[int, ...], torch.dtype, int], ...]

    def __str__(self) -> str:
        return "a state of each rank's own"


@dataclass
class Whole:
    """A tensor of which the ranks together have everything, or not: the plan finds out."""

    spread: Spread


@dataclass
class Owned:
    """A state that belongs to the parts of a parameter that was spread so; rank that had it -> where that is now."""

    spread: Spread
    tensors: dict[int, Spread]


Entry = Number | Whole | Owned
_Described = Number | _Part | _OwnedPart
_Piece = Number | Part | RankOwned


@dataclass
class Given:
    """`state[name][key]` by the names that the parameters have here, `groups` as saved, None if none were; `tensors` are this rank's, by label."""

    state: dict[str, dict[str, Entry]]
    groups: list[dict[str, Any]] | None
    tensors: dict[str, list[Tensor]]


@dataclass
class _Mine:
    state: dict[str, dict[str, _Described]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    is_silent: bool = False
    """Whether it was given no part at all."""


def given_to(
    state: Any,
    translate: Callable[[str], str],
    broadcast_from_rank0: bool,
    error: Exception | None,
    group: Group,
    doing: str,
    *,
    is_known: Callable[[str], bool] = lambda _: False,
    settings: Settings | None = None,
    kind: type[FarstepError] = StateError,
) -> Given:
    """All ranks call it. Raises StateMismatch, which names parameter, state and ranks, where what they were given does not go together.

    `error` is what keeps this rank from going on; if it is not this one, others raise a `kind`. A rank that was given nothing makes no mistake, as long as
    others have everything. `is_known` tells a saved name, `settings` are what all ranks are to have the same.
    """
    mine = _Mine()
    if error is None and (own_rank(group) == 0 or not broadcast_from_rank0):
        try:
            mine = _understood(state, translate, is_known, group)
            if mine.is_silent and (broadcast_from_rank0 or size_of(group) == 1):
                raise no_state(f"this is {'None' if state is None else 'empty'}")
        except Exception as exc:
            error = exc
    settings = {"broadcast_from_rank0": broadcast_from_rank0, **(settings or {})}
    if broadcast_from_rank0:
        told, groups = firsts((mine.state, mine.groups), error, group, doing, settings=settings, kind=kind)
        return Given(_merged([told]), groups, mine.tensors)
    every = everyones(
        (mine.state, mine.groups, mine.is_silent), error, group, doing, settings=settings, kind=kind
    )
    if every is None:
        if mine.is_silent:
            raise no_state("no rank was given anything")
        return Given(_merged([mine.state] * size_of(group)), mine.groups, mine.tensors)
    heard = {rank: each for rank, (*each, is_silent) in enumerate(every) if not is_silent}
    groups = None
    for number, (rank, (_, theirs)) in enumerate(heard.items()):
        if number:
            _check_groups(groups, theirs, f"rank {next(iter(heard))}", f"rank {rank}")
        else:
            groups = theirs
    states = [heard[rank][0] if rank in heard else None for rank in range(len(every))]
    return Given(_merged(states), groups, mine.tensors)


def given_alone(
    state: Any, translate: Callable[[str], str], is_known: Callable[[str], bool], group: Group
) -> Given:
    """The same where every rank has the same whole state, so that none has to be asked."""
    mine = _understood(state, translate, is_known, group)
    if mine.is_silent:
        raise no_state("this is empty")
    return Given(_merged([mine.state] * size_of(group)), mine.groups, mine.tensors)


# -- on one rank ------------------------------------------------------------------------------------------


def _understood(
    given: Any, translate: Callable[[str], str], is_known: Callable[[str], bool], group: Group
) -> _Mine:
    if is_nothing(given):
        return _Mine(is_silent=True)
    mine = _Mine()
    found: dict[str, dict[str, list[_Piece]]] = {}
    for number, part in enumerate(parts_of(given, is_known)):
        rank = own_rank(group) if part.rank is None else part.rank
        for name, values in _by_own_names(part.state, translate):
            pieces = found.setdefault(name, {})
            for key, value in values.items():
                pieces.setdefault(key, []).append(_piece(value, label(name, key), rank))
        groups = None if part.groups is None else [_group(each, translate) for each in part.groups]
        if number:
            _check_groups(mine.groups, groups, "the first part", f"part {number}")
        else:
            mine.groups = groups
    samples = _samples(found)
    for name, pieces in found.items():
        mine.state[name] = {
            key: _described(mine, name, key, several, samples) for key, several in pieces.items()
        }
    return mine


def _by_own_names(
    state: Mapping[str, Mapping[str, Any]], translate: Callable[[str], str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """By the names that the parameters have here. One that was saved under several has the same under each."""
    names: dict[str, str] = {}
    for old, values in state.items():
        name = translate(old)
        first = names.setdefault(name, old)
        if first == old:
            yield name, values
        elif values is not state[first] and not same(state[first], values):
            raise StateMismatch(
                f"{first!r} and {old!r} of the state are one parameter here, {name!r}, and have different state; nothing has been loaded"
            )


def _group(saved: Mapping[str, Any], translate: Callable[[str], str]) -> dict[str, Any]:
    return {**options_of(saved), "params": union([[translate(name) for name in saved["params"]]])}


def _piece(value: Any, text: str, saved_by: int) -> _Piece:
    if isinstance(value, RankOwned):
        for tensor in value.tensors.values():
            check_readable(tensor, text)
        return value
    if isinstance(value, Shards) or (isinstance(value, Tensor) and value.dim()):
        return part_of(value, rank=saved_by, name=text)
    if isinstance(value, Tensor) and value.is_meta:
        check_readable(value, text)
    return Number.of(value)


def _samples(found: Mapping[str, Mapping[str, list[_Piece]]]) -> dict[int, int]:
    """Of all tensors, by id."""
    tensors = {
        id(tensor): tensor
        for pieces in found.values()
        for several in pieces.values()
        for piece in several
        if not isinstance(piece, Number)
        for tensor in (piece.tensors.values() if isinstance(piece, RankOwned) else piece.tensors)
    }
    return dict(zip(tensors, samples_of(list(tensors.values())), strict=True))


def _described(
    mine: _Mine, name: str, key: str, pieces: Sequence[_Piece], samples: Mapping[int, int]
) -> _Described:
    """What the parts say together of one piece of state. Its tensors are put among `mine`."""
    first = pieces[0]
    if isinstance(first, Number):
        for other in pieces[1:]:
            if other != first:
                raise _in_parts(name, key, first, other)
        return first
    if isinstance(first, Part):
        boxes: dict[Box, Tensor] = {}
        for piece in pieces:
            if not isinstance(piece, Part) or (piece.shape, piece.dtype) != (first.shape, first.dtype):
                raise _in_parts(name, key, first, piece)
            for box, tensor in zip(piece.boxes, piece.tensors, strict=True):
                if samples[id(boxes.setdefault(box, tensor))] != samples[id(tensor)]:
                    raise StateMismatch(
                        f"{box} of {label(name, key)} is in several parts, with different elements: they are not of one save; nothing has been loaded"
                    )
        mine.tensors[label(name, key)] = list(boxes.values())
        taken = tuple(samples[id(tensor)] for tensor in boxes.values())
        return _Part(first.shape, first.dtype, tuple(boxes), taken, all(p.is_whole for p in pieces))  # type: ignore[union-attr]
    owned: dict[int, Tensor] = {}
    for piece in pieces:
        if not isinstance(piece, RankOwned) or piece.spread != first.spread:
            raise _in_parts(name, key, first, piece)
        for rank, tensor in piece.tensors.items():
            if _look(owned.setdefault(rank, tensor), samples) != _look(tensor, samples):
                raise StateMismatch(
                    f"{label(name, key, rank)} is in several parts, which are not of one save; nothing has been loaded"
                )
    mine.tensors |= {label(name, key, rank): [tensor] for rank, tensor in owned.items()}
    return _OwnedPart(first.spread, tuple((rank, *_look(tensor, samples)) for rank, tensor in owned.items()))


def _look(tensor: Tensor, samples: Mapping[int, int]) -> tuple[tuple[int, ...], torch.dtype, int]:
    return tuple(tensor.shape), tensor.dtype, samples[id(tensor)]


def _in_parts(name: str, key: str, one: _Piece, other: _Piece) -> StateMismatch:
    return StateMismatch(
        f"the state {key!r} of parameter {name!r} is {_words(one)} in one part and {_words(other)} in another; nothing has been loaded"
    )


def _words(piece: _Piece) -> str:
    if isinstance(piece, Part):
        return f"{piece.dtype} of shape {piece.shape}"
    return str(piece) if isinstance(piece, Number) else f"a state of each rank's own, for {piece.spread!r}"


# -- of all ranks -----------------------------------------------------------------------------------------


def _merged(every: Sequence[Mapping[str, Mapping[str, _Described]] | None]) -> dict[str, dict[str, Entry]]:
    """`every` rank's; None of one that was given nothing."""
    found: dict[str, dict[str, Entry]] = {}
    first = every[0]
    spreads: dict[Any, Spread] = {}
    if first is not None and all(each is first for each in every):
        for name, state in first.items():
            found[name] = {key: _joined([entry] * len(every), spreads) for key, entry in state.items()}
        return found
    heard = [each for each in every if each is not None]
    silent = {rank for rank, each in enumerate(every) if each is None}
    for name in union(heard):
        found[name] = {}
        for key in union(each.get(name, ()) for each in heard):
            said = [None if each is None else each.get(name, {}).get(key) for each in every]
            _compare(name, key, said, silent)
            found[name][key] = _joined(said, spreads)
    return found


def _compare(name: str, key: str, said: Sequence[_Described | None], silent: set[int]) -> None:
    here = [entry for entry in said if entry is not None]
    is_everyones = any(isinstance(e, _Part) and e.is_whole for e in here) or isinstance(here[0], Number)
    alike: list[tuple[_Described | None, list[int]]] = []
    for rank, entry in enumerate(said):
        if rank not in silent and (entry is not None or is_everyones):
            ranks = next((ranks for other, ranks in alike if _is_alike(entry, other)), None)
            if ranks is None:
                alike.append((entry, [rank]))
            else:
                ranks.append(rank)
    if len(alike) > 1:
        words = "; ".join(
            f"{'absent' if entry is None else entry} on {ranks_named(ranks)}" for entry, ranks in alike
        )
        raise StateMismatch(
            f"the ranks were given different states: {key!r} of parameter {name!r} is {words}; nothing has been loaded"
        )
    _compare_samples(name, key, said)


def _is_alike(a: _Described | None, b: _Described | None) -> bool:
    """Whether two ranks have the same of a piece of state but for its elements."""
    return a == b if isinstance(a, Number) or isinstance(b, Number) else str(a) == str(b)


def _compare_samples(name: str, key: str, said: Sequence[_Described | None]) -> None:
    """What several ranks have, such as a whole tensor or a replica, is the same on all of them."""
    seen: dict[Any, tuple[int, Any]] = {}
    spread: Spread | None = None
    for rank, entry in enumerate(said):
        if isinstance(entry, _OwnedPart):
            spread = spread or entry.spread
            if entry.spread != spread:
                raise StateMismatch(
                    f"the ranks were given different states: {key!r} of parameter {name!r} belongs to the parts of a parameter that was {spread!r}, and on rank "
                    f"{rank} to those of one that was {entry.spread!r}; nothing has been loaded"
                )
            found = [(f"rank {owner}'s", look) for owner, *look in entry.tensors]
        elif isinstance(entry, _Part):
            found = list(zip(entry.boxes, entry.samples, strict=True))  # type: ignore[arg-type]
        else:
            continue
        for what, look in found:
            first, wanted = seen.setdefault(what, (rank, look))
            if look != wanted:
                raise StateMismatch(
                    f"the ranks were given different states: {key!r} of parameter {name!r} has other elements on rank {rank} than on rank {first} ({what}); nothing "
                    f"has been loaded"
                )


def _joined(said: Sequence[_Described | None], spreads: dict[Any, Spread]) -> Entry:
    first = next(entry for entry in said if entry is not None)
    if isinstance(first, Number):
        return first
    if isinstance(first, _Part):
        boxes = tuple(entry.boxes if isinstance(entry, _Part) else () for entry in said)
        known = first.shape, first.dtype, boxes
        if known not in spreads:
            spreads[known] = Spread.of(first.shape, first.dtype, dict(enumerate(boxes)))
        return Whole(spreads[known])
    holders: dict[int, tuple[tuple[int, ...], torch.dtype, list[int]]] = {}
    for rank, entry in enumerate(said):
        if isinstance(entry, _OwnedPart):
            for saved_by, shape, dtype, _ in entry.tensors:
                holders.setdefault(saved_by, (shape, dtype, []))[2].append(rank)
    return Owned(
        first.spread, {r: Spread.whole(shape, dtype, at) for r, (shape, dtype, at) in holders.items()}
    )


def _check_groups(
    ours: Sequence[Mapping[str, Any]] | None, theirs: Sequence[Mapping[str, Any]] | None, we: str, they: str
) -> None:
    if (ours is None) != (theirs is None) or len(ours or ()) != len(theirs or ()):
        raise StateMismatch(
            f"different states were given: {they} has {len(theirs or ())} parameter groups and {we} has {len(ours or ())}; nothing has been loaded"
        )
    for number, (one, other) in enumerate(zip(ours or (), theirs or (), strict=True)):
        for key in union([one, other]):
            if key not in one or key not in other or not same(one[key], other[key]):
                raise StateMismatch(
                    f"different states were given: {key!r} of group {number} differs between {we} and {they}; nothing has been loaded"
                )
