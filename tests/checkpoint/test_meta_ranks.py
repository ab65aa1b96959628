"""Sharded models that begin on the meta device, as large ones do: against one process, and against torch's DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from farstep import checkpoint
from farstep.errors import CheckpointError, CheckpointMismatch


class Net(nn.Module):
    """Shards of unequal length, ranks that hold nothing of a parameter, tied weights, and plain buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(self.first(x)).tanh()))


def whole_model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def sharded(model: nn.Module, kind: str = "fsdp2") -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tp":
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        model.norm = nn.Identity()  # type: ignore[assignment]
        return parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    for each in (model.first, model.second):
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        model(x).square().sum().backward()
        optimizer.step()


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_model(found: nn.Module, wanted: nn.Module) -> None:
    values = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(whole(values[name]), value, msg=lambda m, n=name: f"{n}: {m}")


def _fsdp2_on_meta(path: str) -> None:
    one = whole_model()
    steps = adam(one)
    train(one, steps, 0, 2)
    if dist.get_rank() == 0:
        checkpoint.save({"model": one, "optim": steps}, f"{path}/one", no_dist=True)
    dist.barrier()
    with torch.device("meta"):
        two = sharded(Net())
    parameters = dict(two.named_parameters())
    other = adam(two)
    assert not checkpoint.load({"model": two, "optim": other}, f"{path}/one")
    assert all(p is parameters[name] and p.device.type == "cpu" for name, p in two.named_parameters())
    same_model(two, one)
    train(one, steps, 2, 2)
    train(two, other, 2, 2)
    same_model(two, one)
    state = {"model": two, "optim": other}
    checkpoint.save(state, f"{path}/two")
    _sharded_optimizer_state(f"{path}/two", other)
    with torch.device("meta"):
        three = sharded(Net())
    third = adam(three)
    assert not checkpoint.load({"model": three, "optim": third}, f"{path}/two")
    assert not checkpoint.load(state, f"{path}/two")  # again, into what has memory
    train(one, steps, 4, 1)
    train(three, third, 4, 1)
    train(two, other, 4, 1)
    same_model(three, one)
    same_model(two, one)


def _sharded_optimizer_state(path: str, wanted: torch.optim.Optimizer) -> None:
    """By a model's state dict on meta."""
    with torch.device("meta"):
        like = sharded(Net()).state_dict()
    found = checkpoint.load_sharded_optimizer_state_dict(like, "optim", path)["optim"]["state"]
    (moment, *_) = (values["exp_avg"] for values in wanted.state.values())
    assert torch.equal(found["first.weight"]["exp_avg"].full_tensor(), moment.full_tensor())


@pytest.mark.timeout(120)  # the first test waits for torch's imports on all ranks
def test_fsdp2_trains_on(two: Ranks, tmp_path: Path) -> None:
    two.run(_fsdp2_on_meta, str(tmp_path), timeout_s=100)


def _let_go_and_loaded(path: str) -> None:
    """FSDP2 keeps what it has gathered from until it hears of other memory."""
    one = whole_model()
    checkpoint.save({"model": one}, path)
    model = sharded(whole_model())
    train(model, adam(model), 0, 2)
    model.to("meta")
    assert not checkpoint.load({"model": model}, path)
    train(model, adam(model), 2, 1)
    train(one, adam(one), 2, 1)
    same_model(model, one)


def test_a_trained_model_that_was_moved_to_meta(two: Ranks, tmp_path: Path) -> None:
    two.run(_let_go_and_loaded, str(tmp_path))


def _as_dcp_loads(path: str) -> None:
    one = whole_model()
    full = {"model": one.state_dict()}
    checkpoint.save(full, f"{path}/ours")
    dcp.save(full, checkpoint_id=f"{path}/dcp")
    for source in ("ours", "dcp"):
        with torch.device("meta"):
            model = sharded(Net())
        theirs = {"model": model.state_dict()}
        dcp.load(theirs, checkpoint_id=f"{path}/dcp")
        ours = {"model": model.state_dict()}
        assert not checkpoint.load(ours, f"{path}/{source}")
        for name, value in theirs["model"].items():
            found = ours["model"][name]
            assert type(found) is type(value), name
            assert (found.device, found.dtype) == (value.device, value.dtype), name
            if isinstance(value, DTensor):
                assert found.placements == value.placements
                found, value = found.to_local(), value.to_local()
            assert torch.equal(found, value), name
        model.load_state_dict(ours["model"], assign=True)
        train(model, adam(model), 0, 1)


def test_a_state_dict_gets_what_dcp_gives_it(two: Ranks, tmp_path: Path) -> None:
    two.run(_as_dcp_loads, str(tmp_path))


def _dtensors_on_meta(path: str) -> None:
    full = torch.arange(15.0).reshape(5, 3)
    checkpoint.save({"w": full}, path)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1)):
        made = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [placement])
        state = {"w": made}
        assert not checkpoint.load(state, path)
        assert state["w"] is made
        assert torch.equal(made.full_tensor(), full)
    checkpoint.save(full, f"{path}/bare")
    bare = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(0)])
    assert not checkpoint.load(bare, f"{path}/bare")
    assert torch.equal(bare.full_tensor(), full)
    bare = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(0)])
    with pytest.raises(CheckpointError, match=r"'a.w' is on the meta device.*Nothing has been saved"):
        checkpoint.save({"a": {"w": bare}}, f"{path}/never")


def test_dtensors_by_themselves(two: Ranks, tmp_path: Path) -> None:
    two.run(_dtensors_on_meta, str(tmp_path))


def _tensor_parallel_on_meta(path: str) -> None:
    with torch.device("meta"):
        model = sharded(Net(), "tp")
    one = whole_model()
    one.norm = nn.Identity()  # type: ignore[assignment]
    checkpoint.save({"model": one}, path)
    assert not checkpoint.load({"model": model}, path)
    same_model(model, one)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_tensor_parallel(two: Ranks, tmp_path: Path) -> None:
    two.run(_tensor_parallel_on_meta, str(tmp_path))


def _one_rank_fails(path: str) -> None:
    """All are on meta again, though one rank alone could not."""
    checkpoint.save({"model": whole_model(), "more": torch.ones(2)}, path)
    with torch.device("meta"):
        model = sharded(Net())
    more = torch.ones(2 + dist.get_rank())
    with pytest.raises(CheckpointMismatch, match="'more'"):
        checkpoint.load({"model": model, "more": more}, path)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not checkpoint.load({"model": model}, path)
    same_model(model, whole_model())


def test_one_rank_that_fails(two: Ranks, tmp_path: Path) -> None:
    two.run(_one_rank_fails, str(tmp_path))


def _fsdp1_from_meta(path: str) -> None:
    """FSDP1 gives parameters memory when it wraps them; an ignored module stays on meta until it is loaded."""
    one = whole_model()
    checkpoint.save({"model": one}, path)
    for original in (False, True):
        with torch.device("meta"):
            bare = Net()
        model = FullyShardedDataParallel(
            bare,
            device_id=torch.device("cpu"),
            use_orig_params=original,
            ignored_modules=[bare.last],
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
        )
        assert bare.last.weight.is_meta
        assert not checkpoint.load({"model": model}, path)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(x), whole_model()(x))


def test_fsdp1_with_deferred_initialisation(two: Ranks, tmp_path: Path) -> None:
    two.run(_fsdp1_from_meta, str(tmp_path))
