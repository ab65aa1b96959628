"""A step of a ShardedOptimizer, which all ranks take together, or fail together.

Where state is spread over ranks, a step begins and ends with a small collective. What goes wrong on one rank in between is carried there: that rank goes on sending
and receiving, so that nobody waits for it, and at the end all raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farstep.errors import OptimError
from farstep.optim.adapters import StepHooks
from farstep.optim.groups import options_of
from farstep.optim.members import Member, Part
from farstep.optim.scaling import Scaling, is_scaled, scaling_of
from farstep.optim.zero import STEP, Notes
from farstep.state.council import agree, mark_of

if TYPE_CHECKING:
    from farstep.optim.sharded import ShardedOptimizer

__all__ = ["step"]


def step(optimizer: ShardedOptimizer, closure: Callable[[], Any] | None) -> Any:
    """Hooks, closure and update. Returns the closure's loss."""
    hooks = StepHooks(optimizer, closure)
    loss, error = None, None
    scaling: Scaling | None = None
    options: dict[str, str] = {}
    try:
        closure = hooks.run_before()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling = scaling_of(optimizer, _members(optimizer))
        options = _options(optimizer) if optimizer._zeros else {}
    except Exception as exc:
        error = exc
    notes = Notes(error, scaling is not None and scaling.found_inf, hooks.has_after)
    # Of all, before anything is changed.
    found = [(zero, zero.begin(options, notes)) for zero in optimizer._zeros]
    said = found[0][1] if found else _alone(notes, optimizer)
    if said.found_inf:
        for zero in optimizer._zeros:
            zero.forget()
    else:
        if scaling is not None:
            scaling.unscale(_members(optimizer))
        try:
            _step_local(optimizer)
        except Exception as exc:
            error = exc
        for zero, census in found:
            zero.run(census, optimizer._update, error)
        if error is not None:
            raise error
    _run_after(hooks, optimizer, said.has_hooks and bool(found))
    return loss


def _alone(notes: Notes, optimizer: ShardedOptimizer) -> Notes:
    """Without state that is spread, ranks step without a word to each other, unless there is a scaler: then one's inf is everyone's."""
    found_inf = notes.found_inf
    if is_scaled(optimizer):
        mark = mark_of(bytes([found_inf]))
        found_inf |= not agree(notes.error, optimizer.process_group, STEP, mark, kind=OptimError)
    elif notes.error is not None:
        raise notes.error
    return Notes(None, found_inf, notes.has_hooks)


def _run_after(hooks: StepHooks, optimizer: ShardedOptimizer, is_shared: bool) -> None:
    """Hooks after the step. Where some rank has any, and all step together, all learn how they went."""
    error = None
    try:
        hooks.run_after()
    except Exception as exc:
        error = exc
    if is_shared:
        agree(error, optimizer.process_group, f"what comes after {STEP}", kind=OptimError)
    elif error is not None:
        raise error


def _options(optimizer: ShardedOptimizer) -> dict[str, str]:
    """Of all groups, in words that can be compared."""
    return {
        f"param_groups[{number}][{key!r}]": repr(value.tolist() if isinstance(value, Tensor) else value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in options_of(group).items()
    }


def _members(optimizer: ShardedOptimizer) -> list[Member]:
    return [member for members in optimizer._members for member in members]


def _step_local(optimizer: ShardedOptimizer) -> None:
    """What this rank steps without the others."""
    taken: list[Member] = []
    given: dict[int, list[Tensor]] = {}
    try:
        for number, members in enumerate(optimizer._members):
            for member in members:
                if not isinstance(member, Part):
                    taken.append(member)
                    if member.take_gradients():
                        given.setdefault(number, []).extend(member.shadows)
        if given:
            optimizer._update(given)
    finally:
        for member in taken:
            member.drop_gradients()
