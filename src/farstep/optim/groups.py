"""What a user gives as parameters -> groups of names, parameters and options. What a parameter is, `Rules` say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farstep.state.optim_entries import copied
from farstep.state.optim_schema import NOT_OPTIONS, options_of

__all__ = [
    "NOT_OPTIONS",
    "Group",
    "Rules",
    "copied",
    "differ",
    "options_of",
    "parse_group",
    "parse_groups",
]


@dataclass
class Group:
    names: list[str]
    params: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Rules:
    """What an optimizer takes for its parameters."""

    wanted: str
    """What "params" is, in words."""
    kind: type
    """What a parameter is. A group may have one that is in no list."""
    refuse_unlisted: Callable[[Any], None]
    """Raises TypeError for what is one thing, and not several."""
    check: Callable[[Any], None]
    """Raises TypeError for what is no parameter."""
    identity: Callable[[Any], Any]
    """The same for the same parameter."""
    name_of: Callable[[int], str] | None
    """The name of one that was given without, from how many there are before it; None if all must have one."""
    help_on_names: str
    """What to do where two have one name."""


def parse_groups(given: Any, rules: Rules) -> list[Group]:
    """Parameters, (name, parameter) pairs, a mapping name -> parameter, or groups of these: dicts with "params" and options."""
    rules.refuse_unlisted(given)
    items = list(given.items()) if isinstance(given, Mapping) else list(given)
    if not items:
        raise ValueError("optimizer got an empty parameter list: it has no parameters")
    groups: list[Group] = []
    for each in items if isinstance(items[0], dict) else [{"params": items}]:
        groups.append(parse_group(each, groups, rules))
    return groups


def parse_group(given: Any, before: Sequence[Group], rules: Rules) -> Group:
    """One group, after those `before` it, whose names and parameters are taken."""
    group = Group([], [], {})
    taken = {name for each in before for name in each.names}
    seen = {
        rules.identity(p): name for each in before for name, p in zip(each.names, each.params, strict=True)
    }
    for name, parameter in _pairs(given, len(taken), rules):
        if not isinstance(name, str):
            raise TypeError(f"a parameter's name is a string, not {name!r}")
        rules.check(parameter)
        if name in taken:
            raise ValueError(
                f"two parameters have the name {name!r}. Names must differ, since the state is saved by name{rules.help_on_names}"
            )
        other = seen.setdefault(rules.identity(parameter), name)
        if other != name:
            raise ValueError(
                f"{other!r} and {name!r} are the same parameter: some parameters appear in more than one parameter group, or twice in one. "
                f"A parameter can be given only once"
            )
        taken.add(name)
        group.names.append(name)
        group.params.append(parameter)
    if not group.names:
        raise ValueError("a parameter group has no parameters: leave it out, and add it when it has some")
    group.options = options_of(given)
    return group


def _pairs(given: Any, count: int, rules: Rules) -> list[tuple[Any, Any]]:
    """Name and parameter of each in a group that comes after `count` others."""
    if not isinstance(given, Mapping):
        raise TypeError(f"param_group must be a dict, but got {type(given)}")
    if "params" not in given:
        raise ValueError(f'a parameter group needs "params": {rules.wanted}')
    params = given["params"]
    if isinstance(params, set):
        raise TypeError("parameters must come in an order that stays the same: give a list, not a set")
    if isinstance(params, rules.kind):
        params = [params]
    names = given.get("param_names")
    rules.refuse_unlisted(params)
    listed = list(params.items()) if isinstance(params, Mapping) else list(params)
    found = []
    for position, each in enumerate(listed):
        if isinstance(each, tuple | list) and len(each) == 2:
            found.append((each[0], each[1]))
        elif names is not None:
            found.append((names[position], each))
        elif rules.name_of is not None:
            found.append((rules.name_of(count + position), each))
        else:
            rules.check(each)
            raise TypeError(
                f"parameters have names here, since the state is saved by them: give {rules.wanted}"
            )
    return found


def differ(a: Any, b: Any) -> bool:
    if a is b:
        return False
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return not (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.device == b.device
            and torch.equal(a, b)
        )
    try:
        return type(a) is not type(b) or bool(a != b)
    except (RuntimeError, ValueError):  # arrays inside of something: they are sent again
        return True
