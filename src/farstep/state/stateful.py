"""Objects with `state_dict` and `load_state_dict` inside an optimizer's state, such as preconditioners.

They are saved as what their `state_dict` returns, and loaded by their `load_state_dict`, as TorchRec's KeyedOptimizer does it.
They may lie in dicts, lists and tuples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from farstep.errors import StateMismatch
from farstep.state.optim_entries import copied

__all__ = ["Load", "has_stateful", "is_stateful", "loads_into", "saved_form", "saved_state"]

Load = Callable[[], None]
"""Loads one object. It has been tried on a copy of the object."""


def is_stateful(value: Any) -> bool:
    """True for an object that saves and loads its own state."""
    return (
        not isinstance(value, Tensor | type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def has_stateful(value: Any) -> bool:
    """True if it is such an object, or a dict, list or tuple with one inside."""
    if isinstance(value, dict):
        return any(map(has_stateful, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_stateful, value))
    return is_stateful(value)


def saved_form(value: Any) -> Any:
    """The value with each object's state dict in its place. The same value if there is no such object inside."""
    if not has_stateful(value):
        return value
    if is_stateful(value):
        return saved_form(value.state_dict())
    return _rebuilt(value, {key: saved_form(each) for key, each in _items(value)})


def saved_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved form of all that an optimizer keeps of one parameter."""
    if not any(not isinstance(value, Tensor) and has_stateful(value) for value in state.values()):
        return state
    return {key: saved_form(value) for key, value in state.items()}


def loads_into(now: Any, saved: Any, where: str) -> tuple[Any, list[Load]]:
    """The value that takes the place of `now`, with the same objects inside, and what loads them.

    Nothing is changed yet. Raises StateMismatch where the saved value does not fit; `where` says what it is the value of.
    """
    if is_stateful(now):
        if saved is now:
            return now, []
        return now, [_load_of(now, saved_form(saved), where)]
    if not has_stateful(now):
        return copied(saved), []
    kinds = dict if isinstance(now, dict) else list | tuple
    theirs = dict(_items(saved)) if isinstance(saved, kinds) else None
    ours = dict(_items(now))
    if theirs is None or theirs.keys() != ours.keys():
        raise StateMismatch(
            f"{where} is a {type(now).__name__} with {len(ours)} entries, some of them objects with load_state_dict, and the saved "
            f"state has {'a ' + type(saved).__name__ if theirs is None else 'other entries'}; nothing has been loaded"
        )
    parts = {key: loads_into(each, theirs[key], f"{where}[{key!r}]") for key, each in ours.items()}
    value = _rebuilt(now, {key: part for key, (part, _) in parts.items()})
    return value, [load for _, loads in parts.values() for load in loads]


def _load_of(target: Any, saved: Any, where: str) -> Load:
    """What loads one object. A copy of the object is loaded first: what it refuses, it refuses before anything is changed."""
    try:
        twin = copy.deepcopy(target)
    except Exception:
        twin = None  # it cannot be copied, so it cannot be tried either
    if twin is not None:
        try:
            twin.load_state_dict(copied(saved))
        except Exception as exc:
            raise StateMismatch(
                f"{where} is a {type(target).__name__}, whose load_state_dict does not take the saved state "
                f"({type(exc).__name__}: {exc}); nothing has been loaded"
            ) from exc

    def load() -> None:
        try:
            target.load_state_dict(copied(saved))
        except Exception as exc:
            raise StateMismatch(
                f"{where} is a {type(target).__name__}, whose load_state_dict failed ({type(exc).__name__}: "
                f"{exc}). It cannot be copied, so it could not be tried before. Other objects and tensors of the "
                f"optimizer may have been loaded already: load again before use"
            ) from exc

    return load


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if isinstance(value, dict) else enumerate(value))


def _rebuilt(value: Any, items: dict[Any, Any]) -> Any:
    """A container of the same type with these items."""
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update(items)
        return made
    if hasattr(value, "_fields"):
        return type(value)(*items.values())
    return type(value)(items.values())
