"""Which entries of a parameter's saved state an optimizer can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.known import NUMBERS, is_extra
from farstep.state.optim_entries import Number
from farstep.state.optim_given import Entry, Owned, Whole
from farstep.state.optim_pieces import KeyCheck, is_known, misfit_of_kind
from farstep.state.optim_seats import Seat

__all__ = ["check_kind", "known_entries", "odd_classes"]


def known_entries(
    check: KeyCheck,
    seat: Seat,
    parameter: Tensor,
    entries: Mapping[str, Entry],
    old: Mapping[str, Any],
) -> dict[str, Entry]:
    """The pieces that a class knows, and extra ones that are numbers, shaped like the parameter,
    or shaped like what `old`, the optimizer's state, has under the same key.
    """

    def fits(key: str, entry: Entry) -> bool:
        if not is_extra(check.optimizer, key) or isinstance(entry, Number):
            return True
        if not isinstance(entry, Whole):
            return False
        now = old.get(key)
        shapes = [seat.shape, *([tuple(now.shape)] if isinstance(now, Tensor) else [])]
        return entry.spread.shape in shapes

    known = check.known(seat.name, parameter, dict(entries))
    return {key: entry for key, entry in known.items() if fits(key, entry)}


def check_kind(stepper: Optimizer, parameter: Tensor, seat: Seat, key: str, entry: Entry) -> None:
    """Raise StateMismatch for an entry that the class cannot use.

    Of torch's own classes it is known which pieces are numbers, and that all others are tensors
    of the parameter's dtype or one like it.
    """
    if not is_known(stepper) or isinstance(entry, Owned) or is_extra(stepper, key):
        return
    if isinstance(entry, Number):
        is_tensor = entry.dtype is not None
        wrong = misfit_of_kind(stepper, key, torch.empty((), device="meta") if is_tensor else entry.value)
        if wrong is None and is_tensor and key not in NUMBERS and seat.shape:
            wrong = f"is a tensor of one number, {entry.value!r}"
    else:
        spread = entry.spread
        wrong = misfit_of_kind(stepper, key, torch.empty(spread.shape, device="meta"))
        numbers = spread.dtype.is_floating_point or spread.dtype.is_complex
        if wrong is None and key not in NUMBERS and not numbers and parameter.dtype.is_floating_point:
            wrong = f"is {spread.dtype}"
    if wrong:
        raise StateMismatch(
            f"the state {key!r} of parameter {seat.name!r} {wrong}, which {type(stepper).__name__} "
            f"cannot use for a parameter of shape {seat.shape}; nothing has been loaded"
        )


def odd_classes() -> tuple[type[Optimizer], ...]:
    """Classes of torch's that keep state of other shapes than their parameters'."""
    return tuple(getattr(torch.optim, name) for name in ("Adafactor", "LBFGS") if hasattr(torch.optim, name))
