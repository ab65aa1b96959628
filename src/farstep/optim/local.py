"""The owner's side: one ordinary optimizer over those of the parameters that live here."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from farstep.autograd.link import link_of
from farstep.autograd.locks import ParameterLocks, held
from farstep.errors import OptimError
from farstep.optim import fast
from farstep.optim.groups import NOT_OPTIONS, copied, differ, options_of
from farstep.optim.shadow import follow, give_back, shadow_of
from farstep.rpc.current import running
from farstep.rpc.rref import RRef, local_value_of
from farstep.state.first_step import needs_closure

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["Changes", "LocalOptimizer", "Spec", "find_local", "step_locks"]

Spec = tuple[int, list[str], list[RRef[Any]], dict[str, Any]]
"""This owner's share of a group: the group's number, names, references, and the options that the user gave."""
Changes = dict[int, tuple[dict[str, Any], list[str] | None]]
"""Group number -> options that are new or have changed, and those that are gone; None: all others are."""

step_locks = ParameterLocks()
_all: weakref.WeakValueDictionary[int, LocalOptimizer] = weakref.WeakValueDictionary()
"""A step names its optimizer by number: that costs nothing to send. Only the worker that had it made may name it; and what keeps the
optimizer is their reference."""


def find_local(id: int, agent: Agent) -> LocalOptimizer:
    """The optimizer of that number, for the worker that calls."""
    local = _all.get(id) if type(id) is int else None
    if local is None or local.agent is not agent or local.maker != running.caller:
        raise OptimError(
            f"worker {agent.info.name!r} has no part {id} of a DistributedOptimizer: it was dropped, or this is another process "
            f"than the one that made it. Make a new DistributedOptimizer"
        )
    return local


@dataclass
class Member:
    """A parameter, and what the optimizer sees of it."""

    name: str
    parameter: torch.Tensor
    shadow: torch.Tensor


class LocalOptimizer:
    """Made, used and dropped by one DistributedOptimizer. Calls for it run on any thread; its locks keep them apart."""

    def __init__(
        self,
        agent: Agent,
        make: Callable[..., Optimizer],
        args: Any,
        kwargs: Any,
        specs: list[Spec],
        consistency: str,
    ) -> None:
        self.agent = agent
        self.maker = running.caller
        """The rank of the worker that had it made."""
        self._consistency = consistency
        self.numbers: list[int] = []
        """Of each of the optimizer's groups: its number among the caller's."""
        self.options: dict[int, dict[str, Any]] = {}
        """Group number -> options as the caller has them."""
        self.chosen: list[dict[str, bool]] = []
        """Of each group: what this worker has set beyond that. See `fast`."""
        self.members: list[list[Member]] = []
        _refuse_closures(make)
        for number, names, rrefs, _ in specs:
            self._take(number, names, rrefs)
        given: list[Any] = [
            {"params": [m.shadow for m in members], **options}
            for members, (_, _, _, options) in zip(self.members, specs, strict=True)
        ]
        if len(given) == 1 and len(given[0]) == 1:
            given = given[0]["params"]  # some classes take nothing else
        self.optimizer = make(given, *args, **kwargs)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"{make!r} made a {type(self.optimizer).__name__}, and not a torch.optim.Optimizer"
            )
        _refuse_closures(type(self.optimizer))
        made = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        if made != [[id(m.shadow) for m in members] for members in self.members]:
            raise OptimError(
                f"{getattr(make, '__name__', make)} has put the parameters into groups, or an order, of its own, so that neither options nor "
                f"state could be told apart. Give the groups to DistributedOptimizer: [{{'params': ..., 'lr': ...}}, ...]"
            )
        self._copies_gradients = not fast.is_torchs(self.optimizer)
        self.pending: tuple[Optimizer, list[dict[str, bool]], dict[int, dict[str, Any]]] | None = None
        """What `prepare` has loaded and `commit` will put in place."""
        self._settle()
        self.id = secrets.randbits(62)
        _all[self.id] = self

    @property
    def where(self) -> str:
        return f"{type(self.optimizer).__name__} on worker {self.agent.info.name!r}"

    # -- groups -------------------------------------------------------------------------------------------

    def add_group(self, spec: Spec) -> None:
        number, names, rrefs, options = spec
        with self.locked("adding a group to", self.agent.rpc_timeout):
            self._take(number, names, rrefs)
            try:
                shadows = [m.shadow for m in self.members[-1]]
                self.optimizer.add_param_group({"params": shadows, **options})
            except BaseException:
                self.numbers.pop()
                self.members.pop()
                raise
            self._settle()

    def remove_group(self, number: int) -> None:
        """Undo the last `add_group`, since another owner could not do it, or this one did not answer in time."""
        with self.locked("removing a group from", self.agent.rpc_timeout):
            if self.numbers and self.numbers[-1] == number:
                self.numbers.pop()
                self.members.pop()
                self.optimizer.param_groups.pop()
                self.chosen.pop()
                del self.options[number]
                self._settle()

    def _take(self, number: int, names: list[str], rrefs: list[RRef[Any]]) -> None:
        known = {id(m.parameter): m.name for m in itertools.chain.from_iterable(self.members)}
        members = []
        for name, rref in zip(names, rrefs, strict=True):
            parameter = self._checked(name, local_value_of(rref))
            if id(parameter) in known:
                raise ValueError(
                    f"{known[id(parameter)]!r} and {name!r} are the same parameter on worker {self.agent.info.name!r}: some parameters "
                    f"appear more than once; a parameter can be given only once"
                )
            known[id(parameter)] = name
            members.append(Member(name, parameter, shadow_of(parameter, self._consistency)))
        self.numbers.append(number)
        self.members.append(members)

    def _checked(self, name: str, value: Any) -> torch.Tensor:
        where = f"parameter {name!r} on worker {self.agent.info.name!r}"
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"optimizer can only optimize Tensors, but {where} is a {torch.typename(value)}; for a module, give "
                f"parameter_rrefs(module_rref)"
            )
        if not value.is_leaf:
            raise ValueError(f"can't optimize a non-leaf Tensor: {where} was computed from others")
        return value

    def _settle(self) -> None:
        """After a change of groups: which locks, and for a new group, how the caller will see its options, and which implementation."""
        self._all_members = list(itertools.chain.from_iterable(self.members))
        self._locks = step_locks.of([m.parameter for m in self._all_members])
        for position, number in enumerate(self.numbers):
            if number not in self.options:
                group = self.optimizer.param_groups[position]
                self.options[number] = copied(options_of(group))
                group.update(
                    copied(options_of(group))
                )  # a tensor that the caller, on this same worker, may change
                self.chosen.append({})
                self._choose(position)

    def _choose(self, position: int) -> None:
        group = self.optimizer.param_groups[position]
        for key in self.chosen[position]:
            group[key] = None
        self.chosen[position] = fast.choose(self.optimizer, group)
        group.update(self.chosen[position])

    def change(self, changes: Changes) -> None:
        for number, (new, gone) in changes.items():
            if number not in self.numbers or new.keys() & set(NOT_OPTIONS):
                raise OptimError(f"{self.where} has been told of options that it cannot have")
            if gone is None:
                gone = [key for key in self.options[number] if key not in new]
            position = self.numbers.index(number)
            group = self.optimizer.param_groups[position]
            for key in self.chosen[position]:
                group[key] = None
            self.chosen[position] = {}
            group.update(copied(new))
            for key in gone:
                group.pop(key, None)
                self.options[number].pop(key, None)
            self.options[number].update(copied(new))
            self._choose(position)

    def drift(self) -> dict[int, dict[str, Any]]:
        """The options that the class itself has changed, of each group."""
        found: dict[int, dict[str, Any]] = {}
        for number, group, chosen in zip(self.numbers, self.optimizer.param_groups, self.chosen, strict=True):
            told = self.options[number]
            found[number] = {
                key: copied(value)
                for key, value in options_of(group).items()
                if key not in chosen and (key not in told or differ(value, told[key]))
            }
        return found

    # -- steps --------------------------------------------------------------------------------------------

    def step(self, context_id: int, changes: Changes | None, timeout_s: float) -> int:
        """Apply the gradients of a context. Where the context has not been, there are none. Returns how many parameters had one."""
        gradients = self._gradients(context_id)
        given: list[Member] = []
        with self.locked("a step of", timeout_s):
            if changes:
                self.change(changes)
            try:
                for position, members in enumerate(self.members):
                    for member in members:
                        gradient = gradients.get(member.parameter)
                        if gradient is not None:
                            if follow(member.shadow, member.parameter):
                                self._choose(position)
                            given.append(member)
                            fitting = fast.fitting(gradient, member.shadow)
                            if fitting is gradient and self._copies_gradients:
                                fitting = gradient.clone()  # who knows what the class does to it
                            member.shadow.grad = fitting
                with fast.only_what_fused_takes(self.optimizer):
                    self.optimizer.step()
                if self._consistency == "strict":
                    for member in given:
                        increment_version(member.shadow)  # a fused update does not
            finally:
                for member in given:
                    member.shadow.grad = None
                    give_back(member.shadow, member.parameter)
        return len(given)

    def locked(self, what: str, timeout_s: float) -> Any:
        # A little less than the caller's own patience, so that it learns what was waited for.
        return held(self._locks, f"{what} {self.where}", timeout_s * 0.9, OptimError)

    def _gradients(self, context_id: int) -> Mapping[torch.Tensor, torch.Tensor]:
        context = link_of(self.agent).find(context_id)
        return {} if context is None else context.gradients.snapshot()

    def gradients(self, context_id: int) -> list[torch.Tensor]:
        """Those of this optimizer's parameters, in their order."""
        found = self._gradients(context_id)
        return [found[m.parameter] for m in self._all_members if m.parameter in found]

    def change_gradients(
        self, context_id: int, function: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> None:
        """See `Gradients.change`."""
        context = link_of(self.agent).find(context_id)
        if context is not None:
            with torch.no_grad():
                context.gradients.change([m.parameter for m in self._all_members], function)


def _refuse_closures(kind: Any) -> None:
    """A step is one message: there is no closure that could run the forward pass again on all workers."""
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        return
    if needs_closure(kind):
        raise TypeError(
            f"{kind.__name__}.step needs a closure that computes the loss again, several times in one step; a DistributedOptimizer "
            f"steps once, with the gradients of a context. Use another class, such as torch.optim.Adam"
        )
