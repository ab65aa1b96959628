"""The copies of a conversion: planned by each rank, begun by all or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farstep.errors import LayoutError
from farstep.state.adapters.ranks import Group, own_rank
from farstep.state.exchange import BUDGET_BYTES, Progress, exchange
from farstep.state.layout import Layout
from farstep.state.optim_entries import agree
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
    options: Options,
    profile: Profile,
    doing: str,
) -> None:
    """Fill the targets. If one rank cannot, all raise, and nothing has been sent."""
    part, error = None, None
    with profile.phase("plan"):
        try:
            part = plan(_layout(sources), _layout(targets), options.rank)
        except LayoutError as exc:
            error = exc
        agree(error, options.group, doing)
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


def _layout(tensors: Mapping[str, Shards]) -> Layout:
    return Layout({name: each.spread for name, each in tensors.items()})
