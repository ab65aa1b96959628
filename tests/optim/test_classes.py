"""Every optimizer class: distributed steps do what local ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from farstep import autograd
from farstep.optim import DistributedOptimizer

from .spread import Spread, train


class Slowing(optim.Optimizer):
    """A user's own class: plain Python, state of its own, and no foreach or fused."""

    def __init__(self, params: Any, lr: float, slowing: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "slowing": slowing})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["pace"] = state.get("pace", torch.ones_like(p)) * group["slowing"]
                    p -= group["lr"] * state["pace"] * p.grad


CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (optim.Adam, {"lr": 0.1}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01}),
    (optim.Adam, {"lr": 0.1, "fused": False, "maximize": True}),
    (optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.95)}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adamax, {"lr": 0.1}),
    (optim.RMSprop, {"lr": 0.02, "momentum": 0.9, "centered": True}),
    (optim.Rprop, {"lr": 0.05}),
    (optim.NAdam, {"lr": 0.05}),
    (optim.RAdam, {"lr": 0.05}),
    (optim.ASGD, {"lr": 0.05}),
    (Slowing, {"lr": 0.1}),
]
for _name in ("Adafactor", "Muon"):  # where torch has them
    if hasattr(optim, _name):
        CASES.append((getattr(optim, _name), {"lr": 0.05}))


def exponential(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=[f"{k.__name__}-{'-'.join(o)}" for k, o in CASES])
def test_twenty_steps_with_schedule_and_clipping(three, kind, options):
    two_dimensional = [(3, 4), (4, 2), (2, 3), (5, 2)] if kind.__name__ == "Muon" else None
    spread = Spread([0, 1, 2, 1], two_dimensional)
    optimizer = DistributedOptimizer(kind, spread.rrefs, **options)
    ordinary = kind(spread.local, **options)

    def of(step: int) -> list[int]:  # parameter 3 joins late, parameter 0 rests now and then
        return [i for i in range(4) if not (i == 3 and step < 5) and not (i == 0 and step % 4 == 2)]

    train(spread, optimizer, ordinary, 20, schedule=exponential, max_norm=2.0, of=of)
    spread.assert_same(rtol=1e-6, atol=1e-8)
    assert all(p.grad is None for p in spread.remote)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SparseAdam, {"lr": 0.1}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.SGD, {"lr": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_twenty_steps_with_sparse_gradients(three, kind, options):
    spread = Spread([0, 1, 2], [(6, 3)] * 3)
    optimizer = DistributedOptimizer(kind, spread.rrefs, **options)

    def rows(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randint(6, (5,), generator=generator) for _ in range(3)]

    train(spread, optimizer, kind(spread.local, **options), 20, schedule=exponential, inputs=rows)
    spread.assert_same()


def test_dense_and_sparse_gradients_by_turns(three):
    spread = Spread([1, 2], [(6, 3)] * 2)
    optimizer = DistributedOptimizer(optim.Adagrad, spread.rrefs, lr=0.1)

    def inputs(step: int) -> list[torch.Tensor]:
        return [torch.tensor([1, 1, 4]), torch.tensor([2])] if step % 2 else spread.inputs(step)

    train(spread, optimizer, optim.Adagrad(spread.local, lr=0.1), 6, inputs=inputs)
    spread.assert_same()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adagrad], ids=lambda kind: kind.__name__)
def test_other_types_of_numbers(three, kind, dtype):
    spread = Spread([0, 1], dtype=dtype)
    options = {"lr": 0.1, "momentum": 0.9} if kind is optim.SGD else {"lr": 0.1}
    optimizer, ordinary = DistributedOptimizer(kind, spread.rrefs, **options), kind(spread.local, **options)
    for seed in range(3):
        with autograd.context() as context_id:
            calls = spread.inputs(seed)
            real = [c.real if c.is_complex() else c for c in calls]
            _backward_real(spread, context_id, real)
            optimizer.step(context_id)
        for p in spread.local:
            p.grad = None
        sum(real_loss(p, x) for p, x in zip(spread.local, real, strict=True)).backward()
        ordinary.step()
    loose = {} if dtype in (torch.float32, torch.complex64) else {"rtol": 0.05, "atol": 0.02}
    spread.assert_same(**loose)


def real_loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((p.abs() if p.is_complex() else p) * x).float().tanh().sum()


def _real_loss_there(number: int, x: torch.Tensor) -> torch.Tensor:
    from .spread import _tensors

    return real_loss(_tensors[number], x)


def _backward_real(spread: Spread, context_id: int, inputs: list[torch.Tensor]) -> None:
    from farstep import rpc

    losses = [
        rpc.rpc_sync(w, _real_loss_there, args=(n, x))
        for w, n, x in zip(spread.where, spread.numbers, inputs, strict=True)
    ]
    autograd.backward(context_id, [sum(losses)])


def test_gradients_laid_out_otherwise_than_their_parameter(three):
    """Fused updates go through memory. A gradient that is transposed there must not be taken for one that is not."""
    spread = Spread([1, 1], [(3, 4), (4, 3)])
    with torch.no_grad():  # one parameter is transposed, of the other the gradient will be
        spread.local[0] = spread.local[0].detach().t().contiguous().t().requires_grad_()
        spread.remote[0].data = spread.remote[0].detach().t().contiguous().t()
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    ordinary = optim.Adam(spread.local, lr=0.1)

    def inputs(step: int) -> list[torch.Tensor]:
        a, b = spread.inputs(step)
        return [a.contiguous(), b.t().contiguous().t()]

    train(spread, optimizer, ordinary, 5, inputs=inputs)
    spread.assert_same()


def test_a_class_that_needs_a_closure_is_refused(three):
    with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure.*Use another class"):
        DistributedOptimizer(optim.LBFGS, Spread([1, 2]).rrefs)


class Replacing(optim.SGD):
    """Sets `.data` instead of changing it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = p.data - self.param_groups[0]["lr"] * p.grad


def test_a_class_may_replace_a_parameters_memory(three):
    spread = Spread([0, 1])
    train(spread, DistributedOptimizer(Replacing, spread.rrefs), optim.SGD(spread.local, lr=0.1), 3)
    spread.assert_same()


@pytest.mark.parametrize(
    "kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam], ids=str
)
def test_a_learning_rate_that_is_a_tensor(three, kind):
    spread = Spread([0, 1])
    optimizer = DistributedOptimizer(kind, spread.rrefs, lr=torch.tensor(0.1))
    ordinary = kind(spread.local, lr=torch.tensor(0.1))
    train(spread, optimizer, ordinary, 3, schedule=exponential)
    spread.assert_same()


def test_a_factory_may_stand_for_a_class(three):
    spread = Spread([0, 1])
    train(spread, DistributedOptimizer(adam_of_mine, spread.rrefs), adam_of_mine(spread.local), 2)
    spread.assert_same()
    with pytest.raises(TypeError, match=r"made a list, and not a torch\.optim\.Optimizer"):
        DistributedOptimizer(list, spread.rrefs)


def adam_of_mine(params: Any) -> optim.Optimizer:
    return optim.Adam(params, lr=0.3)
