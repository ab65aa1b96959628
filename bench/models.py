"""The parts of models that workers hold, and the functions that run them.

A part is made from its kind and number alone, so that every process that asks for it has the same weights.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bench import remote

MLP_LAYERS, MLP_WIDTH = 4, 256
LAYER_WIDTH = 64
STAGE_LAYERS, STAGE_WIDTH = 16, 64
CHAIN_WIDTH = 64
BIG_TENSORS = 8
CHAIN_STEP_NODES = 5
"""A product, a sum, a tanh, and the two parameters' own nodes."""


class Chain(nn.Module):
    """Many small steps, so that what each node costs is seen and not what it computes."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(CHAIN_WIDTH) + 0.5 for _ in range(steps))
        self.shifts = nn.ParameterList(torch.rand(CHAIN_WIDTH) - 0.5 for _ in range(steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = torch.tanh(x * scale + shift)
        return x


class Big(nn.Module):
    """Many numbers and next to no graph."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        size = numbers // BIG_TENSORS
        self.weights = nn.ParameterList(torch.rand(size) for _ in range(BIG_TENSORS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * x


def make(kind: str, number: int) -> nn.Module:
    if kind == "mlp":
        layers = [nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(MLP_LAYERS)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    if kind == "layer":
        return nn.Sequential(nn.Linear(LAYER_WIDTH, LAYER_WIDTH), nn.Tanh())
    if kind == "stage":
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(STAGE_WIDTH, 4, 2 * STAGE_WIDTH, dropout=0.0, batch_first=True)
                for _ in range(STAGE_LAYERS)
            )
        )
    if kind == "chain":
        return Chain(number // CHAIN_STEP_NODES)
    if kind == "big":
        return Big(number)
    raise ValueError(f"no such part: {kind}")


@cache
def part(kind: str, number: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return make(kind, number)


def forward(kind: str, number: int, x: torch.Tensor) -> torch.Tensor:
    """Run a part, where it is."""
    result: torch.Tensor = part(kind, number)(x)
    return result


def hop(x: torch.Tensor) -> torch.Tensor:
    """Hardly any work, so that what a crossing costs is seen."""
    return x * 1.25


def gradients(kind: str, number: int, context_id: int) -> list[torch.Tensor]:
    """What the context holds for a part's parameters, where the part is."""
    found = autograd_of(remote.used()).get_gradients(context_id)
    return [found[parameter] for parameter in part(kind, number).parameters()]


def rrefs(kind: str, number: int) -> list[Any]:
    """References to a part's parameters, made where the part is."""
    return [remote.used().RRef(parameter) for parameter in part(kind, number).parameters()]


def weights(kind: str, number: int) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in part(kind, number).parameters()]


def forget() -> None:
    """Let go of all parts: some are large."""
    part.cache_clear()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def optim_of(rpc: ModuleType) -> ModuleType:
    return importlib.import_module(rpc.__name__.removesuffix("rpc") + "optim")


def autograd_of(rpc: ModuleType) -> ModuleType:
    """Torch and farstep both have the two side by side."""
    return importlib.import_module(rpc.__name__.removesuffix("rpc") + "autograd")


def count_nodes(root: torch.Tensor) -> int:
    """How many nodes the graph of a tensor has, with those of its leaves."""
    seen, todo = set(), [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return len(seen)
