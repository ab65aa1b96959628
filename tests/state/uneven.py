"""A model that training treats unevenly, under every parallelism: of most parameters some ranks
hold nothing, and not all are trained.

The gradient of each element is a function of that element alone, and it comes from a real
backward pass. So under every parallelism, training does what it does
in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from farstep.optim import NamedOptimizer, ShardedOptimizer
from farstep.state import named_shards, respread

__all__ = ["KINDS", "Reference", "Trained", "tour"]

LR = 0.004


class Layer(nn.Module):
    """Its loss is that of its elements, each by itself."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in zip(("weight", "bias"), shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

        self.names = [name for name, _ in self.named_parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return sum(_summed(getattr(self, name)) for name in self.names) * x


def _summed(p: Tensor) -> Tensor:
    """A split parameter has the loss of the elements that are here, so that its gradient is split
    alike.
    """
    here = p.to_local() if isinstance(p, DTensor) else p
    return (0.05 * here * here.abs() - 3 * here.cos()).sum()


def gradient(p: Tensor) -> Tensor:
    """That of `Layer`'s loss, which is zero at zero: what fills a shard up stays as it is."""
    return 0.1 * p.abs() + 3 * p.sin()


class Uneven(nn.Module):
    """`first` is as large as all else, `one` is a single element; `frozen`, `unused`, and
    `sometimes`, which every second step leaves out, say what they are.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Layer((6, 5), (6,))
        self.second = Layer((2, 3, 2), (3,))
        self.one = Layer((1,))
        self.frozen = Layer((3, 2), (2,)).requires_grad_(False)
        self.unused = Layer((2, 2), (2,))
        self.sometimes = Layer((3, 2), (1,))

    def forward(self, x: Tensor, is_all: bool) -> Tensor:
        layers = [self.first, self.second, self.one, self.frozen, *([self.sometimes] if is_all else ())]
        return sum(layer(x) for layer in layers)


def is_all(step: int) -> bool:
    """Whether this step trains all that is trained at all."""
    return step % 2 == 0


class Trained:
    """A model and its optimizer. `whole()` reads the parameters by torch's own means."""

    def __init__(self, seed: int) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.model = self.wrap(Uneven(seed))
        self.optimizer = self.optimized()

    def wrap(self, model):
        return model

    def optimized(self):
        return torch.optim.AdamW(self.model.parameters(), lr=LR)

    def train(self, step: int) -> None:
        self.model(torch.ones(()), is_all(step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_parameters(self, other: Trained) -> None:
        respread(named_shards(other.model), named_shards(self.model))

    def whole(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("module."): p.full_tensor() if isinstance(p, DTensor) else p.detach()
            for name, p in self.model.named_parameters()
        }


class Plain(Trained):
    pass


class Ddp(Trained):
    def wrap(self, model):
        return DistributedDataParallel(model, find_unused_parameters=True)


class Fsdp2(Trained):
    def wrap(self, model):
        mesh = init_device_mesh("cpu", (self.ranks,))
        for layer in (model.unused, model.sometimes):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Hsdp2(Trained):
    def wrap(self, model):
        return fully_shard(model, mesh=grid(self.ranks))


def grid(ranks: int):
    shape = (ranks // 2, 2) if ranks % 2 == 0 else (1, ranks)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


def split(_: str, layer: nn.Module, mesh) -> None:
    """Weights by their last dimension, other parameters by their first."""
    for name, p in layer.named_parameters(recurse=False):
        placement = Shard(p.dim() - 1 if name == "weight" else 0)
        split_up = distribute_tensor(p.detach(), mesh, [placement])
        layer.register_parameter(name, nn.Parameter(split_up, p.requires_grad))


class Tp(Trained):
    def wrap(self, model):
        return distribute_module(model, init_device_mesh("cpu", (self.ranks,)), split)


class TwoD(Trained):
    """Split, and then sharded over the other dimension of the mesh. fully_shard fails where a
    rank has nothing to shard: single elements are not split.
    """

    def wrap(self, model):
        mesh = grid(self.ranks)
        for layer in model.children():
            if all(p.numel() > 1 for p in layer.parameters()):
                distribute_module(layer, mesh["inner"], split)
        return fully_shard(model, mesh=mesh["outer"])


class Flat(Trained):
    """FSDP1. What is trained together lies in one flat parameter; with `use_orig_params`, what is
    frozen lies there too.
    """

    use_orig_params = False
    strategy = ShardingStrategy.FULL_SHARD

    def wrap(self, model):
        options = {
            "use_orig_params": self.use_orig_params,
            "sharding_strategy": self.strategy,
            "device_id": torch.device("cpu"),
        }
        if self.strategy == ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = grid(self.ranks)
        for name in ("unused", "sometimes") if self.use_orig_params else ("unused", "sometimes", "frozen"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        return FullyShardedDataParallel(model, **options)

    def whole(self):
        with FullyShardedDataParallel.summon_full_params(self.model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.model.named_parameters()
            }


class FlatWhole(Flat):
    strategy = ShardingStrategy.NO_SHARD


class FlatOriginal(Flat):
    use_orig_params = True


class FlatNamed(FlatOriginal):
    strategy = ShardingStrategy.SHARD_GRAD_OP

    def optimized(self):
        return NamedOptimizer(self.model.named_parameters(), torch.optim.AdamW, lr=LR)


class FlatLocal(FlatOriginal):
    strategy = ShardingStrategy.HYBRID_SHARD

    def optimized(self):
        return ShardedOptimizer(dict(self.model.named_parameters()), torch.optim.AdamW, shard="local", lr=LR)


class Zero(Trained):
    """A replicated model whose state is spread over the ranks."""

    def optimized(self):
        return ShardedOptimizer(dict(self.model.named_parameters()), torch.optim.AdamW, lr=LR)


class ZeroFsdp2(Fsdp2):
    optimized = Zero.optimized


class Strips(Trained):
    """ShardedTensors of single rows, dealt out in turn. They cannot run, so the gradients are
    worked out.
    """

    def wrap(self, model):
        rank = dist.get_rank()
        self.trained: list[tuple[str, Tensor]] = []
        holder = nn.Module()
        for path, p in list(model.named_parameters()):
            name, last = path.split(".")
            local = [
                LocalShard.from_tensor_and_offsets(
                    p.detach()[row : row + 1].clone().requires_grad_(p.requires_grad),
                    [row] + [0] * (p.dim() - 1),
                    rank,
                )
                for row in range(rank, len(p), self.ranks)
            ]
            if not hasattr(holder, name):
                holder.add_module(name, nn.Module())
            setattr(getattr(holder, name), last, init_from_local_shards(local, *p.shape))
            self.trained += [(name, shard.tensor) for shard in local]
        return holder

    def optimized(self):
        return torch.optim.AdamW([tensor for _, tensor in self.trained], lr=LR)

    def train(self, step: int) -> None:
        left_out = {"frozen", "unused"} | (set() if is_all(step) else {"sometimes"})
        for name, tensor in self.trained:
            if name not in left_out:
                tensor.grad = gradient(tensor.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        found = {}
        for path, layer in self.model.named_children():
            for name, value in vars(layer).items():
                if hasattr(value, "local_shards"):
                    rows = [None] * self.ranks
                    local = [(s.metadata.shard_offsets[0], s.tensor.detach()) for s in value.local_shards()]
                    dist.all_gather_object(rows, local)
                    ordered = sorted(itertools.chain(*rows), key=lambda row: row[0])
                    found[f"{path}.{name}"] = torch.cat([tensor for _, tensor in ordered])
        return found


KINDS = [
    Plain,
    Ddp,
    Fsdp2,
    Hsdp2,
    Tp,
    TwoD,
    Flat,
    FlatWhole,
    FlatOriginal,
    FlatNamed,
    FlatLocal,
    Strips,
    Zero,
    ZeroFsdp2,
]


class Reference:
    """One process that trains through. Steps are asked for in order."""

    def __init__(self) -> None:
        self._training, self._taken = Plain.__new__(Plain), 0
        model = Uneven(0)
        self._training.model = model
        self._training.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def after(self, steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Parameters and state, by name, after so many steps."""
        for step in range(self._taken, steps):
            self._training.train(step)
        self._taken = max(steps, self._taken)
        state = self._training.optimizer.state
        named = dict(self._training.model.named_parameters())
        return {name: p.detach() for name, p in named.items()}, {
            name: state[p] for name, p in named.items() if state.get(p)
        }


def tour(count: int, differences: Iterable[int] | None = None) -> list[int]:
    """Numbers below `count`, such that each pair (a, a + d) comes once as neighbours, for all d
    of the `differences`: by default, all pairs.

    One of the differences has no common divisor with `count`.
    """
    ways = {a: [(a + d) % count for d in differences or range(count)] for a in range(count)}
    return list(_walk(ways))[::-1]


def _walk(ways: dict[int, list[int]]) -> Iterator[int]:
    """Backwards: where there is no way left, the walk ends; before that, go where there is one."""
    path = [0]
    while path:
        if ways[path[-1]]:
            path.append(ways[path[-1]].pop())
        else:
            yield path.pop()
