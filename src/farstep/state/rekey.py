"""Optimizer state dicts by parameter number <-> by parameter name. Nothing is communicated, and no tensor is copied or looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters.names import clean_name
from farstep.state.optim_entries import copied
from farstep.state.optim_schema import options_of
from farstep.state.same import differing, same

__all__ = ["OptimInput", "parameter_groups", "to_names", "to_numbers"]

OptimInput = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None
"""What an optimizer was made with: parameters or groups; None for all of a model's parameters."""


def parameter_groups(model: nn.Module, optim_input: OptimInput, optim: Optimizer | None) -> list[list[Any]]:
    """The parameters in their groups, in the order in which an optimizer numbers them."""
    if optim_input is None:
        if optim is None:
            return [list(model.parameters())]
        return [list(group["params"]) for group in optim.param_groups]
    given: list[Any] = list(optim_input)
    if not given:
        raise ValueError("optim_input has no parameters: give what the optimizer was made with")
    if all(isinstance(each, torch.Tensor) for each in given):
        return [given]
    if not all(isinstance(each, Mapping) and "params" in each for each in given):
        raise TypeError('optim_input is a list of parameters, or of groups: dicts with "params"')
    return [
        [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"])
        for each in given
    ]


def to_names(
    state_dict: Mapping[str, Any], model: nn.Module, groups: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """From numbers. The groups stay as they are saved, each in the optimizer's order."""
    names = _Names(model)
    order = [names.one_of(parameter) for group in groups for parameter in group]
    numbers = {
        *state_dict["state"],
        *(n for group in state_dict.get("param_groups", ()) for n in group["params"]),
    }
    strange = [n for n in numbers if not (isinstance(n, int) and 0 <= n < len(order))]
    if strange:
        raise StateMismatch(
            f"the state has the parameter numbers {_listed(strange)}, and the optimizer has {len(order)} parameters: give the optimizer or the "
            f"optim_input that the state is from"
        )
    found: dict[str, Any] = {"state": {}}
    for n, state in state_dict["state"].items():
        _put(found["state"], order[n], state, f"parameter {n}", order[n])
    if "param_groups" in state_dict:
        found["param_groups"] = [
            {**_options(group), "params": [order[n] for n in group["params"]]}
            for group in state_dict["param_groups"]
        ]
    return found


def to_numbers(
    state_dict: Mapping[str, Any], model: nn.Module, groups: Sequence[Sequence[Any]], *, regroup: bool
) -> dict[str, Any]:
    """From names, to the numbers that an optimizer with these groups would have.

    torch's optimizers match groups by their place alone. So if `regroup`, the groups that come out are those of the optimizer, in its order, each
    with the options that its parameters were saved with. Otherwise they are those of the state.
    """
    names = _Names(model)
    numbers: dict[str, int] = {}
    for group in groups:
        for parameter in group:
            number = len(numbers)
            numbers[names.one_of(parameter)] = number
    saved_groups = state_dict.get("param_groups")
    own = names.aliases
    unknown = [
        name
        for name in dict.fromkeys(
            [*state_dict["state"], *(n for each in saved_groups or () for n in each["params"])]
        )
        if own.get(name, name) not in numbers
    ]
    if unknown:
        raise StateMismatch(
            f"the state has {_listed(unknown)}, which the optimizer does not step: give the model and optimizer that are to load it, or "
            f"leave these out of the state"
        )
    found: dict[str, Any] = {"state": {}}
    for name, state in state_dict["state"].items():
        _put(found["state"], numbers[own.get(name, name)], state, repr(name), own.get(name, name))
    if saved_groups is None:
        return found
    if not regroup:
        found["param_groups"] = [
            {
                **_options(group),
                "params": sorted({numbers[own.get(name, name)] for name in group["params"]}),
            }
            for group in saved_groups
        ]
        return found
    home = {own.get(name, name): i for i, each in enumerate(saved_groups) for name in each["params"]}
    found["param_groups"] = []
    first = 0
    for place, group in enumerate(groups):
        options = _options_of(place, [names.one_of(parameter) for parameter in group], saved_groups, home)
        found["param_groups"].append({**options, "params": list(range(first, first + len(group)))})
        first += len(group)
    return found


class _Names:
    """The names of a model's parameters, without those of wrappers. `aliases` are those that come second."""

    def __init__(self, model: nn.Module) -> None:
        self.aliases: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._flat: dict[int, list[str]] = {}
        owners: dict[str, int] = {}
        if "torch.distributed.fsdp" in sys.modules:
            from farstep.state.adapters.fsdp1 import flat_parameters

            for flat in flat_parameters(model):
                self._flat[id(flat.parameter)] = list(flat.layout.names)
                self._names.update((id(p), name) for name, p in flat.originals.items())
                self.aliases.update(flat.aliases)
        for raw, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in self._flat:
                continue
            name = clean_name(model, raw)
            if owners.setdefault(name, id(parameter)) != id(parameter):
                raise StateMismatch(
                    f"two parameters of the model have the name {name!r} when what wrappers put into names is left out: rename one of the modules"
                )
            first = self._names.setdefault(id(parameter), name)
            if first != name:
                self.aliases[name] = first

    def one_of(self, parameter: Any) -> str:
        name = self._names.get(id(parameter))
        if name is not None:
            return name
        flat = self._flat.get(id(parameter))
        if flat is None:
            raise StateMismatch(
                f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that the model does not have: give the model that it steps"
            )
        if len(flat) == 1:
            return flat[0]
        raise StateMismatch(
            f"the optimizer steps a flat parameter, which has the names {_listed(flat)} and one number: full_optim_state_dict and "
            f"optim_state_dict_to_load turn its state into that of each, and back"
        )


def _put(states: dict[Any, Any], key: Any, state: Any, given: str, name: str) -> None:
    """Two that are one parameter here have the same state, or one would be lost."""
    if key in states and not same(states[key], state):
        raise StateMismatch(
            f"{given} is parameter {name!r}, and the state has another for that already, which is not the same"
        )
    states.setdefault(key, state)


def _options_of(
    place: int, names: Sequence[str], saved: Sequence[Mapping[str, Any]], home: Mapping[str, int]
) -> dict[str, Any]:
    """Those with which the parameters of a group were saved. They may have been grouped otherwise, as long as the options are the same."""
    missing = [name for name in names if name not in home]
    if missing:
        raise StateMismatch(
            f"group {place} of the optimizer has {_listed(missing)}, which is in no group of the state: torch's optimizers load all or nothing"
        )
    sources: dict[int, str] = {}
    for name in names:
        sources.setdefault(home[name], name)
    (first, one), *others = sources.items() or [(0, "")]
    options = _options(saved[first])
    for number, other in others:
        theirs = _options(saved[number])
        unlike = differing(options, theirs)
        if unlike:
            raise StateMismatch(
                f"group {place} of the optimizer has {one!r} and {other!r}, which were saved in groups with different {', '.join(unlike)}"
            )
    return options


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied(value) for key, value in options_of(group).items()}


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, values[:5]))
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"
