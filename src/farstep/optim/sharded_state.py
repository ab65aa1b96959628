"""A ShardedOptimizer's state by parameter name: read as each rank has it or whole, and loaded from any layout.

Both are respreadings: the state as it is spread now, the state as it shall be, and the copies in between. What has no shape travels along with the
description of the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import FarstepError, OptimError, StateMismatch
from farstep.optim import fast
from farstep.optim.agreement import agree, gathered
from farstep.optim.elementwise import ELEMENTWISE
from farstep.optim.fitting import twin_of
from farstep.optim.groups import copied, differ, options_of
from farstep.optim.members import Member, kind_of
from farstep.optim.state_dicts import build, plan_load
from farstep.state import Box, Layout, Shards, Spread, exchange, local_tensors, plan, respread, shards_of
from farstep.state.room import Room, aligned

if TYPE_CHECKING:
    from farstep.optim.sharded import ShardedOptimizer

__all__ = ["load", "read"]


@dataclass
class _Number:
    """Something without a shape, which is the same for all parts of a parameter. Of a tensor the number, which is pickled faster by far."""

    value: Any
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> _Number:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return cls(value.item(), value.dtype)
        return cls(value)

    def is_like(self, other: _Number) -> bool:
        is_nan = self.value != self.value and other.value != other.value
        return is_nan or not differ(self.value, other.value)

    def copy(self) -> Any:
        return copied(self.value) if self.dtype is None else torch.tensor(self.value, dtype=self.dtype)


@dataclass
class _Spread:
    """A tensor: of the parameter's shape or another, and what is held of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[int, list[Box]] = field(default_factory=dict)


Entry = _Number | _Spread
Entries = dict[str, dict[str, Entry]]
"""By the names of parameter and state."""


def read(optimizer: ShardedOptimizer, full: bool, rank0_only: bool, cpu_offload: bool) -> dict[str, Any]:
    rank = _rank(optimizer)
    error: BaseException | None = None
    held: dict[str, list[dict[str, Any]]] = {}
    own: Entries = {}
    try:
        held = _held(optimizer)
        own = _schema(optimizer, held)
    except Exception as exc:
        error = exc
    agree(optimizer.process_group, error)
    schema = _merged(gathered(optimizer.process_group, own))
    states: dict[str, dict[str, Any]] = {}
    sources: dict[str, Shards] = {}
    targets: dict[str, Shards] = {}
    receives = not rank0_only or rank == 0
    wholes: dict[tuple[tuple[int, ...], torch.dtype], Spread] = {}
    ranks = [0] if rank0_only else range(optimizer._ranks)
    room = Room(_nbytes(schema) if full and receives else 0)
    for member in _members(optimizer):
        for key, entry in schema.get(member.name, {}).items():
            state = states.setdefault(member.name, {})
            if isinstance(entry, _Number):
                state[key] = entry.copy()
                continue
            tensors = [each[key] for each in held[member.name] if key in each]
            if not full:
                state[key] = _form(member, entry, tensors, rank)
                continue
            label = _label(member.name, key)
            sources[label] = _shards(member, entry, tensors, rank, optimizer._ranks)
            device = torch.device("cpu") if cpu_offload else _device(member)
            whole = [room.take(entry.shape, entry.dtype, device)] if receives else []
            kind = entry.shape, entry.dtype
            if kind not in wholes:
                wholes[kind] = Spread.whole(*kind, ranks)
            targets[label] = Shards(wholes[kind], whole)
            if receives:
                state[key] = whole[0]
    if full:
        respread(sources, targets, optimizer.process_group)
        if not receives:
            return {}
    found = build(optimizer.param_groups, states, {})
    return found if full else {**found, "rank": rank}


def load(optimizer: ShardedOptimizer, given: Any, strict: bool, broadcast_from_rank0: bool) -> None:
    group, rank = optimizer.process_group, _rank(optimizer)
    error: BaseException | None = None
    tensors: dict[str, list[Tensor]] = {}
    entries: Entries = {}
    groups: Any = None
    if rank == 0 or not broadcast_from_rank0:
        try:
            entries, groups, tensors = _given(optimizer, given, rank)
        except Exception as exc:
            error = exc
    agree(group, error)
    every = gathered(group, (entries, groups))
    merged = _merged([each for each, _ in every])
    saved_groups = next((each for _, each in every if each is not None), None)
    for _, each in every:
        if each is not None and differ([_plain(g) for g in each], [_plain(g) for g in saved_groups or ()]):
            raise StateMismatch(
                "the ranks were given states with different param_groups: parts of one save belong together; nothing has been loaded"
            )
    # From here on to the plan every rank comes to the same.
    parts = {"state": merged, "param_groups": saved_groups}
    loading = plan_load(optimizer._make, optimizer.defaults, optimizer.param_groups, parts, strict)
    targets, states = _targets(optimizer, loading.states)
    source = Layout(
        {
            _label(name, key): Spread.of(entry.shape, entry.dtype, entry.boxes)
            for name, state in loading.states.items()
            for key, entry in state.items()
            if isinstance(entry, _Spread)
        }
    )
    part = None
    try:
        part = plan(source, Layout({label: shards.spread for label, shards in targets.items()}), rank)
    except FarstepError as exc:
        error = StateMismatch(f"{exc}; nothing has been loaded")
    agree(group, error)
    assert part is not None
    exchange(
        part,
        {label: tensors.get(label, []) for label in targets},
        {label: shards.tensors for label, shards in targets.items()},
        group,
    )
    try:
        twin = _loaded(optimizer, loading.options, states, loading.kept)
    except Exception as exc:
        error = exc
    agree(group, error)
    optimizer._inner.__dict__.update(twin.__dict__)
    optimizer._adopt_all()


def _nbytes(schema: Entries) -> int:
    entries = [entry for state in schema.values() for entry in state.values() if isinstance(entry, _Spread)]
    return sum(aligned(math.prod(entry.shape) * entry.dtype.itemsize) for entry in entries)


# -- what there is ----------------------------------------------------------------------------------------


def _held(optimizer: ShardedOptimizer) -> dict[str, list[dict[str, Any]]]:
    """The state of each shadow of each parameter, through the class's own state_dict."""
    with optimizer._showing_all():
        saved = optimizer._inner.state_dict()
    others = saved.keys() - {"state", "param_groups"}
    if others:
        raise OptimError(
            f"{type(optimizer._inner).__name__} keeps {', '.join(sorted(map(str, others)))} in its state_dict, which belongs to no parameter, so it cannot "
            f"be saved by parameter names"
        )
    indices = itertools.count()
    return {
        member.name: [saved["state"].get(next(indices), {}) for _ in member.shadows]
        for member in _members(optimizer)
    }


def _schema(optimizer: ShardedOptimizer, held: dict[str, list[dict[str, Any]]]) -> Entries:
    """What this rank can say of the state: of parameters that it has a part of."""
    found: Entries = {}
    for member in _members(optimizer):
        for shadow, state in zip(member.shadows, held[member.name], strict=True):
            for key, value in state.items():
                known = found.setdefault(member.name, {})
                if not isinstance(value, Tensor) or value.dim() == 0:
                    known.setdefault(key, _Number.of(value))
                elif value.shape == shadow.shape:
                    known.setdefault(key, _Spread(member.shape, value.dtype))
                elif member.takes_any_shape:
                    known.setdefault(key, _Spread(tuple(value.shape), value.dtype))
                else:
                    raise OptimError(
                        f"the state {key!r} of parameter {member.name!r} has shape {tuple(value.shape)} for a part of shape {tuple(shadow.shape)}, so "
                        f"nobody knows what it is of the whole"
                    )
    return found


def _form(member: Member, entry: _Spread, tensors: Sequence[Tensor], rank: int) -> Any:
    """As this rank has it."""
    if entry.shape == member.shape:
        return member.form(tensors, entry.dtype)
    if member.owner is None:
        return tensors[0]
    return Shards(Spread.whole(entry.shape, entry.dtype, [member.owner]), tensors)


def _shards(member: Member, entry: _Spread, tensors: Sequence[Tensor], rank: int, ranks: int) -> Shards:
    if entry.shape == member.shape:
        return member.shards(tensors, entry.dtype)
    holders = range(ranks) if member.owner is None else [member.owner]
    return Shards(Spread.whole(entry.shape, entry.dtype, holders), tensors)


# -- what is to be loaded ---------------------------------------------------------------------------------


def _given(
    optimizer: ShardedOptimizer, given: Any, rank: int
) -> tuple[Entries, Any, dict[str, list[Tensor]]]:
    """What this rank was given: a description for the others, and the tensors."""
    entries: Entries = {}
    tensors: dict[str, list[Tensor]] = {}
    groups = None
    for each in [given] if isinstance(given, Mapping) else list(given or ()):
        if not isinstance(each, Mapping) or "state" not in each or "param_groups" not in each:
            raise StateMismatch(
                'this is no state dict by names of parameters, with "state" and "param_groups"; nothing has been loaded. Where only the first rank has one, '
                "say broadcast_from_rank0=True"
            )
        groups = groups or each["param_groups"]
        for name, state in each["state"].items():
            if not isinstance(state, Mapping):
                raise StateMismatch(
                    f"the state of parameter {name!r} is a {type(state).__name__}, and not a dict; nothing has been loaded"
                )
            for key, value in state.items():
                entry, parts = _described(optimizer, name, key, value, each.get("rank", rank), rank)
                known = entries.setdefault(name, {}).setdefault(key, entry)
                mine = tensors.setdefault(_label(name, key), [])
                if known is entry:
                    mine += parts
                elif isinstance(known, _Spread) and isinstance(entry, _Spread):
                    _check_alike(name, key, known, entry)
                    for box, tensor in zip(entry.boxes[rank], parts, strict=True):
                        if box not in known.boxes[rank]:
                            known.boxes[rank].append(box)
                            mine.append(tensor)
    return entries, groups, tensors


def _described(
    optimizer: ShardedOptimizer, name: str, key: str, value: Any, saved_by: int, rank: int
) -> tuple[Entry, list[Tensor]]:
    if isinstance(value, Shards):
        boxes = value.spread.boxes(saved_by)
        value.check(_label(name, key), saved_by)
        return _Spread(value.shape, value.dtype, {rank: boxes}), value.tensors
    if not isinstance(value, Tensor):
        return _Number(value), []
    if value.dim() == 0:
        return _Number.of(local_tensors(value)[0]), []
    if value.layout is not torch.strided and kind_of(value) == "Tensor":
        raise StateMismatch(
            f"the state {key!r} of parameter {name!r} is {value.layout}; nothing has been loaded"
        )
    shards = shards_of(value, optimizer.process_group, name=_label(name, key))
    return _Spread(shards.shape, shards.dtype, {rank: shards.spread.boxes(rank)}), shards.tensors


def _merged(every: Sequence[Entries]) -> Entries:
    """What all ranks have together."""
    if len(every) == 1:
        return every[0]
    found: Entries = {}
    for entries in every:
        for name, state in entries.items():
            for key, entry in state.items():
                known = found.setdefault(name, {}).setdefault(key, entry)
                if known is entry:
                    continue
                if isinstance(entry, _Spread) and isinstance(known, _Spread):
                    _check_alike(name, key, known, entry)
                    known.boxes.update(entry.boxes)
                elif isinstance(entry, _Spread) or isinstance(known, _Spread) or not known.is_like(entry):
                    raise StateMismatch(
                        f"the state {key!r} of parameter {name!r} is not the same on all ranks: parts of one save belong together; nothing has been changed"
                    )
    return found


def _check_alike(name: str, key: str, known: _Spread, entry: _Spread) -> None:
    if (known.shape, known.dtype) != (entry.shape, entry.dtype):
        raise StateMismatch(
            f"the state {key!r} of parameter {name!r} is {known.dtype} of shape {known.shape} in one part and {entry.dtype} of shape {entry.shape} in "
            f"another; nothing has been loaded"
        )


def _targets(
    optimizer: ShardedOptimizer, wanted: Mapping[str, Mapping[str, Entry]]
) -> tuple[dict[str, Shards], dict[str, list[dict[str, Any]]]]:
    """Fresh memory for the state of this rank's shadows, as it is to be filled, and as the optimizer will have it."""
    targets: dict[str, Shards] = {}
    states: dict[str, list[dict[str, Any]]] = {}
    rank = _rank(optimizer)
    for member in _members(optimizer):
        if member.name not in wanted:
            continue
        mine: list[dict[str, Any]] = [{} for _ in member.shadows]
        states[member.name] = mine
        for key, entry in wanted[member.name].items():
            if isinstance(entry, _Number):
                if fast.is_torchs(optimizer._inner) and key not in fast.NUMBERS and member.shape:
                    raise StateMismatch(
                        f"the state {key!r} of parameter {member.name!r} is {entry.value!r}, and the parameter has the shape {member.shape}; nothing has been loaded"
                    )
                for state in mine:
                    state[key] = entry.copy()
                continue
            if entry.shape == member.shape:
                tensors = [
                    torch.empty_like(s, dtype=entry.dtype, requires_grad=False) for s in member.shadows
                ]
            elif member.takes_any_shape and _may_differ(optimizer):
                tensors = [
                    torch.empty(entry.shape, dtype=entry.dtype, device=s.device) for s in member.shadows
                ]
            else:
                raise StateMismatch(
                    f"the state {key!r} of parameter {member.name!r} has shape {entry.shape}, which does not fit the parameter's, {member.shape}; nothing has "
                    f"been loaded"
                )
            targets[_label(member.name, key)] = _shards(member, entry, tensors, rank, optimizer._ranks)
            for state, tensor in zip(mine, tensors, strict=True):
                state[key] = tensor
    return targets, states


def _may_differ(optimizer: ShardedOptimizer) -> bool:
    """Whether the class may keep a state that has another shape than its parameter."""
    return type(optimizer._inner) not in ELEMENTWISE


def _loaded(
    optimizer: ShardedOptimizer,
    options: list[dict[str, Any]],
    states: dict[str, list[dict[str, Any]]],
    kept: set[str],
) -> Any:
    """Another object of the inner optimizer's class that has loaded all this."""
    indices = itertools.count()
    state: dict[int, Any] = {}
    groups = []
    with optimizer._showing_all():
        for members, each in zip(optimizer._members, options, strict=True):
            places = []
            for member in members:
                for position, shadow in enumerate(member.shadows):
                    index = next(indices)
                    places.append(index)
                    if member.name in kept:
                        if shadow in optimizer._inner.state:
                            state[index] = optimizer._inner.state[shadow]
                    elif member.name in states:
                        state[index] = states[member.name][position]
            groups.append({**each, "params": places})
        twin = twin_of(optimizer._inner)
        twin.load_state_dict({"state": state, "param_groups": groups})
    return twin


def _members(optimizer: ShardedOptimizer) -> list[Member]:
    return [member for members in optimizer._members for member in members]


def _plain(group: Any) -> dict[str, Any]:
    return {**options_of(group), "params": list(group["params"])}


def _label(name: str, key: str) -> str:
    return f"state[{name!r}][{key!r}]"


def _rank(optimizer: ShardedOptimizer) -> int:
    return dist.get_rank(optimizer.process_group) if dist.is_initialized() else 0


def _device(member: Member) -> torch.device:
    return torch.device(member.parameter.device)
