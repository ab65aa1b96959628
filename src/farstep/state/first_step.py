"""What a class of torch's makes of state in its first step, found out by letting it take that step on a tensor that is nobody's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.state.known import is_torchs
from farstep.state.optim_entries import copied

__all__ = [
    "Records",
    "State",
    "attributes_of",
    "first_state",
    "needed_keys",
    "needs_closure",
    "step_without_hooks",
    "zeros_like",
]

State = dict[str, Any]
"""What an optimizer remembers of one parameter."""


def needed_keys(
    optimizer: Optimizer, options: Mapping[str, Any], parameter: torch.Tensor
) -> frozenset[str] | None:
    """The pieces of state without which a class of torch's cannot step, with these options. None where that is not known."""
    late = (torch.optim.SGD, torch.optim.LBFGS)
    if not is_torchs(optimizer) or isinstance(optimizer, late):
        return None
    like = torch.zeros([1] * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    try:
        return frozenset(first_state(optimizer, options, like.requires_grad_(), is_sparse))
    except Exception:  # options that do not go with this device or dtype: its own step will say so
        return None


def first_state(
    optimizer: Optimizer, options: Mapping[str, Any], shadow: torch.Tensor, is_sparse: bool
) -> State:
    """The first value that a step assigns to each piece of state. The shadow is stepped, and nothing else."""
    recorded = Records()
    # A differentiable step needs a graph around it, and has the same state.
    group = {
        **options,
        "params": [shadow],
        **({"differentiable": False} if "differentiable" in options else {}),
    }
    twin = type(optimizer).__new__(type(optimizer))
    attributes = {**attributes_of(optimizer), "state": recorded, "param_groups": [group]}
    Optimizer.__setstate__(twin, attributes)
    shadow.grad = zeros_like(shadow, is_sparse)
    step_without_hooks(twin)
    return recorded.first_of(shadow)


def needs_closure(kind: type[Optimizer]) -> bool:
    """Whether `step` cannot do without a function that computes the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What it has, without the hooks that users have put on it. A scheduler puts one in place of `step`."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key != "step" and not key.startswith("_optimizer_")
    }


def step_without_hooks(optimizer: Optimizer, *args: Any) -> None:
    """The step of the class itself: not what a scheduler has put in its place, and neither hooks of this object nor of all."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *args)


def zeros_like(like: torch.Tensor, is_sparse: bool) -> torch.Tensor:
    zeros = torch.zeros_like(like.detach())
    return zeros.to_sparse() if is_sparse else zeros


class _Record(dict[str, Any]):
    """A parameter's state that keeps a copy of the first value of each piece."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.first: State = {}
        self.update(*args, **kwargs)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = copied(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


class Records(dict[Any, Any]):
    """The states of all parameters, as records. Like an optimizer's own, it has one for every parameter that is asked for."""

    def __missing__(self, key: Any) -> _Record:
        self[key] = {}
        record: _Record = self[key]
        return record

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _Record(value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def first_of(self, key: Any) -> State:
        record = self.get(key)
        return record.first if isinstance(record, _Record) else {}
