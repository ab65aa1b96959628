"""State dicts by parameter name: put together, and taken apart for owners that may be others. The caller's side of state_dict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from farstep.errors import OptimError, StateMismatch
from farstep.optim.groups import copied, differ, options_of

__all__ = ["Plan", "build", "name_of_class", "plan_load", "share"]

Drift = dict[int, dict[str, Any]]
"""Group number -> options that the class itself has changed, on one owner. Every group that the owner has a share of is there."""


@dataclass
class Plan:
    """What is to be loaded."""

    options: list[dict[str, Any]]
    """Of each group."""
    states: dict[str, Any]
    """By name; RRefs where the state is sharded."""
    kept: set[str]
    """Parameters that keep the state that they have."""


def build(
    param_groups: Iterable[dict[str, Any]], states: dict[str, Any], drift: dict[str, Drift]
) -> dict[str, Any]:
    """The state dict, in the order of the groups. `drift` is what each owner's class has made of the options since."""
    groups = []
    for number, group in enumerate(param_groups):
        options = {key: copied(value) for key, value in options_of(group).items()}
        groups.append({**options, **_agreed(number, drift), "params": list(group["param_names"])})
    order = [name for group in groups for name in group["params"]]
    return {"state": {name: states[name] for name in order if name in states}, "param_groups": groups}


def _agreed(number: int, drift: dict[str, Drift]) -> dict[str, Any]:
    """What the class itself has changed in a group, if all owners have come to the same."""
    found: dict[str, Any] = {}
    shares = {worker: theirs[number] for worker, theirs in drift.items() if number in theirs}
    for worker, share in shares.items():
        for key, value in share.items():
            for other, their in shares.items():
                if key not in their or differ(value, their[key]):
                    raise OptimError(
                        f"the optimizer class changes the option {key!r} of group {number} itself, and it is not the same on {worker!r} "
                        f"and {other!r}, so there is no one state to save. Such a class needs all parameters of a group on one worker"
                    )
            found[key] = value
    return found


def plan_load(
    make: Callable[..., Any],
    defaults: dict[str, Any],
    param_groups: list[dict[str, Any]],
    state_dict: dict[str, Any],
    strict: bool,
) -> Plan:
    """Which state and which options go where. StateMismatch where that cannot be said."""
    saved_groups, states = _parts(state_dict)
    foreign = _foreign(
        make, {**defaults, **{key: 0 for group in param_groups for key in group}}, saved_groups
    )
    if strict and foreign:
        raise StateMismatch(
            f"the state has the options {', '.join(foreign)}, which {name_of_class(make)} does not have: it was saved by another optimizer "
            f"class, or another version of it. Nothing has been loaded. load_state_dict(state, strict=False) leaves them out"
        )
    saved_groups = [
        {key: value for key, value in group.items() if key not in foreign} for group in saved_groups
    ]
    home: dict[str, int] = {
        name: number for number, group in enumerate(saved_groups) for name in group["params"]
    }
    names = [list(group["param_names"]) for group in param_groups]
    ours = [name for each in names for name in each]
    missing = [name for name in ours if name not in home]
    unexpected = [name for name in {**home, **states} if name not in set(ours)]
    if strict and (missing or unexpected):
        raise StateMismatch(_mismatch(missing, unexpected))
    return Plan(
        [_options_for(number, group, saved_groups, home) for number, group in enumerate(param_groups)],
        {name: state for name, state in states.items() if name in set(ours)},
        set(missing),
    )


OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""What torch's schedulers keep in groups."""


def _foreign(make: Callable[..., Any], known: Iterable[str], saved: list[dict[str, Any]]) -> list[str]:
    """The saved options that the class does not have.

    A class that is not torch's may add options to its groups as it goes: there only those of torch's classes are known not to be its own.
    """
    known = {*known, *OF_SCHEDULES}
    found = dict.fromkeys(key for group in saved for key in options_of(group) if key not in known)
    is_torchs = getattr(make, "__module__", "").startswith("torch.optim")
    return [key for key in found if is_torchs or key in _options_of_torch()]


@functools.cache
def _options_of_torch() -> frozenset[str]:
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    found = {name for kind in classes for name in inspect.signature(kind).parameters}
    return frozenset(found - {"params", "defaults", "args", "kwargs"})


def name_of_class(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", repr(make))


def share(
    plan: Plan, names: dict[int, list[str]]
) -> tuple[dict[int, dict[str, Any]], dict[str, Any], list[str]]:
    """The part of a plan for an owner of these parameters, by group: options, states, and which are kept."""
    options = {number: plan.options[number] for number in names}
    own = [name for each in names.values() for name in each]
    states = {name: plan.states[name] for name in own if name in plan.states}
    return options, states, [name for name in own if name in plan.kept]


def _parts(state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    try:
        groups, states = list(state_dict["param_groups"]), dict(state_dict["state"])
        named = all(isinstance(name, str) for group in groups for name in group["params"])
    except (KeyError, TypeError) as exc:
        raise StateMismatch(
            f'this is no state dict of a DistributedOptimizer: it has "state" and "param_groups" ({type(exc).__name__}: {exc})'
        ) from exc
    if not named:
        raise StateMismatch(
            "this state dict has numbers where parameters' names are wanted; it is that of an ordinary optimizer. Put the name of each "
            'parameter in place of its number, in "state" and in the "params" of each group'
        )
    return groups, states


def _mismatch(missing: list[str], unexpected: list[str]) -> str:
    lines = ["the state does not fit the optimizer's parameters, and nothing has been loaded."]
    if missing:
        lines.append(f"Missing in the state: {', '.join(missing)}.")
    if unexpected:
        lines.append(f"Unexpected in the state: {', '.join(unexpected)}.")
    lines.append("load_state_dict(state, strict=False) loads what fits")
    return " ".join(lines)


def _options_for(
    number: int, group: dict[str, Any], saved: list[dict[str, Any]], home: dict[str, int]
) -> dict[str, Any]:
    """The saved options of a group's parameters. They may have been grouped otherwise, as long as these agree."""
    sources: dict[int, str] = {}
    for name in group["param_names"]:
        if name in home:
            sources.setdefault(home[name], name)
    found = list(sources)
    for other in found[1:]:
        a, b = options_of(saved[found[0]]), options_of(saved[other])
        unlike = [key for key in {**a, **b} if key not in a or key not in b or differ(a[key], b[key])]
        if unlike:
            raise StateMismatch(
                f"group {number} has {sources[found[0]]!r} and {sources[other]!r}, which were saved in groups with different "
                f"{', '.join(unlike)}; nothing has been loaded. Put them in groups of their own, or make the options in the state agree"
            )
    return {**options_of(group), **(options_of(saved[found[0]]) if found else {})}
