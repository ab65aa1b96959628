"""Tensors on the meta device: memory for them in place, so that whoever refers to them, such as an optimizer, sees it too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from farstep.errors import StateError

__all__ = ["device_of", "give_memory", "refresh"]


def give_memory(tensor: Tensor, device: torch.device) -> Callable[[], None]:
    """Give a meta tensor memory on a device, not filled. The tensor stays the same object, with its class and attributes.

    Returns a function that takes the memory back. Raises StateError where torch cannot do it in place, or where something
    would be lost; then the tensor is as it was.
    """
    if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise StateError("it has hooks, which would be lost: register them afterwards")
    try:
        with torch.no_grad():
            other = torch.empty_like(tensor, device=device)
            if type(other) is not type(tensor):
                other = other.as_subclass(type(tensor))
            for key, value in vars(tensor).items():
                vars(other).setdefault(key, value)
        other.requires_grad_(tensor.requires_grad)
        swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError, TypeError) as exc:  # weak references, or a class that cannot
        raise StateError(str(exc)) from exc
    return lambda: swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def device_of(tensor: Tensor) -> torch.device | None:
    """Where a tensor's memory is, or is to be; None for a plain tensor on the meta device, which does not say."""
    if not tensor.is_meta:
        return tensor.device
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return None
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def refresh(module: nn.Module) -> None:
    """Tell FSDP2 that its sharded parameters have other memory, as `Module.to_empty` does."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for each in module.modules():
        if isinstance(each, kind):
            state: Any = each._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            with torch.no_grad():
                for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
                    parameter.reset_sharded_param()
