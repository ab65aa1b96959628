"""clip_grad_norm_: one norm over the gradients of several optimizers, wherever these are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farstep.dist import operation
from farstep.optim.clip import norms
from farstep.optim.combined import CombinedOptimizer
from farstep.optim.distributed import DistributedOptimizer
from farstep.optim.sharded import ShardedOptimizer
from farstep.optim.sharded_clip import accumulated, coefficient_of, joined, norm_of
from farstep.rpc.options import UNSET_RPC_TIMEOUT

__all__ = ["clip_grad_norm_"]


@dataclass
class _Share:
    """Of one optimizer: what it adds to the norm, and how its gradients are scaled."""

    sum: Tensor | None
    """See `accumulated`; None without gradients."""
    dtype: torch.dtype
    scale: Callable[[Tensor], None]


@operation("clip_grad_norm_")
@torch.no_grad()
def clip_grad_norm_(
    optimizers: Optimizer | Iterable[Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context_id: int | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Tensor:
    """Scale the gradients of all these optimizers' parameters so that their norm together is at
    most `max_norm`; returns the norm before.

    It is the number that `torch.nn.utils.clip_grad_norm_` gives for the same gradients in one process;
    sparse ones count with their entries. A DistributedOptimizer's gradients are those of the context
    `context_id`, and `timeout` is for its owners; those of any other optimizer are in `.grad`. With
    ShardedOptimizers among them all of their ranks call this, with the optimizers in the same order.
    """
    if isinstance(optimizers, int):
        raise TypeError(
            "clip_grad_norm_ takes the optimizers first, and the context by its name: "
            "clip_grad_norm_(optimizers, max_norm, context_id=context_id). Only the method of a "
            "DistributedOptimizer takes the context first"
        )
    parts = list(_parts([optimizers] if isinstance(optimizers, Optimizer) else optimizers))
    _refuse_twice(parts)
    norm_type, max_norm = float(norm_type), float(max_norm)
    shares = [_share(part, max_norm, norm_type, context_id, timeout) for part in parts]
    sums = [share.sum for share in shares if share.sum is not None]
    if not sums:
        return torch.tensor(0.0)
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in shares if each.sum is not None))
    total = norm_of(joined(sums, norm_type), norm_type).to(dtype)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({total.item()}), "
            f"so they cannot be clipped. Give error_if_nonfinite=False to scale them "
            f"all the same"
        )
    coefficient = coefficient_of(total, max_norm)
    if not coefficient >= 1.0:  # also where it is not a number
        for share in shares:
            share.scale(coefficient)
    return total


def _parts(optimizers: Iterable[Any]) -> Iterator[Optimizer]:
    for each in optimizers:
        if isinstance(each, CombinedOptimizer):
            yield from _parts(part for _, part in each.optimizers)
        elif isinstance(each, Optimizer):
            yield each
        else:
            raise TypeError(
                f"clip_grad_norm_ takes optimizers, not {torch.typename(each)}: "
                f"torch.nn.utils.clip_grad_norm_ takes parameters"
            )


def _refuse_twice(parts: Iterable[Optimizer]) -> None:
    seen: set[Any] = set()
    for part in parts:
        own = {getattr(p, "_id", id(p)) for group in part.param_groups for p in group["params"]}
        if not seen.isdisjoint(own):
            raise ValueError(
                "two of the optimizers have the same parameter, whose gradient would count twice: "
                "give clip_grad_norm_ each parameter once"
            )
        seen |= own


def _share(
    optimizer: Optimizer, max_norm: float, norm_type: float, context_id: int | None, timeout: float
) -> _Share:
    if isinstance(optimizer, DistributedOptimizer):
        if context_id is None:
            raise TypeError(
                "a DistributedOptimizer's gradients are in a context: clip_grad_norm_(optimizers, "
                "max_norm, context_id=context_id)"
            )
        found = optimizer._gradient_norms(context_id, norm_type, timeout)
        scale = functools.partial(optimizer._scale_gradients, context_id, timeout=timeout)
        return _Share(accumulated(found, norm_type), found.dtype, scale)
    if isinstance(optimizer, ShardedOptimizer):
        total, gradients = optimizer._norm_and_gradients(max_norm, norm_type)
        return _Share(
            total, optimizer._norm_dtype(), functools.partial(optimizer._scale_gradients, gradients)
        )
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in params if p.grad is not None]
    found = norms(gradients, norm_type)
    return _Share(accumulated(found, norm_type), found.dtype, functools.partial(_scale, gradients))


def _scale(gradients: list[Tensor], coefficient: Tensor) -> None:
    factor = coefficient.item()  # fits plain gradients, sparse ones and DTensors
    for gradient in gradients:
        gradient.mul_(factor)
