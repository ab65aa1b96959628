"""Parameters on several agents of this process, and the same ones for an ordinary optimizer beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from farstep import autograd, rpc
from farstep.optim import DistributedOptimizer

SHAPES = [(3, 4), (4,), (2, 3), (5, 2)]
_numbers = itertools.count()
_tensors: dict[int, torch.Tensor] = {}


def _reference(number: int) -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(_tensors[number])


def _loss(number: int, x: torch.Tensor) -> torch.Tensor:
    return loss_of(_tensors[number], x)


def loss_of(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Dense gradients for numbers, sparse ones for indices of rows (one row more than once, so they must be added up)."""
    if x.dtype is torch.int64:
        return torch.nn.functional.embedding(x, parameter, sparse=True).sin().sum()
    return ((parameter * x).tanh() + parameter.square() / 9).sum()


class Spread:
    """`remote[i]` is the parameter that `where[i]` owns; `local[i]` its twin, for the ordinary optimizer."""

    def __init__(
        self,
        where: Sequence[int],
        shapes: Sequence[tuple[int, ...]] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        shapes = shapes or [SHAPES[i % len(SHAPES)] for i in range(len(where))]
        generator = torch.Generator().manual_seed(0)
        self.where = [f"worker{w}" for w in where]
        self.local = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
        self.remote = [p.detach().clone().requires_grad_() for p in self.local]
        self.numbers = [next(_numbers) for _ in where]
        _tensors.update(zip(self.numbers, self.remote, strict=True))
        self.rrefs = [
            rpc.rpc_sync(w, _reference, args=(n,)) for w, n in zip(self.where, self.numbers, strict=True)
        ]

    def inputs(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return [torch.randn(p.shape, generator=generator, dtype=p.dtype) * 3 for p in self.local]

    def backward(
        self, context_id: int, inputs: Sequence[torch.Tensor], of: Iterable[int] | None = None
    ) -> None:
        """The backward of a loss that depends on these parameters, on their owners."""
        which = list(range(len(self.where)) if of is None else of)
        calls = [rpc.rpc_async(self.where[i], _loss, args=(self.numbers[i], inputs[i])) for i in which]
        autograd.backward(context_id, [sum(call.wait() for call in calls)])

    def backward_here(self, inputs: Sequence[torch.Tensor], of: Iterable[int] | None = None) -> None:
        which = list(range(len(self.where)) if of is None else of)
        for p in self.local:
            p.grad = None
        sum(loss_of(self.local[i], inputs[i]) for i in which).backward()

    def step(self, optimizer: DistributedOptimizer, seed: int = 0, **kwargs: Any) -> None:
        with autograd.context() as context_id:
            self.backward(context_id, self.inputs(seed))
            optimizer.step(context_id, **kwargs)

    def step_here(self, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
        self.backward_here(self.inputs(seed))
        optimizer.step()

    def assert_same(self, **tolerances: float) -> None:
        for i, (here, there) in enumerate(zip(self.local, self.remote, strict=True)):
            torch.testing.assert_close(there, here, msg=lambda m, i=i: f"parameter {i}: {m}", **tolerances)


def train(
    spread: Spread,
    optimizer: DistributedOptimizer,
    ordinary: torch.optim.Optimizer,
    steps: int,
    *,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_norm: float | None = None,
    of: Callable[[int], Iterable[int] | None] = lambda step: None,
    inputs: Callable[[int], list[torch.Tensor]] | None = None,
) -> None:
    """The same steps with both."""
    schedules = [schedule(optimizer), schedule(ordinary)] if schedule else []
    for step in range(steps):
        given = (inputs or spread.inputs)(step)
        with autograd.context() as context_id:
            spread.backward(context_id, given, of(step))
            if max_norm is not None:
                norm = optimizer.clip_grad_norm_(context_id, max_norm)
            optimizer.step(context_id, close=bool(step % 2))
        spread.backward_here(given, of(step))
        if max_norm is not None:
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(spread.local, max_norm))
        ordinary.step()
        for each in schedules:
            each.step(*([0.5] if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
