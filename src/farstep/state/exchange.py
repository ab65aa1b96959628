"""Runs a plan over a process group: all ranks begin, or none, and each hears how it went on the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import operation
from farstep.errors import ExchangeError
from farstep.state.adapters.values import shards_of
from farstep.state.agreement import Agreement
from farstep.state.layout import Layout
from farstep.state.local import Local
from farstep.state.neighbours import Neighbours
from farstep.state.plans import Plan
from farstep.state.reshard import plan as plan_copies
from farstep.state.shards import Shards
from farstep.state.traffic import BUDGET_BYTES, Options, Place, Progress, Traffic

__all__ = ["BUDGET_BYTES", "Progress", "exchange", "respread"]


@torch.no_grad()
def exchange(
    plan: Plan,
    source: Mapping[str, Sequence[Tensor]],
    target: Mapping[str, Sequence[Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    same_host: bool | None = None,
) -> None:
    """Fill `target` from `source`, on all ranks of the group at once.

    The plan is everyone's or this rank's part; its ranks are those within `group`. `source` and `target` have this rank's local tensors by
    name, one for each of its boxes in the layout; those that the rank has no copies of may be left out. The target's are written in place.
    Without an initialized process group this process is rank 0 of one.

    At most `budget_bytes`, the same on all ranks, are used for packing; contiguous regions of more than 64 KiB go from memory to memory
    and need none. `progress(bytes_done, bytes_total)` is called on this thread, for what this rank sends, receives and copies within
    itself. `timeout_s` bounds the wait for ranks that are absent, by default FARSTEP_RANK_TIMEOUT_S does.

    Before anything is sent, ranks compare what they are to send one another, and whether each has its tensors; in the end, whether all came
    through. Whatever one rank raises, all raise. `check=False` leaves that out, on all ranks alike. Where the ranks of a gloo group can read each
    other's memory, large regions are read and not sent; not with `same_host=False`. Raises LayoutError if local tensors don't fit the
    layout, StateError if a target shares memory with another, or with a source that goes elsewhere, ExchangeError if ranks disagree, or one has
    failed, is lost or late; then targets may be partly written.
    """

    def prepared(place: Place) -> Traffic:
        options = Options(budget_bytes, progress, timeout_s, check, same_host)
        return Traffic(Local(plan.part(place.rank), place.rank, place.ranks, source, target), place, options)

    with _operation("exchange", timeout_s):
        _exchange(prepared, group, check)


@torch.no_grad()
def respread(
    source: Mapping[str, Tensor | Shards],
    target: Mapping[str, Tensor | Shards],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    same_host: bool | None = None,
) -> None:
    """Fill the target's tensors from the source's, on all ranks at once: each plans its part and runs it. Options as for `exchange`.

    Both map names to what `shards_of` takes: Shards, DTensors, ShardedTensors, and plain tensors, which are whole on every rank.
    If one rank cannot plan its part, all raise.
    """

    def prepared(place: Place) -> Traffic:
        options = Options(budget_bytes, progress, timeout_s, check, same_host)
        here, there = _shards_by_name(source, group), _shards_by_name(target, group)
        part = plan_copies(
            Layout({name: each.spread for name, each in here.items()}),
            Layout({name: each.spread for name, each in there.items()}),
            place.rank,
        )
        given, wanted = ({name: each.tensors for name, each in side.items()} for side in (here, there))
        return Traffic(Local(part, place.rank, place.ranks, given, wanted), place, options)

    with _operation("respread", timeout_s):
        _exchange(prepared, group, check)


def _shards_by_name(
    given: Mapping[str, Tensor | Shards], group: dist.ProcessGroup | None
) -> dict[str, Shards]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"tensors by name are wanted, not a {type(given).__name__}: of a model, give named_shards(model)"
        )
    return {
        name: value if isinstance(value, Shards) else shards_of(value, group, name=name)
        for name, value in given.items()
    }


def _operation(name: str, timeout_s: float | None) -> operation:
    """A timeout that is none is refused later, when the other ranks can be told."""
    is_valid = isinstance(timeout_s, int | float) and timeout_s > 0
    return operation(name, timeout_s=timeout_s if is_valid else None)


def _exchange(
    prepared: Callable[[Place], Traffic],
    group: dist.ProcessGroup | None,
    check: bool,
) -> None:
    place = Place.of(group)
    if place.ranks == 1 or not check:
        alone = prepared(place)
        alone.run(_neighbours(alone))
        return
    traffic, failure = None, None
    try:
        traffic = prepared(place)
    except Exception as exc:  # whatever it is, the others wait to hear of it
        failure = exc
    all_ranks = Agreement(group, place.rank, place.ranks, place.name)
    if traffic is None:
        all_ranks.begin(None, failure, 0)  # raises it
        raise AssertionError
    all_ranks.begin(traffic.local, None, traffic.settings)
    traffic.run(_neighbours(traffic))
    all_ranks.end(traffic.failure)


def _neighbours(traffic: Traffic) -> Neighbours | None:
    place, same_host = traffic.place, traffic.options.same_host
    if place.ranks == 1 or same_host is False or place.device is None:
        return None
    found = Neighbours.known(place.group)
    if found is None and same_host:
        raise ExchangeError("same_host=True, and the ranks cannot read each other's memory")
    return found
