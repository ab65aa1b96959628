"""The copies of a conversion: planned by each rank, begun by all or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farstep.errors import FarstepError, LayoutError, StateError
from farstep.state.adapters.ranks import Group, own_rank
from farstep.state.council import agree, mark_of
from farstep.state.exchange import BUDGET_BYTES, Progress, exchange
from farstep.state.layout import Layout
from farstep.state.optim_profile import Profile
from farstep.state.reshard import plan
from farstep.state.shards import Shards

__all__ = ["Options", "move"]


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
    """Fill the targets. If one rank cannot, or has an error already, all raise, others a `kind`, and nothing has been sent."""
    part, mark = None, b""
    with profile.phase("plan"):
        if error is None:
            try:
                source, target = _layout(sources), _layout(targets)
                part = plan(source, target, options.rank)
                mark = _mark(source, target)
            except LayoutError as exc:
                error = exc
        if not agree(error, options.group, doing, mark_of(mark), kind=kind):
            raise kind(f"{doing} did not come about: the ranks do not see the same model and optimizer")
    assert part is not None
    profile.add("gather", part.bytes_moved)
    profile.add("copy", part.bytes_kept)
    with profile.phase("gather"):
        exchange(
            part,
            {name: each.tensors for name, each in sources.items()},
            {name: each.tensors for name, each in targets.items()},
            options.group,
            budget_bytes=options.budget_bytes,
            progress=options.progress,
        )


def _mark(*layouts: Layout) -> bytes:
    parts = []
    for layout in layouts:
        columns = layout.columns
        parts.append(repr([(name, each.shape, str(each.dtype)) for name, each in layout.items()]).encode())
        parts += [each.tobytes() for each in (columns.tensor, columns.rank, columns.start, columns.stop)]
    return mark_of(*parts)


def _layout(tensors: Mapping[str, Shards]) -> Layout:
    """In an order that is the same on all ranks, whatever order they came upon the tensors in."""
    return Layout({name: tensors[name].spread for name in sorted(tensors)})
