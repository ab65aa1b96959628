"""What a user gives as parameters with names: which are the same one, and which are meant in a group."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from farstep.optim.groups import options_of

__all__ = ["group_of", "named", "without_ties"]


def named(given: Mapping[str, Any] | Iterable[tuple[str, Any]], what: str) -> dict[str, Any]:
    """Name -> parameter, of a mapping or of pairs. `what` is the argument's name."""
    if isinstance(given, nn.Module):
        raise TypeError(f"{what} is a mapping or pairs, not a module: give module.named_parameters()")
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    found: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                f"{what} is a mapping of names to parameters, or pairs, as module.named_parameters() gives"
            )
        name, parameter = pair
        if found.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"two parameters have the name {name!r}. Names must differ, since the state is saved by name"
            )
    return found


def without_ties(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Each parameter by the first of its names; and the other names, with the first."""
    first: dict[int, str] = {}
    for name, parameter in params.items():
        first.setdefault(id(parameter), name)
    own = {name: p for name, p in params.items() if first[id(p)] == name}
    return own, {name: first[id(p)] for name, p in params.items() if name not in own}


def group_of(
    given: Any, params: Mapping[str, Any], aliases: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A group as optimizers want it, and the parameters in it that had no name until now."""
    if not isinstance(given, Mapping):
        raise TypeError(f"a parameter group is a dict, not a {type(given).__name__}")
    if "params" not in given:
        raise ValueError('a parameter group needs "params": a list of names, or of parameters')
    listed = given["params"]
    if isinstance(listed, str | torch.Tensor):
        listed = [listed]
    elif isinstance(listed, Mapping):
        listed = list(listed.items())
    elif isinstance(listed, set):
        raise TypeError("parameters must come in an order that stays the same: give a list, not a set")
    known = {id(p) for p in params.values()}
    found = []
    new: dict[str, Any] = {}
    for each in listed:
        if isinstance(each, str):
            each = _by_name(each, params, aliases)
        elif isinstance(each, tuple):
            name, each = each
            if id(each) not in known:
                if name in params or name in aliases or name in new:
                    raise ValueError(f"there is another parameter of the name {name!r} already")
                new[name] = each
        elif not isinstance(each, torch.Tensor):
            raise TypeError(
                f"optimizer can only optimize Tensors, but one of the params is {torch.typename(each)}; give parameters, or their names"
            )
        elif id(each) not in known:
            raise ValueError(
                f"a parameter of shape {tuple(each.shape)} has no name: some parameters are not in the module. Give (name, parameter)"
            )
        found.append(each)
    return {**options_of(dict(given)), "params": found}, new


def _by_name(name: str, params: Mapping[str, Any], aliases: Mapping[str, str]) -> Any:
    name = aliases.get(name, name)
    if name not in params:
        near = difflib.get_close_matches(name, [*params, *aliases], 1)
        raise ValueError(
            f"there is no parameter of the name {name!r}" + (f": did you mean {near[0]!r}?" if near else "")
        )
    return params[name]
