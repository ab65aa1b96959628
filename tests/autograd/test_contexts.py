"""What a context is, where it goes, what it holds, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.workers import bounded, eventually
from torch.autograd.graph import get_gradient_edge

from farstep import autograd, rpc
from farstep.errors import AutogradError, BackwardError, BackwardTimeout, FarstepError, UnknownContext
from farstep.rpc import Agent

from .conftest import Agents, contexts_on, nothing_left_on, speaking_for

PATIENCE_S = 60.0
parameters = [torch.linspace(0.5, 2.0, 3, dtype=torch.float64).add(i).requires_grad_() for i in range(3)]
"""One for each worker."""


@pytest.fixture(autouse=True)
def grads_stay_empty() -> Iterator[None]:
    yield
    left = [i for i, p in enumerate(parameters) if p.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    assert not left, f".grad of parameters {left}"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)


def mine() -> torch.Tensor:
    """The parameter of the worker that this runs on."""
    return parameters[rpc.get_worker_info().id]


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * mine()


def through(x: torch.Tensor, *workers: str) -> torch.Tensor:
    """Scaled here, then on each worker in turn, one calling the next."""
    x = scale(x)
    return rpc.rpc_sync(workers[0], through, args=(x, *workers[1:])) if workers else x  # type: ignore[no-any-return]


def context_here() -> int:
    return autograd._current_context()._context_id()


def context_through(*workers: str) -> list[int]:
    here = [context_here()]
    return here + (rpc.rpc_sync(workers[0], context_through, args=workers[1:]) if workers else [])


@rpc.functions.async_execution
def context_later(to: str) -> torch.futures.Future[list[int]]:
    here = context_here()
    there = rpc.rpc_async(to, context_here)
    return there.then(lambda done: [here, done.value(), context_here()])


def is_known(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


def on(agent: Agent, function: Callable[..., Any], *args: Any) -> Any:
    with speaking_for(agent):
        return function(*args)


def check(context_id: int, agents: list[Agent], expected: dict[torch.Tensor, torch.Tensor]) -> None:
    """The gradients of the context, on all workers together, are these and no others."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for agent in agents:
        if on(agent, is_known, context_id):
            found.update(on(agent, autograd.get_gradients, context_id))
    assert {id(leaf) for leaf in found} == {id(leaf) for leaf in expected}
    for leaf, gradient in expected.items():
        torch.testing.assert_close(found[leaf], gradient)


def local_gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, leaves), strict=True))


# -- where a context goes


def test_a_call_takes_the_context_along(three: list[Agent]) -> None:
    with autograd.context() as context_id:
        assert context_here() == context_id
        assert rpc.rpc_sync("worker1", context_here) == context_id
        assert rpc.rpc_async("worker1", context_here).wait() == context_id
        assert rpc.remote("worker1", context_here).to_here() == context_id
        assert rpc.rpc_sync("worker0", context_here) == context_id
        path = ("worker1", "worker2", "worker0", "worker1")
        assert context_through(*path) == [context_id] * 5
        assert rpc.rpc_sync("worker1", context_later, args=("worker2",)) == [context_id] * 3
    for to in ("worker0", "worker1", "worker2"):
        with pytest.raises(AutogradError, match="doesn't have a valid autograd context"):
            rpc.rpc_sync(to, context_here)


def test_callbacks_run_in_the_context_of_their_call(three: list[Agent]) -> None:
    seen: list[int] = []
    done = threading.Event()

    def note(_: Any) -> None:
        seen.append(context_here())
        done.set()

    with autograd.context() as context_id:
        future = rpc.rpc_async("worker1", context_here)
        assert future.then(lambda _: context_here()).wait() == context_id
        again = future.then(lambda _: rpc.rpc_sync("worker2", context_here))
        assert again.wait() == context_id
        future.add_done_callback(note)
        assert done.wait(PATIENCE_S)
    assert seen == [context_id]


def test_every_thread_has_its_own_context(three: list[Agent]) -> None:
    inside = threading.Barrier(3)
    found: dict[int, tuple[int, list[int]]] = {}

    def run(number: int) -> None:
        with speaking_for(three[number]), autograd.context() as context_id:
            inside.wait(PATIENCE_S)
            found[number] = context_id, context_through("worker1", "worker0", "worker2")
            inside.wait(PATIENCE_S)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    with autograd.context() as outer:
        for thread in threads:
            thread.start()
        for thread in threads:
            bounded(thread.join)
        assert context_here() == outer
    assert len(found) == 3
    assert all(ids == [context_id] * 4 for context_id, ids in found.values())
    assert len({context_id for context_id, _ in found.values()} | {outer}) == 4


def test_a_context_in_a_context_is_refused(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        with pytest.raises(AutogradError, match=f"Already have an autograd context id.*{context_id}"):
            open_and_close()
        autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
        check(context_id, three, local_gradients((x * parameters[1]).sum(), x, parameters[1]))
    with autograd.context() as other:
        assert other != context_id


def test_a_call_inside_a_served_call_may_not_open_another(three: list[Agent]) -> None:
    with autograd.context(), pytest.raises(AutogradError, match="Already have"):
        rpc.rpc_sync("worker1", open_and_close)
    assert rpc.rpc_sync("worker1", open_and_close) >> 48 == 1


def open_and_close() -> int:
    with autograd.context() as context_id:
        return context_id


# -- what crosses


def grad_is_enabled() -> bool:
    return torch.is_grad_enabled()


def test_no_grad_is_honoured(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        with torch.no_grad():
            bare = rpc.rpc_sync("worker1", scale, args=(x,))
            later = rpc.rpc_async("worker1", scale, args=(x,))
            rref = rpc.remote("worker1", scale, args=(x,))
            assert not rpc.rpc_sync("worker1", grad_is_enabled)
            assert not rpc.rpc_sync("worker1", nested_grad_is_enabled, args=("worker2",))
        assert not bare.requires_grad
        assert not later.wait().requires_grad
        assert not rref.to_here().requires_grad
        assert autograd._retrieve_context(context_id)._send_functions() == {}
        assert rpc.rpc_sync("worker1", grad_is_enabled)
        full = rpc.rpc_sync("worker1", scale, args=(x,))
        assert full.requires_grad
        with torch.no_grad():
            assert not rpc.remote("worker1", scale, args=(x,)).to_here().requires_grad
        loss = (full * bare).sum()
        autograd.backward(context_id, [loss])
        fixed = (x * parameters[1]).detach()
        check(context_id, three, local_gradients((x * parameters[1] * fixed).sum(), x, parameters[1]))


def nested_grad_is_enabled(to: str) -> bool:
    return rpc.rpc_sync(to, grad_is_enabled)  # type: ignore[no-any-return]


def view_without_grad() -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        view = mine()[:1]
    return view, mine() * 2


def test_a_view_of_a_leaf_that_was_made_without_grad_has_none(three: list[Agent]) -> None:
    """Torch says that such a view requires a gradient, and gives it none."""
    with autograd.context() as context_id:
        view, full = rpc.rpc_sync("worker1", view_without_grad)
        autograd.backward(context_id, [full.sum() + view.sum()])
        check(context_id, three, {parameters[1]: torch.full((3,), 2.0, dtype=torch.float64)})


def kinds(tensors: list[torch.Tensor]) -> list[tuple[bool, bool]]:
    return [(t.requires_grad, t.is_leaf) for t in tensors]


def test_only_what_requires_a_gradient_is_noted(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        context = autograd._retrieve_context(context_id)
        rpc.rpc_sync("worker1", kinds, args=([x.detach(), torch.arange(3)],))
        assert (context._send_functions(), context._recv_functions()) == ({}, {})
        assert context._known_worker_ids() == {1}
        found = rpc.rpc_sync("worker2", kinds, args=([x, x.detach(), x * 2],))
        assert found == [(True, False), (False, True), (True, False)]
        assert len(context._send_functions()) == 1
        assert len(next(iter(context._send_functions().values())).next_functions) == 2
        assert context._known_worker_ids() == {1, 2}
        rpc.rpc_sync("worker2", scale, args=(x,))
        assert len(context._recv_functions()) == 1
        there = on(three[2], autograd._retrieve_context, context_id)
        assert (len(there._recv_functions()), len(there._send_functions())) == (2, 1)


def apply(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)  # type: ignore[no-any-return]


def test_parameters_that_are_sent_keep_their_gradient(three: list[Agent], x: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(x.detach() * 2)
    linear = torch.nn.Linear(3, 2, dtype=torch.float64)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(parameter,)).sum()
        loss = loss + rpc.rpc_sync("worker1", apply, args=(linear, x)).pow(2).sum()
        autograd.backward(context_id, [loss])
        local = (parameter * parameters[1]).sum() + linear(x).pow(2).sum()
        leaves = (parameter, parameters[1], x, linear.weight, linear.bias)
        check(context_id, three, local_gradients(local, *leaves))
    assert all(leaf.grad is None for leaf in leaves)


def change_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1.0)
    x.mul_(mine())
    x[0] = y[1] * 2
    y[1:].mul_(3.0)
    return x * 2 + y.exp_()


def test_received_tensors_may_be_changed_in_place(three: list[Agent], x: torch.Tensor) -> None:
    y = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("worker1", change_in_place, args=(x, y))
        result += 1.0
        result.mul_(y)
        autograd.backward(context_id, [result.sum()])
        assert x.tolist() == [1.0, -2.0, 3.0]
        with speaking_for(three[1]):
            local = change_in_place(x.clone(), y.clone())
        leaves = (x, y, parameters[1])
        check(context_id, three, local_gradients(((local + 1.0) * y).sum(), *leaves))


def change_part_and_all(x: torch.Tensor) -> torch.Tensor:
    x[:1] = mine()[:1] * 0.5
    x.sub_(mine())
    return x


def test_received_tensors_are_not_views(three: list[Agent]) -> None:
    """Torch refuses to change a view in place after a part of it was changed in place."""
    zeros = torch.zeros(3, 1, dtype=torch.float64)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", change_part_and_all, args=(zeros.expand(3, 3).contiguous(),))
        autograd.backward(context_id, [y.sum()])
        expected = torch.tensor([-3.0 + 1.5, -3.0, -3.0], dtype=torch.float64)
        check(context_id, three, {parameters[1]: expected})


def are_one(first: torch.Tensor, second: torch.Tensor) -> tuple[bool, torch.Tensor]:
    return first is second, first * second


def test_a_tensor_that_is_sent_twice(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        h = x * 3
        is_one, product = rpc.rpc_sync("worker1", are_one, args=(h, h))
        assert is_one
        loss = product.sum() + rpc.rpc_sync("worker1", scale, kwargs={"x": h}).sum()
        loss = loss + rpc.rpc_sync("worker2", scale, args=(h,)).sum()
        autograd.backward(context_id, [loss])
        local = (x * 3).pow(2).sum() + (x * 3 * (parameters[1] + parameters[2])).sum()
        check(context_id, three, local_gradients(local, x, parameters[1], parameters[2]))


def test_tensors_to_oneself(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker0", through, args=(x, "worker0", "worker1", "worker0"))
        z = rpc.remote("worker0", scale, args=(y,)).to_here()
        autograd.backward(context_id, [z.sum()])
        a, b = parameters[0], parameters[1]
        check(context_id, three, local_gradients((x * a**4 * b).sum(), x, a, b))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
def test_dtypes(three: list[Agent], dtype: torch.dtype) -> None:
    x = torch.tensor([1.5, -2.0, 0.25]).to(dtype).requires_grad_()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, x))
        autograd.backward(context_id, [y.abs().sum()])
        expected = local_gradients((x * x).abs().sum(), x)
        assert expected[x].dtype == dtype
        check(context_id, three, expected)


def test_a_gradient_has_the_dtype_of_its_tensor(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.Tensor.to, args=(x, torch.float16))
        autograd.backward(context_id, [y.float().pow(2).sum()])
        check(context_id, three, local_gradients(x.half().float().pow(2).sum(), x))


def shapes_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.pow(2) for t in tensors] + [tensors[0].t(), tensors[1][1:], tensors[2].expand(2, 4)]


def test_views_and_strides(three: list[Agent]) -> None:
    x = torch.arange(12, dtype=torch.float64).view(3, 4).requires_grad_()

    def views() -> list[torch.Tensor]:
        return [x.t(), x[::2, 1:], x[1:2], x.flatten()[3:9:2], x[:1].expand(3, 4), x[0, 0], x[:0]]

    def total(tensors: list[torch.Tensor]) -> torch.Tensor:
        return sum(t.sum() * (i + 1) for i, t in enumerate(tensors))  # type: ignore[return-value]

    with autograd.context() as context_id:
        autograd.backward(context_id, [total(rpc.rpc_sync("worker1", shapes_of, args=(views(),)))])
        check(context_id, three, local_gradients(total(shapes_of(views())), x))


def embed(weight: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(which, weight, sparse=True)


def densify(x: torch.Tensor) -> torch.Tensor:
    return x.to_dense() * 2


def test_sparse_gradients(three: list[Agent]) -> None:
    weight = torch.randn(10, 3, requires_grad=True)
    which = torch.tensor([1, 4, 4, 9])
    with autograd.context() as context_id:
        here = embed(weight, which)
        there = rpc.rpc_sync("worker1", embed, args=(weight, which))
        autograd.backward(context_id, [there.sum()], retain_graph=True)
        assert autograd.get_gradients(context_id)[weight].is_sparse
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(here, 3)).sum()])
        found = autograd.get_gradients(context_id)[weight]
        (expected,) = torch.autograd.grad(embed(weight, which).sum() * 4, weight)
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), expected.to_dense())
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, args=(weight, 2)).sum()])
        dense = autograd.get_gradients(context_id)[weight]
        torch.testing.assert_close(dense, expected.to_dense() + 2)


def test_sparse_tensors(three: list[Agent]) -> None:
    x = torch.eye(4, dtype=torch.float64).requires_grad_()
    leaf = torch.eye(4, dtype=torch.float64).to_sparse().requires_grad_()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", densify, args=(x.to_sparse(),))
        z = rpc.rpc_sync("worker1", densify, args=(leaf,))
        autograd.backward(context_id, [y.sum() + z.sum()])
        found = autograd.get_gradients(context_id)
        (expected,) = torch.autograd.grad(densify(x.to_sparse()).sum(), x)
        torch.testing.assert_close(found[x].to_dense(), expected.to_dense())
        (expected,) = torch.autograd.grad(densify(leaf).sum(), leaf)
        torch.testing.assert_close(found[leaf].to_dense(), expected.to_dense())


class Ignores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def ignore(x: torch.Tensor) -> torch.Tensor:
    return Ignores.apply(mine(), x)  # type: ignore[no-any-return]


def test_a_gradient_that_is_missing_stays_missing(three: list[Agent], x: torch.Tensor) -> None:
    # In one process a Function that lets its gradients be materialized would be given zeros; the guide says so.
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", ignore, args=(Doubles.apply(x),)).sum()])
        check(context_id, three, {parameters[1]: torch.ones(3, dtype=torch.float64)})


# -- gradients


def test_grad_is_not_touched(three: list[Agent], x: torch.Tensor) -> None:
    before = torch.full((3,), 7.0, dtype=torch.float64)
    x.grad = before
    parameters[1].grad = before
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
            check(context_id, three, local_gradients((x * parameters[1]).sum(), x, parameters[1]))
        assert x.grad is before
        assert parameters[1].grad is before
        assert before.tolist() == [7.0] * 3
    finally:
        parameters[1].grad = None


def test_passes_of_a_context_add_up_and_what_was_read_stays(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        expected = parameters[1].detach().clone()
        for times in range(1, 5):
            autograd.backward(context_id, [loss], retain_graph=True)
            found = autograd.get_gradients(context_id)[x]
            torch.testing.assert_close(found, expected * times)
        autograd.backward(context_id, [loss])
        with pytest.raises(BackwardError, match="second time"):
            autograd.backward(context_id, [loss])


def test_passes_of_a_context_from_several_workers_at_once(three: list[Agent], x: torch.Tensor) -> None:
    """Each of the workers runs backward from a root of its own, in one context, at the same time."""
    with autograd.context() as context_id:
        h = x * 2
        rrefs = [rpc.remote(f"worker{i}", loss_of, args=(h,)) for i in range(3)]
        start = threading.Barrier(3)
        futures = [rpc.rpc_async(r.owner(), backward_at, args=(context_id, r)) for r in rrefs]
        barriers[context_id] = start
        for future in futures:
            bounded(future.wait)
        a, b, c = parameters
        check(context_id, three, local_gradients((x * 2 * (a + b + c) * 3).sum(), x, a, b, c))


barriers: dict[int, threading.Barrier] = {}


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return scale(x).sum()


def backward_at(context_id: int, rref: rpc.RRef[torch.Tensor]) -> None:
    barrier = eventually(lambda: barriers.get(context_id))
    for _ in range(3):
        barrier.wait(PATIENCE_S)
        autograd.backward(context_id, [rref.local_value()], retain_graph=True)


def test_a_backward_from_a_nested_call(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        h = x * 2
        rpc.rpc_sync("worker1", backward_there, args=(context_id, h))
        check(
            context_id,
            three,
            local_gradients((x * 2 * parameters[1] * parameters[2]).sum(), x, parameters[1], parameters[2]),
        )


def backward_there(context_id: int, x: torch.Tensor) -> None:
    y = rpc.rpc_sync("worker2", scale, args=(scale(x),))
    autograd.backward(context_id, [y.sum()])


def test_unknown_contexts(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [(x * 2).sum()])
        assert set(autograd.get_gradients(context_id)) == {x}
        with pytest.raises(UnknownContext) as caught:
            on(three[2], autograd.get_gradients, context_id)  # it never got there
        assert caught.value.context_id == context_id
    for unknown in (context_id, 12345, -1, 1 << 62):
        for function in (autograd.get_gradients, autograd.populate_grad, autograd._retrieve_context):
            with pytest.raises(UnknownContext, match=f"Could not find autograd context with id: {unknown}"):
                function(unknown)
        with pytest.raises(UnknownContext):
            autograd.backward(unknown, [(x * 2).sum()])
        assert not autograd._is_valid_context(unknown)


def test_what_backward_refuses(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = (x * 2).sum()
        for function in (autograd.backward, autograd.backward_async):
            with pytest.raises(AutogradError, match="No tensors provided"):
                function(context_id, [])
            with pytest.raises(AutogradError, match="requires_grad not set on root 1"):
                function(context_id, [loss, torch.ones(1)])
            with pytest.raises(AutogradError, match="root 0 is not a scalar"):
                function(context_id, [x * 2])
            with pytest.raises(AutogradError, match="does not have a valid gradient function"):
                function(context_id, [torch.ones(1, requires_grad=True)])
            for arguments in (
                (context_id, loss),
                (context_id, None),
                ("0", [loss]),
                (True, [loss]),
                (context_id, [3]),
            ):
                with pytest.raises(TypeError, match="incompatible function arguments"):
                    function(*arguments)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="'slow'"):
                function(context_id, [loss], mode="slow")
        assert autograd.get_gradients(context_id) == {}
        autograd.backward(context_id, [loss])
        check(context_id, three, {x: torch.full((3,), 2.0, dtype=torch.float64)})


def test_roots_that_are_the_same_or_below_each_other(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        first = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        second = first * 2
        autograd.backward(context_id, [first, second, first])
        check(context_id, three, local_gradients((x * parameters[1] * 4).sum(), x, parameters[1]))


def test_a_received_tensor_as_root(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", loss_of, args=(x,))
        autograd.backward(context_id, [loss])
        check(context_id, three, local_gradients((x * parameters[1]).sum(), x, parameters[1]))


def test_fast_says_what_it_waits_for(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        h = x * 2
        y = rpc.rpc_sync("worker1", scale, args=(h,))
        rpc.rpc_sync("worker2", scale, args=(h,))
        with pytest.raises(AutogradError, match=r"worker0.*not used in the loss.*mode='smart'"):
            autograd.backward(context_id, [y.sum()], retain_graph=True, mode="fast")
    with autograd.context() as context_id:
        h = x * 2
        y = rpc.rpc_sync("worker1", scale, args=(h,))
        rpc.rpc_sync("worker2", scale, args=(h,))
        autograd.backward(context_id, [y.sum()])
        check(context_id, three, local_gradients((x * 2 * parameters[1]).sum(), x, parameters[1]))


late = threading.Event()
later = threading.Event()


def release_the_late(_: torch.Tensor) -> None:
    late.set()
    assert later.wait(PATIENCE_S)


def with_hook(x: torch.Tensor) -> torch.Tensor:
    y = rpc.rpc_sync("worker2", scale, args=(x * 2,))
    y.register_hook(release_the_late)
    return y * 1.5  # type: ignore[no-any-return]


def send_late(x: torch.Tensor) -> None:
    assert late.wait(PATIENCE_S)
    rpc.rpc_sync("worker2", scale, args=(x * 2,))
    later.set()


def test_tensors_that_are_sent_during_backward_and_do_not_matter(three: list[Agent], x: torch.Tensor) -> None:
    """A call whose result nobody uses is still running, and calls others, while gradients are on their way."""
    late.clear()
    later.clear()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", with_hook, args=(x,))
        unused = rpc.rpc_async("worker1", send_late, args=(y,))
        autograd.backward(context_id, [y.sum()])
        check(context_id, three, local_gradients((x * 3 * parameters[2]).sum(), x, parameters[2]))
        bounded(unused.wait)


def test_plain_backward_says_what_to_do(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        with pytest.raises(RuntimeError, match=r"farstep\.autograd\.backward\(context_id, roots\)") as caught:
            loss.backward()
        assert str(context_id) in str(caught.value)
    assert x.grad is None


def test_a_tensor_of_another_context(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as first:
        old = rpc.rpc_sync("worker1", scale, args=(x,))
    with autograd.context() as second:
        y = rpc.rpc_sync("worker1", scale, args=(x * old,))
        with pytest.raises(AutogradError, match=rf"context {second}.*received in context\s+{first}"):
            autograd.backward(second, [y.sum()])


# -- hooks


def test_hooks_see_the_whole_gradient_once(three: list[Agent], x: torch.Tensor) -> None:
    seen: dict[str, list[torch.Tensor]] = {}

    def hook(name: str, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(gradient: torch.Tensor) -> torch.Tensor:
            seen.setdefault(name, []).append(gradient.clone())
            return gradient * factor

        return run

    def run(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        h = x * 2
        h.register_hook(hook("sent", 2.0))
        y = call("worker1", h)
        y.register_hook(hook("received", 3.0))
        z = call("worker2", y) + call("worker1", y) * h
        return z.sum() + y.sum() + h.sum()

    handles = [x.register_hook(hook("leaf", 5.0)), parameters[1].register_hook(hook("parameter", 7.0))]
    try:
        leaves = (x, parameters[1], parameters[2])
        expected = local_gradients(run(lambda to, t: t * parameters[int(to[-1])]), *leaves)
        expected_seen = dict(seen)
        seen.clear()
        with autograd.context() as context_id:
            autograd.backward(context_id, [run(lambda to, t: rpc.rpc_sync(to, scale, args=(t,)))])
            check(context_id, three, expected)
        assert {name: len(calls) for name, calls in seen.items()} == dict.fromkeys(expected_seen, 1)
        torch.testing.assert_close(seen, expected_seen)
    finally:
        for handle in handles:
            handle.remove()


def test_hooks_on_the_node_that_accumulates(three: list[Agent], x: torch.Tensor) -> None:
    node = get_gradient_edge(parameters[1]).node
    seen: list[tuple[str, list[float]]] = []

    def before(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(("before", gradients[0].tolist()))
        return (gradients[0] * 2,)

    handles = [
        node.register_prehook(before),
        node.register_hook(lambda _, gradients: seen.append(("after", gradients[0].tolist()))),
    ]
    try:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
            check(context_id, three, {x: parameters[1].detach(), parameters[1]: x.detach() * 2})
        assert seen == [("before", x.tolist()), ("after", (x * 2).tolist())]
    finally:
        for handle in handles:
            handle.remove()


def test_a_hook_that_comes_after_passes_without_any_runs(three: list[Agent], x: torch.Tensor) -> None:
    node = get_gradient_edge(parameters[1]).node
    seen: list[int] = []

    for number in range(3):  # without any, twice with one, without any again
        hooks = number % 2
        handles = [node.register_hook(lambda *_, number=number: seen.append(number)) for _ in range(hooks)]
        for _ in range(2):
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("worker1", scale, args=(x,)).sum()])
        for handle in handles:
            handle.remove()
    assert seen == [1, 1]


def test_a_hook_may_call_other_workers(three: list[Agent], x: torch.Tensor) -> None:
    def ask(gradient: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("worker2", torch.mul, args=(gradient, 10.0))  # type: ignore[no-any-return]

    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        y.register_hook(ask)
        bounded(autograd_of(three[0], context_id, y.sum()))
        check(context_id, three, local_gradients((x * parameters[1] * 10).sum(), x, parameters[1]))


def autograd_of(agent: Agent, context_id: int, loss: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with speaking_for(agent):
            autograd.backward(context_id, [loss])

    return run


# -- the end of a context


def test_a_context_is_released_everywhere(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", through, args=(x, "worker2", "worker1"))
        assert contexts_on(three) == {f"worker{i}": [context_id] for i in range(3)}
        assert autograd._get_debug_info()["num_autograd_contexts"] == "1"
    assert contexts_on(three) == {}
    assert autograd._get_debug_info() == {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}


def fail_after_a_call(x: torch.Tensor) -> None:
    rpc.rpc_sync("worker2", scale, args=(x,))
    raise KeyError("on purpose")


def test_a_context_is_released_when_its_body_raises(three: list[Agent], x: torch.Tensor) -> None:
    def fail_there() -> None:
        with autograd.context():
            rpc.rpc_sync("worker1", fail_after_a_call, args=(x,))

    def fail_here() -> None:
        with autograd.context() as context_id:
            rpc.rpc_sync("worker1", scale, args=(x,))
            assert contexts_on(three) == {"worker0": [context_id], "worker1": [context_id]}
            raise ZeroDivisionError

    with pytest.raises(KeyError):
        fail_there()
    assert contexts_on(three) == {}
    with pytest.raises(ZeroDivisionError):
        fail_here()
    assert contexts_on(three) == {}
    with autograd.context() as context_id:  # and this thread may open another
        assert context_here() == context_id


def test_a_context_can_be_released_early(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        autograd._release_context(context_id)
        assert contexts_on(three) == {}
        with pytest.raises(UnknownContext):
            autograd.backward(context_id, [loss])
        with pytest.raises(UnknownContext):
            autograd._release_context(context_id)


def call_again_and_again(to: str, x: torch.Tensor) -> None:
    for _ in range(30):
        rpc.rpc_sync(to, scale, args=(x,))


@pytest.mark.parametrize("to", ["worker0", "worker1", "worker2"])
def test_a_released_context_does_not_come_back(three: list[Agent], x: torch.Tensor, to: str) -> None:
    """A call that nobody waits for goes on calling while the context ends."""
    futures = []
    for _ in range(100):
        with autograd.context():
            futures.append(rpc.rpc_async("worker1", call_again_and_again, args=(to, x)))
            rpc.rpc_sync("worker1", scale, args=(x,))
    for future in futures:
        bounded(future.wait)
    nothing_left_on(three)


# -- RRef.backward, populate_grad, backward_async, create_graph


def test_backward_of_a_reference(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        rref = rpc.remote("worker1", loss_of, args=(x,))
        rref.backward(context_id, retain_graph=True)
        expected = local_gradients((x * parameters[1]).sum(), x, parameters[1])
        check(context_id, three, expected)
        rref.backward(context_id)
        check(context_id, three, {leaf: gradient * 2 for leaf, gradient in expected.items()})
    with autograd.context() as context_id:
        owned = rpc.RRef(rpc.rpc_sync("worker1", loss_of, args=(x,)))
        assert owned.is_owner()
        owned.backward(context_id)
        check(context_id, three, expected)
    for rref in (rpc.RRef((x * 2).sum()), rpc.remote("worker1", loss_of, args=(x.detach(),))):
        with pytest.raises(UnknownContext):
            rref.backward(context_id)


def test_backward_of_a_reference_to_something_else(three: list[Agent]) -> None:
    with autograd.context() as context_id:
        for rref in (rpc.RRef(3), rpc.remote("worker1", int, args=(3,))):
            with pytest.raises(FarstepError, match="tensor"):
                rref.backward(context_id)
        with pytest.raises(AutogradError, match="not a scalar"):
            rpc.remote("worker1", scale, args=(torch.ones(3),)).backward(context_id)


def test_populate_grad(three: list[Agent], x: torch.Tensor) -> None:
    try:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", through, args=(x, "worker2", "worker1")).sum()
            autograd.backward(context_id, [loss])
            autograd.populate_grad(context_id)
            leaves = (x, parameters[1], parameters[2])
            expected = local_gradients((x * parameters[1] ** 2 * parameters[2]).sum(), *leaves)
            for leaf, gradient in expected.items():
                torch.testing.assert_close(leaf.grad, gradient)
                assert leaf.grad is not None
                leaf.grad.add_(1.0)  # it is the leaf's own
            check(context_id, three, expected)
            autograd.populate_grad(context_id)
            for leaf, gradient in expected.items():
                torch.testing.assert_close(leaf.grad, gradient * 2 + 1.0)
    finally:
        for parameter in parameters:
            parameter.grad = None


def test_backward_async(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        futures = [autograd.backward_async(context_id, [loss], retain_graph=True) for _ in range(8)]
        assert [bounded(f.wait) for f in futures] == [None] * 8
        check(context_id, three, local_gradients((x * parameters[1]).sum() * 8, x, parameters[1]))
        assert context_here() == context_id
        h = x * 2
        rpc.rpc_sync("worker2", scale, args=(h,))
        fast = autograd.backward_async(
            context_id, [rpc.rpc_sync("worker1", scale, args=(h,)).sum()], mode="fast"
        )
        with pytest.raises(AutogradError, match="not used in the loss"):
            bounded(fast.wait)


def test_backward_in_a_callback(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:

        def go_on(done: torch.futures.Future[torch.Tensor]) -> int:
            y = rpc.rpc_sync("worker2", scale, args=(done.value(),))
            autograd.backward(context_id, [y.sum()])
            return context_here()

        future = rpc.rpc_async("worker1", scale, args=(x,)).then(go_on)
        assert bounded(future.wait) == context_id
        leaves = (x, parameters[1], parameters[2])
        check(context_id, three, local_gradients((x * parameters[1] * parameters[2]).sum(), *leaves))


def test_create_graph_on_one_worker(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [x.pow(3).sum()], create_graph=True)
        gradient = autograd.get_gradients(context_id)[x]
        torch.testing.assert_close(gradient, 3 * x**2)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        torch.testing.assert_close(second, 6 * x.detach())


def test_create_graph_does_not_cross_workers(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
        with pytest.raises(AutogradError, match="create_graph=True"):
            autograd.backward(context_id, [loss], create_graph=True)


# -- what goes wrong


def test_an_error_in_a_hook_here(three: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", scale, args=(x,))
        y.register_hook(fail)
        with pytest.raises(BackwardError, match=r"Error on Node 0: .*on purpose"):
            autograd.backward(context_id, [y.sum()])
    assert contexts_on(three) == {}


def fail(_: Any) -> None:
    raise ValueError("on purpose")


gate = threading.Event()


def wait_at_gate(_: torch.Tensor) -> None:
    assert gate.wait(PATIENCE_S)


def gated(x: torch.Tensor) -> torch.Tensor:
    y = scale(x)
    y.register_hook(wait_at_gate)
    return y * 1.0


def test_a_pass_that_times_out_leaves_nothing_for_the_next(three: list[Agent], x: torch.Tensor) -> None:
    gate.clear()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", gated, args=(x,)).sum()
        try:
            with pytest.raises(BackwardTimeout, match="worker1"):
                autograd.backward(context_id, [loss], retain_graph=True, timeout=0.1)
        finally:
            gate.set()
        autograd.backward(context_id, [loss], retain_graph=True)
        check(context_id, three, local_gradients((x * parameters[1]).sum(), x, parameters[1]))


def test_many_contexts_share_parameters(agents_of: Agents) -> None:
    """Threads that run one pass after another, all through the same parameters."""
    agents = agents_of(3)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with speaking_for(agents[number % 3]):
                for i in range(20):
                    x = torch.full((3,), float(number * 100 + i), dtype=torch.float64, requires_grad=True)
                    with autograd.context() as context_id:
                        loss = rpc.rpc_sync("worker1", through, args=(x, "worker2", "worker0")).sum()
                        autograd.backward(context_id, [loss])
                        a, b, c = parameters
                        check(context_id, agents, local_gradients((x * a * b * c).sum(), x, a, b, c))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        bounded(thread.join)
    if failures:
        raise failures[0]
    nothing_left_on(agents)
