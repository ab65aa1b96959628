"""Steps: what they touch, what they leave alone, how they fail, and several at once."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref

import pytest
import torch
from autograd.conftest import contexts_on, speaking_for
from support.workers import bounded, eventually
from torch import optim

from farstep import autograd, rpc
from farstep.autograd.locks import held
from farstep.errors import AutogradError, OptimError, RemoteTraceback, StepError, UnknownContext
from farstep.optim import DistributedOptimizer
from farstep.optim.local import _all as local_optimizers
from farstep.optim.local import step_locks

from .spread import Spread, _tensors


class Refusing(optim.SGD):
    """Does not step on parameters with two elements in the first dimension."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def step(self, closure=None):
        if any(p.shape[0] == 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("I do not like this one")
        super().step()


class Unmakeable(optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        if any(p.shape[0] == 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("cannot be made here")


# -- what a step touches


def test_the_users_grad_is_neither_read_nor_written(three):
    spread = Spread([0, 1])
    marks = [torch.full_like(p, 7.0) for p in spread.remote]
    for p, mark in zip(spread.remote, marks, strict=True):
        p.grad = mark
    spread.step(DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1))
    spread.step_here(optim.SGD(spread.local, lr=0.1))
    spread.assert_same()
    for p, mark in zip(spread.remote, marks, strict=True):
        assert p.grad is mark
        assert bool((mark == 7.0).all())


def test_parameters_without_a_gradient_are_left_alone(three):
    spread = Spread([0, 1, 2])
    before = spread.remote[1].detach().clone()
    optimizer = DistributedOptimizer(optim.AdamW, spread.rrefs, lr=0.1, weight_decay=0.5)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0), of=[0])
        optimizer.step(context_id)
    assert torch.equal(spread.remote[1], before)
    assert list(optimizer.state_dict()["state"]) == ["0"]


def test_a_step_reaches_workers_that_the_context_has_not(three):
    spread = Spread([0, 1, 2])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0), of=[1])
        optimizer.step(context_id)
        assert set(contexts_on(three)) == {"worker0", "worker1"}  # and takes no context there


def test_two_contexts_do_not_mix(three):
    spread, twin = Spread([1, 2]), Spread([1, 2])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    barrier = threading.Barrier(2, timeout=20)

    def train(seed):
        with speaking_for(three[0]), autograd.context() as context_id:
            spread.backward(context_id, spread.inputs(seed))
            barrier.wait()  # both have gradients, none has stepped: SGD adds up, whoever is first
            optimizer.step(context_id)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    gradients = []
    for seed in range(2):
        twin.backward_here(twin.inputs(seed))
        gradients.append([p.grad for p in twin.local])
    for p, start, a, b in zip(spread.remote, twin.local, *gradients, strict=True):
        torch.testing.assert_close(p, start - 0.1 * (a + b), check_stride=False)


def test_data_set_to_something_else_is_followed(three):
    spread = Spread([0, 1])
    optimizer, ordinary = (
        DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1),
        optim.Adam(spread.local, lr=0.1),
    )
    for seed in range(3):
        spread.step(optimizer, seed)
        spread.step_here(ordinary, seed)
        for here, there in zip(spread.local, spread.remote, strict=True):
            here.data = here.data * 2
            there.data = there.data * 2
    spread.assert_same()


def test_zero_grad_does_nothing(three):
    spread = Spread([1])
    spread.remote[0].grad = torch.ones_like(spread.remote[0])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        optimizer.zero_grad()
        optimizer.step(context_id)
    spread.step_here(optim.SGD(spread.local, lr=0.1))
    spread.assert_same()
    assert spread.remote[0].grad is not None


# -- the end of a context that rides along


def test_a_step_that_closes_leaves_nothing_for_the_end(three):
    spread = Spread([0, 1, 2])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        optimizer.step(context_id, close=True)
        assert contexts_on(three) == {"worker0": [context_id]}
        assert three[0].extension.get(context_id).workers == set()
    spread.step_here(optim.SGD(spread.local, lr=0.1))
    spread.assert_same()


def relay(number, x, then):
    return _tensors[number].sum() * rpc.rpc_sync(then[0], relay_end, args=(then[1], x))


def relay_end(number, x):
    return (_tensors[number] * x).sum()


@pytest.mark.parametrize("owners", [[1], [2], [1, 2]])
def test_closing_reaches_workers_that_an_owner_has_called(three, owners):
    """worker0 calls worker1, which calls worker2; whoever of them has parameters in the optimizer, all forget the context."""
    spread = Spread([1, 2])
    rrefs = [r for r, owner in zip(spread.rrefs, [1, 2], strict=True) if owner in owners]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)
    with autograd.context() as context_id:
        x = torch.ones(4, dtype=torch.float64, requires_grad=True)
        loss = rpc.rpc_sync("worker1", relay, args=(spread.numbers[0], x, ("worker2", spread.numbers[1])))
        autograd.backward(context_id, [loss])
        optimizer.step(context_id, close=True)
        assert three[0].extension.get(context_id).workers == {1, 2} - set(owners)
    assert contexts_on(three) == {}


def step_for(optimizer_of, number, context_id):
    """On worker1, inside worker0's context."""
    rrefs = [rpc.rpc_sync(f"worker{w}", reference_again, args=(n,)) for w, n in optimizer_of]
    loss = rpc.rpc_sync("worker2", relay_end, args=(number, torch.ones(3, dtype=torch.float64)))
    autograd.backward(context_id, [loss])
    DistributedOptimizer(optim.SGD, rrefs, lr=0.1).step(context_id, close=True)


def test_a_step_that_closes_on_a_worker_that_did_not_open_the_context(three):
    """The end is the opener's: until then every part stays, and then all are told."""
    spread = Spread([0, 1, 2])
    numbers = list(enumerate(spread.numbers))
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", step_for, args=(numbers, spread.numbers[2], context_id))
        assert set(contexts_on(three)) == {"worker0", "worker1", "worker2"}
    assert contexts_on(three) == {}


def test_only_the_last_step_of_a_context_may_close_it(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        optimizer.step(context_id, close=True)
        with pytest.raises(AutogradError, match="closed on worker1: an earlier step had close=True"):
            optimizer.step(context_id)
        spread.backward(context_id, spread.inputs(1))  # it comes to life again with a new call
        optimizer.step(context_id)


# -- errors


def test_a_failed_step_says_who_failed_and_who_did_not(three):
    spread = Spread([0, 1, 2], [(3,), (2,), (4,)])
    optimizer = DistributedOptimizer(Refusing, spread.rrefs)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        with pytest.raises(StepError) as caught:
            optimizer.step(context_id)
    error = caught.value
    assert sorted(error.stepped) == ["worker0", "worker2"]
    assert [(name, type(e), str(e)) for name, e in error.failed.items()] == [
        ("worker1", ValueError, "I do not like this one")
    ]
    assert "worker 'worker1': ValueError: I do not like this one" in str(error)
    assert "did step" in str(error)
    assert isinstance(error.__cause__.__cause__, RemoteTraceback)
    assert "in step" in str(error.__cause__.__cause__)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.stepped) == (str(error), error.stepped)


def test_a_failed_step_does_not_close(three):
    spread = Spread([1, 2], [(2,), (3,)])
    optimizer = DistributedOptimizer(Refusing, spread.rrefs)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        with pytest.raises(StepError):
            optimizer.step(context_id, close=True)
        assert set(contexts_on(three)) == {"worker0", "worker1"}


def test_a_constructor_that_fails_leaves_nothing_behind(three):
    gc.collect()
    before = set(local_optimizers)  # those of earlier tests may be on their way out
    spread = Spread([0, 1, 2], [(3,), (2,), (4,)])
    with pytest.raises(ValueError, match="cannot be made here") as caught:
        DistributedOptimizer(Unmakeable, spread.rrefs)
    assert caught.value.__notes__ == ["worker 'worker1' could not make its part"]
    del caught
    assert eventually(lambda: gc.collect() >= 0 and set(local_optimizers) <= before)


def test_nothing_is_left_when_the_optimizer_is_gone(three):
    gc.collect()
    before = set(local_optimizers)  # those of earlier tests may be on their way out
    spread = Spread([0, 1, 2])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    spread.step(optimizer)
    state = optimizer.state_dict(sharded=True)
    kept = weakref.ref(state["state"]["1"])
    assert len(set(local_optimizers) - before) == 3
    del optimizer, state
    assert eventually(lambda: gc.collect() >= 0 and set(local_optimizers) <= before)
    assert kept() is None


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        ([torch.ones(2)], TypeError, "behind RRefs.*rpc.RRef"),
        ([("a", 1)], TypeError, "behind RRefs"),
        (torch.ones(2), TypeError, "a list of RRefs"),
        ([{"lr": 1.0}], ValueError, 'needs "params"'),
    ],
)
def test_parameters_that_are_none(three, params, error, text):
    with pytest.raises(error, match=text):
        DistributedOptimizer(optim.SGD, params, lr=0.1)


def test_parameters_given_twice(three):
    a, b = Spread([1, 1]).rrefs
    with pytest.raises(ValueError, match="'0' and '1' are the same parameter"):
        DistributedOptimizer(optim.SGD, [a, a], lr=0.1)
    with pytest.raises(ValueError, match=r"name 'w'.*use parameter_rrefs\(module_rref, prefix"):
        DistributedOptimizer(optim.SGD, [("w", a), ("w", b)], lr=0.1)
    spread = Spread([1])
    other = rpc.rpc_sync("worker1", rpc.RRef, args=(1,))
    with pytest.raises(TypeError, match="parameter '1' on worker 'worker1' is a int"):
        DistributedOptimizer(optim.SGD, [spread.rrefs[0], other], lr=0.1)
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": spread.rrefs})


def reference_again(number):
    return rpc.RRef(_tensors[number])


def test_one_parameter_behind_two_references(three):
    spread = Spread([1])
    again = rpc.rpc_sync("worker1", reference_again, args=(spread.numbers[0],))
    with pytest.raises(ValueError, match="same parameter on worker 'worker1'"):
        DistributedOptimizer(optim.SGD, {"a": spread.rrefs[0], "b": again}, lr=0.1)


def test_options_that_the_class_refuses(three):
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=-1.0)
    with pytest.raises(ValueError, match="consistency is one of relaxed, strict"):
        DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=0.1, consistency="loose")


def test_a_step_outside_a_context(three):
    optimizer = DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=0.1)
    with pytest.raises(UnknownContext):
        optimizer.step(12345)


# -- several trainers


def test_trainers_at_once_lose_no_step(three):
    spread, twin = Spread([2, 2]), Spread([2, 2])
    steps = 15

    def train(agent):
        with speaking_for(agent):
            mine = [rpc.rpc_sync("worker2", reference_again, args=(n,)) for n in spread.numbers]
            optimizer = DistributedOptimizer(Counting, mine)
            for _ in range(steps):
                with autograd.context() as context_id:
                    spread.backward(context_id, spread.inputs(0))
                    optimizer.step(context_id)

    threads = [threading.Thread(target=train, args=(agent,)) for agent in three[:2] for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for p, start in zip(spread.remote, twin.local, strict=True):
        torch.testing.assert_close(p, start + 4 * steps)


class Counting(optim.Optimizer):
    """Adds one, in a way that loses steps unless they are taken one at a time."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                value = p.detach().clone()
                threading.Event().wait(0.0005)  # another thread's turn
                p.data.copy_(value + 1)


class Slow(optim.SGD):
    """Steps on worker1 wait until they are let go."""

    began, go = threading.Event(), threading.Event()

    def step(self, closure=None):
        self.began.set()
        assert self.go.wait(20)
        super().step()


def test_only_steps_on_the_same_parameters_wait_for_each_other(three):
    one, other = Spread([1]), Spread([1])
    Slow.began.clear()
    Slow.go.clear()
    slow = DistributedOptimizer(Slow, one.rrefs, lr=0.1)
    same = DistributedOptimizer(optim.SGD, one.rrefs, lr=0.1)
    both = DistributedOptimizer(optim.SGD, one.rrefs + other.rrefs, lr=0.1)
    free = DistributedOptimizer(optim.SGD, other.rrefs, lr=0.1)

    def step_slowly():
        with speaking_for(three[0]):
            one.step(slow)

    thread = threading.Thread(target=step_slowly)
    thread.start()
    try:
        assert Slow.began.wait(20)
        other.step(free)  # returns, though worker1 is busy with the other parameter
        for waiting in (same, both):
            # Either side's patience may end first.
            with pytest.raises(StepError, match=r"has waited|RPC ran for more than"):
                one.step(waiting, timeout=0.2)
    finally:
        Slow.go.set()
        bounded(thread.join)
    one.step(same)


def test_a_wait_for_parameters_says_what_it_waits_for():
    first, second = torch.ones(1), torch.ones(1)
    own, all_of_them = step_locks.of([first]), step_locks.of([second, first])
    assert len(all_of_them) == 2
    with held(own, "a step of Adam on worker 'a'", 1.0, OptimError):
        with pytest.raises(
            OptimError, match=r"B has waited 0.01 s.*a step of Adam on worker 'a' is still working"
        ):
            held(all_of_them, "B", 0.01, OptimError).__enter__()
        with held(all_of_them[1:], "C", 0.01, OptimError):  # what was taken before the wait is free again
            pass
    with held(all_of_them, "B", 0.01, OptimError):
        pass


# -- the race of a parameter server


def squared(number, x):
    return (_tensors[number] ** 2 * x).sum()  # its backward needs the weights


@pytest.mark.parametrize("consistency", ["relaxed", "strict"])
def test_a_step_between_another_trainers_forward_and_backward(three, consistency):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1, consistency=consistency)
    x = torch.ones(4, dtype=torch.float64)
    outcome = []

    def slow_trainer(forward_done, stepped):
        with speaking_for(three[2]), autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", squared, args=(spread.numbers[0], x))
            forward_done.set()
            assert stepped.wait(20)
            try:
                autograd.backward(context_id, [loss])
                outcome.append(rpc.rpc_sync("worker1", gradient_of, args=(context_id, spread.numbers[0])))
            except RuntimeError as exc:
                outcome.append(exc)

    forward_done, stepped = threading.Event(), threading.Event()
    thread = threading.Thread(target=slow_trainer, args=(forward_done, stepped))
    thread.start()
    assert forward_done.wait(20)
    spread.step(optimizer)
    stepped.set()
    bounded(thread.join)
    if consistency == "strict":
        assert "modified by an inplace operation" in str(outcome[0])
    else:
        torch.testing.assert_close(
            outcome[0], 2 * spread.remote[0].detach()
        )  # the weights as they are by then


def gradient_of(context_id, number):
    return autograd.get_gradients(context_id)[_tensors[number]]


def test_a_part_that_is_gone_is_said_to_be(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    next(iter(optimizer._owners.values())).id = 10**9
    with pytest.raises(OptimError, match=r"has no part 1000000000.*Make a new DistributedOptimizer"):
        spread.step(optimizer)
