"""The state that an optimizer has before its first step, which most classes make only in that step.

The class's own `step` runs on copies of the parameters, with gradients of zero, and the first value that it assigns to each piece of state is
kept: `state["exp_avg"] = zeros`, before the update changes it. A step that starts with that state does what it would do without.

Torch's own classes are known to work so (the tests show it for each), one parameter at a time, so that little memory is needed; two of them
need words of their own. Of others nothing is known: what was found is tried, against a first step without it, and refused if the two differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import OptimError
from farstep.state.first_step import (
    Records,
    State,
    attributes_of,
    first_state,
    needs_closure,
    step_without_hooks,
    zeros_like,
)
from farstep.state.known import is_torchs
from farstep.state.optim_entries import copied
from farstep.state.optim_schema import options_of
from farstep.state.same import same
from farstep.state.stateful import has_stateful, is_stateful, saved_form

__all__ = ["FreshObjects", "fresh_states"]


def fresh_states(
    optimizer: Optimizer, sparse: frozenset[int] = frozenset(), *, with_empty: bool = True
) -> dict[torch.Tensor, State]:
    """The state of each parameter that has none and is trained. `sparse`: the ids of those whose gradients are. Changes nothing.

    Without `with_empty`, parameters without elements get none: of what FSDP has no elements on this rank there is no gradient either.
    """
    wanted = [
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and (with_empty or p.numel()) and not optimizer.state.get(p)
    ]
    if not is_torchs(optimizer):
        return _tried(optimizer, [p for _, p in wanted], sparse) if wanted else {}
    if isinstance(optimizer, torch.optim.LBFGS):
        # One state for all, with the first. Its history grows as it goes.
        first = optimizer.param_groups[0]["params"][0]
        return {} if optimizer.state.get(first) else {first: {"func_evals": 0, "n_iter": 0}}
    if isinstance(optimizer, torch.optim.SparseAdam):
        sparse = frozenset(id(p) for _, p in wanted)
    found = {}
    for group, p in wanted:
        if isinstance(optimizer, torch.optim.SGD):
            state = _momentum(group, p, id(p) in sparse)
        else:
            state = first_state(optimizer, options_of(group), _shadow(p), id(p) in sparse)
        if state:
            found[p] = state
    return found


class FreshObjects:
    """Objects that load themselves, made as the first step would make them, for parameters that have no state yet."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: Mapping[torch.Tensor, State] | None = None

    def of(self, parameter: torch.Tensor, saved: Mapping[str, Any]) -> State:
        """By key. None of a class that is torch's, or whose first step cannot be foreseen."""
        may_have = any(isinstance(value, dict | list | tuple) for value in saved.values())
        if not may_have or is_torchs(self._optimizer):
            return {}
        if self._states is None:
            try:
                self._states = fresh_states(self._optimizer)
            except Exception:
                self._states = {}
        state = self._states.get(parameter, {})
        return {key: value for key, value in state.items() if has_stateful(value)}


def _momentum(group: Mapping[str, Any], parameter: torch.Tensor, is_sparse: bool) -> State:
    """SGD's first step makes the gradient its momentum. Momentum of zero comes to the same, unless it is dampened: then there must be none."""
    if not group["momentum"] or group["dampening"] or is_sparse:
        return {}
    return {"momentum_buffer": torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)}


# -- classes of which nothing is known ------------------------------------------------------------------------


def _tried(
    optimizer: Optimizer, wanted: list[torch.Tensor], sparse: frozenset[int]
) -> dict[torch.Tensor, State]:
    """Some classes assign a piece of state when it has been updated already: a weight that decays is in it, a counter is at one.

    So there are four guesses.
    """
    without = _rehearsed(optimizer, wanted, sparse, {})
    for at_zero in (False, True):
        recorded = _recorded(optimizer, wanted, sparse, at_zero)
        for states in (recorded, {p: _uncounted(state) for p, state in recorded.items()}):
            if _same(_rehearsed(optimizer, wanted, sparse, states), without):
                return {p: state for p, state in states.items() if state}
    raise OptimError(
        f"{type(optimizer).__name__} makes its state in a way that init_state cannot foresee: its first step would be another one than "
        f"without. Nothing has been changed. load_state_dict needs no init_state; or let the class make its state, at its start, "
        f"where a parameter has none: `if not state: state['average'] = torch.zeros_like(p)`"
    )


def _recorded(
    optimizer: Optimizer, wanted: list[torch.Tensor], sparse: frozenset[int], at_zero: bool
) -> dict[torch.Tensor, State]:
    twin, shadows = _copied_whole(optimizer, at_zero)
    records = Records(twin.state)
    twin.state = records  # type: ignore[assignment]
    _step(twin, {shadows[id(p)]: zeros_like(p, id(p) in sparse) for p in wanted})
    return {p: records.first_of(shadows[id(p)]) for p in wanted}


def _rehearsed(
    optimizer: Optimizer,
    wanted: list[torch.Tensor],
    sparse: frozenset[int],
    states: Mapping[torch.Tensor, State],
) -> list[Any]:
    """What two steps make of the parameters and of their state."""
    twin, shadows = _copied_whole(optimizer, at_zero=False)
    for p, state in states.items():
        if state:
            twin.state[shadows[id(p)]] = copied(state)
    for scale in (1.0, -0.3):
        _step(twin, {shadows[id(p)]: _some_gradient(p, scale, id(p) in sparse) for p in wanted})
    return [(shadow.detach(), dict(twin.state.get(shadow, {}))) for shadow in shadows.values()]


def _step(optimizer: Optimizer, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        for shadow, gradient in gradients.items():
            shadow.grad = gradient.clone()
        return torch.zeros(())

    closure()
    with _same_random_numbers(list(gradients)):
        step_without_hooks(optimizer, *([closure] if needs_closure(type(optimizer)) else []))


def _copied_whole(optimizer: Optimizer, at_zero: bool) -> tuple[Optimizer, dict[int, torch.Tensor]]:
    """A copy of an optimizer over copies of its parameters, and these by the id of the parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shadows = {id(p): _shadow(p) for p in parameters}
    if at_zero:
        with torch.no_grad():
            for shadow in shadows.values():
                shadow.zero_()
    twin = type(optimizer).__new__(type(optimizer))
    try:
        attributes = copy.deepcopy(attributes_of(optimizer), dict(shadows))
    except Exception as exc:
        raise OptimError(
            f"init_state needs a copy of the {type(optimizer).__name__}, and it cannot be copied ({type(exc).__name__}: {exc}). "
            f"Nothing has been changed"
        ) from exc
    Optimizer.__setstate__(twin, attributes)
    return twin, shadows


def _shadow(parameter: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own."""
    shadow = parameter.detach().clone()
    if isinstance(parameter, torch.nn.Parameter):
        shadow = torch.nn.Parameter(shadow, requires_grad=parameter.requires_grad)
    else:
        shadow.requires_grad_(parameter.requires_grad)
    if type(parameter) in (torch.Tensor, torch.nn.Parameter):
        shadow.__dict__.update(parameter.__dict__)  # a class may look at what a user has written there
    return shadow


def _some_gradient(parameter: torch.Tensor, scale: float, is_sparse: bool) -> torch.Tensor:
    gradient = ((parameter.detach() * 1.7).sin() + 0.3) * scale
    return gradient.to_sparse() if is_sparse else gradient


@contextmanager
def _same_random_numbers(tensors: list[torch.Tensor]) -> Iterator[None]:
    """What is drawn inside is drawn again by the next who draws."""
    devices: dict[str, set[int]] = {}
    for tensor in tensors:
        if tensor.device.index is not None:
            devices.setdefault(tensor.device.type, set()).add(tensor.device.index)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, numbers in devices.items():
            if kind != "cpu":
                stack.enter_context(torch.random.fork_rng(devices=sorted(numbers), device_type=kind))
        yield


def _uncounted(state: State) -> State:
    """The same with counters that stand at one set back to zero."""
    return {key: _zero_of(value) if _is_one(value) else value for key, value in state.items()}


def _is_one(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and bool(value == 1)
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


def _zero_of(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def _same(a: Any, b: Any) -> bool:
    if is_stateful(a) and is_stateful(b):
        return type(a) is type(b) and _same(saved_form(a), saved_form(b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return same(a, b)
