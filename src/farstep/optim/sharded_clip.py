"""The norm of all gradients together, of which every rank has a part."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import waiting
from farstep.state.kept import keep

__all__ = ["coefficient_of", "total_norm"]


def total_norm(
    parts: Iterable[Tensor], norm_type: float, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Tensor:
    """Of what all ranks give together, as a `dtype`. Each part's norm is torch's own; they are put together in float64."""
    found = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    device = found[0].device if found else torch.device("cpu")
    is_max = math.isinf(norm_type) and norm_type > 0
    is_min = math.isinf(norm_type) and norm_type < 0
    each = (
        torch.stack([n.to(device, torch.float64) for n in found])
        if found
        else torch.zeros(0, dtype=torch.float64)
    )
    if is_max:
        own = each.max() if found else torch.zeros((), dtype=torch.float64)
    elif is_min:
        own = each.min() if found else torch.full((), math.inf, dtype=torch.float64)
    elif norm_type == 0:
        own = (each != 0).sum().to(torch.float64)  # the norm of norms: how many gradients are not zero
    else:
        own = each.pow(norm_type).sum()
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        kind = dist.ReduceOp.MAX if is_max else dist.ReduceOp.MIN if is_min else dist.ReduceOp.SUM
        keep(own)
        with waiting(group, "the norm of all gradients", help="Gradients have not been scaled"):
            dist.all_reduce(own, kind, group)
    if not (is_max or is_min or norm_type == 0):
        own = own.pow(1 / norm_type)
    return own.to(dtype)


def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
