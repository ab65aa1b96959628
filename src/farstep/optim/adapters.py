"""What torch's public API does not offer: running the hooks that `register_state_dict_pre_hook` and its like have registered, and a step
without its hooks.

`torch.optim.Optimizer` runs the hooks of state dicts inside methods that optimizers over others replace.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = [
    "run_load_state_dict_post_hooks",
    "run_load_state_dict_pre_hooks",
    "run_state_dict_post_hooks",
    "run_state_dict_pre_hooks",
    "step_without_hooks",
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


def step_without_hooks(optimizer: Optimizer, *args: Any) -> None:
    """The step of the class itself: not what a scheduler has put in its place, and neither hooks of this object nor of all."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *args)
