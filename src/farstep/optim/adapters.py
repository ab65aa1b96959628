"""What torch's public API does not offer: running the hooks that `register_state_dict_pre_hook` and its like have registered, and a step
with them or without.

`torch.optim.Optimizer` runs the hooks of state dicts inside methods that optimizers over others replace, and those of steps around the method.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim import optimizer as torchs

__all__ = [
    "StepHooks",
    "run_load_state_dict_post_hooks",
    "run_load_state_dict_pre_hooks",
    "run_state_dict_post_hooks",
    "run_state_dict_pre_hooks",
    "runs_its_hooks",
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


Method = TypeVar("Method", bound=Callable[..., Any])


def runs_its_hooks(step: Method) -> Method:
    """A `step` that uses StepHooks, so that torch does not run them around it."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


class StepHooks:
    """The hooks of one step, of this optimizer and of all, in torch's order."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        self._optimizer = optimizer
        self._args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
        self._kwargs: dict[str, Any] = {}

    @property
    def has_after(self) -> bool:
        return bool(self._after())

    def run_before(self) -> Callable[[], Any] | None:
        """Returns the closure, which they may have replaced."""
        everyones = torchs._global_optimizer_pre_hooks.values()
        for hook in list(chain(everyones, self._optimizer._optimizer_step_pre_hooks.values())):
            changed = hook(self._optimizer, self._args, self._kwargs)
            if changed is None:
                continue
            if not isinstance(changed, tuple) or len(changed) != 2:
                raise RuntimeError(
                    f"a hook before a step returns None or (args, kwargs), and this one has returned {changed!r}"
                )
            self._args, self._kwargs = changed
        return self._kwargs.get("closure", self._args[1] if len(self._args) > 1 else None)

    def run_after(self) -> None:
        self._optimizer._optimizer_step_code()  # where torch's profiler looks at the optimizer
        for hook in self._after():
            hook(self._optimizer, self._args, self._kwargs)

    def _after(self) -> list[Any]:
        own = self._optimizer._optimizer_step_post_hooks.values()
        return list(chain(own, torchs._global_optimizer_post_hooks.values()))
