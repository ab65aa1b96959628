"""State by parameter name: read from a local optimizer, and loaded into one. The owner's side of state_dict.

Loading has two halves. `prepare` does everything that can fail, on a copy of the optimizer object, through the class's own load_state_dict;
`commit` puts the result in place. So either every owner has the new state, or each still has its old one.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import OptimError, StateMismatch
from farstep.optim import fast
from farstep.optim.groups import copied
from farstep.optim.local import LocalOptimizer, Member

__all__ = ["State", "States", "abandon", "commit", "prepare", "read"]

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
    others = saved.keys() - {"state", "param_groups"}
    if others:
        raise OptimError(
            f"{local.where} keeps {', '.join(sorted(map(str, others)))} in its state_dict, which belongs to no parameter, so it cannot be "
            f"saved by parameter names"
        )
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
            mine: dict[torch.Tensor, State] = {}
            places = []
            for member, index in zip(members, indices, strict=False):
                places.append(index)
                old = before.get(member.name)
                if member.name in kept:
                    found = old
                else:
                    found = _fitted(local, member, copied(given.get(member.name)), old or {})
                if found is not None:
                    state[index] = mine[member.shadow] = found
            new = options[number]
            chosen.append(fast.choose(local.optimizer, {**new, "params": [m.shadow for m in members]}, mine))
            groups.append({**new, **chosen[-1], "params": places})
        twin = _twin(local)
        twin.load_state_dict({"state": state, "param_groups": groups})
        local.pending = twin, chosen, options


def _twin(local: LocalOptimizer) -> Optimizer:
    """Another object with the same attributes. load_state_dict replaces some of them, and leaves the first one's alone.

    Torch's own classes put new objects in their place. Of others that is not known: they get copies, of everything but the parameters.
    """
    optimizer = local.optimizer
    twin = type(optimizer).__new__(type(optimizer))
    if fast.is_torchs(optimizer):
        twin.__dict__.update(optimizer.__dict__)
    else:
        kept = {id(m.shadow): m.shadow for members in local.members for m in members}
        twin.__dict__.update(copy.deepcopy(optimizer.__dict__, kept))
    return twin


NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What torch's own classes keep as a tensor of one number; all else has the parameter's shape."""


def _fitted(local: LocalOptimizer, member: Member, new: Any, old: State) -> State | None:
    """A parameter's state, laid out like the parameter. StateMismatch where it cannot be."""
    if new is None:
        return None
    if not isinstance(new, dict):
        raise StateMismatch(
            f"the state of parameter {member.name!r} is a {type(new).__name__}, and not a dict; nothing has been loaded"
        )
    for key, value in new.items():
        wrong = _misfit(local, member.parameter, key, value, old.get(key))
        if wrong:
            raise StateMismatch(
                f"the state {key!r} of parameter {member.name!r} {wrong}, which does not fit the parameter's on worker "
                f"{local.agent.info.name!r}, {tuple(member.parameter.shape)}; nothing has been loaded"
            )
        if isinstance(value, torch.Tensor) and value.shape == member.shadow.shape:
            new[key] = _laid_out(value, member.shadow)
    return new


def _misfit(local: LocalOptimizer, parameter: torch.Tensor, key: str, value: Any, now: Any) -> str | None:
    """What is wrong with a piece of state. It has the shape that it has now; and torch's own classes are known."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and isinstance(now, torch.Tensor) and now.shape != value.shape:
        return f"has shape {tuple(value.shape)}"
    if not fast.is_torchs(local.optimizer) or key in NUMBERS:
        return None
    if not is_tensor:
        return f"is a {type(value).__name__}" if isinstance(now, torch.Tensor) else None
    if value.layout is not torch.strided:
        return f"is {value.layout}"
    fits = _fits_rows if isinstance(local.optimizer, torch.optim.Adafactor) else torch.Size.__eq__
    return None if fits(value.shape, parameter.shape) else f"has shape {tuple(value.shape)}"


def _fits_rows(shape: torch.Size, parameter: torch.Size) -> bool:
    """Adafactor keeps the means of rows and of columns."""
    return len(shape) == len(parameter) and all(a in (b, 1) for a, b in zip(shape, parameter, strict=True))


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if value.layout is not torch.strided or value.stride() == like.stride():
        return value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)


def abandon(local: LocalOptimizer) -> None:
    """Another owner could not prepare."""
    local.pending = None


def commit(local: LocalOptimizer, timeout_s: float) -> None:
    """Put in place what `prepare` has made."""
    with local.locked("loading a state into", timeout_s):
        if local.pending is not None:
            twin, local.chosen, options = local.pending
            local.pending = None
            local.optimizer.__dict__.update(twin.__dict__)
            local.options = {number: copied(each) for number, each in options.items()}
