"""State by parameter name: read from a local optimizer, and loaded into one. The owner's side of state_dict.

Loading has two halves. `prepare` does everything that can fail, on a copy of the optimizer object, through the class's own load_state_dict;
`commit` puts the result in place. So either every owner has the new state, or each still has its old one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from farstep.optim import fast
from farstep.optim.fitting import State, fitted, twin_of
from farstep.optim.groups import copied
from farstep.optim.local import LocalOptimizer
from farstep.optim.state_dicts import rekey

__all__ = ["Fresh", "State", "States", "abandon", "commit", "prepare", "read"]

States = dict[str, State]
"""Of several, by name. A parameter that has never been stepped on has none."""


class Fresh(State):
    """A state that was made for one load. Nobody else has its tensors, of which no two share memory: they become the optimizer's, without another copy."""


def read(local: LocalOptimizer, timeout_s: float) -> tuple[States, dict[int, dict[str, Any]]]:
    """Copies, made while nobody steps on these parameters; and the options that the class itself has changed, by group."""
    with local.locked("reading the state of", timeout_s):
        return _read(local, copied), local.drift()


def _read(local: LocalOptimizer, take: Any) -> States:
    names = [member.name for members in local.members for member in members]
    saved = rekey(local.optimizer.state_dict(), names, local.where)
    return {name: take(state) for name, state in saved["state"].items()}


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
        on_worker = f" on worker {local.agent.info.name!r}"
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
                    new = given.get(member.name)
                    own = dict(new) if type(new) is Fresh else copied(new)
                    found = fitted(local.optimizer, member.name, member.parameter, own, old, on_worker)
                if found is not None:
                    state[index] = mine[member.shadow] = found
            group = options[number]
            shadows = [member.shadow for member in members]
            chosen.append(fast.choose(local.optimizer, {**group, "params": shadows}, mine))
            groups.append({**group, **chosen[-1], "params": places})
        twin = twin_of(local.optimizer)
        twin.load_state_dict({"state": state, "param_groups": groups})
        local.pending = twin, chosen, options


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
