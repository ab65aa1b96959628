"""KeyedOptimizerWrapper: any optimizer, with its state by the names of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from farstep.optim import fast
from farstep.optim.fitting import State, fitted
from farstep.optim.groups import copied
from farstep.optim.keyed import KeyedOptimizer
from farstep.optim.loading import (
    KeyCheck,
    ObjectLoads,
    put,
    rehearse,
    restore_extras,
    untangled,
)
from farstep.optim.names import group_of, named, without_ties
from farstep.optim.state_dicts import rekey
from farstep.state.fresh import FreshObjects

__all__ = ["KeyedOptimizerWrapper"]


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any optimizer, with its state by the names of parameters.

    Args:
        params: name -> parameter, as for KeyedOptimizer, or pairs.
        optim_factory: makes the optimizer of a list of these parameters.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | Iterable[tuple[str, Any]],
        optim_factory: Callable[[list[Any]], Optimizer],
    ) -> None:
        params = named(params, "params")
        optimizer = optim_factory(list(without_ties(params)[0].values()))
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{optim_factory!r} made a {type(optimizer).__name__}, and not a torch.optim.Optimizer"
            )
        self._optimizer = optimizer
        self._begin(params, optimizer, optimizer.defaults)
        self._refuse_strangers()

    @property
    def _stepper(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the optimizer; returns the closure's loss."""
        # A class of a user's may take no closure.
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group: "params", a list of names, parameters, or (name, parameter) pairs of new ones, and options."""
        group, new = self._group(param_group)
        self._optimizer.add_param_group(group)
        self._params.update(new)

    def _group(self, given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return group_of(given, self.params, self.aliases)

    def _read(self) -> dict[str, Any]:
        names = [name for group in self._named_groups() for name in group["param_names"]]
        return rekey(self._optimizer.state_dict(), names, type(self._optimizer).__name__)

    def _prepare(self, saved: Mapping[str, Any], strict: bool) -> list[Callable[[], None]]:
        plan = self._plan(saved, strict)
        optimizer = self._optimizer
        is_torchs = fast.is_torchs(optimizer)
        live = self._live_ids()
        states: dict[int, State] = {}
        objects: dict[Any, ObjectLoads] = {}
        fresh = FreshObjects(optimizer)
        # A class with a state_dict of its own may save its objects itself.
        has_own = type(optimizer).state_dict is not Optimizer.state_dict
        shown = optimizer.state_dict()["state"] if has_own else None
        groups: list[dict[str, Any]] = []
        positions = itertools.count()
        for number, group in enumerate(self._named_groups()):
            places = []
            check = KeyCheck(optimizer, plan.options[number])
            for name, position in zip(group["param_names"], positions, strict=False):
                places.append(position)
                parameter = self.params[name]
                old = self.state.get(parameter) or {}
                if name in plan.kept:
                    new = dict(old)
                else:
                    new = fitted(optimizer, name, parameter, plan.states.get(name), old) or {}
                    if new and strict:
                        check(name, parameter, new, old.keys())
                    elif new:
                        # Of another class's state nothing may be left: then the parameter keeps its own.
                        new = check.known(name, parameter, new) or dict(old)
                if new:
                    shown_now = old if shown is None else shown.get(position, {})
                    loads = objects[parameter] = ObjectLoads(
                        name, shown_now or (fresh.of(parameter, new) if not old else {}), new
                    )
                    others = loads.others
                    others = untangled(others, old, live) if is_torchs else copied(others)
                    states[position] = {**others, **loads.values}
            groups.append({**copied(plan.options[number]), "params": places})
        packed = {"state": states, "param_groups": groups}
        rehearse(optimizer, packed)

        def commit() -> None:
            before = dict(optimizer.state)
            optimizer.load_state_dict(packed)
            if is_torchs:  # they take the tensors that they are given
                restore_extras(optimizer, states)
                for parameter, state in optimizer.state.items():
                    old = before.get(parameter, {})
                    kept = objects[parameter].values if parameter in objects else {}
                    state.update(
                        {key: put(value, old.get(key)) for key, value in state.items() if key not in kept}
                    )
            for parameter, loads in objects.items():
                loads.load(optimizer.state.get(parameter))

        return [commit]

    def optim_parts(self) -> list[Optimizer]:
        """For farstep.state: whose state it is."""
        return [self._optimizer]

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self._optimizer!r}"
