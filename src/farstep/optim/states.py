"""State by parameter name: read from a local optimizer, and loaded into one. The owner's side of state_dict.

Loading has two halves. `prepare` does everything that can fail, on a copy of the optimizer object, through the class's own load_state_dict;
`commit` puts the result in place. So either every owner has the new state, or each still has its old one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import OptimError, StateMismatch
from farstep.optim import fast
from farstep.optim.groups import copied
from farstep.optim.local import LocalOptimizer, Member

__all__ = ["State", "States", "commit", "prepare", "read"]

State = dict[str, Any]
"""What an optimizer remembers of one parameter."""
States = dict[str, State]
"""Of several, by name. A parameter that has never been stepped on has none."""


def read(local: LocalOptimizer, timeout_s: float) -> tuple[States, dict[int, dict[str, Any]]]:
    """Copies, made while nobody steps on these parameters; and the options that the class itself has changed, by group."""
    with local.locked("reading the state of", timeout_s):
        return _read(local, copied), local.drift()


def _read(local: LocalOptimizer, take: Any) -> States:
    saved = local.optimizer.state_dict()
    names = [member.name for members in local.members for member in members]
    found: States = {}
    for key, state in saved["state"].items():
        if not isinstance(key, int) or not 0 <= key < len(names):
            raise OptimError(
                f"{local.where} keeps state under {key!r}, which belongs to no parameter, so it cannot be saved by parameter names"
            )
        found[names[key]] = take(state)
    return found


def prepare(
    local: LocalOptimizer,
    options: dict[int, dict[str, Any]],
    given: Mapping[str, State],
    kept: set[str],
    timeout_s: float,
) -> None:
    """Load into a copy of the optimizer object, and leave it for `commit`."""
    with local.locked("loading a state into", timeout_s):
        before = _read(local, lambda state: state)
        state: dict[int, State] = {}
        groups: list[dict[str, Any]] = []
        chosen: list[dict[str, bool]] = []
        indices = itertools.count()
        for number, members in zip(local.numbers, local.members, strict=True):
            new = options[number]
            chosen.append(fast.choose(local.optimizer, {**new, "params": [m.shadow for m in members]}))
            groups.append({**new, **chosen[-1], "params": []})
            for index, member in zip(indices, members, strict=False):
                groups[-1]["params"].append(index)
                old = before.get(member.name)
                if member.name in kept:
                    found = old
                else:
                    found = copied(given.get(member.name))
                    _check_shapes(local, member, found or {}, old or {})
                if found is not None:
                    state[index] = found
        twin = _twin(local.optimizer)
        twin.load_state_dict({"state": state, "param_groups": groups})
        local.pending = twin, chosen, options


def _twin(optimizer: Optimizer) -> Optimizer:
    """Another object with the same attributes. load_state_dict replaces some of them, and leaves the first one's alone."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    return twin


def _check_shapes(local: LocalOptimizer, member: Member, new: State, old: State) -> None:
    """A tensor of state has the shape that it has now. In torch's own classes, which are known, it is a number, or has the shape
    of its parameter, or of its rows or columns."""
    is_torchs = type(local.optimizer).__module__.startswith("torch.optim")
    shape = member.parameter.shape
    for key, value in new.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            continue
        now = old.get(key)
        if (isinstance(now, torch.Tensor) and now.shape != value.shape) or (
            is_torchs and not _fits(value.shape, shape)
        ):
            raise StateMismatch(
                f"the state {key!r} of parameter {member.name!r} has shape {tuple(value.shape)}, which does not fit the parameter's "
                f"on worker {local.agent.info.name!r}, {tuple(shape)}; nothing has been loaded"
            )


def _fits(shape: torch.Size, parameter: torch.Size) -> bool:
    return len(shape) == len(parameter) and all(a in (b, 1) for a, b in zip(shape, parameter, strict=True))


def commit(local: LocalOptimizer, timeout_s: float) -> None:
    """Put in place what `prepare` has made."""
    with local.locked("loading a state into", timeout_s):
        if local.pending is not None:
            twin, local.chosen, options = local.pending
            local.pending = None
            local.optimizer.__dict__.update(twin.__dict__)
            local.options = {number: copied(each) for number, each in options.items()}
