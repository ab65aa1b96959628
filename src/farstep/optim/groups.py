"""What a user gives as parameters -> groups of named references."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farstep.rpc.rref import RRef

__all__ = ["NOT_OPTIONS", "Group", "copied", "differ", "options_of", "parse_group", "parse_groups"]

NOT_OPTIONS = ("params", "param_names")


@dataclass
class Group:
    names: list[str]
    rrefs: list[RRef[Any]]
    options: dict[str, Any]


def parse_groups(given: Any) -> list[Group]:
    """RRefs, (name, RRef) pairs, a dict name -> RRef, or groups of these: dicts with "params" and options."""
    _refuse_unlisted(given)
    if isinstance(given, dict):
        given = [{"params": given}]
    else:
        given = list(given)
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        if not isinstance(given[0], dict):
            given = [{"params": given}]
    groups: list[Group] = []
    taken: set[str] = set()
    for each in given:
        groups.append(parse_group(each, taken))
        taken.update(groups[-1].names)
    return groups


def parse_group(given: Any, taken: Iterable[str]) -> Group:
    """One group. Parameters without a name are called by their number; `taken` are the names of the groups before."""
    if not isinstance(given, dict):
        raise TypeError(f"param_group must be a dict, but got {type(given)}")
    if "params" not in given:
        raise ValueError('a parameter group needs "params": a list of RRefs, or of (name, RRef) pairs')
    params = given["params"]
    if isinstance(params, set):
        raise TypeError("parameters must come in an order that stays the same: give a list, not a set")
    if isinstance(params, RRef):
        params = [params]
    _refuse_unlisted(params)
    pairs = list(params.items()) if isinstance(params, dict) else list(params)
    names: list[str] = []
    rrefs: list[RRef[Any]] = []
    taken = set(taken)
    given_names = given.get("param_names")
    for position, each in enumerate(pairs):
        if isinstance(each, tuple | list) and len(each) == 2:
            name, rref = each
        else:
            name, rref = (given_names[position] if given_names else str(len(taken))), each
        if not isinstance(rref, RRef):
            raise TypeError(
                f"optimizer can only optimize parameters behind RRefs, but one of the params is {torch.typename(rref)}; "
                f"rpc.RRef(parameter) makes a reference to a local one, parameter_rrefs(module) to all those of a module, here or remote"
            )
        if not isinstance(name, str):
            raise TypeError(f"a parameter's name is a string, not {name!r}")
        if name in taken:
            raise ValueError(
                f"two parameters have the name {name!r}. Names must differ, since the state is saved by name: where several "
                f"modules have parameters of one name, use parameter_rrefs(module_rref, prefix=...)"
            )
        taken.add(name)
        names.append(name)
        rrefs.append(rref)
    if not rrefs:
        raise ValueError("a parameter group has no parameters: leave it out, and add it when it has some")
    _refuse_repeated(names, rrefs)
    return Group(names, rrefs, options_of(given))


def _refuse_unlisted(given: Any) -> None:
    """What is one thing, and not a list of references."""
    if isinstance(given, nn.Module):
        help = "parameter_rrefs(module) gives those of a module"
    elif isinstance(given, RRef):
        help = "[rref] is a list of one parameter, parameter_rrefs(rref) gives those of a module"
    elif isinstance(given, torch.Tensor):
        help = "[rpc.RRef(parameter)] is a list of one"
    elif isinstance(given, Iterable) and not isinstance(given, str):
        return
    else:
        help = "parameter_rrefs(module) gives those of a module, rpc.RRef(parameter) makes one"
    raise TypeError(
        f"params_rref is a list of RRefs, of (name, RRef) pairs, or of groups, not one {type(given).__name__}: {help}"
    )


def _refuse_repeated(names: list[str], rrefs: list[RRef[Any]]) -> None:
    seen: dict[Any, str] = {}
    for name, rref in zip(names, rrefs, strict=True):
        other = seen.setdefault(rref._id, name)
        if other != name:
            raise ValueError(
                f"{other!r} and {name!r} are the same parameter: a parameter can be given only once"
            )


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def copied(value: Any) -> Any:
    """A copy that does not change when the original is changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


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
