"""One model under every parallelism, with an optimizer, trained by the same rule: the gradient of each element is a function of that element."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from farstep.optim import ShardedOptimizer
from farstep.state import named_shards, respread
from state import holdings

__all__ = ["KINDS", "Trained", "bits_of", "reference"]


class Trained:
    """A model as `form` of holdings wraps it, and its optimizer. `whole()` reads the parameters by torch's own means."""

    form = holdings.Plain

    def __init__(self, make=torch.optim.AdamW, seed: int = 0, **options) -> None:
        self.make, self.options = make, {"lr": 0.01, **options}
        self.holding = self.form(seed)
        self.model = self.holding.model
        self.optimizer = self.optimized()

    def optimized(self):
        return self.make(self.model.parameters(), **self.options)

    def keys(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for p in self.keys():
                p.grad = gradient(p.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def take_parameters(self, other: Trained) -> None:
        respread(named_shards(other.model), named_shards(self.model))

    def whole(self) -> dict[str, torch.Tensor]:
        return self.holding.whole()


def bits_of(*optimizers: torch.optim.Optimizer) -> list:
    """Everything that reading or a failed load might change, copied: options, parameters, gradients, state."""
    return [
        (
            {key: value for key, value in group.items() if key != "params"},
            [(_bits(p), _bits(p.grad), _bits(optimizer.state.get(p))) for p in group["params"]],
            len(optimizer.state),
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _bits(value):
    if isinstance(value, dict):
        return {key: (id(each), _bits(each)) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        if hasattr(local, "local_shards"):
            return [_bits(shard.tensor) for shard in local.local_shards()]
        local = local.detach().contiguous()
        return local.shape, local.dtype, local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return value


def gradient(value: torch.Tensor) -> torch.Tensor:
    return value.sin() * 3 + value.abs() * 0.1  # zero at zero: what fills a shard up stays as it is


def reference(steps: int, make=torch.optim.AdamW, **options) -> tuple[dict, dict]:
    """Parameters and state, by name, of a training in one process that was never interrupted."""
    model = holdings.Net(0)
    optimizer = make(model.parameters(), **{"lr": 0.01, **options})
    for _ in range(steps):
        for p in model.parameters():
            p.grad = gradient(p.detach())
        optimizer.step()
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {name: p.detach() for name, p in model.named_parameters()}, state


class _Bare(holdings._Model):
    def wrap(self, model):
        return model

    def whole(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


class _Tp(holdings.TwoD):
    def wrap(self, model):
        mesh = init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("tp",))
        plan = {"first": ColwiseParallel(), "inner.0": RowwiseParallel(), "inner.2": ColwiseParallel()}
        return parallelize_module(model, mesh["tp"], plan)


class _Strips(holdings.Strips):
    """ShardedTensors where the model had its parameters."""

    def make(self):
        super().make()
        self.model = nn.Module()
        for name, value in self.values.items():
            *path, last = name.split(".")
            at = self.model
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, nn.Module())
                at = getattr(at, part)
            setattr(at, last, value)


class Plain(Trained):
    form = _Bare


class Ddp(Trained):
    form = holdings.Ddp


class Fsdp2(Trained):
    form = holdings.Fsdp2


class Hsdp2(Trained):
    form = holdings.Hsdp2


class Tp(Trained):
    form = _Tp


class TwoD(Trained):
    form = holdings.TwoD


class Flat(Trained):
    form = holdings.Flat


class FlatOriginal(Trained):
    form = holdings.FlatOriginal


class FlatHybrid(Trained):
    form = holdings.FlatHybrid


class FlatGradOp(Trained):
    form = holdings.FlatGradOp


class FlatWhole(Trained):
    form = holdings.FlatWhole


class Strips(Trained):
    form = _Strips

    def optimized(self):
        shards = [shard.tensor for value in self.holding.values.values() for shard in value.local_shards()]
        return self.make(shards or [torch.empty(0)], **self.options)


class Zero(Trained):
    """A replicated model whose state is spread over the ranks."""

    form = _Bare

    def optimized(self):
        return ShardedOptimizer(dict(self.model.named_parameters()), self.make, **self.options)


class ShardedFsdp2(Zero):
    form = holdings.Fsdp2


KINDS = [
    Plain,
    Ddp,
    Fsdp2,
    Hsdp2,
    Tp,
    TwoD,
    Flat,
    FlatOriginal,
    FlatHybrid,
    FlatGradOp,
    FlatWhole,
    Strips,
    Zero,
    ShardedFsdp2,
]
