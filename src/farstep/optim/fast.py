"""Which of torch's implementations of an update to use, where the user has not said: fused, foreach, or torch's own choice.

Fused is the fastest by far where it is offered. Foreach pays on a CPU only for small parameters (docs/decisions/0004-optimizers.md has the figures).
The choice is made for each group, and is not seen in the `param_groups` of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from farstep.state.known import NUMBERS, is_torchs

__all__ = ["NUMBERS", "choose", "fitting", "is_torchs", "laid_out", "only_what_fused_takes"]

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
SMALL = 4096
"""On average so many elements or fewer: then it is calls that cost, not arithmetic."""
PLAIN = (torch.Tensor, torch.nn.Parameter)


def choose(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    state: Mapping[torch.Tensor, Mapping[str, Any]] | None = None,
) -> dict[str, bool]:
    """What to set in a group. Nothing for classes that are not torch's own, or where the user has decided.

    `state` is what the optimizer will have; without it, what it has.
    """
    kind = type(optimizer)
    state = optimizer.state if state is None else state
    if not is_torchs(optimizer) or group.get("differentiable"):
        return {}
    if group.get("fused") is not None or group.get("foreach") is not None:
        return {}
    params = group["params"]
    if not params or not all(type(p) in PLAIN and p.device.type == "cpu" for p in params):
        return {}  # elsewhere torch's own choice is foreach already
    if (
        "fused" in group
        and kind.__name__ in FUSED
        and torch.get_default_dtype() is not torch.float64  # the step's count would have the wrong type
        and all(p.is_floating_point() and _is_dense(p) for p in params)
        and all(_is_alike(p, key, value) for p in params for key, value in state.get(p, {}).items())
    ):
        return {"fused": True}
    if (
        "foreach" in group
        and kind is not torch.optim.ASGD  # slower there, whatever the size
        and not isinstance(group.get("lr"), torch.Tensor)
        and sum(p.numel() for p in params) <= SMALL * len(params)
    ):
        return {"foreach": True}
    return {}


def _is_dense(parameter: torch.Tensor) -> bool:
    """Whether it fills its memory without gaps. Only then has another tensor made like it the same strides."""
    return (
        parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    )


def _is_alike(parameter: torch.Tensor, key: str, value: Any) -> bool:
    """A number, or laid out like the parameter: fused updates go through memory, and believe that everything is."""
    return (
        not isinstance(value, torch.Tensor)
        or (value.dim() == 0 and key in NUMBERS)
        or (value.shape == parameter.shape and value.stride() == parameter.stride())
    )


def fitting(gradient: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's dtype, which a user may have set otherwise (`grad_dtype`), and laid out like it."""
    gradient = laid_out(gradient, shadow)
    return gradient if gradient.dtype == shadow.dtype else gradient.to(shadow.dtype)


def laid_out(gradient: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The gradient laid out like the parameter, as `.grad` always is: fused updates go through memory, whatever the strides."""
    if gradient.shape != shadow.shape:
        raise ValueError(
            f"the gradient in the context has shape {tuple(gradient.shape)}, and its parameter has {tuple(shadow.shape)} by now"
        )
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_conj() or gradient.is_neg():  # the memory has not the values
        gradient = gradient.resolve_conj().resolve_neg()
    if gradient.layout is not torch.strided or gradient.stride() == shadow.stride():
        return gradient
    return torch.empty_like(shadow, dtype=gradient.dtype).copy_(gradient)


@contextmanager
def only_what_fused_takes(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """For one step: groups with gradients that the fused update cannot take go without it."""
    set_aside = [g for g in optimizer.param_groups if g.get("fused") and not _fused_takes(optimizer, g)]
    for group in set_aside:
        group["fused"] = False
    try:
        yield
    finally:
        for group in set_aside:
            group["fused"] = True


def _fused_takes(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    params = [p for p in group["params"] if p.grad is not None]
    if any(p.grad.layout is not torch.strided or p.grad.dtype != p.dtype for p in params):
        return False
    if not group.get("momentum"):
        return True
    # SGD takes all for the first step of all, or none.
    has_momentum = {
        optimizer.state[p].get("momentum_buffer") is not None for p in params if p in optimizer.state
    }
    has_momentum |= {False for p in params if p not in optimizer.state}
    return len(has_momentum) < 2
