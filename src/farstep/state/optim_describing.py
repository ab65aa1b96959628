"""What one rank has of an optimizer's state, without its elements."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farstep.errors import StateError
from farstep.state.known import is_torchs
from farstep.state.optim_entries import Entry, Nested, Number, Odd, Shaped, digest, label, taken_apart
from farstep.state.optim_roster import Roster, Seated
from farstep.state.optim_seats import Seat

__all__ = ["described"]

TABLE_BYTES = 1 << 18
"""What is longer is no table of an optimizer's."""


def described(roster: Roster, *, alone: bool = False) -> dict[str, dict[str, Entry]]:
    """By parameter and key. If `alone`, nobody is going to compare it. Raises StateError for what cannot be read by parameter."""
    _check_owners(roster)
    found: dict[str, dict[str, Entry]] = {}
    chances = _Chances(roster)
    for name, seat in roster.seats.items():
        mine: dict[str, Entry] = {}
        for number in range(len(seat.keys)):
            for key, value in roster.state_of(seat, number).items():
                entry = _entry(seat, number, key, value, alone)
                if mine.setdefault(key, entry) != entry:
                    raise StateError(
                        f"the state {key!r} of parameter {name!r} is {mine[key]} for one of its local shards and {entry} for another"
                    )
                if not alone and isinstance(value, Tensor) and seat.is_cut(number):
                    chances.note(seat, key, value, entry)
        if mine:
            found[name] = mine
    for name, key, entry in chances.settled():
        found[name][key] = entry
    return found


def _entry(seat: Seat, number: int, key: str, value: Any, alone: bool) -> Entry:
    if not isinstance(value, Tensor):
        frame, tensors = taken_apart(value)
        return (
            Nested(frame, tuple(_odd(seat, key, each, alone) for each in tensors))
            if tensors
            else Number(value)
        )
    if value.layout != torch.strided:
        raise _not_dense(seat, key, value)
    if seat.is_like(number, value):
        return Shaped(value.dtype)
    return Number.of(value) if value.dim() == 0 else _odd(seat, key, value, alone)


def _odd(seat: Seat, key: str, value: Tensor, alone: bool) -> Odd:
    if value.layout != torch.strided:
        raise _not_dense(seat, key, value)
    if not hasattr(value, "to_local"):
        return Odd(tuple(value.shape), value.dtype, "" if alone else digest(value))
    local = value.to_local()
    is_part = not all(placement.is_replicate() for placement in value.placements)  # type: ignore[attr-defined]
    return Odd(tuple(local.shape), local.dtype, "" if alone else digest(local), is_part and not alone)


def _not_dense(seat: Seat, key: str, value: Tensor) -> StateError:
    return StateError(
        f"{label(seat.name, key)} is a tensor of layout {value.layout}, and only dense ones are read. Give the optimizer dense gradients, such as "
        f"those of nn.Embedding(sparse=False)"
    )


def _check_owners(roster: Roster) -> None:
    """State under a key that is no parameter would be lost without a word."""
    seated: dict[int, set[int]] = defaultdict(set)
    for group in roster.groups:
        seated[id(group.optimizer)].update(id(key) for seat in group.seats for key in seat.keys)
    left_out = {id(key) for seat in roster.left_out.values() for key in seat.keys}
    for optimizer in roster.optimizers:
        for key, state in optimizer.state.items():
            if id(key) in seated[id(optimizer)] | left_out or (isinstance(key, Tensor) and not state):
                continue
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise StateError(
                f"{type(optimizer).__name__} has state under {what}, which is none of the parameters in its groups, so it has no name here. Keep "
                f"it in the groups' options or apart from the optimizer's state"
            )


class _Chances:
    """Tensors that are as long as what is here of their parameter, and may be so by chance, such as an 8-bit optimizer's table.

    A table is as long for every parameter; what is shaped like them is not. Where all are of one length, the ranks compare elements.
    """

    def __init__(self, roster: Roster) -> None:
        self._homes = roster.homes
        self._torchs: dict[int, bool] = {}
        self._like: dict[tuple[int, str], list[tuple[str, str, Tensor]]] = defaultdict(list)
        self._odd: dict[tuple[int, str], set[tuple[int, ...]]] = defaultdict(set)

    def note(self, seat: Seat, key: str, value: Tensor, entry: Entry) -> None:
        optimizer = self._homes[seat.name].optimizer
        if self._is_torchs(optimizer):
            return
        if isinstance(entry, Shaped) and value.numel():
            self._like[id(optimizer), key].append((seat.name, key, value))
        elif isinstance(entry, Odd):
            self._odd[id(optimizer), key].add(entry.shape)

    def settled(self) -> list[tuple[str, str, Entry]]:
        """What is not shaped like its parameter after all, and what others are to be asked about."""
        found: list[tuple[str, str, Entry]] = []
        digests: dict[int, str] = {}
        for which, several in self._like.items():
            lengths = {tuple(value.shape) for _, _, value in several}
            for name, key, value in several:
                shape = tuple(value.shape)
                is_table = shape in self._odd[which]
                if value.nbytes > TABLE_BYTES or not (is_table or (len(lengths) == 1 and _varies(value))):
                    continue
                if id(value) not in digests:
                    digests[id(value)] = digest(value)
                elements = digests[id(value)]
                entry = Odd(shape, value.dtype, elements) if is_table else Shaped(value.dtype, elements)
                found.append((name, key, entry))
        return found

    def _is_torchs(self, optimizer: Optimizer) -> bool:
        """Of torch's own classes it is known that they keep no tables."""
        known = self._torchs.get(id(optimizer))
        if known is None:
            stepper = optimizer.optim_stepper() if isinstance(optimizer, Seated) else optimizer
            known = self._torchs[id(optimizer)] = is_torchs(stepper)
        return known


def _varies(value: Tensor) -> bool:
    """One number throughout is no table: moments are that, of gradients that are."""
    flat = value.detach().reshape(-1)
    return not bool((flat == flat[0]).all())
