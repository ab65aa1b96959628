"""The copies of a conversion: planned by each rank, begun by all or none."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from farstep.errors import FarstepError, StateError
from farstep.state.adapters.plain import check_readable
from farstep.state.adapters.ranks import Group, own_rank
from farstep.state.council import agree, gathered, mark_of
from farstep.state.exchange import BUDGET_BYTES, Progress, exchange
from farstep.state.layout import Layout
from farstep.state.optim_entries import ranks_named
from farstep.state.optim_profile import Profile
from farstep.state.optim_staging import transfers
from farstep.state.reshard import plan
from farstep.state.shards import Shards

__all__ = ["Options", "move", "moved"]

LEAST_BUDGET_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Options:
    """How tensors travel, the same on all ranks."""

    group: Group = None
    budget_bytes: int = BUDGET_BYTES
    progress: Progress | None = None
    profile: Any = None

    @property
    def rank(self) -> int:
        return own_rank(self.group)

    def mistake(self) -> Exception | None:
        """What is wrong with them. Not raised here: the other ranks wait to hear of it."""
        if not isinstance(self.budget_bytes, int) or self.budget_bytes < LEAST_BUDGET_BYTES:
            return ValueError(f"budget_bytes is at least {LEAST_BUDGET_BYTES}, not {self.budget_bytes}")
        if self.progress is not None and not callable(self.progress):
            return TypeError(f"progress is a function or None, not a {type(self.progress).__name__}")
        if self.profile is not None and not isinstance(self.profile, dict):
            return TypeError(
                f"profile is a dict that is filled, or None, not a {type(self.profile).__name__}"
            )
        return None


def move(
    sources: Mapping[str, Shards],
    targets: Mapping[str, Shards],
    error: Exception | None,
    options: Options,
    profile: Profile,
    doing: str,
    *,
    kind: type[FarstepError] = StateError,
) -> None:
    """Fill the targets. If one rank cannot, or has an error already, all raise, others a `kind`, and nothing has been sent.

    What `progress` raises on one rank is raised when all has arrived, on all ranks.
    """
    failure = moved(sources, targets, error, options, profile, doing, kind=kind)
    agree(failure, options.group, doing, kind=kind)


def moved(
    sources: Mapping[str, Shards],
    targets: Mapping[str, Shards],
    error: Exception | None,
    options: Options,
    profile: Profile,
    doing: str,
    *,
    cast: Collection[str] = (),
    kind: type[FarstepError] = StateError,
) -> Exception | None:
    """The same, for one who will ask the ranks anyway whether all came through: what this one is to say.

    The local tensors of targets that are `cast` have another dtype than their spread.
    """
    part, mark, source, target = None, b"", Layout({}), Layout({})
    settings = {"budget_bytes": options.budget_bytes}
    with profile.phase("plan"):
        if error is None:
            try:
                source, target = _layout(sources), _layout(targets)
                part = plan(source, target, options.rank)
                mark = _mark(sorted(cast), source, target)
                for name, shards in targets.items():
                    for tensor in shards.tensors:
                        check_readable(tensor, name)
            except Exception as exc:
                error = exc
        if not agree(error, options.group, doing, mark_of(mark), settings=settings, kind=kind):
            raise kind(f"{doing} did not come about: {_difference(source, target, options.group, doing)}")
    assert part is not None
    profile.add("gather", part.bytes_moved)
    profile.add("copy", part.bytes_kept)
    watched = _Watched(options.progress, part.bytes_moved + part.bytes_kept)
    # Half for what is cast, half for what is packed.
    budget_bytes = max(options.budget_bytes // 2, LEAST_BUDGET_BYTES) if cast else options.budget_bytes
    with profile.phase("gather"):
        for here, there in transfers(sources, targets, cast, budget_bytes):
            copies = plan(_layout(here), _layout(there), options.rank) if cast else part
            exchange(
                copies,
                {name: shards.tensors for name, shards in here.items()},
                {name: shards.tensors for name, shards in there.items()},
                options.group,
                budget_bytes=budget_bytes,
                progress=watched.call if options.progress is not None else None,
                check=False,  # that has been done, for all ranks together
            )
            watched.begin += copies.bytes_moved + copies.bytes_kept
    return watched.failure


class _Watched:
    """Calls the user's `progress`, over several exchanges. Others wait for this rank's messages, so what it raises is kept for later."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self.begin = 0
        self.failure: Exception | None = None

    def call(self, done: int, _: int) -> None:
        if self._progress is not None and self.failure is None:
            try:
                self._progress(self.begin + done, self._total)
            except Exception as exc:
                self.failure = exc


def _mark(cast: list[str], *layouts: Layout) -> bytes:
    parts = [repr(cast).encode()]
    for layout in layouts:
        columns = layout.columns
        parts.append(repr([(name, each.shape, str(each.dtype)) for name, each in layout.items()]).encode())
        parts += [each.tobytes() for each in (columns.tensor, columns.rank, columns.start, columns.stop)]
    return mark_of(*parts)


def _difference(source: Layout, target: Layout, group: Group, doing: str) -> str:
    """What it is that ranks see otherwise: the first tensor that is not the same everywhere. All ranks call it."""
    mine = {
        name: zlib.crc32(_mark([], Layout({name: source[name]}), Layout({name: target[name]})))
        for name in target
    }
    every = gathered(mine, group, doing)
    for name in dict.fromkeys(name for each in every for name in each):
        ranks: dict[int | None, list[int]] = {}
        for rank, each in enumerate(every):
            ranks.setdefault(each.get(name), []).append(rank)
        if len(ranks) > 1:
            here = repr(target[name]) if name in target else "nothing"
            others = " and ".join(ranks_named(each) for each in ranks.values())
            return (
                f"the ranks do not see the same model and optimizer. {name} is not the same on {others}; here it is {here}. If the ranks have models of their own, or "
                f"share one with some ranks only, say with which: group="
            )
    return "the ranks do not see the same model and optimizer"


def _layout(tensors: Mapping[str, Shards]) -> Layout:
    """In an order that is the same on all ranks, whatever order they came upon the tensors in."""
    return Layout({name: tensors[name].spread for name in sorted(tensors)})
