"""The norm of all gradients together, of which ranks or optimizers have a part each.

What a part adds to the norm is a number in float64: the sum of its gradients' norms to the power
of `norm_type`, for 0 how many of them are not zero, for infinity the
largest and for minus infinity the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import waiting
from farstep.state.kept import keep

__all__ = ["accumulated", "coefficient_of", "joined", "norm_of", "of_all_ranks"]


def accumulated(norms: Tensor, norm_type: float) -> Tensor | None:
    """What gradients of these norms add; None if there are none."""
    if not norms.numel():
        return None
    each = norms.to(torch.float64)
    if math.isinf(norm_type):
        return each.max() if norm_type > 0 else each.min()
    if norm_type == 0:
        return (each != 0).sum().to(torch.float64)  # the norm of norms: how many gradients are not zero
    return each.pow(norm_type).sum()


def joined(sums: Sequence[Tensor], norm_type: float) -> Tensor:
    """What all of these add together."""
    each = torch.stack([one.cpu() for one in sums])
    if math.isinf(norm_type):
        return each.max() if norm_type > 0 else each.min()
    return each.sum()


def norm_of(total: Tensor, norm_type: float) -> Tensor:
    return total if math.isinf(norm_type) or norm_type == 0 else total.pow(1 / norm_type)


def of_all_ranks(parts: Iterable[Tensor], norm_type: float, group: dist.ProcessGroup | None) -> Tensor:
    """What the parts that all ranks give add. Each part's norm is torch's own."""
    found = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    device = found[0].device if found else torch.device("cpu")
    each = torch.stack([n.to(device, torch.float64) for n in found]) if found else torch.zeros(0)
    is_min = math.isinf(norm_type) and norm_type < 0
    nothing = torch.full((), math.inf if is_min else 0.0, dtype=torch.float64)
    own = accumulated(each, norm_type)
    own = nothing if own is None else own
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        extreme = dist.ReduceOp.MIN if is_min else dist.ReduceOp.MAX
        keep(own)
        with waiting(group, "the norm of all gradients", help="Gradients have not been scaled"):
            dist.all_reduce(own, extreme if math.isinf(norm_type) else dist.ReduceOp.SUM, group)
    return own


def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
