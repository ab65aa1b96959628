"""KeyedOptimizer: state by the names of parameters, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

from torch.optim import Optimizer

from farstep.dist import operation
from farstep.errors import StateMismatch
from farstep.optim import adapters
from farstep.optim.fitting import State, attributes_of, fitted
from farstep.optim.groups import copied, options_of
from farstep.optim.loading import ObjectLoads, put, refuse_keys, untangled
from farstep.optim.names import without_ties
from farstep.optim.state_dicts import Plan, by_its_names, check_names, plan_load, translated
from farstep.state.fresh import FreshObjects, fresh_states
from farstep.state.stateful import saved_state

__all__ = ["KeyedOptimizer", "Rename"]

Rename = Mapping[str, str] | Callable[[str], str]
"""A name in the state -> the name of that parameter here. In a mapping, names that stay the same are left out."""


class Source(Protocol):
    """Who has the state, by parameter, and the groups. They are always asked, so that both are seen as they are now."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> Any: ...


class KeyedOptimizer(Optimizer):
    """An optimizer whose state is saved and loaded by the names of its parameters. To be subclassed, with a `step`.

    Args:
        params: name -> parameter: a tensor, DTensor or ShardedTensor. A tensor with several names is known by the first; state that was saved
            under another loads all the same.
        state: parameter -> what is remembered of it. The keys are parameters.
        param_groups: dicts with "params", a list of parameters, and options.

    `state_dict()` has no "param_groups" unless `save_param_groups(True)`: options are often set anew in each run.
    """

    _state_is_by_parameter = True
    """See `farstep.state.optim_roster.has_own_state_dict`."""

    def __init__(
        self,
        params: Mapping[str, Any],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        self._begin(params, SimpleNamespace(state=state, param_groups=param_groups), {})
        known = {id(p) for p in self.params.values()}
        if any(id(key) not in known for key in state):
            strangers = [key for key in state if id(key) not in known]
            raise ValueError(f"the keys of state must be parameters, and these are not: {strangers}")
        self._refuse_strangers()

    def _begin(self, params: Mapping[str, Any], source: Source, defaults: Mapping[str, Any]) -> None:
        self._source: Any = source
        self._params, self._aliases = without_ties(params)
        self._saves_groups = False
        # What an optimizer has when it is unpickled: its hooks. The constructor's part, groups and state, is with the source.
        Optimizer.__setstate__(self, {"defaults": dict(defaults)})

    def _refuse_strangers(self) -> None:
        known = {id(p) for p in self.params.values()}
        for number, group in enumerate(self.param_groups):
            if any(id(p) not in known for p in group["params"]):
                raise ValueError(f"group {number} has a parameter without a name: it is not in `params`")

    @property
    def params(self) -> Mapping[str, Any]:
        """Name -> parameter."""
        return self._params

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of parameters that have several -> the name by which their state is saved."""
        return self._aliases

    @property
    def param_groups(self) -> Any:
        return self._source.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._source.param_groups = groups

    @property
    def state(self) -> Any:
        return self._source.state

    @state.setter
    def state(self, state: Any) -> None:
        self._source.state = state

    def add_param_group(self, param_group: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} has the groups that it was made with")

    def save_param_groups(self, save: bool) -> None:
        """Whether options are part of the state, when it is saved and when it is loaded."""
        self._saves_groups = save

    @property
    def saves_param_groups(self) -> bool:
        return self._saves_groups

    # -- before the first step ----------------------------------------------------------------------------

    @operation("init_state")
    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Make the state that the first step would make, for parameters that have none, so that it can be loaded in place.

        Parameters, gradients, options and counters stay as they are, and training goes on as it would have without. Frozen parameters get no
        state. Some classes take the learning rate into their state: make schedulers before.
        """
        names = {self.aliases.get(name, name) for name in sparse_grad_parameter_names or ()}
        unknown = [name for name in names if name not in self.params]
        if unknown:
            raise ValueError(f"sparse_grad_parameter_names has names of no parameter: {', '.join(unknown)}")
        self._init_state(names)

    def _init_state(self, sparse: Collection[str]) -> None:
        ids = frozenset(id(self.params[name]) for name in sparse)
        for parameter, state in fresh_states(self._stepper, ids).items():
            self.state[parameter] = state

    @property
    def _stepper(self) -> Optimizer:
        """Whose `step` it is."""
        return self

    # -- saving -------------------------------------------------------------------------------------------

    @operation("state_dict")
    def state_dict(self) -> dict[str, Any]:
        """{"state": {name: {...}}}, and {"param_groups": [{option: value, "params": [names]}]} if they are saved.

        The tensors are the optimizer's own, so that a checkpoint can be read right into them. Options are copies. An object in the
        state that has `state_dict` and `load_state_dict` is saved as its state dict, and loaded by its `load_state_dict`.
        """
        adapters.run_state_dict_pre_hooks(self)
        saved = self._read()
        saved["state"] = {name: dict(saved_state(state)) for name, state in saved["state"].items()}
        if self.saves_param_groups:
            saved["param_groups"] = [
                {key: copied(value) for key, value in group.items()} for group in saved["param_groups"]
            ]
        else:
            del saved["param_groups"]
        return adapters.run_state_dict_post_hooks(self, saved)

    def _read(self) -> dict[str, Any]:
        """What is saved, by name, and nothing copied."""
        names = {id(p): name for name, p in self.params.items()}
        return {
            "state": {names[id(p)]: state for p, state in self.state.items()},
            "param_groups": [
                {**options_of(group), "params": group["param_names"]} for group in self._named_groups()
            ],
        }

    def _named_groups(self) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in self.params.items()}
        return [
            {**options_of(group), "param_names": [names[id(p)] for p in group["params"]]}
            for group in self.param_groups
        ]

    # -- loading ------------------------------------------------------------------------------------------

    @operation("load_state_dict")
    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, rename: Rename | None = None
    ) -> None:
        """Load what `state_dict` gave, whatever the groups were, into tensors that are there, or new ones.

        `strict`: the names must be the same; only frozen parameters may be missing. Otherwise parameters that are missing keep their state, and
        what is not known here is left out; some name must be the same. `rename` says what the names in the state are here.
        StateMismatch says what does not fit, and then nothing has been changed.
        """
        with self._together("loading the optimizer's state"):
            state_dict = adapters.run_load_state_dict_pre_hooks(self, dict(state_dict))
            saved = self._understood(state_dict, strict, rename)
        for commit in self._prepare(saved, strict):
            commit()
        self._after_load()

    def post_load_state_dict(self) -> None:
        """For subclasses: called when a state has been loaded."""

    def _together(self, doing: str) -> AbstractContextManager[None]:
        """For an optimizer over several ranks: what fails on one fails on all."""
        return nullcontext()

    def _after_load(self) -> None:
        self.post_load_state_dict()
        adapters.run_load_state_dict_post_hooks(self)

    def _understood(
        self, state_dict: Mapping[str, Any], strict: bool, rename: Rename | None
    ) -> dict[str, Any]:
        """The state by the names that the parameters have here; these are checked."""
        saved = dict(by_its_names(state_dict))
        if not self.saves_param_groups:
            saved["param_groups"] = [{"params": list(saved["state"])}] if "state" in saved else []
        if isinstance(rename, Mapping):
            names = {name for group in saved["param_groups"] for name in group["params"]}
            unknown = [name for name in rename if name not in names | set(saved["state"])]
            if strict and unknown:
                are_prefixes = any(str(name).startswith(str(key)) for key in unknown for name in names)
                raise StateMismatch(
                    f"rename has names that the state does not have: {', '.join(unknown)}. Nothing has been loaded"
                    + (". Whole names are wanted; for prefixes give a function" if are_prefixes else "")
                )
            new_names = dict(rename)
            saved = translated(saved, _checked(lambda name: new_names.get(name, name)))
        elif rename is not None:
            saved = translated(saved, _checked(rename))
        saved = translated(saved, lambda name: self.aliases.get(name, name), tied=True)
        ours = [name for group in self._named_groups() for name in group["param_names"]]
        theirs = [name for group in saved["param_groups"] for name in group["params"]]
        check_names(ours, [*theirs, *saved["state"]], self._may_miss(), strict=strict, has_rename=True)
        return saved

    def _may_miss(self) -> set[str]:
        """Parameters of which nothing need be saved: frozen ones; and where groups are not saved, those that have no state."""
        return {
            name
            for name, p in self.params.items()
            if not p.requires_grad or not (self.saves_param_groups or self.state.get(p))
        }

    def _prepare(self, saved: Mapping[str, Any], strict: bool) -> list[Callable[[], None]]:
        """Check everything. What is returned puts it in place, and does not fail."""
        plan = self._plan(saved, strict)
        found: dict[Any, State] = {}
        loads: list[tuple[Any, ObjectLoads]] = []
        fresh = FreshObjects(self._stepper)
        live = self._live_ids()
        for name, state in plan.states.items():
            parameter = self.params[name]
            old = self.state.get(parameter) or {}
            new = fitted(self, name, parameter, state, old) or {}
            if strict and old and old.keys() != new.keys():
                refuse_keys(name, old.keys() - new.keys(), new.keys() - old.keys())
            objects = ObjectLoads(name, old or fresh.of(parameter, new), new)
            loads.append((parameter, objects))
            found[parameter] = untangled(objects.others, old, live)

        def commit() -> None:
            for parameter, new in found.items():
                old = self.state.get(parameter)
                if old is None:
                    self.state[parameter] = {key: copied(value) for key, value in new.items()}
                else:
                    old.update({key: put(value, old.get(key)) for key, value in new.items()})
            for parameter, objects in loads:
                objects.load(self.state[parameter])
            for group, options in zip(self.param_groups, plan.options, strict=True):
                group.update(copied(options))

        return [commit]

    def _plan(self, saved: Mapping[str, Any], strict: bool) -> Plan:
        stepper = self._stepper
        return plan_load(
            type(stepper), stepper.defaults, self._named_groups(), saved, strict, self._may_miss()
        )

    def _live_ids(self) -> set[int]:
        return {id(value) for state in self.state.values() for value in state.values()}

    def __getstate__(self) -> dict[str, Any]:
        return attributes_of(self)


def _checked(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        new = rename(name)
        if not isinstance(new, str):
            raise TypeError(
                f"rename gave {new!r} for {name!r}, and a name is wanted: the same one, if it stays. Nothing has been loaded"
            )
        return new

    return renamed
