"""An optimizer's state by the names of parameters: as each rank has it, or gathered. Nothing in the optimizer is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from farstep.errors import FarstepError, StateError
from farstep.state.adapters import local_tensors
from farstep.state.adapters.ranks import size_of
from farstep.state.layout import Spread
from farstep.state.optim_entries import (
    Entry,
    Nested,
    Number,
    Odd,
    RankOwned,
    Shaped,
    copied,
    label,
    put_together,
    taken_apart,
)
from farstep.state.optim_moving import Options, move
from farstep.state.optim_profile import Profile
from farstep.state.optim_roster import Optimizers, Roster, roster_of
from farstep.state.optim_schema import Owned, Schema, schema_of
from farstep.state.optim_seats import Seat
from farstep.state.optim_selection import EVERYTHING, Selection
from farstep.state.room import Room, aligned
from farstep.state.shards import Shards

__all__ = ["plain_of", "read", "read_roster"]


def read(
    model: nn.Module,
    optim: Optimizers,
    *,
    full: bool,
    rank0_only: bool,
    cpu_offload: bool,
    options: Options,
    selection: Selection = EVERYTHING,
) -> dict[str, Any]:
    error = options.mistake()
    profile = Profile(options.profile if error is None else None)
    with profile.phase("plan"):
        roster = None
        if error is None:
            try:
                roster = roster_of(model, optim, options.group)
                selection.narrow(model, roster)
            except Exception as exc:
                error = exc
    return read_roster(
        roster,
        error,
        full=full,
        rank0_only=rank0_only,
        cpu_offload=cpu_offload,
        options=options,
        profile=profile,
    )


def read_roster(
    roster: Roster | None,
    error: Exception | None,
    *,
    full: bool,
    rank0_only: bool,
    cpu_offload: bool,
    options: Options,
    profile: Profile,
    kind: type[FarstepError] = StateError,
) -> dict[str, Any]:
    """The same of parameters that are seated already, unless an error has kept this rank from that: then all raise, others a `kind`."""
    with profile.phase("plan"):
        settings = {"full": full, "rank0_only": rank0_only, "budget_bytes": options.budget_bytes}
        schema = schema_of(roster, error, options.group, settings=settings, kind=kind)
    assert roster is not None
    reading = _Reading(roster, schema, options, profile)
    if full:
        state = reading.gathered([0] if rank0_only else list(range(size_of(options.group))), cpu_offload)
        if state is None:
            return {}
    else:
        with profile.phase("offload" if cpu_offload else "copy"):
            state = reading.here(cpu_offload)
    groups = [{**each, "params": list(names)} for each, names in schema.groups]
    order = [name for group in groups for name in group["params"]]
    found = {"state": {name: state[name] for name in order if name in state}, "param_groups": groups}
    return found if full else {**found, "rank": options.rank}


class _Reading:
    def __init__(self, roster: Roster, schema: Schema, options: Options, profile: Profile) -> None:
        self._roster, self._schema, self._options, self._profile = roster, schema, options, profile
        self._rank = options.rank
        self._held = {
            name: [roster.state_of(seat, number) for number in range(len(seat.keys))]
            for name, seat in roster.seats.items()
            if name in schema.state
        }

    def gathered(self, ranks: list[int], cpu_offload: bool) -> dict[str, dict[str, Any]] | None:
        """Whole plain tensors on these ranks, None on others."""
        gathering = _Gathering(self._rank, ranks)
        state: dict[str, dict[str, Any]] = {}
        error: Exception | None = None
        with self._profile.phase("plan"):
            try:
                gathering.make_room(self._shaped_bytes())
                for seat, key, entry in self._entries():
                    device = torch.device("cpu") if cpu_offload else self._device(seat, key)
                    state.setdefault(seat.name, {})[key] = self._whole(gathering, seat, key, entry, device)
            except Exception as exc:  # there may be no memory for it
                error = exc
        move(
            gathering.sources,
            gathering.targets,
            error,
            self._options,
            self._profile,
            "gathering the optimizer's state",
        )
        return state if gathering.receives else None

    def _whole(
        self, gathering: _Gathering, seat: Seat, key: str, entry: Entry | Owned, device: torch.device | None
    ) -> Any:
        if isinstance(entry, Number):
            return self._number(seat, key, entry)
        if isinstance(entry, Shaped):
            return gathering.add(label(seat.name, key), self._shards(seat, key, entry), device, in_room=True)
        if isinstance(entry, Odd):
            return gathering.add(label(seat.name, key), self._shards(seat, key, entry), device)
        if isinstance(entry, Nested):
            parts = [
                gathering.add(f"{label(seat.name, key)}, tensor {n}", source, device)
                for n, source in enumerate(self._nested(seat, key, entry))
            ]
            return put_together(entry.frame, parts) if gathering.receives else None
        owned = {
            rank: gathering.add(label(seat.name, key, rank), self._odd(seat, key, odd, [rank]), device)
            for rank, odd in entry.tensors.items()
        }
        return RankOwned(seat.spread, {rank: each for rank, each in owned.items() if each is not None})

    def here(self, cpu_offload: bool) -> dict[str, dict[str, Any]]:
        """As this rank has it: the optimizer's own tensors, or copies of them in main memory."""
        state: dict[str, dict[str, Any]] = {}
        for seat, key, entry in self._entries():
            values = self._values(seat, key)
            found: Any
            if isinstance(entry, Number):
                found = self._number(seat, key, entry)
            elif isinstance(entry, Owned):
                is_here = values and self._rank in entry.tensors
                found = RankOwned(seat.spread, {self._rank: plain_of(values[0])} if is_here else {})
            elif isinstance(entry, Nested):
                if self._rank not in self._schema.holders[seat.name, key]:
                    continue
                found = put_together(entry.frame, [each.detach() for each in taken_apart(values[0])[1]])
            elif isinstance(entry, Shaped) and (values or not seat.keys):
                found = seat.form(values, entry.dtype)
            else:
                found = self._shards(seat, key, entry)
            if size_of(self._options.group) == 1 and isinstance(found, Shards):
                found = _whole_tensor(found)
            state.setdefault(seat.name, {})[key] = self._offloaded(found) if cpu_offload else found
        return state

    def _entries(self) -> Iterator[tuple[Seat, str, Entry | Owned]]:
        for name, entries in self._schema.state.items():
            for key, entry in entries.items():
                yield self._roster.seats[name], key, entry

    def _shaped_bytes(self) -> int:
        return sum(
            aligned(seat.spread.numel * entry.dtype.itemsize)
            for seat, _, entry in self._entries()
            if isinstance(entry, Shaped)
        )

    def _values(self, seat: Seat, key: str) -> list[Tensor]:
        """One for each of the seat's keys; none where this rank has no state of it."""
        return [state[key] for state in self._held[seat.name] if key in state]

    def _number(self, seat: Seat, key: str, entry: Number) -> Any:
        """A rank that holds none of the parameter takes the others' number: its own may be old,
        since nothing there is stepped.
        """
        values = self._values(seat, key)
        if values and seat.is_held_by(self._rank):
            return copied(plain_of(values[0]))
        if entry.dtype is None:
            return copied(entry.value)
        device = values[0].device if values and isinstance(values[0], Tensor) else None
        return torch.tensor(entry.value, dtype=entry.dtype, device=device)

    def _shards(self, seat: Seat, key: str, entry: Shaped | Odd) -> Shards:
        if isinstance(entry, Odd):
            return self._odd(seat, key, entry, self._schema.holders[seat.name, key])
        return seat.shards(self._values(seat, key), entry.dtype)

    def _odd(self, seat: Seat, key: str, entry: Odd, ranks: list[int]) -> Shards:
        values = self._values(seat, key) if self._rank in ranks else []
        spread = Spread.whole(entry.shape, entry.dtype, ranks)
        return Shards(spread, [plain_of(value) for value in values[:1]])

    def _nested(self, seat: Seat, key: str, entry: Nested) -> list[Shards]:
        """Its tensors, which all ranks that have it have alike."""
        ranks = self._schema.holders[seat.name, key]
        here = taken_apart(self._values(seat, key)[0])[1] if self._rank in ranks else []
        return [
            Shards(
                Spread.whole(odd.shape, odd.dtype, ranks), [plain_of(tensor) for tensor in here[n : n + 1]]
            )
            for n, odd in enumerate(entry.tensors)
        ]

    def _device(self, seat: Seat, key: str) -> torch.device | None:
        """Where the optimizer keeps this state, and where it would."""
        values = self._values(seat, key)
        return values[0].device if values and isinstance(values[0], Tensor) else seat.device

    def _offloaded(self, value: Any) -> Any:
        """In main memory; what is there already stays."""
        if isinstance(value, Shards):
            return Shards(value.spread, [self._to_cpu(t) for t in value.tensors])
        if isinstance(value, RankOwned):
            return RankOwned(value.spread, {rank: self._to_cpu(t) for rank, t in value.tensors.items()})
        return self._to_cpu(value) if isinstance(value, Tensor) else value

    def _to_cpu(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        self._profile.add("offload", sum(each.nbytes for each in local_tensors(tensor)))
        return tensor.cpu()


class _Gathering:
    """Tensors that go to some ranks whole."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self._rank, self._ranks = rank, ranks
        self.receives = rank in ranks
        self.sources: dict[str, Shards] = {}
        self.targets: dict[str, Shards] = {}
        self._room: Room | None = None
        self._spreads: dict[tuple[tuple[int, ...], torch.dtype], Spread] = {}

    def make_room(self, nbytes: int) -> None:
        """For all that will be added with `in_room`."""
        if self.receives:
            self._room = Room(nbytes)

    def add(
        self, text: str, source: Shards, device: torch.device | None, *, in_room: bool = False
    ) -> Tensor | None:
        """Memory for it on the ranks that get it; it is filled later."""
        kind = source.shape, source.dtype
        spread = self._spreads.get(kind)
        if spread is None:
            spread = self._spreads[kind] = Spread.whole(*kind, self._ranks)
        self.sources[text] = source
        if self._room is not None and in_room and device is not None:
            self.targets[text] = Shards(spread, [self._room.take(source.shape, source.dtype, device)])
        else:
            self.targets[text] = Shards.empty(spread, self._rank, device)
        return self.targets[text].tensors[0] if self.receives else None


def _whole_tensor(shards: Shards) -> Shards | Tensor:
    """The plain tensor that one process alone has, if it has all of it in one piece."""
    is_whole = len(shards.tensors) == 1 and tuple(shards.tensors[0].shape) == shards.shape
    return shards.tensors[0] if is_whole else shards


def plain_of(value: Any) -> Any:
    """What is here of a DTensor; anything else as it is."""
    if type(value) is Tensor:
        return value.detach()
    return local_tensors(value)[0] if isinstance(value, Tensor) else value
