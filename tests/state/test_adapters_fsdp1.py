"""Flat parameters of FullyShardedDataParallel: all that a model may have in them, and an optimizer's state that is shaped like them."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import Shard, distribute_tensor

from farstep.errors import LayoutError
from farstep.state import named_shards, on_rank, respread, shards_of
from farstep.state.adapters.fsdp1 import flat_parameters


def wrap(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def gather(shards):
    """All tensors in full, on every rank."""
    whole = {name: torch.full(each.shape, -1, dtype=each.dtype) for name, each in shards.items()}
    respread(shards, {name: shards_of(t, name=name) for name, t in whole.items()})
    return whole


class Odd(nn.Module):
    """Tied, frozen, channels-last, ignored, checkpointed and empty parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.kept = nn.Linear(3, 2)
        self.module = nn.Linear(2, 3)  # a name that DDP's wrapper has as well
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(3))


def odd_model(use_orig_params):
    model = Odd()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    if use_orig_params:
        model.conv.bias.requires_grad_(False)
        model.embed.weight.requires_grad_(False)
    ignored = [model.kept]
    model.middle = checkpoint_wrapper(wrap(checkpoint_wrapper(model.middle), use_orig_params=use_orig_params))
    whole = wrap(checkpoint_wrapper(model), use_orig_params=use_orig_params, ignored_modules=ignored)
    found = named_shards(whole)
    assert list(found) == list(wanted)
    for name, tensor in gather(found).items():
        assert torch.equal(tensor, wanted[name]), name
    every = named_shards(whole, buffers=True, remove_duplicate=False)
    assert set(every) == {*wanted, "head.weight", "count"}
    assert every["head.weight"].spread is every["embed.weight"].spread
    assert set(every["kept.weight"].spread.ranks.tolist()) == {0, 1, 2, 3}
    # Written through the views, it is what FSDP gathers; and the memory format is the parameter's still.
    new = {name: torch.randn_like(t) for name, t in wanted.items()}
    for t in new.values():
        dist.broadcast(t, 0)
    respread({name: on_rank(t) for name, t in new.items()}, named_shards(whole))
    with FullyShardedDataParallel.summon_full_params(whole):
        assert torch.equal(whole.conv.weight, new["conv.weight"])
        assert whole.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(whole.head.weight, new["embed.weight"])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_all_that_a_model_may_have(four, use_orig_params):
    four.run(odd_model, use_orig_params)


def small():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return optimizer


def optimizer_state(use_orig_params, strategy):
    """`exp_avg` of flat parameters, gathered, against an Adam that was never sharded."""
    plain = small()
    batches = [torch.randn(4, 5) for _ in range(3)]
    for batch in batches:
        dist.broadcast(batch, 0)
    reference = train(plain, batches)
    wanted = {name: reference.state[p]["exp_avg"] for name, p in plain.named_parameters()}
    model = small()
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
    if strategy == ShardingStrategy.HYBRID_SHARD:
        pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        groups = [[dist.new_group(each) for each in pair] for pair in pairs]
        rank = dist.get_rank()
        options["process_group"] = (groups[0][rank // 2], groups[1][rank % 2])
    model[0] = wrap(model[0], **options)
    model = wrap(model, **options)
    optimizer = train(model, batches)
    found = {}
    for flat in flat_parameters(model):
        if use_orig_params:
            state = {name: optimizer.state[p].get("exp_avg") for name, p in flat.originals.items()}
            found |= {
                name: flat.view(name, torch.zeros(0) if value is None else value)
                for name, value in state.items()
            }
        else:
            found |= flat.views(optimizer.state[flat.parameter]["exp_avg"])
    assert set(found) == set(wanted)
    for name, tensor in gather(found).items():
        torch.testing.assert_close(tensor, wanted[name])
    for name, tensor in gather(named_shards(model)).items():
        torch.testing.assert_close(tensor, dict(plain.named_parameters())[name].detach())


STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
]


def all_optimizer_states():
    for case in itertools.product([False, True], STRATEGIES):
        optimizer_state(*case)


def test_the_state_of_an_optimizer_is_that_of_an_unsharded_one(four):
    four.run(all_optimizer_states)


def refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    whole = wrap(model, use_orig_params=True)
    (flat,) = flat_parameters(whole)
    with pytest.raises(
        LayoutError, match=r"'0.weight' lies in a flat tensor with shards of \d+ elements.*\(3,\)"
    ):
        flat.views(torch.zeros(3))
    with pytest.raises(LayoutError, match=r"elements of '1.bias', and a tensor of shape \(9,\)"):
        flat.view("1.bias", torch.zeros(9))
    with pytest.raises(KeyError, match=r"no '2.bias' in this flat tensor; it has 0.weight"):
        flat.view("2.bias", torch.zeros(9))
    if dist.get_rank() < 2:
        with pytest.raises(
            LayoutError, match=r"'0.weight' is also held by rank 2, 3 of its FSDP process group"
        ):
            flat_parameters(whole, dist.new_group([0, 1], use_local_synchronization=True))
    crossed = [[dist.new_group(each) for each in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])]
    rank = dist.get_rank()
    groups = crossed[0][rank // 2], crossed[1][0 if rank in (0, 3) else 1]
    hybrid = wrap(nn.Linear(3, 4), process_group=groups, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(LayoutError, match=r"which ranks hold 'weight' cannot be told.*device_mesh"):
        flat_parameters(hybrid)


def test_what_does_not_fit_is_refused_by_name(four):
    four.run(refused)


def of_tensor_parallel():
    """FSDP1 keeps the local part of a DTensor in its flat parameter; that is not an element range of the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]))
    whole = wrap(model, device_mesh=mesh["dp"], use_orig_params=True)
    with pytest.raises(
        LayoutError, match=r"'weight' is a DTensor inside FullyShardedDataParallel.*fully_shard"
    ):
        named_shards(whole)


def test_dtensors_in_flat_parameters_are_refused(four):
    four.run(of_tensor_parallel)
