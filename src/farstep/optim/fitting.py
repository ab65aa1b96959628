"""Whether a piece of state fits a parameter, and another object of an optimizer's class to try a load on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.optim import fast
from farstep.optim.fast import NUMBERS
from farstep.state.first_step import attributes_of
from farstep.state.known import is_extra
from farstep.state.optim_pieces import ADVICE_FOR_EXTRA, is_known, misfit_of_kind
from farstep.state.stateful import has_stateful

__all__ = [
    "State",
    "attributes_of",
    "fitted",
    "is_known",
    "local_shards",
    "misfit_of_kind",
    "twin_of",
]

State = dict[str, Any]
"""What an optimizer remembers of one parameter."""


def twin_of(optimizer: Optimizer) -> Optimizer:
    """Another object with the same attributes. load_state_dict replaces some of them, and leaves the first one's alone.

    Torch's own classes put new objects in their place. Of others that is not known: they get copies, of everything but the parameters.
    """
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    if not fast.is_torchs(optimizer):
        kept = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        twin.__dict__.update(copy.deepcopy(attributes_of(optimizer), kept))
    return twin


def local_shards(value: Any) -> list[torch.Tensor] | None:
    """What is here of a ShardedTensor. None for anything else."""
    return [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else None


def fitted(
    optimizer: Optimizer,
    name: str,
    parameter: torch.Tensor,
    new: Any,
    old: Mapping[str, Any] | None = None,
    where: str = "",
) -> State | None:
    """A parameter's state, laid out like the parameter. StateMismatch where it cannot be. `old` is the state that it has now."""
    if new is None:
        return None
    if not isinstance(new, dict):
        raise StateMismatch(
            f"the state of parameter {name!r} is a {type(new).__name__}, and not a dict; nothing has been loaded"
        )
    laid_out = dict(new)
    for key, value in new.items():
        wrong = _misfit(optimizer, parameter, key, value, (old or {}).get(key))
        if wrong:
            raise StateMismatch(
                f"the state {key!r} of parameter {name!r} {wrong}, which does not fit the parameter's{where}, "
                f"{tuple(parameter.shape)}; nothing has been loaded"
                + (ADVICE_FOR_EXTRA.format(key=key) if is_extra(optimizer, key) else "")
            )
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            laid_out[key] = _laid_out(value, parameter)
    return laid_out


def _misfit(optimizer: Optimizer, parameter: torch.Tensor, key: str, value: Any, now: Any) -> str | None:
    """What is wrong with a piece of state. It has the shape that it has now; and torch's own classes are known."""
    if has_stateful(now):
        return None  # the object itself says what it takes
    if local_shards(value) is not None or local_shards(now) is not None:
        return _misfit_of_shards(value, now)
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and isinstance(now, torch.Tensor) and now.shape != value.shape:
        return f"has shape {tuple(value.shape)}"
    wrong = misfit_of_kind(optimizer, key, value)
    if wrong or not is_known(optimizer) or key in NUMBERS or value is None:
        return wrong
    if is_extra(optimizer, key):
        is_odd = is_tensor and value.dim() and value.shape != parameter.shape
        return f"has shape {tuple(value.shape)}" if is_odd and now is None else None
    if value.layout is not torch.strided:
        return f"is {value.layout}"
    if isinstance(optimizer, torch.optim.Adafactor):
        return None if _fits_rows(value.shape, parameter.shape) else f"has shape {tuple(value.shape)}"
    if value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}"
    return None if _placement(value) == _placement(parameter) else f"is {_placement(value) or 'whole'}"


def _misfit_of_shards(value: Any, now: Any) -> str | None:
    here, there = local_shards(now), local_shards(value)
    if now is None:
        return None
    if here is None or there is None:
        return f"is a {type(value).__name__} in place of a {type(now).__name__}"
    shapes = [tuple(shard.shape) for shard in there]
    return (
        None if shapes == [tuple(shard.shape) for shard in here] else f"has local shards of shapes {shapes}"
    )


def _placement(value: torch.Tensor) -> str | None:
    """How a DTensor is spread."""
    placements = getattr(value, "placements", None)
    return None if placements is None else f"a DTensor with {placements} on {value.device_mesh}"  # type: ignore[attr-defined]


def _fits_rows(shape: torch.Size, parameter: torch.Size) -> bool:
    """Adafactor keeps the means of rows and of columns."""
    return len(shape) == len(parameter) and all(a in (b, 1) for a, b in zip(shape, parameter, strict=True))


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if (
        local_shards(value) is not None
        or value.layout is not torch.strided
        or value.stride() == like.stride()
    ):
        return value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)
