"""DistributedOptimizer: the caller's side. It has the groups and their options; parameters, gradients and state stay with their owners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_not
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from farstep.autograd.link import link_of
from farstep.errors import AutogradError, OptimError, PayloadError, UnknownContext
from farstep.optim import adapters, calls, state_dicts
from farstep.optim.failures import named_error, step_error
from farstep.optim.gate import Gate
from farstep.optim.groups import Group, copied, differ, options_of, parse_group, parse_groups
from farstep.optim.local import Changes, LocalOptimizer, Spec
from farstep.optim.owners import Outcome, ask_owners
from farstep.optim.rref_groups import RREFS
from farstep.optim.shadow import CONSISTENCIES
from farstep.rpc.current import current_agent
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.options import UNSET_RPC_TIMEOUT
from farstep.rpc.rref import RRef

if TYPE_CHECKING:
    from farstep.autograd.context import Context

__all__ = ["DistributedOptimizer"]

log = logging.getLogger("farstep.optim")


@dataclass
class Owner:
    """A worker with some of the parameters, and what it was told last."""

    info: WorkerInfo
    rref: RRef[LocalOptimizer]
    """Keeps the local optimizer there, and lets it go with this one."""
    id: int
    names: dict[int, list[str]]
    """Group number -> its parameters there."""
    told: dict[int, dict[str, Any] | None]
    """Group number -> options as the owner has them; None where a message may or may not have reached it."""

    def forget(self) -> None:
        """Something went wrong: it is told everything anew."""
        self.told = dict.fromkeys(self.told)


class DistributedOptimizer(Optimizer):
    """An optimizer over parameters behind RRefs: one `optimizer_class` on each worker that owns some, stepping there.

    Args:
        optimizer_class: any `torch.optim.Optimizer` class that the owners can import.
        params_rref: RRefs; or (name, RRef) pairs, as `parameter_rrefs` gives; or a dict name -> RRef; or groups, dicts with "params" and
            options of their own. Parameters without a name are called "0", "1" and so on.
        args, kwargs: for `optimizer_class`, on each owner.
        consistency: "relaxed": a backward pass that another trainer runs during a step goes on, and sees weights as they were or as they are.
            "strict": it raises, as in torch.

    It is a `torch.optim.Optimizer`: `param_groups` holds the RRefs and the options. Options may be changed, by hand or by
    any scheduler, and go to the owners with the next step. `state` is empty here; see `state_dict`.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Any,
        *args: Any,
        consistency: str = "relaxed",
        **kwargs: Any,
    ) -> None:
        if consistency not in CONSISTENCIES:
            raise ValueError(f"consistency is one of {', '.join(CONSISTENCIES)}, not {consistency!r}")
        _check_class(optimizer_class)
        groups = parse_groups(params_rref, RREFS)
        self._agent = current_agent()
        self._make = (optimizer_class, args, kwargs)
        self._consistency = consistency
        self._owners: dict[WorkerInfo, Owner] = {}
        self._placed: list[Group] | None = None
        """The groups that the owners know. None while this is being made."""
        self._has_warned = False
        self._gate = Gate()
        """Steps are stopped while groups are added or a state is loaded or saved: each is
        several messages."""
        defaults, options = self._create(_by_owner(enumerate(groups)))
        # What every optimizer has; the groups are known better here.
        super().__init__([{"params": []}], defaults)
        self.param_groups = [_as_group(group, options[number]) for number, group in enumerate(groups)]
        self._placed = groups

    def _create(
        self, specs: Mapping[WorkerInfo, list[Spec]]
    ) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """Make the local optimizers. Where one cannot be made the others are dropped. Returns the defaults and each group's options."""
        args = {owner: (*self._make, each, self._consistency) for owner, each in specs.items()}
        outcome = self._ask(calls._create, args)
        if outcome.errors:
            raise named_error(outcome, "could not make its part")
        defaults: dict[str, Any] = {}
        options: dict[int, dict[str, Any]] = {}
        for owner, (rref, id, theirs, shares) in outcome.results.items():
            names = {number: share for number, share, _, _ in specs[owner]}
            self._owners[owner] = Owner(owner, rref, id, names, dict(shares))
            defaults = theirs
            options |= shares
        return defaults, options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: "params" as in the constructor, and options. Either all owners take it, or none does."""
        if self._placed is not None:
            with self._gate.stopped("add_param_group", self._agent.rpc_timeout):
                self._place(param_group, self._placed)

    def _place(self, param_group: dict[str, Any], placed: list[Group]) -> None:
        number = len(placed)
        group = parse_group(param_group, placed, RREFS)
        specs = _by_owner([(number, group)])
        old = {owner: each[0] for owner, each in specs.items() if owner in self._owners}
        new = {owner: each for owner, each in specs.items() if owner not in self._owners}
        options = self._add(old) if old else {}
        try:
            options = self._create(new)[1][number] if new else options
        except BaseException:
            self._remove(list(old), number)
            raise
        placed.append(group)
        self.param_groups.append(_as_group(group, options))

    def _add(self, specs: Mapping[WorkerInfo, Spec]) -> dict[str, Any]:
        outcome = self._ask(calls._add_group, {o: (self._owners[o].id, spec) for o, spec in specs.items()})
        number = next(iter(specs.values()))[0]
        if outcome.errors:
            self._remove(list(specs), number)  # one that did not answer in time may have it
            raise named_error(outcome, "did not take the group")
        options: dict[str, Any] = {}
        for owner, options in outcome.results.items():
            self._owners[owner].told[number] = options
            self._owners[owner].names[number] = specs[owner][1]
        return options

    def _remove(self, owners: list[WorkerInfo], number: int) -> None:
        self._ask(calls._remove_group, {owner: (self._owners[owner].id, number) for owner in owners})
        for owner in owners:
            self._owners[owner].told.pop(number, None)
            self._owners[owner].names.pop(number, None)

    # -- steps --------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self, context_id: int, *, close: bool = False, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Apply the gradients of a context, on every owner at once. A parameter without a gradient is left alone.

        With `close` each owner also drops its part of the context, so that its end costs no further message; nothing
        but the end may come after that. `StepError` says which owners did not step, and which did.
        """
        context = self._context(context_id, "step")
        with self._gate.passing():
            self._step(context_id, context, close, timeout)

    def _step(self, context_id: int, context: Context, close: bool, timeout: float) -> None:
        link = link_of(self._agent)
        # Another worker's context is not this one's to bring to an end.
        close = close and context.opener == self._agent.info.id
        seconds = self._agent.effective_timeout(timeout)
        told = self._told()
        args = {
            # This worker's own part is dropped where the context ends, and it must know whom to tell then.
            info: (
                owner.id,
                context_id,
                close and info != self._agent.info,
                seconds,
                _changes(owner.told, told[info]),
            )
            for info, owner in self._owners.items()
        }
        outcome = ask_owners(self._agent, calls._step, args, seconds)
        for owner in outcome.results:
            self._owners[owner].told = dict(told[owner])
        for owner in outcome.errors:
            self._owners[owner].forget()
        if close:
            handed = {
                owner.id: set(below) for owner, (_, below) in outcome.results.items() if below is not None
            }
            link.take_over(context, handed)
        if outcome.errors:
            raise step_error(outcome)
        if not self._has_warned and not any(stepped for stepped, _ in outcome.results.values()):
            self._has_warned = True
            log.warning(_NO_GRADIENT, context_id)

    def _context(self, context_id: int, what: str) -> Context:
        """For the method `what`: the context, if it is open, and not closed on an owner."""
        if not isinstance(context_id, int) or isinstance(context_id, bool):
            raise TypeError(
                f"{what} takes a context id, as in `with autograd.context() as context_id`, not {_described(context_id)}"
            )
        context = link_of(self._agent).find(context_id)
        if context is None:
            raise UnknownContext(context_id, f"{what} belongs")
        self._refuse_closed(context_id, context.handed_over - context._known_worker_ids())
        return context

    def _refuse_closed(self, context_id: int, closed: set[int]) -> None:
        names = [info.name for info in self._owners if info.id in closed]
        if names:
            raise AutogradError(
                f"context {context_id} is closed on {', '.join(names)}: an earlier step had close=True. Give close=True only to the "
                f"last step of a context"
            )

    def _told(self) -> dict[WorkerInfo, dict[int, dict[str, Any]]]:
        """What each owner will have been told: copies of the options of those groups that it has a share of.

        An option that has not changed keeps the copy that it has, so that a step with nothing new copies nothing.
        """
        placed = self._placed or []
        if len(self.param_groups) != len(placed) or any(
            len(group["params"]) != len(known.params) or any(map(is_not, group["params"], known.params))
            for group, known in zip(self.param_groups, placed, strict=True)
        ):
            raise OptimError(_GROUPS_HELP)
        copies: dict[tuple[int, str], Any] = {}
        result: dict[WorkerInfo, dict[int, dict[str, Any]]] = {}
        for info, owner in self._owners.items():
            mine: dict[int, dict[str, Any]] = {}
            for number, known in owner.told.items():
                now = {}
                before = known or {}
                for key, value in options_of(self.param_groups[number]).items():
                    if key in before and not differ(value, before[key]):
                        now[key] = before[key]
                    else:
                        if (number, key) not in copies:
                            copies[number, key] = copied(value)
                        now[key] = copies[number, key]
                mine[number] = now
            result[info] = mine
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients belong to their context, and go with it. The `.grad` of parameters is not this optimizer's."""

    # -- clipping -----------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        context_id: int,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> torch.Tensor:
        """Scale the context's gradients of all parameters together so that their norm is at most `max_norm`; returns the norm before.

        The same number as `torch.nn.utils.clip_grad_norm_` in one process. One message to each owner, and one more if they must be scaled.
        `farstep.optim.clip_grad_norm_` clips several optimizers by one norm.
        """
        norm_type = float(norm_type)
        norms = self._gradient_norms(context_id, norm_type, timeout)
        total = torch.linalg.vector_norm(norms, norm_type) if norms.numel() else torch.tensor(0.0)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients in context {context_id} is non-finite ({total.item()}), so they "
                f"cannot be clipped. Give error_if_nonfinite=False to scale them all the same"
            )
        coefficient = float(max_norm) / (total + 1e-6)
        if not coefficient >= 1.0:  # also where it is not a number
            self._scale_gradients(context_id, coefficient, timeout)
        return total

    def _gradient_norms(self, context_id: int, norm_type: float, timeout: float) -> torch.Tensor:
        """Of each gradient in the context."""
        parts = self._on_gradients("clip_grad_norm_", calls._norms, context_id, norm_type, timeout)
        found = [part for part in parts if part.numel()]
        return torch.cat(found) if found else torch.zeros(0)

    def _scale_gradients(self, context_id: int, coefficient: torch.Tensor, timeout: float) -> None:
        self._on_gradients("clip_grad_norm_", calls._scale, context_id, coefficient, timeout)

    def clip_grad_value_(
        self, context_id: int, clip_value: float, *, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Bring every number in the context's gradients of these parameters between -`clip_value` and `clip_value`."""
        self._on_gradients("clip_grad_value_", calls._clamp, context_id, float(clip_value), timeout)

    def _on_gradients(
        self, caller: str, function: Callable[..., Any], context_id: int, what: Any, timeout: float
    ) -> list[Any]:
        self._context(context_id, caller)
        outcome = self._ask(
            function, {o: (owner.id, context_id, what) for o, owner in self._owners.items()}, timeout
        )
        if outcome.errors:
            raise named_error(outcome, "did not clip its gradients")
        return list(outcome.results.values())

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self, *, sharded: bool = False, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
        """{"state": {name: {...}}, "param_groups": [{option: value, "params": [names]}]}: copies, by the parameters' names.

        With `sharded` the copies stay with the owners, and the names lead to RRefs of them.
        """
        adapters.run_state_dict_pre_hooks(self)
        seconds = self._agent.effective_timeout(timeout)
        function = calls._state_rrefs if sharded else calls._state
        args = {info: (owner.id, seconds) for info, owner in self._owners.items()}
        outcome = self._ask(function, args, timeout)
        if outcome.errors:
            raise named_error(outcome, "did not give its state")
        states: dict[str, Any] = {}
        for theirs, _ in outcome.results.values():
            states |= theirs
        drift = {owner.name: theirs for owner, (_, theirs) in outcome.results.items()}
        saved = state_dicts.build(self.param_groups, states, drift)
        return adapters.run_state_dict_post_hooks(self, saved)

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, *, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Load what `state_dict` gave, here or elsewhere, whichever workers had the parameters then.

        `strict`: the names must be the same, and the options must be some that the class has. Otherwise parameters that are missing keep their
        state, and what is not known here is left out. Options that are missing keep their value in any case. Everything is checked on all owners before anything is changed; where something does not fit, nothing is.
        """
        with self._gate.stopped("load_state_dict", self._agent.effective_timeout(timeout)):
            self._load(state_dict, strict, timeout)

    def _load(self, state_dict: dict[str, Any], strict: bool, timeout: float) -> None:
        self._commit_load(self._prepare_load(state_dict, strict, timeout), timeout)

    def _prepare_load(self, state_dict: dict[str, Any], strict: bool, timeout: float) -> state_dicts.Plan:
        """All that can fail, on all owners. Then comes `_commit_load` or `_abandon_load`; steps
        are stopped from before this to after that."""
        with self._gate.inside():  # hooks may add groups
            return self._prepared(state_dict, strict, timeout)

    def _prepared(self, state_dict: dict[str, Any], strict: bool, timeout: float) -> state_dicts.Plan:
        state_dict = adapters.run_load_state_dict_pre_hooks(self, state_dict)
        given = state_dicts.by_its_names(state_dict)
        seconds = self._agent.effective_timeout(timeout)
        plan = state_dicts.plan_load(self._make[0], self.defaults, self.param_groups, given, strict)
        args = {
            info: (owner.id, *state_dicts.share(plan, owner.names), seconds)
            for info, owner in self._owners.items()
        }
        outcome = self._ask(calls._prepare, args, timeout)
        if outcome.errors:
            self._ask(calls._abandon, {owner: (self._owners[owner].id,) for owner in outcome.results})
            raise named_error(outcome, "cannot load the state; nothing has been changed")
        return plan

    def _abandon_load(self) -> None:
        self._ask(calls._abandon, {info: (owner.id,) for info, owner in self._owners.items()})

    def _commit_load(self, plan: state_dicts.Plan, timeout: float) -> None:
        seconds = self._agent.effective_timeout(timeout)
        outcome = self._ask(
            calls._commit, {o: (owner.id, seconds) for o, owner in self._owners.items()}, timeout
        )
        for info in outcome.results:
            self._owners[info].told = {
                number: copied(plan.options[number]) for number in self._owners[info].told
            }
        for info in outcome.errors:
            self._owners[info].forget()
        for group, options in zip(self.param_groups, plan.options, strict=True):
            group.update(copied(options))
        if outcome.errors:
            raise named_error(outcome, "may not have loaded the state, though it fits; load it again")
        with self._gate.inside():
            adapters.run_load_state_dict_post_hooks(self)

    # -- messages -----------------------------------------------------------------------------------------

    def _ask(
        self,
        function: Callable[..., Any],
        args: Mapping[WorkerInfo, tuple[Any, ...]],
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Outcome:
        return ask_owners(self._agent, function, args, self._agent.effective_timeout(timeout))

    def __repr__(self) -> str:
        return f"{state_dicts.name_of_class(self._make[0])} on {', '.join(info.name for info in self._owners)}: {super().__repr__()}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: its parameters and their state are with their owners. Save its "
            "state_dict(), or make another one over the same RRefs"
        )


def _check_class(given: Any) -> None:
    if isinstance(given, Optimizer):
        name = type(given).__name__
        raise TypeError(
            f"optimizer_class is a class, and this is an optimizer made of one: give {name} itself, and its options "
            f"after the parameters, as in DistributedOptimizer({name}, params, lr=0.1)"
        )
    if not callable(given):
        raise TypeError(
            f"optimizer_class is a class such as torch.optim.SGD, not {_described(given)}: give the class itself"
        )
    if "<" in getattr(given, "__qualname__", ""):
        raise PayloadError(
            f"{given.__qualname__} cannot be sent to the owners of parameters: it is defined inside a function, and a message carries only "
            f"its name; define it at module level"
        )


def _described(value: Any) -> str:
    if value is None or isinstance(value, str):
        return repr(value)
    name = type(value).__name__
    return f"a {name}" + (": there are no closures here" if callable(value) else "")


_NO_GRADIENT = (
    "no parameter of this optimizer has a gradient in context %d; was the forward pass inside the `with`, "
    "and did backward run?"
)
_GROUPS_HELP = (
    "param_groups has other groups or parameters than the owners were told of. Groups are added with add_param_group, and cannot be "
    "taken away: to leave parameters out, make a new DistributedOptimizer (load_state_dict(state, strict=False) takes the state over)"
)


def _by_owner(groups: Any) -> dict[WorkerInfo, list[Spec]]:
    """Each owner's share of each group."""
    specs: dict[WorkerInfo, list[Spec]] = {}
    for number, group in groups:
        shares: dict[WorkerInfo, Spec] = {}
        for name, rref in zip(group.names, group.params, strict=True):
            spec = shares.setdefault(rref.owner(), (number, [], [], group.options))
            spec[1].append(name)
            spec[2].append(rref)
        for owner, spec in shares.items():
            specs.setdefault(owner, []).append(spec)
    return specs


def _as_group(group: Group, options: dict[str, Any]) -> dict[str, Any]:
    own = {key: copied(value) for key, value in options.items()}
    return {"params": list(group.params), "param_names": group.names, **own}


def _changes(before: dict[int, dict[str, Any] | None], now: dict[int, dict[str, Any]]) -> Changes | None:
    changes: Changes = {}
    for number, options in now.items():
        old = before[number]
        if old is None:
            changes[number] = options, None
            continue
        new = {key: value for key, value in options.items() if key not in old or old[key] is not value}
        gone = [key for key in old if key not in options]
        if new or gone:
            changes[number] = new, gone
    return changes or None
