"""The cases with optimizers: open a context, forward, backward, step, close the context.

Both sides run the same code, but for one thing: torch's optimizer cannot close the context along with its step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from bench import models
from bench.cases import Act, Case
from bench.gradients import Build, Far, Here, Model, There, mlp

TRAINED = 1000
"""The number of the parts that are trained: those of the other cases keep their weights."""
TRAINERS = 4
BIG_PARAMETERS = 50_000_000
BIG_OWNERS = 3
OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 1e-3}), "adam": (torch.optim.Adam, {"lr": 1e-4})}


def layer(peers: list[str]) -> Model:
    """As small as a model can be: what a whole step costs besides arithmetic is seen."""
    x = torch.rand(8, models.LAYER_WIDTH)

    def loss(far: Far) -> torch.Tensor:
        return far.call(peers[0], models.forward, "layer", TRAINED, x).square().mean()

    return Model(loss, parts=[(peers[0], "layer", TRAINED)])


def steps(build: Build, optimizer: str, *, alone: bool = True) -> Case:
    """Whole steps of training. Where others train the same parameters, nobody can say what they will be."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        autograd, far, model = models.autograd_of(rpc), There(rpc), build(peers)
        context, backward, loss = autograd.context, autograd.backward, model.loss
        kind, options = OPTIMIZERS[optimizer]
        rrefs = [r for part in model.parts for r in rpc.rpc_sync(part[0], models.rrefs, args=part[1:])]
        distributed = models.optim_of(rpc).DistributedOptimizer(kind, rrefs, **options)

        last = {"close": True} if rpc.__name__.startswith("farstep") else {}

        def act() -> None:
            with context() as context_id:
                backward(context_id, [loss(far)])
                distributed.step(context_id, **last)

        if alone:
            check(rpc, model, kind, options, act)
        yield act

    return case


def check(rpc: ModuleType, model: Model, kind: Any, options: dict[str, Any], act: Act) -> None:
    """Compare the first step with the same one in this process."""

    def weights() -> list[torch.Tensor]:
        return [
            w for peer, *part in model.parts for w in rpc.rpc_sync(peer, models.weights, args=tuple(part))
        ]

    here = [p for _, *part in model.parts for p in models.part(*part).parameters()]
    kept = copy.deepcopy([p.data for p in here])
    for parameter, weight in zip(here, weights(), strict=True):
        parameter.data = weight.clone()
    gradients = torch.autograd.grad(model.loss(Here()), here)
    local = kind(here, **options)
    for parameter, gradient in zip(here, gradients, strict=True):
        parameter.grad = gradient
    local.step()
    expected = [p.detach().clone() for p in here]
    for parameter, weight in zip(here, kept, strict=True):
        parameter.data, parameter.grad = weight, None
    act()
    for one, other in zip(weights(), expected, strict=True):
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            raise ValueError("the weights differ from those of one process")


@contextmanager
def big_step(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    """The step alone: its gradients stay in a context."""
    autograd = models.autograd_of(rpc)
    rrefs = [r for peer in peers for r in rpc.rpc_sync(peer, models.rrefs, args=("big", BIG_SHARE))]
    kind, options = OPTIMIZERS["adam"]
    distributed = models.optim_of(rpc).DistributedOptimizer(kind, rrefs, **options)
    with autograd.context() as context_id:
        sums = [
            rpc.rpc_async(peer, models.forward, args=("big", BIG_SHARE, torch.ones(()))) for peer in peers
        ]
        autograd.backward(context_id, [torch.stack([each.wait() for each in sums]).sum()])
        yield lambda: distributed.step(context_id)
    for peer in peers:
        rpc.rpc_sync(peer, models.forget)


@contextmanager
def big_step_here(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
    """The same update in one process, by torch's fused optimizer, with all cores."""
    parameters = [p for _ in peers for p in models.make("big", BIG_SHARE).parameters()]
    kind, options = OPTIMIZERS["adam"]
    local = kind(parameters, fused=True, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    threads = torch.get_num_threads()

    def act() -> None:
        torch.set_num_threads(models.cores())
        local.step()
        torch.set_num_threads(threads)

    yield act


BIG_SHARE = BIG_PARAMETERS // BIG_OWNERS
MODELS: dict[str, Build] = {"layer": layer, "mlp": partial(mlp, number=TRAINED)}

CASES: dict[str, Case] = {
    **{f"{key}-{name}": steps(build, name) for key, build in MODELS.items() for name in OPTIMIZERS},
    "shared-sgd": steps(layer, "sgd", alone=False),
    "big": big_step,
    "big-here": big_step_here,
}
