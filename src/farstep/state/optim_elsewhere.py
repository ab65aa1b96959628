"""Parameters that other ranks step and this one does not: those of which it has no shard, and those that its model does not have.

Some models have parameters on one rank only, beside others that all ranks share: TorchRec's embedding tables beside an FSDP model. The
ranks tell each other of these, so that all see the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farstep.errors import FarstepError, StateError
from farstep.state.adapters.ranks import Group
from farstep.state.council import Settings, everyones
from farstep.state.layout import Spread
from farstep.state.optim_entries import ranks_named, union
from farstep.state.optim_roster import Roster
from farstep.state.optim_seats import Seat, retyped

__all__ = ["complete", "seat_elsewhere"]


def complete(
    roster: Roster, error: Exception | None, group: Group, doing: str, settings: Settings | None = None
) -> None:
    """Add what other ranks step. All ranks call it. `error` is what keeps this rank from going on: then all raise."""
    every = everyones([each.names for each in roster.groups], error, group, doing, settings=settings)
    if every is not None:
        seat_elsewhere(roster, [union(names) for names in every], group, doing)


def seat_elsewhere(
    roster: Roster,
    stepped: Sequence[Sequence[str]],
    group: Group,
    doing: str,
    kind: type[FarstepError] = StateError,
) -> None:
    """The same where it is known what every rank steps."""
    listed = [set(names) for names in stepped]
    uncommon = [name for name in union(stepped) if any(name not in names for names in listed)]
    if not uncommon:
        return
    error: Exception | None = None
    mine: dict[str, Spread | bool] = {}
    try:
        for name in uncommon:
            if name not in roster.seats and name not in roster.left_out:
                seat = roster.seat_elsewhere(name)
                if seat is not None:
                    roster.seats[name] = seat
            mine[name] = roster.seats[name].spread if name in roster.seats else name in roster.known
    except Exception as exc:  # the other ranks wait to hear of it
        error = exc
    every = everyones(mine, error, group, doing, kind=kind)
    if every is None:
        return
    for name in uncommon:
        strangers = [rank for rank, theirs in enumerate(every) if theirs[name] is False]
        if strangers:
            try:
                _take(roster, name, [theirs[name] for theirs in every], strangers)
            except StateError as exc:
                error = error or exc
    if error is not None:  # all ranks find the same
        raise error


def _take(roster: Roster, name: str, said: Sequence[Any], strangers: Sequence[int]) -> None:
    """A parameter that some ranks' models do not have: the others have all of it."""
    spreads = {
        rank: _without(spread, strangers) for rank, spread in enumerate(said) if isinstance(spread, Spread)
    }
    (first, spread), *others = spreads.items()
    for rank, other in others:
        if other != spread:
            raise StateError(
                f"parameter {name!r}, which {ranks_named(strangers)} does not have, is {spread!r} for rank {first} and {other!r} for rank "
                f"{rank}: parameters of different ranks need different names"
            )
    roster.partial.add(name)
    if name in roster.seats:
        seat = roster.seats[name]
        seat.spread = retyped(spread, seat.spread.dtype)
    elif name not in roster.known:
        roster.known.add(name)
        roster.seats[name] = Seat(name, [], spread, [], _nothing, requires_grad=True)


def _without(spread: Spread, ranks: Sequence[int]) -> Spread:
    held = ~np.isin(spread.ranks, ranks)
    return Spread(spread.shape, spread.dtype, spread.ranks[held], spread.offsets[held], spread.sizes[held])


def _nothing(values: Sequence[Tensor]) -> list[Tensor]:
    return []
