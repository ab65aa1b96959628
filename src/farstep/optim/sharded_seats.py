"""ShardedOptimizer's parameters, as farstep.state reads and loads their state by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import OptimError
from farstep.optim.members import Member
from farstep.state.optim_seats import Seat

__all__ = ["check_group", "seat_of"]


def check_group(own: dist.ProcessGroup | None, given: dist.ProcessGroup | None) -> None:
    """Its ranks are those of its own process group."""
    if own is given or not dist.is_initialized():
        return
    ours, theirs = (dist.get_process_group_ranks(group or dist.group.WORLD) for group in (own, given))
    if ours != theirs:
        raise OptimError(
            "this ShardedOptimizer spreads its state over a process group of its own, and another was given: say "
            "group=optimizer.process_group, on the ranks of that group"
        )


def seat_of(member: Member, form: Callable[[Sequence[Tensor], torch.dtype], Any] | None = None) -> Seat:
    """`form` makes the tensor that a user gets of a state: a DTensor of a DTensor, else Shards, if it is not given."""

    def views(values: Sequence[Tensor]) -> list[Tensor]:
        return member.shards(values, values[0].dtype).tensors if values else []

    def fresh(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty_like(member.shadows[number], dtype=dtype, device=device, requires_grad=False)

    def shaped(values: Sequence[Tensor], dtype: torch.dtype) -> Any:
        made = (form or member.form)(values, dtype)
        return made if form is not None or hasattr(made, "placements") else member.shards(values, dtype)

    parameter = member.parameter
    return Seat(
        member.name,
        member.shadows,
        member.spread,
        [shadow.shape for shadow in member.shadows],
        views,
        requires_grad=bool(parameter.requires_grad),
        form=shaped,
        fresh=fresh,
    )
