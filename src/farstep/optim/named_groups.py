"""What a user gives as named parameters -> groups of names, tensors and options. And the named parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from farstep.optim.groups import options_of
from farstep.optim.members import kind_of

__all__ = ["NamedGroup", "named_params_with_sharded_tensor", "parse_named_group", "parse_named_groups"]


@dataclass
class NamedGroup:
    names: list[str]
    parameters: list[Any]
    options: dict[str, Any]


def parse_named_groups(given: Any) -> list[NamedGroup]:
    """A mapping name -> parameter, (name, parameter) pairs, or groups of these: dicts with "params" and options."""
    if isinstance(given, nn.Module):
        raise TypeError(
            "named_params is a mapping of names to parameters: dict(model.named_parameters()), not the module"
        )
    if isinstance(given, Tensor):
        raise TypeError('named_params is a mapping of names to parameters: {"weight": parameter}')
    items = list(given.items()) if isinstance(given, Mapping) else list(given)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    groups: list[NamedGroup] = []
    for each in items if isinstance(items[0], dict) else [{"params": items}]:
        groups.append(parse_named_group(each, groups))
    return groups


def parse_named_group(given: Any, before: list[NamedGroup]) -> NamedGroup:
    if not isinstance(given, Mapping):
        raise TypeError(f"param_group must be a dict, but got {type(given)}")
    if "params" not in given:
        raise ValueError('a parameter group needs "params": a mapping of names to parameters')
    params = given["params"]
    if isinstance(params, Mapping):
        pairs = list(params.items())
    elif isinstance(params, Tensor | set) or "param_names" in given:
        names = given.get("param_names")
        if names is None:
            raise TypeError("a parameter group's params are a mapping of names to parameters, or such pairs")
        pairs = list(zip(names, [params] if isinstance(params, Tensor) else params, strict=True))
    else:
        pairs = list(params)
    group = NamedGroup([], [], options_of(dict(given)))
    taken = {name: p for each in before for name, p in zip(each.names, each.parameters, strict=True)}
    seen = {id(p): name for name, p in taken.items()}
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                'parameters have names here, since the state is saved by them: give {"name": parameter, ...} or (name, parameter) pairs, such as '
                "dict(model.named_parameters())"
            )
        name, parameter = pair
        kind_of(parameter)
        if name in taken:
            raise ValueError(f"two parameters have the name {name!r}")
        if id(parameter) in seen:
            raise ValueError(
                f"{seen[id(parameter)]!r} and {name!r} are the same parameter: some parameters appear in more than one parameter group, or "
                f"twice in one. A tied parameter is given once"
            )
        taken[name], seen[id(parameter)] = parameter, name
        group.names.append(name)
        group.parameters.append(parameter)
    if not group.names:
        raise ValueError("a parameter group has no parameters: leave it out, and add it when it has some")
    return group


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Any]]:
    """A module's ShardedTensors, which are plain attributes of modules, and its parameters: names and values, each once.

    As torch's, and `prefix` and `recurse` hold for both.
    """
    seen: set[int] = set()
    for path, each in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and kind_of(value) == "ShardedTensor" and id(value) not in seen:
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter
