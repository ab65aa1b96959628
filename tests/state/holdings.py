"""One model in every form in which ranks can hold it, and the whole of it read back by torch's own means."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from farstep.state import named_shards, shards_of


class Net(nn.Module):
    """Odd sizes, one to three dimensions, and fewer rows than ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.inner = nn.Sequential(nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 6))
        self.scale = nn.Parameter(torch.randn(2, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) * self.scale.sum()


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in Net(seed).named_parameters()}


class Holding:
    """`shards` is what farstep makes of it; `whole()` gives every tensor in full, on rank 0 at least."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.ranks = dist.get_world_size()
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    @property
    def shards(self):
        return {name: shards_of(value, name=name) for name, value in self.values.items()}

    def whole(self):
        raise NotImplementedError


class Plain(Holding):
    def make(self):
        self.values = tensors(self.seed)

    def whole(self):
        return self.values


class _DTensors(Holding):
    mesh: tuple[int, ...] = ()

    def placements(self, tensor):
        raise NotImplementedError

    def make(self):
        mesh = init_device_mesh("cpu", self.mesh_shape())
        self.values = {
            name: distribute_tensor(t, mesh, self.placements(t)) for name, t in tensors(self.seed).items()
        }

    def mesh_shape(self):
        return (self.ranks,)

    def whole(self):
        return {name: value.full_tensor() for name, value in self.values.items()}


class Rows(_DTensors):
    def placements(self, tensor):
        return [Shard(0)]


class Columns(_DTensors):
    def placements(self, tensor):
        return [Shard(tensor.dim() - 1)]


class Grid(_DTensors):
    """Two mesh dimensions where the number of ranks allows it, the last one first."""

    def mesh_shape(self):
        return (self.ranks // 2, 2) if self.ranks % 2 == 0 else (1, self.ranks)

    def placements(self, tensor):
        return [Shard(tensor.dim() - 1), Shard(0)]


class PartlyReplicated(Grid):
    def placements(self, tensor):
        return [Replicate(), Shard(0)]


class Cube(_DTensors):
    def mesh_shape(self):
        return (2, 2, self.ranks // 4) if self.ranks % 4 == 0 else (1, 1, self.ranks)

    def placements(self, tensor):
        return [Shard(0), Replicate(), Shard(0)]


class _Model(Holding):
    def make(self):
        self.model = self.wrap(Net(self.seed))

    @property
    def shards(self):
        return named_shards(self.model)

    def whole(self):
        return {name: p.full_tensor() for name, p in self.model.named_parameters()}


class Fsdp2(_Model):
    def wrap(self, model):
        mesh = init_device_mesh("cpu", (self.ranks,))
        fully_shard(model.inner, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Hsdp2(_Model):
    def wrap(self, model):
        mesh = init_device_mesh("cpu", Grid.mesh_shape(self), mesh_dim_names=("copies", "shards"))
        return fully_shard(model, mesh=mesh)


class TwoD(_Model):
    """Tensor parallel, then FSDP2 over it: this is where strided shards come from."""

    def wrap(self, model):
        mesh = init_device_mesh("cpu", Grid.mesh_shape(self), mesh_dim_names=("dp", "tp"))
        parallelize_module(
            model,
            mesh["tp"],
            {"first": ColwiseParallel(), "inner.0": RowwiseParallel(), "inner.2": ColwiseParallel()},
        )
        return fully_shard(model, mesh=mesh["dp"])

    def whole(self):
        return {
            name: p.full_tensor() if hasattr(p, "full_tensor") else p
            for name, p in self.model.named_parameters()
        }


class Chunks(Holding):
    """ShardedTensors in chunks, dealt out in reverse, so that shard i is not on rank i. Some ranks have an empty one."""

    def make(self):
        placements = [f"rank:{rank}/cpu" for rank in reversed(range(self.ranks))]
        self.values = {}
        for name, t in tensors(self.seed).items():
            value = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=placements), *t.shape)
            for shard in value.local_shards():
                if shard.tensor.numel():
                    first, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                    shard.tensor.copy_(t[first : first + size])
            self.values[name] = value

    def whole(self):
        """ShardedTensor.gather fails on a rank that has no shard, so the shards travel as objects."""
        whole = {}
        for name, value in self.values.items():
            local = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards() if s.tensor.numel()]
            gathered = [None] * self.ranks
            dist.all_gather_object(gathered, local)
            whole[name] = torch.full(tuple(value.size()), torch.nan)
            for offsets, tensor in itertools.chain(*gathered):
                rows = slice(offsets[0], offsets[0] + len(tensor))
                whole[name][rows] = tensor
        return whole


class Strips(Chunks):
    """ShardedTensors of single rows, dealt out in turn: several shards for a rank, and none for some."""

    def make(self):
        rank = dist.get_rank()
        self.values = {}
        for name, t in tensors(self.seed).items():
            zeros = [0] * (t.dim() - 1)
            local = [
                LocalShard.from_tensor_and_offsets(t[row : row + 1].clone(), [row, *zeros], rank)
                for row in range(rank, len(t), self.ranks)
            ]
            self.values[name] = init_from_local_shards(local, *t.shape)


class _Fsdp1(_Model):
    use_orig_params = False
    strategy = ShardingStrategy.FULL_SHARD

    def wrap(self, model):
        options = {
            "use_orig_params": self.use_orig_params,
            "sharding_strategy": self.strategy,
            "device_id": torch.device("cpu"),
        }
        if self.strategy == ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = init_device_mesh("cpu", Grid.mesh_shape(self))
        model.inner = FullyShardedDataParallel(model.inner, **options)
        return FullyShardedDataParallel(model, **options)

    def whole(self):
        with FullyShardedDataParallel.summon_full_params(self.model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.model.named_parameters()
            }


class Flat(_Fsdp1):
    pass


class FlatOriginal(_Fsdp1):
    use_orig_params = True


class FlatHybrid(_Fsdp1):
    use_orig_params = True
    strategy = ShardingStrategy.HYBRID_SHARD


class FlatGradOp(_Fsdp1):
    strategy = ShardingStrategy.SHARD_GRAD_OP


class FlatWhole(_Fsdp1):
    strategy = ShardingStrategy.NO_SHARD


class Ddp(_Model):
    def wrap(self, model):
        return DistributedDataParallel(model)

    def whole(self):
        return {name.removeprefix("module."): p.detach() for name, p in self.model.named_parameters()}


KINDS = [
    Plain,
    Rows,
    Columns,
    Grid,
    PartlyReplicated,
    Cube,
    Fsdp2,
    Hsdp2,
    TwoD,
    Chunks,
    Strips,
    Flat,
    FlatOriginal,
    FlatHybrid,
    FlatGradOp,
    FlatWhole,
    Ddp,
]
# A few of these stand for the rest where all pairs are tried.
FORMS = [Plain, Rows, TwoD, Strips, Flat, FlatOriginal]
