"""An optimizer's state out of checkpoints that torch's DCP or we have written, in the form that the model has now."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state.holdings import Net
from state.training import Ddp, Flat, FlatOriginal, Fsdp2, Plain, Strips, Tp, Trained, TwoD, Zero, reference
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farstep import checkpoint
from farstep.checkpoint import LocalDisk, load_optimizer, load_sharded_optimizer_state_dict
from farstep.errors import CheckpointError, CheckpointMismatch
from farstep.state import shards_of

pytestmark = pytest.mark.filterwarnings("ignore")


class Alone(Trained):
    """In a process without any group."""

    def __init__(self, seed: int = 0) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


BY_TORCH = [Plain, Ddp, Fsdp2, Tp, TwoD, Flat, FlatOriginal]


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """What torch's DCP writes on two ranks, one directory for each parallelism."""
    folder = tmp_path_factory.mktemp("dcp")
    two.run(save_by_torch, str(folder), timeout_s=55)
    return str(folder)


def save_by_torch(folder: str) -> None:
    warnings.simplefilter("ignore")
    for kind in BY_TORCH:
        each = kind()
        each.train(2)
        model, optimizer = get_state_dict(each.model, each.optimizer)
        dcp.save({"model": model, "optim": optimizer, "steps": 2}, checkpoint_id=f"{folder}/{kind.__name__}")
    flattened = Fsdp2()
    flattened.train(2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(flattened.model, flattened.optimizer, options=options)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/flattened")
    numbered = Plain()
    numbered.train(2)
    state = {"model": numbered.model.state_dict(), "optim": numbered.optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/numbered")


def close(found, wanted, what):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


# -- load and load_optimizer ------------------------------------------------------------------------------


def load_from_torch(folder: str, kinds: list[type[Trained]]) -> None:
    parameters, _ = reference(3)
    for number, kind in enumerate(BY_TORCH):
        target = kinds[number % len(kinds)](seed=1)
        state = {"model": target.model, "optim": target.optimizer, "steps": 0}
        assert not checkpoint.load(state, f"{folder}/{kind.__name__}")
        assert state["steps"] == 2
        target.train(1)
        close(target.whole(), parameters, f"{kind.__name__} -> {type(target).__name__}")


def test_what_dcp_wrote_on_two_ranks_loads_under_any_parallelism_on_one_two_and_four(two, four, saved):
    load_from_torch(saved, [Alone])
    two.run(load_from_torch, saved, [Flat, TwoD, Plain, Fsdp2, Strips, Zero], timeout_s=55)
    four.run(load_from_torch, saved, [Fsdp2, Flat, TwoD], timeout_s=55)


def optimizers_alone(folder: str, names: list[str], kinds: list[type[Trained]]) -> None:
    parameters, _ = reference(3)
    for number, name in enumerate(names):
        target = kinds[number % len(kinds)](seed=1)
        checkpoint.load({"model": target.model}, f"{folder}/Plain")
        assert not load_optimizer(target.model, target.optimizer, f"{folder}/{name}")
        target.train(1)
        close(target.whole(), parameters, f"{name} -> {type(target).__name__}")


def test_load_optimizer_takes_states_by_names_flattened_and_by_numbers(two, four, saved):
    names = ["Fsdp2", "flattened", "numbered", "Flat"]
    optimizers_alone(saved, names, [Alone])
    two.run(optimizers_alone, saved, names, [FlatOriginal, TwoD, Fsdp2], timeout_s=55)
    four.run(optimizers_alone, saved, names[1:], [Fsdp2, Flat], timeout_s=55)


def test_load_optimizer_from_a_checkpoint_of_ours(tmp_path):
    each = Alone()
    each.train(2)
    inside = {"net": each.model, "opt": each.optimizer}
    checkpoint.save({"app": inside, "steps": 2}, tmp_path / "ours")
    target = Alone(seed=1)
    load_optimizer(target.model, target.optimizer, tmp_path / "ours")
    _, state = reference(2)
    for name, p in target.model.named_parameters():
        close(target.optimizer.state[p], state[name], name)
    load_optimizer(target.model, target.optimizer, tmp_path / "ours", key="app.opt")


def test_load_optimizer_says_which_there_are(tmp_path):
    each = Alone()
    each.train(1)
    both = {"model": each.model, "a": each.optimizer, "b": each.optimizer}
    checkpoint.save(both, tmp_path / "two")
    with pytest.raises(CheckpointMismatch, match="2 optimizers \\('a', 'b'\\): key="):
        load_optimizer(each.model, each.optimizer, tmp_path / "two")
    with pytest.raises(CheckpointMismatch, match="called 'c'; it has 'a', 'b'"):
        load_optimizer(each.model, each.optimizer, tmp_path / "two", key="c")
    load_optimizer(each.model, each.optimizer, tmp_path / "two", key="b")
    checkpoint.save({"model": each.model}, tmp_path / "none")
    with pytest.raises(CheckpointMismatch, match="no state of an optimizer"):
        load_optimizer(each.model, each.optimizer, tmp_path / "none")


def test_numbers_of_other_groups_are_refused(tmp_path):
    each = Alone()
    each.train(1)
    dcp.save({"optim": each.optimizer.state_dict()}, checkpoint_id=str(tmp_path / "x"), no_dist=True)
    p, *others = each.model.parameters()
    split = torch.optim.AdamW([{"params": [p]}, {"params": others}])
    with pytest.raises(CheckpointMismatch, match="by their order they cannot be told"):
        load_optimizer(each.model, split, tmp_path / "x")
    assert not split.state


def test_sgd_whose_state_is_empty_comes_back_from_dcp(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model_state, state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": state}, checkpoint_id=str(tmp_path / "x"), no_dist=True)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    load_optimizer(model, other, tmp_path / "x")
    assert other.param_groups[0]["lr"] == 0.5


# -- load_sharded_optimizer_state_dict --------------------------------------------------------------------


def model_state(each: Trained) -> dict:
    if isinstance(each, Strips):
        return each.holding.values
    if isinstance(each, Flat):
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        with FullyShardedDataParallel.state_dict_type(each.model, StateDictType.SHARDED_STATE_DICT):
            return each.model.state_dict()
    return each.model.state_dict()


def check_parts(found: dict, wanted: dict, what: str) -> None:
    """Every rank's parts of every tensor, against slices of the whole."""
    assert found["state"].keys() == wanted.keys(), what
    for name, values in wanted.items():
        assert found["state"][name].keys() == values.keys()
        for key, whole in values.items():
            value = found["state"][name][key]
            shards = shards_of(value)
            for box, tensor in zip(shards.spread.boxes(dist.get_rank()), shards.tensors, strict=True):
                torch.testing.assert_close(tensor, whole[box.slices], rtol=1e-6, atol=1e-7)


def sharded_states(folder: str, kinds: list[type[Trained]]) -> None:
    warnings.simplefilter("ignore")
    _, state = reference(2)
    for number, kind in enumerate(BY_TORCH):
        each = kinds[number % len(kinds)](seed=1)
        parameters = model_state(each)
        path = f"{folder}/{kind.__name__}"
        reader = [path, LocalDisk(path), dcp.FileSystemReader(path)][number % 3]
        found = load_sharded_optimizer_state_dict(parameters, "optim", reader)
        assert found.keys() == {"optim"}
        check_parts(found["optim"], state, f"{kind.__name__} -> {type(each).__name__}")
        theirs = of_torch(parameters, "optim", dcp.FileSystemReader(path))
        check_parts(theirs["optim"], state, "torch's own")
        assert found["optim"]["param_groups"] == theirs["optim"]["param_groups"]
        for name, values in found["optim"]["state"].items():
            like = parameters[name]
            for key in ("exp_avg", "exp_avg_sq"):
                assert type(values[key]) is type(like.data if isinstance(like, nn.Parameter) else like)
                if isinstance(like, DTensor):
                    assert values[key].placements == like.placements
                    assert values[key].device_mesh == like.device_mesh
                if isinstance(like, ShardedTensor):
                    assert [s.metadata.shard_offsets for s in values[key].local_shards()] == [
                        s.metadata.shard_offsets for s in like.local_shards()
                    ]


def test_the_state_has_the_form_of_the_model_and_the_elements_that_torchs_function_gives(two, four, saved):
    two.run(sharded_states, saved, [Fsdp2, Strips, TwoD, Plain], timeout_s=55)
    four.run(sharded_states, saved, [TwoD, Strips, Fsdp2], timeout_s=55)


class Largest(TorchDispatchMode):
    """The largest tensor that has been allocated. What is read aside has a fixed size and is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and "empty" in str(func):
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return result


def only_own_boxes(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    state = {
        "state": {"w": {"exp_avg": whole, "step": torch.tensor(3.0)}},
        "param_groups": [{"params": ["w"]}],
    }
    dcp.save({"optim": state}, checkpoint_id=folder)
    model = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0), Shard(1)])}
    with Largest() as largest:
        found = load_sharded_optimizer_state_dict(model, "optim", folder)
    value = found["optim"]["state"]["w"]["exp_avg"]
    assert largest.nbytes == 32 * 32 * 4
    assert torch.equal(value.full_tensor(), whole)
    assert found["optim"]["state"]["w"]["step"].item() == 3
    replicated = {"w": distribute_tensor(torch.zeros(64, 64), mesh, [Replicate(), Shard(1)])}
    found = load_sharded_optimizer_state_dict(replicated, "optim", folder)
    assert torch.equal(found["optim"]["state"]["w"]["exp_avg"].full_tensor(), whole)


def test_a_rank_allocates_its_own_boxes_alone(four, tmp_path):
    four.run(only_own_boxes, str(tmp_path / "x"))


def sharded_tensor(local: list, shards: list[tuple[list[int], list[int], int]], size: list[int], group) -> ShardedTensor:  # fmt: skip
    metadata = [ShardMetadata(o, n, f"rank:{r}/cpu") for o, n, r in shards]
    here = [each for each in metadata if each.placement.rank() == dist.get_rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(t, m) for t, m in zip(local, here, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(size), TensorProperties(dtype=torch.float32)),
        process_group=group,
    )


def nested_sharded_tensors(folder: str) -> None:
    """Columns over pairs of ranks, and rows of each half over the others: what FSDP made of tensor parallelism before DTensor."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    whole = torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6)
    state = {
        "state": {"w": {"exp_avg": whole, "step": torch.tensor(3.0)}},
        "param_groups": [{"params": ["w"]}],
    }
    dcp.save({"optim": state}, checkpoint_id=folder)
    half = rank % 2
    inner = sharded_tensor(
        [torch.zeros(4, 3)], [([0, 0], [4, 3], half), ([4, 0], [4, 3], half + 2)], [8, 3], rows
    )
    outer = sharded_tensor([torch.zeros(8, 3)], [([0, 3 * r], [8, 3], r) for r in range(2)], [8, 6], None) if rank < 2 else None  # fmt: skip
    if outer is None:  # the same for the other pair
        metadata = [ShardMetadata([0, 3 * r], [8, 3], f"rank:{r + 2}/cpu") for r in range(2)]
        outer = ShardedTensor._init_from_local_shards_and_global_metadata(
            [LocalShard(torch.zeros(8, 3), metadata[half])],
            ShardedTensorMetadata(metadata, torch.Size([8, 6]), TensorProperties(dtype=torch.float32)),
        )
    outer.local_shards()[0].tensor = inner
    found = load_sharded_optimizer_state_dict({"w": outer}, "optim", folder)
    value = found["optim"]["state"]["w"]["exp_avg"]
    (shard,) = value.local_shards()
    begin = 4 * (rank // 2)
    assert torch.equal(shard.tensor, whole[begin : begin + 4, 3 * half : 3 * half + 3])
    assert tuple(value.size()) == (
        8,
        3,
    )  # as torch has it; torch's own function fails on groups other than the first ranks


def test_two_dimensions_of_sharded_tensors(four, tmp_path):
    four.run(nested_sharded_tensors, str(tmp_path / "x"))


def refusals(folder: str) -> None:
    each = Fsdp2(seed=1)
    parameters = each.model.state_dict()
    with pytest.raises(CheckpointMismatch, match=r"no 'optimizer' at its top: it has .*'optim'"):
        load_sharded_optimizer_state_dict(parameters, "optimizer", f"{folder}/Fsdp2")
    with pytest.raises(CheckpointMismatch, match="load_optimizer takes those"):
        load_sharded_optimizer_state_dict(parameters, "optim", f"{folder}/numbered")

    class Own(dcp.DefaultLoadPlanner):
        pass

    with pytest.raises(CheckpointError, match="Own is not asked"):
        load_sharded_optimizer_state_dict(parameters, "optim", f"{folder}/Fsdp2", Own())
    load_sharded_optimizer_state_dict(parameters, "optim", f"{folder}/Fsdp2", dcp.DefaultLoadPlanner())
    with pytest.raises(CheckpointError, match="has no path"):
        load_sharded_optimizer_state_dict(parameters, "optim", object())


def test_what_is_not_there_is_said(two, saved):
    two.run(refusals, saved)


def ours_for_torch(folder: str) -> None:
    each = Fsdp2()
    each.train(2)
    checkpoint.save({"model": each.model, "optim": each.optimizer}, f"{folder}/ours")
    _, state = reference(2)
    found = load_sharded_optimizer_state_dict(each.model.state_dict(), "optim", f"{folder}/ours")
    check_parts(found["optim"], state, "ours")


def test_a_checkpoint_of_ours_by_torchs_contract(two, tmp_path):
    two.run(ours_for_torch, str(tmp_path))
