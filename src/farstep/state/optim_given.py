"""A state that is to be loaded: what each rank was given of it, and what all have together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import FarstepError, StateError, StateMismatch
from farstep.state.adapters import shards_of
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.box import Box
from farstep.state.council import agree, everyones
from farstep.state.layout import Spread
from farstep.state.optim_entries import Number, RankOwned, label, ranks_named, union, unlike
from farstep.state.optim_schema import options_of
from farstep.state.shards import Shards

__all__ = ["Given", "Owned", "Whole", "given_alone", "given_to"]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a tensor. `is_whole`: a plain tensor, which is to be on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class _OwnedPart:
    """What one rank has of a state that belongs to the parts of a parameter: rank that had it -> shape and dtype."""

    spread: Spread
    tensors: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]

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
    kind: type[FarstepError] = StateError,
) -> Given:
    """All ranks call it. Raises StateMismatch, which names parameter, state and ranks, where what they were given does not go together.

    `error` is what keeps this rank from going on; if it is not this one, others raise a `kind`. A rank that was given an empty list has nothing, which
    is no mistake as long as others have everything.
    """
    mine = _Mine()
    if error is None and (own_rank(group) == 0 or not broadcast_from_rank0):
        try:
            mine = _understood(state, translate, group)
        except Exception as exc:
            error = exc
    told = mine.state, mine.groups
    if broadcast_from_rank0 and size_of(group) > 1:
        agree(error, group, doing, kind=kind)
        box: list[Any] = [told]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return Given(_merged([box[0][0]]), box[0][1], mine.tensors)
    every = everyones((*told, mine.is_silent), error, group, doing, kind=kind)
    if every is None:
        if mine.is_silent:
            raise _no_state()
        return Given(_merged([mine.state] * size_of(group)), mine.groups, mine.tensors)
    heard = {rank: each for rank, (*each, is_silent) in enumerate(every) if not is_silent}
    groups = _the_groups({rank: each for rank, (_, each) in heard.items()})
    return Given(
        _merged([heard[rank][0] if rank in heard else None for rank in range(len(every))]),
        groups,
        mine.tensors,
    )


def given_alone(state: Any, translate: Callable[[str], str], group: Group) -> Given:
    """The same where every rank has the same whole state, so that none has to be asked."""
    mine = _understood(state, translate, group)
    return Given(_merged([mine.state] * size_of(group)), mine.groups, mine.tensors)


# -- on one rank ------------------------------------------------------------------------------------------


def _understood(given: Any, translate: Callable[[str], str], group: Group) -> _Mine:
    rank = own_rank(group)
    mine = _Mine(is_silent=isinstance(given, list) and not given)
    for each in _parts(given):
        state = each["state"]
        if any(not isinstance(name, str) for name in state):
            raise StateMismatch(
                "this state has numbers where parameters' names are wanted: it is that of an ordinary optimizer, whose numbers mean nothing "
                "elsewhere. rekey_optim_state_dict puts names in their place"
            )
        names: dict[str, str] = {}
        for old, values in state.items():
            name = translate(old)
            if names.setdefault(name, old) != old:
                if _same(state[names[name]], values):
                    continue
                raise StateMismatch(
                    f"{names[name]!r} and {old!r} of the state are one parameter here, {name!r}, and have different state; nothing has been "
                    f"loaded"
                )
            if not isinstance(values, Mapping):
                raise StateMismatch(
                    f"the state of parameter {name!r} is a {type(values).__name__}, and not a dict; nothing has been loaded"
                )
            for key, value in values.items():
                _take(mine, name, key, value, each.get("rank", rank), rank, group)
        groups = each.get("param_groups")
        if groups is not None and mine.groups is None:
            mine.groups = [
                {**options_of(saved), "params": union([[translate(name) for name in saved["params"]]])}
                for saved in groups
            ]
    return mine


def _parts(given: Any) -> list[Mapping[str, Any]]:
    """One state dict, or those that several ranks had saved."""
    parts = [given] if isinstance(given, Mapping) else given
    if isinstance(parts, Sequence) and all(isinstance(p, Mapping) and "state" in p for p in parts):
        return list(parts)
    raise _no_state()


def _no_state() -> StateMismatch:
    return StateMismatch(
        'this is no state by the names of parameters, {"state": ..., "param_groups": ...}; nothing has been loaded. Where only the first rank '
        "has one, all say broadcast_from_rank0=True"
    )


def _take(mine: _Mine, name: str, key: str, value: Any, saved_by: int, rank: int, group: Group) -> None:
    known = mine.state.setdefault(name, {})
    entry: _Described
    tensors: dict[str, list[Tensor]] = {}
    if isinstance(value, RankOwned):
        own = [(r, tuple(t.shape), t.dtype) for r, t in value.tensors.items()]
        entry = _OwnedPart(value.spread, tuple(own))
        tensors = {label(name, key, r): [t] for r, t in value.tensors.items()}
    elif not isinstance(value, Shards | Tensor) or (isinstance(value, Tensor) and value.dim() == 0):
        entry = Number.of(value)
    elif isinstance(value, Shards):
        value.check(label(name, key), saved_by)
        entry = _Part(value.shape, value.dtype, tuple(value.spread.boxes(saved_by)), False)
        tensors = {label(name, key): value.tensors}
    else:
        shards = shards_of(value, group, name=label(name, key))
        is_plain = not hasattr(value, "placements") and not hasattr(value, "local_shards")
        entry = _Part(shards.shape, shards.dtype, tuple(shards.spread.boxes(rank)), is_plain)
        tensors = {label(name, key): shards.tensors}
    before = known.get(key)
    if before is None:
        known[key] = entry
        mine.tensors |= tensors
    elif isinstance(before, _Part) and isinstance(entry, _Part):
        _check_alike(name, key, {before: [rank], entry: [rank]})
        new = [box not in before.boxes for box in entry.boxes]
        kept = [box for box, is_new in zip(entry.boxes, new, strict=True) if is_new]
        known[key] = _Part(before.shape, before.dtype, (*before.boxes, *kept), False)
        parts = tensors[label(name, key)]
        mine.tensors[label(name, key)] = [
            *mine.tensors[label(name, key)],
            *(t for t, is_new in zip(parts, new, strict=True) if is_new),
        ]
    elif isinstance(before, _OwnedPart) and isinstance(entry, _OwnedPart):
        known[key] = _OwnedPart(before.spread, tuple(union([before.tensors, entry.tensors])))
        mine.tensors |= tensors
    elif before != entry:
        raise StateMismatch(
            f"the state {key!r} of parameter {name!r} is {before} in one part and {entry} in another; nothing has been loaded"
        )


def _same(a: Any, b: Any) -> bool:
    """Whether two states are the same, as far as that can be told here."""
    if a is b:
        return True
    if not isinstance(a, Mapping) or not isinstance(b, Mapping) or a.keys() != b.keys():
        return False
    for key, value in a.items():
        other = b[key]
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape:
            if not torch.equal(value, other):
                return False
        elif value is not other and unlike(value, other):
            return False
    return True


def cleaned(name: str, known: Callable[[str], bool]) -> str:
    """A name without what wrappers put into it, if the model knows it so."""
    bare = re.sub(r"\b(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.", "", name)
    for candidate in (bare, bare.removeprefix("module.")):
        if known(candidate):
            return candidate
    return bare


# -- of all ranks -----------------------------------------------------------------------------------------


def _merged(every: Sequence[Mapping[str, Mapping[str, _Described]] | None]) -> dict[str, dict[str, Entry]]:
    """`every` rank's; None of one that was given nothing."""
    found: dict[str, dict[str, Entry]] = {}
    first = every[0]
    if len(every) > 1 and first is not None and all(each is first for each in every):
        spreads: dict[_Part, Spread] = {}
        for name, state in first.items():
            found[name] = {key: _joined([entry] * len(every), spreads) for key, entry in state.items()}
        return found
    heard = [each for each in every if each is not None]
    silent = {rank for rank, each in enumerate(every) if each is None}
    for name in union(heard):
        for key in union(each.get(name, ()) for each in heard):
            said = [None if each is None else each.get(name, {}).get(key) for each in every]
            _compare(name, key, said, silent)
            found.setdefault(name, {})[key] = _joined(said, {})
        found.setdefault(name, {})
    return found


def _compare(name: str, key: str, said: Sequence[_Described | None], silent: set[int]) -> None:
    here = [entry for entry in said if entry is not None]
    is_everyones = any(isinstance(e, _Part) and e.is_whole for e in here) or isinstance(here[0], Number)
    by_entry: dict[Any, list[int]] = {}
    for rank, entry in enumerate(said):
        if rank not in silent and (entry is not None or is_everyones):
            by_entry.setdefault(entry, []).append(rank)
    _check_alike(name, key, by_entry)


def _joined(said: Sequence[_Described | None], spreads: dict[_Part, Spread]) -> Entry:
    first = next(entry for entry in said if entry is not None)
    if isinstance(first, Number):
        return first
    if isinstance(first, _Part):
        spread = spreads.get(first)
        if spread is None:
            boxes = {rank: entry.boxes for rank, entry in enumerate(said) if isinstance(entry, _Part)}
            spread = spreads[first] = Spread.of(first.shape, first.dtype, boxes)
        return Whole(spread)
    holders: dict[int, tuple[tuple[int, ...], torch.dtype, list[int]]] = {}
    for rank, entry in enumerate(said):
        if isinstance(entry, _OwnedPart):
            for saved_by, shape, dtype in entry.tensors:
                holders.setdefault(saved_by, (shape, dtype, []))[2].append(rank)
    return Owned(
        first.spread, {r: Spread.whole(shape, dtype, at) for r, (shape, dtype, at) in holders.items()}
    )


def _check_alike(name: str, key: str, by_entry: Mapping[Any, list[int]]) -> None:
    words: dict[str, list[int]] = {}
    for entry, ranks in by_entry.items():
        words.setdefault("absent" if entry is None else str(entry), []).extend(ranks)
    if len(words) > 1:
        said = "; ".join(f"{what} on {ranks_named(sorted(ranks))}" for what, ranks in words.items())
        raise StateMismatch(
            f"the ranks were given different states: {key!r} of parameter {name!r} is {said}; nothing has been loaded"
        )


def _the_groups(every: Mapping[int, Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Those that the ranks were given, which are to be the same."""
    first_rank, first = next(iter(every.items()))
    for rank, groups in every.items():
        if (groups is None) != (first is None) or len(groups or ()) != len(first or ()):
            raise StateMismatch(
                f"the ranks were given different states: rank {rank} has {len(groups or ())} parameter groups and rank {first_rank} has "
                f"{len(first or ())}; nothing has been loaded"
            )
        for number, (ours, theirs) in enumerate(zip(first or (), groups or (), strict=True)):
            for key in union([ours, theirs]):
                if key not in ours or key not in theirs or unlike(ours[key], theirs[key]):
                    raise StateMismatch(
                        f"the ranks were given different states: {key!r} of group {number} differs between rank {first_rank} and rank {rank}; nothing "
                        f"has been loaded"
                    )
    return None if first is None else [dict(group) for group in first]
