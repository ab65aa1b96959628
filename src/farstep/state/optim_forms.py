"""The forms in which a state may be given, made into one: parts, each a state by names, with its groups and the rank that saved it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from farstep.errors import StateMismatch

__all__ = [
    "MATCHED_BY_ORDER",
    "SavedPart",
    "are_numbers",
    "flattened",
    "is_nothing",
    "no_state",
    "numbers_named",
    "parts_of",
]

Named = Callable[[str], str]
"""A saved name -> the parameter's own here."""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One state dict, whose names are still those that were saved. `rank` is None if it does not say whose part it is."""

    state: Mapping[str, Mapping[str, Any]]
    groups: list[Mapping[str, Any]] | None
    rank: int | None


def is_nothing(given: Any) -> bool:
    """Whether a rank was given no part at all: None, or an empty list or dict."""
    return given is None or (isinstance(given, Mapping | Sequence) and not given)


def parts_of(given: Any, is_known: Callable[[str], bool]) -> list[SavedPart]:
    """One state dict, or those that several ranks saved. `is_known` tells a name of the model. Raises StateMismatch for anything else."""
    parts = [given] if isinstance(given, Mapping) else given
    if (
        not isinstance(parts, Sequence)
        or isinstance(parts, str)
        or not all(isinstance(p, Mapping) for p in parts)
    ):
        raise no_state(f"this is a {type(given).__name__}")
    return [_part(each, is_known) for each in parts]


def no_state(what: str) -> StateMismatch:
    return StateMismatch(
        f'{what}, and no state by the names of parameters, {{"state": ..., "param_groups": ...}}; nothing has been loaded. Where only the first '
        f"rank has one, all say broadcast_from_rank0=True, or the others give an empty list"
    )


def _part(given: Mapping[str, Any], is_known: Callable[[str], bool]) -> SavedPart:
    if "state" not in given:
        flattened = _unflattened(given, is_known)
        if flattened is None:
            raise no_state(f"this is a dict with {_keys_of(given)}")
        given = flattened
    state, groups, rank = given["state"], given.get("param_groups"), given.get("rank")
    if not isinstance(state, Mapping):
        raise no_state(f'this has a {type(state).__name__} as its "state"')
    if rank is not None and not isinstance(rank, int):
        raise StateMismatch(
            f'the "rank" of a part is the number of the rank that saved it, not {rank!r}; nothing has been loaded'
        )
    checked = _checked_groups(groups)
    keys = [*state, *(name for group in checked or () for name in group["params"])]
    if any(not isinstance(key, str) for key in keys):
        state, checked = _by_its_names(state, checked)
    for name, values in state.items():
        if not isinstance(values, Mapping):
            raise StateMismatch(
                f"the state of parameter {name!r} is a {type(values).__name__}, and not a dict; nothing has been loaded"
            )
    return SavedPart(state, checked, rank)


def _keys_of(given: Mapping[str, Any]) -> str:
    keys = list(given)
    shown = ", ".join(map(repr, keys[:8])) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
    inner = [key for key, value in given.items() if isinstance(value, Mapping) and "state" in value]
    return f"the keys {shown}" + (f" (under {inner[0]!r} there is one: give that)" if inner else "")


def _checked_groups(groups: Any) -> list[Mapping[str, Any]] | None:
    if groups is None:
        return None
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise StateMismatch(
            f'"param_groups" is a list of groups, not a {type(groups).__name__}; nothing has been loaded'
        )
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not _is_listing(group.get("params")):
            raise StateMismatch(
                f'group {number} of "param_groups" is a dict of options, with the names of its parameters under "params", and this is '
                f"{'a ' + type(group).__name__ if not isinstance(group, Mapping) else 'without them'}; nothing has been loaded"
            )
    return list(groups)


def _is_listing(value: Any) -> TypeGuard[Collection[Any]]:
    return isinstance(value, list | tuple | set | frozenset)


def _by_its_names(
    state: Mapping[Any, Any], groups: list[Mapping[str, Any]] | None
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """An ordinary optimizer numbers its parameters. One that was made of `named_parameters()` keeps their names beside the numbers."""
    names: dict[Any, str] = {}
    for group in groups or ():
        own = group.get("param_names")
        if not _is_listing(own) or len(own) != len(group["params"]):
            names.clear()
            break
        names.update(zip(group["params"], own, strict=True))
    if (
        not names
        or not all(isinstance(name, str) for name in names.values())
        or any(key not in names for key in state)
    ):
        raise _numbered("an ordinary optimizer's numbers mean nothing elsewhere")
    renamed: list[Mapping[str, Any]] = [
        {**group, "params": [names[key] for key in group["params"]]} for group in groups or ()
    ]
    return {names[key]: values for key, values in state.items()}, renamed


def _numbered(why: str) -> StateMismatch:
    return StateMismatch(
        f"this state has numbers where parameters' names are wanted: {why}; nothing has been loaded. rekey_optim_state_dict, with "
        f"the model and the optimizer that the state is from, puts names in their place"
    )


MATCHED_BY_ORDER = (
    ". The state has numbers instead of names, so it was matched by the order of the parameters, which may "
    "have been another where it was saved. rekey_optim_state_dict, with the model and the optimizer that "
    "the state is from, puts names in their place"
)


def are_numbers(given: Any, named: Any) -> bool:
    """Whether `numbers_named` gave a state, or one of its parts, names by the order of parameters."""
    if isinstance(given, list | tuple):
        return any(are_numbers(a, b) for a, b in zip(given, named, strict=True))
    return named is not given


def numbers_named(
    given: Any, order: Callable[[], list[list[str]]], check: Callable[[str, Mapping[str, Any]], None]
) -> Any:
    """A state by the numbers of parameters, as `optimizer.state_dict()` has it, by names. Any other state as it is.

    `order` gives the names in the groups of the optimizer that is to load it. Raises StateMismatch where the groups do not match, and what
    `check` raises for a parameter's name and state.
    """
    if isinstance(given, list | tuple):
        return [numbers_named(each, order, check) for each in given]
    if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
        return given
    groups = _checked_groups(given.get("param_groups"))
    keys = [*given["state"], *(key for group in groups or () for key in group["params"])]
    has_names = groups is not None and all("param_names" in group for group in groups)
    if not keys or has_names or not all(type(key) is int for key in keys):
        return given
    ours = order()
    if groups is None:
        numbers = list(range(sum(map(len, ours))))
    else:
        if [len(group["params"]) for group in groups] != [len(names) for names in ours]:
            raise _numbered(
                f"its groups have {[len(group['params']) for group in groups]} parameters, and those of the optimizer "
                f"{[len(names) for names in ours]}, so that their order says nothing"
            )
        numbers = [number for group in groups for number in group["params"]]
    names = dict(zip(numbers, (name for names in ours for name in names), strict=True))
    strange = [key for key in given["state"] if key not in names]
    if strange:
        raise _numbered(f"it has state for parameter {strange[0]}, and the optimizer has {len(names)}")
    found = {**given, "state": {names[key]: values for key, values in given["state"].items()}}
    for name, values in found["state"].items():
        check(name, values)
    if groups is not None:
        found["param_groups"] = [
            {**group, "params": [names[key] for key in group["params"]]} for group in groups
        ]
    return found


# -- torch.distributed.checkpoint's flattened form --------------------------------------------------------


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by names as StateDictOptions(flatten_optimizer_state_dict=True) has it: one dict, in which each parameter has its own options."""
    found: dict[str, Any] = {}
    for name, values in state["state"].items():
        _flatten(found, f"state.{name}", values)
    for group in state["param_groups"]:
        for name in group["params"]:
            for option, value in group.items():
                if option not in ("params", "param_names"):
                    found[f"param_groups.{name}.{option}"] = value
    return found


def _flatten(found: dict[str, Any], head: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        is_nested = isinstance(value, dict) and value and all(type(k) is str and "." not in k for k in value)
        if is_nested:
            _flatten(found, f"{head}.{key}", value)
        else:
            found[f"{head}.{key}"] = value


def _unflattened(given: Mapping[str, Any], is_known: Callable[[str], bool]) -> dict[str, Any] | None:
    """`{"state.<name>.<key>": value, "param_groups.<name>.<option>": value}`, where each parameter has a group of its own; None if it is not that."""
    heads = ("state.", "param_groups.")
    if not given or not all(isinstance(key, str) and key.startswith(heads) for key in given):
        return None
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        head, rest = key.split(".", 1)
        name, last = _split(rest, is_known)
        values = (state if head == "state" else groups).setdefault(name, {})
        *outer, last = last.split(".") if head == "state" else [last]
        for each in outer:
            values = values.setdefault(each, {})
        values[last] = value
    for name, options in groups.items():
        options.pop("param_names", None)
        options["params"] = [name]
    return {"state": state, "param_groups": list(groups.values()) or None}


def _split(text: str, is_known: Callable[[str], bool]) -> tuple[str, str]:
    """A parameter's name, and what follows it. Either may have dots."""
    at = len(text)
    while (at := text.rfind(".", 0, at)) > 0:
        if is_known(text[:at]):
            return text[:at], text[at + 1 :]
    name, _, last = text.rpartition(".")
    return name, last
