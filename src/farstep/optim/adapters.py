"""What torch's public API does not offer: running the hooks that `register_state_dict_pre_hook` and its like have registered.

`torch.optim.Optimizer` runs them inside methods that a DistributedOptimizer replaces.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = [
    "run_load_state_dict_post_hooks",
    "run_load_state_dict_pre_hooks",
    "run_state_dict_post_hooks",
    "run_state_dict_pre_hooks",
]


def _hooks(optimizer: Optimizer, name: str) -> list[Any]:
    return list(getattr(optimizer, f"_optimizer_{name}_hooks", {}).values())


def run_state_dict_pre_hooks(optimizer: Optimizer) -> None:
    for hook in _hooks(optimizer, "state_dict_pre"):
        hook(optimizer)


def run_state_dict_post_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    for hook in _hooks(optimizer, "state_dict_post"):
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def run_load_state_dict_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = dict(state_dict)
    for hook in _hooks(optimizer, "load_state_dict_pre"):
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    for hook in _hooks(optimizer, "load_state_dict_post"):
        hook(optimizer)
