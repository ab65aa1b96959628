"""What an owner does for a DistributedOptimizer elsewhere: the functions that its messages name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.autograd.context import COUNTER_BITS
from farstep.autograd.link import link_of
from farstep.errors import OptimError
from farstep.optim import clip, states
from farstep.optim.groups import copied
from farstep.optim.local import Changes, LocalOptimizer, Spec, find_local
from farstep.rpc.current import current_agent, running
from farstep.rpc.rref import RRef, local_value_of

__all__: list[str] = []

Made = tuple[RRef[LocalOptimizer], int, dict[str, Any], dict[int, dict[str, Any]]]
"""What keeps the local optimizer, its number, the class's defaults, and the options of its groups."""


def _create(
    make: Callable[..., Optimizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: list[Spec],
    consistency: str,
) -> Made:
    agent = current_agent()
    agent.trust.check_callable(make)
    local = LocalOptimizer(agent, make, args, kwargs, specs, consistency)
    return RRef(local), local.id, dict(local.optimizer.defaults), copied(local.options)


def _add_group(id: int, spec: Spec) -> dict[str, Any]:
    local = find_local(id, current_agent())
    local.add_group(spec)
    return copied(local.options[spec[0]])  # type: ignore[no-any-return]


def _remove_group(id: int, number: int) -> None:
    find_local(id, current_agent()).remove_group(number)


def _step(
    id: int, context_id: int, close: bool, timeout_s: float, changes: Changes | None
) -> tuple[int, list[int] | None]:
    """Step, and return how many parameters had a gradient. With `close`, also drop this worker's part of the context, and return the
    workers that it would have told of its end."""
    agent = current_agent()
    local = find_local(id, agent)
    if close and running.caller != context_id >> COUNTER_BITS:
        raise OptimError(f"{local.where}: only the worker that opened context {context_id} may close it")
    stepped = local.step(context_id, changes, timeout_s)
    below = link_of(agent).hand_over(context_id) if close else None
    return stepped, None if below is None else list(below)


def _norms(id: int, context_id: int, norm_type: float) -> torch.Tensor:
    return clip.norms(find_local(id, current_agent()).gradients(context_id), norm_type)


def _scale(id: int, context_id: int, coefficient: torch.Tensor) -> None:
    find_local(id, current_agent()).change_gradients(context_id, clip.scaling(coefficient))


def _clamp(id: int, context_id: int, clip_value: float) -> None:
    find_local(id, current_agent()).change_gradients(context_id, clip.clamping(clip_value))


def _state(id: int, timeout_s: float) -> tuple[states.States, dict[int, dict[str, Any]]]:
    return states.read(find_local(id, current_agent()), timeout_s)


def _state_rrefs(
    id: int, timeout_s: float
) -> tuple[dict[str, RRef[states.State]], dict[int, dict[str, Any]]]:
    found, drift = _state(id, timeout_s)
    return {name: RRef(state) for name, state in found.items()}, drift


def _states_of(rrefs: list[RRef[states.State]]) -> list[states.State]:
    return [local_value_of(rref) for rref in rrefs]


def _prepare(
    id: int, options: dict[int, dict[str, Any]], given: dict[str, Any], kept: list[str], timeout_s: float
) -> None:
    """The first half of loading: everything that can fail. `given` holds states, or references to them; `kept` names stay as they are."""
    agent = current_agent()
    states.prepare(find_local(id, agent), options, _fetched(given, timeout_s), set(kept), timeout_s)


def _fetched(given: dict[str, Any], timeout_s: float) -> states.States:
    """Referenced states, straight from those who have them, in one call each. What this worker has itself is not copied here."""
    agent = current_agent()
    by_owner: dict[Any, dict[str, RRef[states.State]]] = {}
    found = dict(given)
    for name, state in given.items():
        if isinstance(state, RRef) and state.is_owner():
            found[name] = local_value_of(state)
        elif isinstance(state, RRef):
            by_owner.setdefault(state.owner(), {})[name] = state
    futures = {
        owner: agent.call_async(owner, _states_of, (list(rrefs.values()),), {}, timeout_s)
        for owner, rrefs in by_owner.items()
    }
    for owner, rrefs in by_owner.items():
        found.update(zip(rrefs, futures[owner].wait(), strict=True))
    return found


def _abandon(id: int) -> None:
    states.abandon(find_local(id, current_agent()))


def _commit(id: int, timeout_s: float) -> None:
    states.commit(find_local(id, current_agent()), timeout_s)
