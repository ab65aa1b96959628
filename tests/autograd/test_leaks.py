"""After 1,000 passes nothing is left on any worker: no context, no node of the graph, no tensor."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.workers import Group, eventually

from farstep import autograd, rpc
from farstep.errors import AutogradError, BackwardError, BackwardTimeout
from farstep.rpc import RRef
from farstep.rpc.current import current_agent

from .conftest import Agents, speaking_for

pytestmark = pytest.mark.slow
parameter = torch.ones(4, 4, requires_grad=True)


class Canary:
    """Lives as long as the node that has it."""


class Sings(torch.autograd.Function):
    """A node with a canary."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.canary = Canary()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def count() -> Counter[str]:
    """How many objects of ours, and how many tensors, there are in this process."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if (
            str(kind.__module__).startswith("farstep.autograd")
            or "RecvRpc" in kind.__name__
            or kind in (Canary, RRef)
        ):
            counts[kind.__name__] += 1
        elif issubclass(kind, torch.Tensor):
            counts["Tensor"] += 1
    return counts


@contextlib.contextmanager
def leaves_nothing() -> Iterator[None]:
    before = count()
    yield
    try:
        eventually(lambda: not count() - before, timeout_s=5.0)
    except AssertionError:
        raise AssertionError(f"more than before: {dict(count() - before)}") from None


def test_counting_sees_what_is_there(agents_of: Agents) -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with speaking_for(agents_of(3)[0]):
        before = count()
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", layer, args=(x,))
            autograd.backward(context_id, [y.sum()], retain_graph=True)
            found = count() - before
            assert {"Canary", "Context", "Gradients", "Recv", "Send", "Tensor"} <= found.keys(), found
            assert any("RecvRpc" in name for name in found)
            del y


# -- passes


def layer(x: torch.Tensor) -> torch.Tensor:
    return Sings.apply(x @ parameter)  # type: ignore[no-any-return]


def there_and_back(x: torch.Tensor, to: str, home: str) -> tuple[torch.Tensor, torch.Tensor]:
    y = rpc.rpc_sync(to, layer, args=(layer(x),))
    z = rpc.rpc_sync(home, layer, args=(y,))
    return z, y * 2


def failing(gradient: torch.Tensor) -> None:
    raise ValueError("on purpose")


def layer_that_fails(x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.register_hook(failing)
    return layer(y)


def a_plain_pass() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", layer, args=(x,)).sum()])
        assert len(autograd.get_gradients(context_id)) >= 1


def a_pass_with_unused_outputs() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        h = layer(x)
        y, unused = rpc.rpc_sync("worker1", there_and_back, args=(h, "worker2", "worker0"))
        rpc.rpc_sync("worker2", layer, args=(h,))
        rref = rpc.remote("worker2", layer, args=(y,))
        rpc.remote("worker1", layer, args=(unused,))
        autograd.backward(context_id, [rref.to_here().sum() + h.sum()], retain_graph=True)
        autograd.backward(context_id, [y.sum()])
        assert x in autograd.get_gradients(context_id)


def a_pass_with_several_threads() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        futures = [rpc.rpc_async(f"worker{i}", layer, args=(x,)) for i in range(3)]
        loss = sum(future.then(lambda done: layer(done.value())).wait().sum() for future in futures)
        autograd.backward_async(context_id, [loss]).wait()  # type: ignore[list-item]


def a_forward_without_backward() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with contextlib.suppress(ZeroDivisionError), autograd.context():
        rpc.rpc_sync("worker1", there_and_back, args=(x, "worker2", "worker0"))
        raise ZeroDivisionError


def a_pass_that_fails() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker2", layer_that_fails, args=(rpc.rpc_sync("worker1", layer, args=(x,)),))
        with contextlib.suppress(BackwardError):
            autograd.backward(context_id, [y.sum()])
            raise AssertionError("it should have failed")


def a_pass_that_fast_refuses() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        h = layer(x)
        y = rpc.rpc_sync("worker1", layer, args=(h,))
        rpc.rpc_sync("worker2", layer, args=(h,))
        with contextlib.suppress(AutogradError):
            autograd.backward(context_id, [y.sum()], mode="fast")
            raise AssertionError("it should have been refused")


gate = threading.Event()


def layer_that_waits(x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.register_hook(lambda _: gate.wait(20) and None)
    return layer(y)


def a_pass_that_times_out() -> None:
    gate.clear()
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", layer_that_waits, args=(x,))
        with contextlib.suppress(BackwardTimeout):
            autograd.backward(context_id, [y.sum()], timeout=0.001)
            raise AssertionError("it should have been too late")
    gate.set()


PASSES: list[tuple[Callable[[], None], int]] = [
    (a_plain_pass, 1000),
    (a_pass_with_unused_outputs, 300),
    (a_pass_with_several_threads, 200),
    (a_forward_without_backward, 200),
    (a_pass_that_fails, 200),
    (a_pass_that_fast_refuses, 200),
    (a_pass_that_times_out, 20),
]


@pytest.mark.parametrize(("run", "times"), PASSES, ids=lambda p: getattr(p, "__name__", ""))
def test_passes_leave_nothing(
    agents_of: Agents, caplog: pytest.LogCaptureFixture, run: Callable[[], None], times: int
) -> None:
    caplog.set_level("CRITICAL", "farstep")  # a captured record holds what it tells of
    agents = agents_of(3)
    with speaking_for(agents[0]):
        for _ in range(5):
            run()
        with leaves_nothing():
            for _ in range(times):
                run()
    assert not any(agent.extension.contexts() for agent in agents)  # type: ignore[attr-defined]
    assert not any(agent.extension.conductor.running for agent in agents)  # type: ignore[attr-defined]


def test_a_program_that_ends_with_its_agents_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Also contexts that were never closed."""
    caplog.set_level("CRITICAL", "farstep")

    def run() -> None:
        with rpc.local_agents(3) as agents, speaking_for(agents[0]):
            a_pass_with_unused_outputs()
            for agent in agents:
                with speaking_for(agent):
                    agent.extension.open()  # type: ignore[attr-defined]

    run()
    with leaves_nothing():
        for _ in range(3):
            run()


# -- in worker processes

before: Counter[str] = Counter()


def note_counts() -> None:
    before.update(count())


def counts_more() -> dict[str, int]:
    return dict(count() - before)


def run_many(times: int) -> None:
    for _ in range(times):
        for run in (a_plain_pass, a_pass_with_unused_outputs, a_pass_with_several_threads, a_pass_that_fails):
            run()


def contexts_here() -> int:
    return len(current_agent().extension.contexts())  # type: ignore[attr-defined]


def test_passes_between_processes_leave_nothing(workers: Callable[..., Group]) -> None:
    group = workers(3)
    group.run_all(run_many, 3)
    group.run_all(note_counts)
    group.run_all(run_many, 25)
    assert group.run_all(contexts_here) == [0, 0, 0]
    found: list[dict[str, int]] = []

    def is_clean() -> bool:
        found[:] = group.run_all(counts_more)
        return not any(found)

    try:
        eventually(is_clean)
    except AssertionError:
        raise AssertionError(f"more than before, by worker: {found}") from None
