"""Programs that are right and rare, and peers that are wrong on purpose."""

from __future__ import annotations

import datetime
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from support.workers import bounded, eventually
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from farstep import autograd, rpc
from farstep.autograd.context import COUNTER_BITS
from farstep.autograd.passes import ROOTS, Settings
from farstep.autograd.tracker import Report, Tracker
from farstep.errors import AutogradError, WorkerLost
from farstep.rpc import Agent
from farstep.rpc.message import EMPTY
from farstep.rpc.payload import pack
from farstep.rpc.wire import Kind

from .conftest import contexts_on, speaking_for

PATIENCE_S = 60.0
weight = torch.full((2,), 3.0, requires_grad=True)


def same(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def ones() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


# -- two passes of one context at the same time


class Gate:
    """Holds a gradient up, on the worker that it is on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def hook(self, gradient: torch.Tensor) -> None:
        self.reached.set()
        assert self.open.wait(PATIENCE_S)


gate = Gate()


def held_up(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.register_hook(gate.hook)
    return y


def half_of_it(x: torch.Tensor) -> tuple[torch.Tensor, rpc.RRef[torch.Tensor]]:
    h = x * 2
    return h * 1, rpc.RRef(h)


def rest_of_it(rref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return rref.local_value() * 5


def test_a_pass_that_waits_survives_another_of_the_same_context(three: list[Agent]) -> None:
    """Between two gradients a worker holds nothing of the pass but what it knows; the next pass must leave that to it."""
    gate.reached.clear()
    gate.open.clear()
    x, other = ones(), ones()
    with autograd.context() as context_id:
        first = rpc.rpc_sync("worker1", scaled, args=(ones(),))
        half, rref = rpc.rpc_sync("worker1", half_of_it, args=(x,))
        rpc.rpc_sync("worker1", rest_of_it, args=(rref,))  # crossed, and not used
        loss = first.sum() + rpc.rpc_sync("worker2", held_up, args=(half,)).sum()
        other_loss = rpc.rpc_sync("worker1", same, args=(other,)).sum()
        waiting = autograd.backward_async(context_id, [loss])
        assert gate.reached.wait(PATIENCE_S)
        autograd.backward(context_id, [other_loss])
        gate.open.set()
        bounded(waiting.wait)
        gradients = autograd.get_gradients(context_id)
        torch.testing.assert_close(gradients[x], torch.full((2,), 2.0))
        torch.testing.assert_close(gradients[other], torch.ones(2))


# -- a worker that is lost before the root knows that it takes part


def test_a_loss_that_was_told_before_the_worker_took_part_ends_the_pass() -> None:
    """Word of the loss comes once. Who passes gradient on to that worker afterwards may not have heard of it yet."""
    gate.reached.clear()
    gate.open.clear()
    with rpc.local_agents(3) as agents, speaking_for(agents[0]), autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", held_up, args=(ones(),)).sum()
        waiting = autograd.backward_async(context_id, [loss], timeout=0)
        assert gate.reached.wait(PATIENCE_S)
        agents[2].close()
        eventually(lambda: not agents[0].is_present(2))
        [id] = agents[0].extension.conductor._trackers  # type: ignore[attr-defined]
        passed_on = (1, [], [((2 << COUNTER_BITS) + 77, 2)], None, 1)
        post(agents[1], "worker0", ("report", id, context_id, False, False, "smart", id[1], passed_on, None))
        try:
            with pytest.raises(WorkerLost, match="'worker2' is lost: it took part in backward"):
                bounded(waiting.wait, timeout_s=5.0)
        finally:
            gate.open.set()


# -- DistributedDataParallel in several threads


class Inside:
    """A module in DistributedDataParallel that says when it is about to reduce, and so waits for the other ranks."""

    def __init__(self, value: float, group: dist.ProcessGroup) -> None:
        linear = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(linear.weight, value)
        self.weight = linear.weight
        self.reached = threading.Event()
        self.module = DistributedDataParallel(linear, process_group=group)
        self.module.register_comm_hook(group, self._reduce)

    def _reduce(self, group, bucket):  # type: ignore[no-untyped-def]  # torch refuses types that are strings
        self.reached.set()
        return allreduce_hook(group, bucket)

    def train(self, scale: float) -> torch.Tensor:
        """The gradient, in a context of its own."""
        with autograd.context() as context_id:
            x = rpc.rpc_sync("worker1", same, args=(torch.full((1, 2), scale),))
            autograd.backward(context_id, [self.module(x).sum()], timeout=0)
            return autograd.get_gradients(context_id)[self.weight]


def in_other_orders() -> list[list[float]]:
    """Rank 0 reduces the first module before it begins with the second; rank 1 does it the other way about."""
    patience = datetime.timedelta(seconds=PATIENCE_S)
    modules = [Inside(i + 1.0, dist.new_group([0, 1], timeout=patience)) for i in range(2)]
    rank = dist.get_rank()
    found: dict[int, list[float]] = {}
    with rpc.local_agents(2) as agents:

        def train(number: int) -> None:
            with speaking_for(agents[0]):
                found[number] = modules[number].train(10.0 * number + rank).flatten().tolist()

        threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
        threads[rank].start()
        assert modules[rank].reached.wait(PATIENCE_S)
        threads[1 - rank].start()
        for thread in threads:
            thread.join(PATIENCE_S)
    return [found[0], found[1]]


def side_by_side() -> list[tuple[float, list[float]]]:
    """Contexts of several threads through one module. Returns what is not as it should be."""
    *_, mine = dist.new_subgroups(1)[1][: dist.get_rank() + 1]
    module = Inside(1.0, mine)
    wrong: list[tuple[float, list[float]]] = []
    with rpc.local_agents(2) as agents:

        def train(thread: int) -> None:
            with speaking_for(agents[0]):
                for i in range(40):
                    scale = 100.0 * thread + i
                    gradient = module.train(scale).flatten().tolist()
                    if gradient != [scale, scale]:
                        wrong.append((scale, gradient))

        threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert module.weight.grad is None
    return wrong


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_modules_that_ranks_reduce_in_other_orders_do_not_wait_for_each_other(two_ranks: Ranks) -> None:
    assert two_ranks.run(in_other_orders) == [[[0.5, 0.5], [10.5, 10.5]]] * 2


def test_contexts_through_one_reduced_module_do_not_mix_their_gradients(two_ranks: Ranks) -> None:
    assert two_ranks.run(side_by_side) == [[], []]


# -- nodes at a border, which are run by hand


class TakesNone(torch.autograd.Function):
    """Asks to be given None where there is no gradient, and tells it from zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        result = torch.zeros(2)
        if a is not None:
            result = result + a * 2
        if b is not None:
            result = result + b * 3 + 100
        return result


def test_a_function_that_takes_none_is_given_none(three: list[Agent]) -> None:
    x = ones()
    with autograd.context() as context_id:
        h = x * 1
        used, _ = TakesNone.apply(h)
        autograd.backward(context_id, [(used + rpc.rpc_sync("worker1", same, args=(h,))).sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], torch.full((2,), 3.0))


def test_backward_in_a_hook_of_an_ordinary_backward(three: list[Agent]) -> None:
    x, y = ones(), torch.full((2,), 3.0, requires_grad=True)
    with autograd.context() as context_id:
        h = y * y
        inner = (h * 5 + rpc.rpc_sync("worker1", same, args=(h,))).sum()
        z = x * 1
        z.register_hook(lambda _: autograd.backward(context_id, [inner]))
        torch.autograd.grad((z * 2).sum(), x)
        torch.testing.assert_close(autograd.get_gradients(context_id)[y], torch.full((2,), 36.0))


@pytest.mark.parametrize("at_border", [True, False])
def test_a_reentrant_checkpoint_is_refused_everywhere(three: list[Agent], at_border: bool) -> None:
    """It would put its gradients into `.grad`."""
    x = ones()
    with autograd.context() as context_id:
        h = x * 1
        loss = checkpoint(scaled, h, use_reentrant=True).sum()
        loss = loss + rpc.rpc_sync("worker1", same, args=(h if at_border else x * 2,)).sum()
        with pytest.raises(AutogradError, match="use_reentrant"):
            autograd.backward(context_id, [loss])
    assert weight.grad is None


# -- hooks and leaves


def call_home(gradient: torch.Tensor) -> None:
    """From worker1: worker0 runs a pass of its own, through another leaf with a hook on worker1."""
    rpc.rpc_sync("worker0", a_pass_of_its_own)


def a_pass_of_its_own() -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", through_hooked_leaf, args=(ones(),)).sum()])


hooked_leaf, calling_leaf = ones(), ones()
hooked_leaf.register_hook(lambda gradient: gradient * 1)
calling_leaf.register_hook(call_home)


def through_hooked_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * hooked_leaf


def through_calling_leaf(x: torch.Tensor) -> torch.Tensor:
    return x * calling_leaf


def test_a_hook_on_a_leaf_may_call_for_another_pass(three: list[Agent]) -> None:
    x = ones()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", through_calling_leaf, args=(x,)).sum()
        bounded(autograd.backward_async(context_id, [loss]).wait)
        assert x in autograd.get_gradients(context_id)


class Stop(torch.autograd.Function):
    """Takes part, and gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:  # type: ignore[override]
        return None


def stopped(x: torch.Tensor) -> torch.Tensor:
    return Stop.apply(x)  # type: ignore[no-any-return]


def test_gradients_of_two_leaves_are_not_one_memory(three: list[Agent]) -> None:
    x, y = ones(), ones()
    with autograd.context() as context_id:
        h = y + 1  # gradient waits here, and is then y's as it was x's
        loss = ((x + h) * torch.tensor([1.0, 2.0])).sum()
        loss = loss + rpc.rpc_sync("worker1", stopped, args=(h,)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
        gradients[x].mul_(100)
        torch.testing.assert_close(gradients[y], torch.tensor([1.0, 2.0]))


def test_trainers_populate_the_same_parameter_at_once(three: list[Agent]) -> None:
    trainers, passes = 3, 20
    start = torch.ones(2)

    def train(agent: Agent) -> None:
        with speaking_for(agent):
            for _ in range(passes):
                with autograd.context() as context_id:
                    autograd.backward(context_id, [rpc.rpc_sync("worker1", scaled, args=(start,)).sum()])
                    autograd.populate_grad(context_id)

    threads = [threading.Thread(target=train, args=(agent,)) for agent in three[:trainers]]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        torch.testing.assert_close(weight.grad, start * trainers * passes)
    finally:
        weight.grad = None


def test_ctrl_c_in_the_local_part_of_backward(three: list[Agent]) -> None:
    x = ones()
    y = x * 1
    y.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", same, args=(y,)).sum() + y.sum()
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context_id, [loss])
    assert contexts_on(three) == {}


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
def test_compressed_sparse_tensors_cross_in_a_context(three: list[Agent], layout: str) -> None:
    eye = torch.eye(4)
    x = {"csr": eye.to_sparse_csr, "csc": eye.to_sparse_csc, "bsr": lambda: eye.to_sparse_bsr((2, 2))}[
        layout
    ]()
    with autograd.context():
        came_back = rpc.rpc_sync("worker1", torch.clone, args=(x.requires_grad_(),))
    assert torch.equal(came_back.detach().to_dense(), eye)


# -- a peer that has passed the handshake, and lies


def post(agent: Agent, to: str, head: Any, tensors: tuple[Any, ...] | None = None) -> None:
    packed = EMPTY if tensors is None else pack(tensors)
    agent.peer(to).post(Kind.EXTENSION, 0, head, packed, deadline=time.monotonic() + PATIENCE_S)


def settled(agent: Agent, to: str) -> None:
    """What the agent has posted has been dealt with: messages are taken in order, and jobs of one depth too."""
    with speaking_for(agent):
        rpc.rpc_sync(to, same, args=(torch.ones(1),))


def test_only_the_opener_and_callers_release_a_context(three: list[Agent]) -> None:
    x = ones()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scaled, args=(x,))
        for to in ("worker0", "worker1"):
            post(three[2], to, ("release", context_id))
            settled(three[2], to)
        autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach())


@pytest.mark.parametrize("shape", [(2,), (5,), (2, 3)])
def test_a_gradient_for_what_went_elsewhere_is_refused(three: list[Agent], shape: tuple[int, ...]) -> None:
    x = ones()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scaled, args=(x,))
        [send] = autograd._retrieve_context(context_id)._send_functions()
        forged = ("grad", (2, 999), context_id, False, False, "smart", 0, [(send, [True])], False, None)
        post(three[2], "worker0", forged, (torch.full(shape, 7.0),))
        settled(three[2], "worker0")
        autograd.backward(context_id, [y.sum()])
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach())


def test_a_gradient_of_another_shape_is_refused() -> None:
    leaf = ones()
    with rpc.local_agents(2) as agents, speaking_for(agents[0]), autograd.context() as context_id:
        rpc.rpc_sync("worker1", same, args=(leaf,))
        context = autograd._retrieve_context(context_id)
        [send] = context.sends.values()
        with pytest.raises(AutogradError, match=r"shape \(5,\) for a tensor of shape \(2,\)"):
            send.fit([torch.ones(5)])
        with pytest.raises(AutogradError, match="2 gradients for message"):
            send.fit([None, None])


def test_a_report_in_anothers_name_ends_nothing_and_costs_its_sender() -> None:
    gate.reached.clear()
    gate.open.clear()
    x = ones()
    with rpc.local_agents(3) as three, speaking_for(three[0]), autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", held_up, args=(x,)).sum()
        with speaking_for(three[1]):
            [send] = autograd._retrieve_context(context_id)._send_functions()
        waiting = autograd.backward_async(context_id, [loss])
        assert gate.reached.wait(PATIENCE_S)
        conductor: Any = three[0].extension.conductor  # type: ignore[attr-defined]
        [id] = conductor._trackers
        done = (2, [send], [], False, 1000)  # in its own name, for what was asked of worker1
        post(three[2], "worker0", ("report", id, context_id, False, False, "smart", id[1], done, None))
        eventually(lambda: not three[0].is_present(2), "the liar being dropped")
        assert not waiting.done()
        gate.open.set()
        bounded(waiting.wait)
        assert x in autograd.get_gradients(context_id)


@pytest.mark.parametrize("forged_first", [True, False])
def test_only_whom_a_key_was_passed_on_to_has_dealt_with_it(forged_first: bool) -> None:
    """Whichever word comes first."""
    tracker = Tracker(Settings((0, 1), 5), me=0, name_of=str)
    forged, passed_on = Report(2, [7], []), Report(0, [ROOTS], [(7, 1)], is_blocked=False, number=1)
    for report in (forged, passed_on) if forged_first else (passed_on, forged):
        tracker.report(report)
    assert not tracker.is_over
    tracker.report(Report(1, [7], [], is_blocked=False, number=1))
    assert tracker.is_over
    assert tracker.error is None


def test_hooks_registered_on_the_node_still_run() -> None:
    """What `node_hooks` finds, it finds without changing it."""
    leaf, seen = ones(), []
    node = get_gradient_edge(leaf).node
    node.register_prehook(lambda gradients: seen.append("before"))
    node.register_hook(lambda _, gradients: seen.append("after"))
    with rpc.local_agents(2) as agents, speaking_for(agents[0]):
        for _ in range(2):
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("worker1", same, args=(leaf,)).sum()])
    assert seen == ["before", "after"] * 2
