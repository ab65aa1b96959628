"""Errors and dead workers during forward and backward: everyone who waits is told, and the others go on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.workers import Group, WorkerFailed, eventually

from farstep import autograd, rpc
from farstep.errors import BackwardError, RemoteTraceback, UnknownContext, WorkerLost
from farstep.rpc import Agent

from .conftest import contexts_on, speaking_for
from .programs import Key, assert_same, distributed, reference

Workers = Callable[..., Group]
PATIENCE_S = 60.0
parameter = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
"""In each process its own."""


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * parameter


def through(x: torch.Tensor, *workers: str) -> torch.Tensor:
    x = scale(x)
    return rpc.rpc_sync(workers[0], through, args=(x, *workers[1:])) if workers else x  # type: ignore[no-any-return]


# -- errors


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("a backward on purpose")


def with_failing_function(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(scale(x))  # type: ignore[no-any-return]


def failing_hook(gradient: torch.Tensor) -> None:
    raise LookupError("a hook on purpose")


def with_failing_hook(x: torch.Tensor) -> torch.Tensor:
    y = scale(x)
    y.register_hook(failing_hook)
    return y * 1.0


def with_failing_hook_on_received(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(failing_hook)
    return scale(x)


def hook_of_wrong_shape(x: torch.Tensor) -> torch.Tensor:
    y = scale(x)
    y.register_hook(lambda g: torch.ones(7, dtype=torch.float64))
    return y * 1.0


def call_on(to: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, function, args=(scale(x),)) * 2  # type: ignore[no-any-return]


FAILING = {
    with_failing_function: ("a backward on purpose", "ArithmeticError"),
    with_failing_hook: ("a hook on purpose", "LookupError"),
    with_failing_hook_on_received: ("a hook on purpose", "LookupError"),
    hook_of_wrong_shape: ("shape|size", "RuntimeError"),
}


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("function", FAILING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("hops", [1, 2])
def test_an_error_on_another_worker(
    three: list[Agent], function: Callable[[torch.Tensor], torch.Tensor], hops: int, mode: str
) -> None:
    text, kind = FAILING[function]
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        if hops == 1:
            y = rpc.rpc_sync("worker2", function, args=(x,))
        else:
            y = rpc.rpc_sync("worker1", call_on, args=("worker2", function, x))
        with pytest.raises(BackwardError, match=f"^Error on Node 2: .*({text})") as caught:
            autograd.backward(context_id, [y.sum()], mode=mode)
        assert (caught.value.worker, caught.value.rank) == ("worker2", 2)
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert cause.worker == "worker2"
        assert "Traceback" in cause.text
        assert kind in cause.text
        # The context lives, and the next pass through another graph is exact.
        before = autograd.get_gradients(context_id).get(x, torch.zeros(2, dtype=torch.float64)).clone()
        autograd.backward(context_id, [rpc.rpc_sync("worker2", scale, args=(x,)).sum()], mode="smart")
        torch.testing.assert_close(autograd.get_gradients(context_id)[x] - before, parameter.detach())
    assert contexts_on(three) == {}


def test_an_error_on_one_of_many_workers_ends_the_pass_on_all(three: list[Agent]) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for _ in range(20):
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(f"worker{i}", through, args=(x, "worker0", "worker1")) for i in range(3)]
            futures.append(rpc.rpc_async("worker2", with_failing_hook, args=(x,)))
            loss = sum(future.wait().sum() for future in futures)
            with pytest.raises(BackwardError, match="Error on Node 2"):
                autograd.backward(context_id, [loss])  # type: ignore[list-item]
            assert autograd._get_debug_info()["num_current_backward_passes"] == "0"
        assert contexts_on(three) == {}


def test_a_context_that_is_gone_on_another_worker(three: list[Agent]) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for path in (["worker1"], ["worker2", "worker1"]):
        for mode in ("smart", "fast"):
            with autograd.context() as context_id:
                loss = rpc.rpc_sync(path[0], through, args=(x, *path[1:])).sum()
                with speaking_for(three[1]):
                    autograd._release_context(context_id)
                with pytest.raises(UnknownContext) as caught:
                    autograd.backward(context_id, [loss], mode=mode)
                assert caught.value.context_id == context_id
            assert contexts_on(three) == {}


# -- dead workers: run in worker processes

reached = threading.Event()
gate = threading.Event()


def watch_gate(gradient: torch.Tensor) -> None:
    reached.set()
    assert gate.wait(PATIENCE_S)


def gated(x: torch.Tensor, *workers: str) -> torch.Tensor:
    """`through`, whose backward stops at the gate of the last worker."""
    x = scale(x)
    if workers:
        return rpc.rpc_sync(workers[0], gated, args=(x, *workers[1:]))  # type: ignore[no-any-return]
    x.register_hook(watch_gate)
    return x * 1.0


def await_gate() -> bool:
    return reached.wait(PATIENCE_S)


def open_gate() -> None:
    gate.set()


def backward_through(function: Callable[..., torch.Tensor], *workers: str) -> list[list[float]]:
    """The gradients of an input and of this worker's parameter."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        loss = function(x, *workers).sum()
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
        return [found[x].tolist(), found[parameter].tolist()]


def call_backward_through(to: str, function: Callable[..., torch.Tensor], *workers: str) -> Any:
    return rpc.rpc_sync(to, backward_through, args=(function, *workers))


def open_contexts() -> list[int]:
    return [context.id for context in rpc_agent().extension.contexts()]  # type: ignore[attr-defined]


def rpc_agent() -> Agent:
    from farstep.rpc.current import current_agent

    return current_agent()


def is_clean(group: Group) -> None:
    """No context is left on any worker that lives."""

    def check() -> bool:
        return not any(group.run_all(open_contexts))

    eventually(check, "the release of every context")


def is_exact(group: Group, *ranks: int) -> None:
    """The next passes on the survivors give the right gradients."""
    first, *others = ranks
    found = group[first].run(backward_through, through, *(f"worker{rank}" for rank in others))
    power = len(ranks)
    assert found == [[2.0**power, 3.0**power], [2.0 ** (power - 1), 3.0 ** (power - 1)]]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_a_worker_is_lost_in_the_middle_of_a_chain(workers: Workers, victim: int) -> None:
    """The gradient has gone 0 -> 3, and waits there; then a worker dies that it has yet to reach, or came from."""
    group = workers(4)
    path = ("worker1", "worker3", "worker2") if victim == 1 else ("worker1", "worker2")
    last = int(path[-1][-1])
    pending = group[0].start(backward_through, gated, *path)
    assert group[last].run(await_gate)
    group[victim].kill()
    if victim != last:
        group[last].run(open_gate)
    with pytest.raises(WorkerLost, match=f"worker{victim}") as caught:
        pending.result()
    assert caught.value.worker == f"worker{victim}"
    is_clean(group)
    is_exact(group, 0, 3, *({1, 2} - {victim}))


@pytest.mark.slow
def test_the_root_dies(workers: Workers) -> None:
    group = workers(4)
    group[0].start(backward_through, gated, "worker1", "worker3", "worker2")
    assert group[2].run(await_gate)
    group[0].kill()
    eventually(lambda: not any(group.run_all(open_contexts)), "the release of the contexts of the dead")
    group[2].run(open_gate)
    is_exact(group, 1, 2, 3)
    is_clean(group)


@pytest.mark.slow
def test_a_worker_is_lost_during_a_backward_from_a_nested_call(workers: Workers) -> None:
    group = workers(4)
    pending = group[0].start(call_backward_through, "worker1", gated, "worker3", "worker2")
    assert group[2].run(await_gate)
    group[2].kill()
    with pytest.raises(WorkerLost, match="worker2"):
        pending.result()
    is_clean(group)
    is_exact(group, 1, 0, 3)


def hold_context(*workers: str) -> None:
    """Open a context, take it to these workers, and stay in it."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with autograd.context():
        through(x, *workers)
        reached.set()
        gate.wait()


def stay_inside(x: torch.Tensor, to: str) -> None:
    reached.set()
    assert gate.wait(PATIENCE_S)
    rpc.rpc_sync(to, scale, args=(x,))


def hold_context_and_call(to: str, then: str) -> None:
    with autograd.context():
        rpc.rpc_sync(to, stay_inside, args=(torch.ones(2, requires_grad=True), then), timeout=0)


@pytest.mark.slow
def test_contexts_end_when_their_opener_dies(workers: Workers) -> None:
    group = workers(4)
    group[0].start(hold_context, "worker1", "worker2", "worker3")
    assert group[0].run(await_gate)
    assert all(len(ids) == 1 for ids in group.run_all(open_contexts))
    group[0].kill()
    is_clean(group)
    is_exact(group, 1, 2, 3)


@pytest.mark.slow
def test_a_context_of_the_dead_does_not_come_back(workers: Workers) -> None:
    """A function that the dead worker has called goes on calling."""
    group = workers(3)
    group[0].start(hold_context_and_call, "worker1", "worker2")
    assert group[1].run(await_gate)
    group[0].kill()
    is_clean(group)
    group[1].run(open_gate)
    is_exact(group, 1, 2)
    is_clean(group)


def use_some(lost: str, used: bool) -> list[list[float]]:
    """One of the outputs is of a worker that dies before backward."""
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        h = x * 1.0
        first = rpc.rpc_sync("worker1", scale, args=(h,))
        second = rpc.rpc_sync(lost, scale, args=(h,))
        reached.set()
        assert gate.wait(PATIENCE_S)
        told = threading.Event()
        rpc.on_worker_lost(lambda *_: told.set())
        if len(rpc.get_worker_infos()) == 3:
            assert told.wait(PATIENCE_S)
        autograd.backward(context_id, [first.sum() + second.sum() if used else first.sum()])
        return [autograd.get_gradients(context_id)[x].tolist()]


@pytest.mark.slow
def test_a_dead_worker_whose_output_is_used(workers: Workers) -> None:
    group = workers(3)
    pending = group[0].start(use_some, "worker2", True)
    assert group[0].run(await_gate)
    group[2].kill()
    group[0].run(open_gate)
    with pytest.raises(WorkerLost, match="worker2"):
        pending.result()
    is_clean(group)
    is_exact(group, 0, 1)


@pytest.mark.slow
def test_a_dead_worker_whose_output_is_not_used_is_not_missed(workers: Workers) -> None:
    group = workers(3)
    pending = group[0].start(use_some, "worker2", False)
    assert group[0].run(await_gate)
    group[2].kill()
    group[0].run(open_gate)
    assert pending.result() == [[2.0, 3.0]]
    is_clean(group)


held: list[rpc.RRef[torch.Tensor]] = []


def hold_reference(to: str) -> None:
    held.append(rpc.remote(to, torch.zeros, args=(2,)))
    held[0].to_here()


def held_reference() -> rpc.RRef[torch.Tensor]:
    return held[0]


def test_an_answer_with_a_reference_to_the_dead() -> None:
    with rpc.local_agents(3) as agents, speaking_for(agents[0]):
        rpc.rpc_sync("worker1", hold_reference, args=("worker2",))
        agents[2].close()
        eventually(lambda: len(agents[1].get_worker_infos()) == 2, "the loss of worker2")
        try:
            with pytest.raises(WorkerLost, match="worker2"):
                rpc.rpc_sync("worker1", held_reference, timeout=10)
        finally:
            held.clear()


# -- dead workers in the middle of random programs

finished = [0]


def run_programs(first: int, workers: int, count: int) -> tuple[int, str]:
    """Programs rooted here, until one fails. How many were exact, and how the last one failed."""
    me = rpc.get_worker_info().id
    for number in range(count):
        key = Key((first + number) * workers + me, workers, uses_all=number % 3 == 0)
        try:
            actual = distributed(key)
        except AssertionError:
            raise
        except Exception as exc:
            return number, f"{type(exc).__name__}: {exc}"
        assert_same(reference(key), actual)
        finished[0] += 1
    return count, ""


def programs_finished() -> int:
    return finished[0]


def run_survivors(seeds: range, ranks: tuple[int, ...]) -> None:
    me = ranks.index(rpc.get_worker_info().id)
    for seed in seeds:
        key = Key(seed * len(ranks) + me, len(ranks), ranks=ranks)
        assert_same(reference(key), distributed(key))


def kill_at_random(seeds: random.Random, group: Group, victim: int) -> None:
    """After some programs, at any moment of the next one."""
    goal = seeds.randrange(4)
    eventually(lambda: group[victim].run(programs_finished) >= goal, "programs")
    time.sleep(seeds.random() * 0.05)  # the moment is what is random here
    group[victim].kill()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_worker_dies_at_a_random_moment(workers: Workers, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice((3, 4, 5))
    group = workers(count)
    victim = rng.randrange(count)
    pending = group.start_all(run_programs, seed * 1000, count, 10_000)
    kill_at_random(rng, group, victim)
    survivors = [rank for rank in range(count) if rank != victim]
    for rank in survivors:
        exact, error = pending[rank].result()
        assert error, f"worker{rank} has never met the dead one in {exact} programs"
        assert f"worker 'worker{victim}' is lost" in error, error
    with pytest.raises(WorkerFailed):
        pending[victim].result()
    is_clean(group)
    ranks = tuple(survivors)
    group.finish([group[rank].start(run_survivors, range(seed * 10, seed * 10 + 5), ranks) for rank in ranks])
    is_clean(group)
