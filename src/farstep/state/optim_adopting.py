"""State as the class of an optimizer has it: its dtype, its numbers, and what its `__setstate__` makes of it."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters import like
from farstep.state.first_step import attributes_of
from farstep.state.known import NUMBERS, is_extra, is_torchs
from farstep.state.optim_entries import Number, copied
from farstep.state.optim_options import stepper_of
from farstep.state.optim_seats import Seat

__all__ = ["as_its_class_has_it", "dtype_for", "number_for"]


def dtype_for(stepper: Optimizer, key: str, own: torch.dtype, saved: torch.dtype) -> torch.dtype:
    """The dtype in which a piece of state is kept. Torch's own classes keep theirs in the
    parameter's dtype and fail with another. Of others that is not known.
    """
    is_number = saved.is_floating_point and own.is_floating_point
    return own if is_number and is_torchs(stepper) and not is_extra(stepper, key) else saved


def number_for(
    key: Tensor, seat: Seat, options: Mapping[str, Any], old: Any, name: str, entry: Number
) -> Any:
    """A number under the key of a parameter, as the optimizer has it now: a number or a tensor of one, and where; unless it would be another number then."""
    value = entry.value
    if entry.dtype is None:
        if isinstance(old, Tensor) and old.dim() == 0 and isinstance(value, int | float):
            return torch.tensor(
                value, dtype=old.dtype if _holds(old.dtype, value) else None, device=old.device
            )
        return copied(value)
    if isinstance(old, int | float) and isinstance(value, int | float):
        return type(old)(value) if type(old)(value) == value else value
    on_cpu = name == "step" and not (options.get("capturable") or options.get("fused"))
    device = old.device if isinstance(old, Tensor) else torch.device("cpu") if on_cpu else key.device
    made = torch.tensor(value, dtype=entry.dtype, device=device)
    is_part = hasattr(key, "placements") and seat.shape == () and name not in NUMBERS
    return like(key, [made]) if is_part else made


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a number is one of a dtype's, but for rounding."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return (
        value == bool(value)
        if dtype == torch.bool
        else value == int(value)
        if math.isfinite(value)
        else False
    )


def as_its_class_has_it(
    optimizer: Optimizer, state: dict[Tensor, Any], groups: list[dict[str, Any]]
) -> tuple[dict[Tensor, Any], list[dict[str, Any]]]:
    """Passed through the class's own `__setstate__`, on another object: it knows how states of older versions become its own."""
    stepper = stepper_of(optimizer)
    if isinstance(getattr(type(stepper), "state", None), property):
        return state, groups
    twin = type(stepper).__new__(type(stepper))
    twin.__dict__.update(stepper.__dict__ if is_torchs(stepper) else _copies_of_attributes(stepper))
    try:
        twin.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
    except Exception as exc:
        raise StateMismatch(
            f"{type(stepper).__name__} does not take this state ({type(exc).__name__}: {exc}); nothing has been loaded"
        ) from exc
    return twin.state, twin.param_groups


def _copies_of_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Of a class of which nobody knows what it does with them. What cannot be copied is shared."""
    found = dict(optimizer.__dict__)
    kept = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for key, value in attributes_of(optimizer).items():
        if key not in ("state", "param_groups"):
            with suppress(Exception):
                found[key] = copy.deepcopy(value, dict(kept))
    return found
