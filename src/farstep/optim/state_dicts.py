"""State dicts by parameter name: put together, renamed, and taken apart for owners that may be others. The caller's side of state_dict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farstep.errors import OptimError, StateMismatch
from farstep.optim.groups import copied, differ, options_of
from farstep.state.known import OF_SCHEDULES

__all__ = [
    "Plan",
    "build",
    "by_its_names",
    "check_names",
    "name_of_class",
    "options_and_states",
    "plan_load",
    "rekey",
    "share",
    "translated",
]

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
    left_out: list[str] = field(default_factory=list)
    """Options that the class does not have, if not strict: `param_groups.1.betas`."""


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
    state_dict: Mapping[str, Any],
    strict: bool,
    may_miss: Collection[str] = (),
) -> Plan:
    """Which state and which options go where. StateMismatch where that cannot be said. `may_miss` need not be in the state."""
    saved_groups, states = options_and_states(state_dict)
    foreign = _foreign(
        make, {**defaults, **{key: 0 for group in param_groups for key in group}}, saved_groups
    )
    if strict and foreign:
        raise StateMismatch(
            f"the state has the options {', '.join(foreign)}, which {name_of_class(make)} does not have: it was saved by another optimizer "
            f"class, or another version of it. Nothing has been loaded"
        )
    left_out = [
        f"param_groups.{number}.{key}"
        for number, group in enumerate(saved_groups)
        for key in group
        if key in foreign
    ]
    saved_groups = [
        {key: value for key, value in group.items() if key not in foreign} for group in saved_groups
    ]
    home: dict[str, int] = {
        name: number for number, group in enumerate(saved_groups) for name in group["params"]
    }
    ours = [name for group in param_groups for name in group["param_names"]]
    check_names(ours, {**home, **states}, may_miss, strict=strict)
    return Plan(
        [_options_for(number, group, saved_groups, home) for number, group in enumerate(param_groups)],
        {name: states[name] for name in ours if name in states},
        {name for name in ours if name not in home},
        left_out,
    )


def check_names(
    ours: list[str],
    saved: Iterable[str],
    may_miss: Collection[str] = (),
    *,
    strict: bool = True,
    has_rename: bool = False,
) -> None:
    """StateMismatch, which lists them, where a name is in one and not in the other; if not `strict`, where none is in both.

    `has_rename`: whether `load_state_dict` can be told of other names.
    """
    theirs = dict.fromkeys(saved)
    if not strict:
        if ours and theirs and theirs.keys().isdisjoint(ours):
            raise StateMismatch(
                f"the state and the optimizer have no name of a parameter in common, and nothing has been loaded. In the state: "
                f"{_some(theirs)}. Here: {_some(ours)}.{RENAMED if has_rename else ''}"
            )
        return
    missing = [name for name in ours if name not in theirs and name not in may_miss]
    known = set(ours)
    unexpected = [name for name in theirs if name not in known]
    if missing or unexpected:
        raise StateMismatch(_mismatch(missing, unexpected, has_rename))


RENAMED = " If the parameters were renamed: load_state_dict(state, rename=...)"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


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


def options_and_states(state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The two parts of a state dict: groups, and states by name. StateMismatch if it is none."""
    try:
        groups, states = list(state_dict["param_groups"]), dict(state_dict["state"])
        named = all(isinstance(name, str) for group in groups for name in group["params"])
    except (KeyError, TypeError) as exc:
        raise StateMismatch(
            f'this is no state dict by names of parameters: it has "state" and "param_groups" ({type(exc).__name__}: {exc})'
        ) from exc
    if not named:
        call = (
            "rekey(state_dict)"
            if all("param_names" in group for group in groups)
            else "rekey(state_dict, names)"
        )
        raise StateMismatch(
            f"this state dict has numbers where parameters' names are wanted; it is that of an ordinary optimizer. "
            f"farstep.optim.{call} puts names in their place"
        )
    return groups, states


def by_its_names(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of an ordinary optimizer that was given names keeps them beside the numbers: by these names. Any other as it is."""
    try:
        groups = list(state_dict["param_groups"])
        numbers = [key for group in groups for key in group["params"] if not isinstance(key, str)]
        has_names = all("param_names" in group for group in groups)
    except (KeyError, TypeError):
        return state_dict  # it is no state dict, which others say
    return rekey(state_dict) if numbers and has_names else state_dict


def rekey(
    state_dict: Mapping[str, Any],
    names: Iterable[str | tuple[str, Any]] | None = None,
    whose: str | None = None,
) -> dict[str, Any]:
    """An ordinary optimizer's state dict, with the parameters' names in place of their numbers. Nothing is copied.

    `names`, or (name, parameter) pairs, are in the order in which the optimizer has the parameters, group after group. An optimizer that was
    made of `named_parameters()` has the names in its state: there they may be left out, and others are refused. `whose` is for farstep's own
    optimizers, which know better than what they wrap.
    """
    is_users = whose is None
    whose = whose or "the optimizer"
    others = state_dict.keys() - {"state", "param_groups"}
    if others:
        raise OptimError(
            f"{whose} keeps {', '.join(sorted(map(str, others)))} in its state_dict, which belongs to no parameter, so it cannot be "
            f"saved by parameter names"
        )
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    own = None
    if groups and all("param_names" in group for group in groups):
        own = [name for group in groups for name in group["param_names"]]
    if names is None:
        if own is None:
            raise ValueError(
                "this state dict has no names of parameters: rekey(state_dict, names) wants them"
            )
        names = own
    names = [each[0] if isinstance(each, tuple) else each for each in names]
    if len(names) != len(keys) or len(set(names)) != len(names):
        raise ValueError(
            f"rekey wants one name for each of the {len(keys)} parameters in the state dict, each another; it was given {len(names)}, "
            f"{len(set(names))} of them different"
        )
    if is_users and own is not None and names != own:
        given, saved = next((a, b) for a, b in zip(names, own, strict=True) if a != b)
        raise StateMismatch(
            f"rekey was given the name {given!r} for a parameter that the state dict calls {saved!r}. It has names of its own: "
            f"rekey(state_dict) takes them"
        )
    name_of = dict(zip(keys, names, strict=True))
    for key in state_dict["state"]:
        if key not in name_of:
            raise OptimError(
                f"{whose} keeps state under {key!r}, which belongs to no parameter, so it cannot be saved by parameter names"
            )
    return {
        "state": {name_of[key]: state for key, state in state_dict["state"].items()},
        "param_groups": [
            {**options_of(group), "params": [name_of[key] for key in group["params"]]} for group in groups
        ],
    }


def translated(
    state_dict: Mapping[str, Any], to: Callable[[str], str], *, tied: bool = False
) -> dict[str, Any]:
    """A state dict with other names. Where two names become one: an error, unless they are `tied` and have the same state."""
    groups, states = options_and_states(state_dict)
    taken: dict[str, str] = {}
    new_states: dict[str, Any] = {}
    new_groups = []
    for group in groups:
        names = []
        for name in group["params"]:
            if _is_first(name, to(name), taken, states, tied):
                names.append(to(name))
        new_groups.append({**group, "params": names})
    for name, state in states.items():
        if _is_first(name, to(name), taken, states, tied) or to(name) not in new_states:
            new_states[to(name)] = state
    return {**state_dict, "state": new_states, "param_groups": new_groups}


def _is_first(old: str, new: str, taken: dict[str, str], states: dict[str, Any], tied: bool) -> bool:
    other = taken.setdefault(new, old)
    if other == old:
        return True
    a, b = states.get(other), states.get(old)
    if not tied or (
        a and b and any(key not in a or key not in b or differ(a[key], b[key]) for key in {**a, **b})
    ):
        what = "and they have different state" if tied else "and rename gives both that name"
        raise StateMismatch(
            f"{other!r} and {old!r} of the state are one parameter here, {new!r}, {what}; nothing has been loaded"
        )
    return False


def _mismatch(missing: list[str], unexpected: list[str], has_rename: bool) -> str:
    lines = ["the state does not fit the optimizer's parameters, and nothing has been loaded."]
    if missing:
        lines.append(f"Missing in the state: {', '.join(missing)}.")
    if unexpected:
        lines.append(f"Unexpected in the state: {', '.join(unexpected)}.")
    lines.append("load_state_dict(state, strict=False) loads what fits")
    renamed = f".{RENAMED}" if has_rename and missing and unexpected else ""
    return " ".join(lines) + renamed


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
