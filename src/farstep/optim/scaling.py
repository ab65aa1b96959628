"""What torch.amp.GradScaler asks of an optimizer that wants to know of infs itself, instead of not being called.

The scaler leaves two attributes on the optimizer for the time of a step: `found_inf`, whether this rank's gradients have any, and `grad_scale`, by which they are
still to be divided, None if `unscale_` has done that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from farstep.errors import OptimError
from farstep.optim.members import Member, kind_of

__all__ = ["Scaling", "forget", "is_scaled", "scaling_of"]


@dataclass(frozen=True)
class Scaling:
    found_inf: bool
    factor: float | None
    """By which gradients are to be multiplied."""

    def unscale(self, members: Sequence[Member]) -> None:
        if self.factor is None:
            return
        for gradient in (g for member in members for g in member.gradients()):
            # Past the version, by which gradients are known that have changed since they were clipped.
            gradient.data.mul_(self.factor)


def is_scaled(optimizer: Any) -> bool:
    """Whether this step is a scaler's."""
    return hasattr(optimizer, "found_inf")


def scaling_of(optimizer: Any, members: Sequence[Member]) -> Scaling | None:
    """None if it is not. Raises OptimError where the scaler has not seen the gradients."""
    if not is_scaled(optimizer):
        return None
    found, scale = optimizer.found_inf, optimizer.grad_scale
    if any(kind_of(member.parameter) == "ShardedTensor" for member in members):
        raise OptimError(
            "the gradients of a ShardedTensor are with its local shards, where GradScaler does not look: scale the loss and the gradients by hand. Nothing has "
            "been changed"
        )
    if not isinstance(found, Tensor):
        raise OptimError(
            "no parameter has a gradient here, so GradScaler has seen nothing, and its update() would fail: zero_grad(set_to_none=False) lets all have one. "
            "Nothing has been changed"
        )
    factor = None if scale is None else 1.0 / float(scale)
    return Scaling(bool(found.item()), factor)


def forget(optimizer: Any) -> None:
    """After a step that has failed: the scaler takes back what it left only from one that has not, and would count this scale twice."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)
