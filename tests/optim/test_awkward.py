"""State that does not fit, steps that fail half-way, classes with ideas of their own, and several threads on one optimizer."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from autograd.conftest import contexts_on, speaking_for
from torch import optim

from farstep import autograd, rpc
from farstep.errors import OptimError, StateMismatch, StepError
from farstep.optim import DistributedOptimizer
from farstep.optim import calls as owner_calls
from farstep.optim.local import _all as local_optimizers

from .spread import Spread

PATIENCE_S = 60.0

# -- state and parameters that do not fit each other


@pytest.mark.parametrize(("small", "large"), [((1, 16), (64, 16)), ((1,), (64,)), ((), (64,))])
def test_state_of_another_shape_is_refused(three, small, large):
    """A fused update would go through memory that is not there."""
    one, other = Spread([1], [small]), Spread([1], [large])
    optimizer = DistributedOptimizer(optim.Adam, one.rrefs)
    one.step(optimizer)
    into = DistributedOptimizer(optim.Adam, other.rrefs)
    with pytest.raises(StateMismatch, match="exp_avg"):
        into.load_state_dict(optimizer.state_dict())
    other.step(into)


def test_a_parameter_that_has_grown_is_an_error_of_the_step(three):
    spread = Spread([1], [(4, 16)], torch.float32)
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs)
    spread.step(optimizer)
    spread.remote[0].data = torch.zeros(50_000, 16)
    spread.local[0].data = torch.zeros(50_000, 16)
    with pytest.raises(StepError, match="size of tensor"):
        spread.step(optimizer)


def momentum(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad, momentum])
@pytest.mark.parametrize("when", ["during training", "when it is loaded"])
def test_a_parameter_that_is_laid_out_anew(three, kind, when):
    shape = (4, 3, 5, 5)
    spread = Spread([1], [shape], torch.float32)
    optimizer, local = DistributedOptimizer(kind, spread.rrefs), kind(spread.local)
    for seed in range(3):
        spread.step(optimizer, seed)
        spread.step_here(local, seed)
    spread.remote[0].data = spread.remote[0].data.to(memory_format=torch.channels_last)
    if when == "when it is loaded":
        saved = optimizer.state_dict()
        optimizer = DistributedOptimizer(kind, spread.rrefs)
        optimizer.load_state_dict(saved)
    for seed in range(3, 6):
        spread.step(optimizer, seed)
        spread.step_here(local, seed)
    torch.testing.assert_close(spread.remote[0], spread.local[0], rtol=1e-5, atol=1e-6)


# -- steps that fail


class Careful(optim.SGD):
    """Refuses a large learning rate when it is too late."""

    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["lr"] > 1:
            raise ArithmeticError("too fast")
        super().step()


def test_an_option_that_is_set_back_after_a_failed_step_is_back(three):
    spread = Spread([1, 2])
    optimizer, local = DistributedOptimizer(Careful, spread.rrefs, lr=0.1), optim.SGD(spread.local, lr=0.1)
    optimizer.param_groups[0]["lr"] = 5.0
    with pytest.raises(StepError, match="too fast"):
        spread.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    spread.step(optimizer)
    spread.step_here(local)
    for one, other in zip(spread.remote, spread.local, strict=True):
        torch.testing.assert_close(one, other)


# -- classes with ideas of their own


def in_two_groups(params: Any) -> optim.Optimizer:
    first, *rest = params
    return optim.SGD([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1)


def backwards(params: Any) -> optim.Optimizer:
    return optim.SGD(list(params)[::-1], lr=0.1)


@pytest.mark.parametrize("make", [in_two_groups, backwards])
def test_groups_that_a_function_makes_itself_are_refused(three, make):
    with pytest.raises(OptimError, match="groups, or an order, of its own"):
        DistributedOptimizer(make, Spread([1, 1]).rrefs)


class Centring(optim.SGD):
    """Writes into the gradient."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()
        super().step()


def test_a_class_that_writes_into_gradients_has_its_own(three):
    spread = Spread([1])
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        DistributedOptimizer(Centring, spread.rrefs, lr=0.1).step(context_id)
        DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1).step(context_id)
    spread.step_here(optim.SGD(spread.local, lr=0.1))
    torch.testing.assert_close(spread.remote[0], spread.local[0])


class Counting(optim.SGD):
    """Keeps something in its state that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 7}


def test_state_that_belongs_to_no_parameter_is_not_dropped_silently(three):
    optimizer = DistributedOptimizer(Counting, Spread([1]).rrefs, lr=0.1)
    with pytest.raises(OptimError, match="count"):
        optimizer.state_dict()


class Wrapping(optim.Optimizer):
    """Has another optimizer inside, and loads into it."""

    def __init__(self, params: Any) -> None:
        self.inner = optim.Adam(list(params), lr=0.1)
        super().__init__(self.inner.param_groups[0]["params"], {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_a_load_that_one_owner_refuses_changes_nothing_on_the_others(three):
    spread = Spread([1, 2], [(3,), (4,)])
    optimizer = DistributedOptimizer(Wrapping, spread.rrefs)
    spread.step(optimizer)
    before = optimizer.state_dict()
    changed = optimizer.state_dict()
    changed["state"]["0"]["exp_avg"].fill_(99)
    changed["state"]["1"]["exp_avg"] = torch.zeros(9)
    with pytest.raises(StateMismatch):
        optimizer.load_state_dict(changed)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"]["0"]["exp_avg"], before["state"]["0"]["exp_avg"])
    ids = [owner.id for owner in optimizer._owners.values()]
    assert all(local_optimizers[id].pending is None for id in ids)


# -- groups


def test_a_parameter_that_an_owner_has_already_is_not_added_again(three):
    """As after an answer that was lost."""
    spread = Spread([1, 1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs[:1], lr=0.1)
    [owner] = optimizer._owners.values()
    spec = (1, ["late"], [spread.rrefs[1]], {})
    rpc.rpc_sync("worker1", owner_calls._add_group, args=(owner.id, spec))
    with pytest.raises(ValueError, match="same parameter"):
        rpc.rpc_sync("worker1", owner_calls._add_group, args=(owner.id, (2, ["late"], [spread.rrefs[1]], {})))


@pytest.mark.parametrize("groups", [{}, [{"params": []}], [{"params": {}}]])
def test_an_empty_group_is_refused(three, groups):
    with pytest.raises(ValueError, match="no parameters"):
        DistributedOptimizer(optim.SGD, groups, lr=0.1)


def test_options_that_hold_arrays(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, [{"params": spread.rrefs, "mask": [np.ones(2)]}], lr=0.1)
    optimizer.param_groups[0]["mask"] = [np.zeros(2)]
    spread.step(optimizer)
    spread.step(optimizer, timeout=float("inf"))


def test_nobody_else_can_name_an_owners_part(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    for guess in range(1, 50):
        with pytest.raises(OptimError, match="has no part"):
            rpc.rpc_sync("worker1", owner_calls._state, args=(guess, 1.0))
    [owner] = optimizer._owners.values()
    changes = {0: ({"params": []}, [])}
    with autograd.context() as context_id, pytest.raises(OptimError, match="cannot have"):
        rpc.rpc_sync("worker1", owner_calls._step, args=(owner.id, context_id, False, 1.0, changes))


# -- several at once


def test_two_loads_at_once_leave_one_of_them(three):
    spread = Spread([1, 2], [(3,), (3,)])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs)
    spread.step(optimizer)
    states = []
    for value in (1.0, 2.0):
        state = optimizer.state_dict()
        for each in state["state"].values():
            each["exp_avg"].fill_(value)
        state["param_groups"][0]["lr"] = value
        states.append(state)
    for _ in range(10):
        threads = [threading.Thread(target=_load, args=(three[0], optimizer, state)) for state in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        found = optimizer.state_dict()
        values = {x.item() for each in found["state"].values() for x in each["exp_avg"]}
        assert values == {found["param_groups"][0]["lr"]}


def _load(agent: Any, optimizer: DistributedOptimizer, state: dict[str, Any]) -> None:
    with speaking_for(agent):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("first", [0, 1])
def test_a_context_that_was_closed_and_used_again_is_released(three, first):
    spread = Spread([1, 2])
    optimizers = [DistributedOptimizer(optim.SGD, [rref], lr=0.1) for rref in spread.rrefs]
    with autograd.context() as context_id:
        for number in (first, 1 - first):
            loss = rpc.rpc_sync("worker1", _through_both, args=(spread.rrefs[0], spread.rrefs[1]))
            autograd.backward(context_id, [loss])
            optimizers[number].step(context_id, close=True)
    assert contexts_on(three) == {}


def _through_both(first: rpc.RRef[torch.Tensor], second: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return first.local_value().sum() * rpc.rpc_sync("worker2", _total, args=(second,))


def _total(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.local_value().sum()
