"""Whatever ranks hold, from any form to any other, in real processes: compared with what torch itself reads back."""

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch.distributed._shard import shard_parameter
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from farstep.errors import LayoutError
from farstep.state import Shards, like, local_tensors, named_shards, on_rank, respread, shards_of
from state.holdings import FORMS, KINDS, Chunks, Flat, FlatOriginal, Fsdp2, Net, Plain, Strips, TwoD, tensors


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


four = pytest.mark.parametrize("ranks", [4], indirect=True)


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def gathered_and_spread():
    """From every kind to rank 0, where the others' targets are left alone; and back from the last rank, whose whole the others know by shape alone."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    new = {name: t if rank == last else torch.empty_like(t, device="meta") for name, t in tensors(3).items()}
    for kind in KINDS:
        holding = kind(seed=1)
        whole = {name: torch.full_like(t, -1) for name, t in tensors(1).items()}
        respread(holding.shards, {name: on_rank(t) for name, t in whole.items()})
        if rank == 0:
            same(whole, tensors(1))
        else:
            assert all((t == -1).all() for t in whole.values())
        respread({name: on_rank(t, last) for name, t in new.items()}, holding.shards)
        same(holding.whole(), tensors(3))


def test_every_kind_is_gathered_to_one_rank_and_spread_from_one(ranks):
    ranks.run(gathered_and_spread)


def converted():
    pairs = itertools.permutations(FORMS, 2)
    if dist.get_world_size() > 4:  # each once as source and as target
        pairs = zip(FORMS, FORMS[1:] + FORMS[:1], strict=True)
    for source, target in pairs:
        there = target(seed=2)
        respread(source(seed=1).shards, there.shards)
        same(there.whole(), tensors(1))


def test_any_form_becomes_any_other(ranks):
    ranks.run(converted)


def like_each():
    doubled = {name: t.double() * 2 for name, t in tensors(1).items()}
    for kind, type_ in (
        (Plain, torch.Tensor),
        (TwoD, DTensor),
        (Chunks, ShardedTensor),
        (Strips, ShardedTensor),
        (Flat, Shards),
    ):
        holding = kind(seed=1)
        values = holding.shards if kind is Flat else getattr(holding, "values", None)
        values = values or dict(holding.model.named_parameters())
        made = {
            name: like(value, [t.double() * 2 for t in local_tensors(value)], dtype=torch.float64)
            for name, value in values.items()
        }
        assert {type(value) for value in made.values()} == {type_}
        whole = {name: torch.zeros_like(t) for name, t in doubled.items()}
        found = {name: shards_of(value, name=name) for name, value in made.items()}
        respread(found, {name: on_rank(t) for name, t in whole.items()})
        if dist.get_rank() == 0:
            same(whole, doubled)
        if type_ is DTensor:
            same({name: value.full_tensor() for name, value in made.items()}, doubled)


@four
def test_state_in_the_form_of_its_parameter(ranks):
    ranks.run(like_each)


def pickled():
    after = pickle.loads(pickle.dumps(Flat(seed=1).shards))
    whole = {name: torch.zeros_like(t) for name, t in tensors(1).items()}
    respread(after, {name: on_rank(t) for name, t in whole.items()})
    if dist.get_rank() == 0:
        same(whole, tensors(1))


@four
def test_what_a_rank_holds_is_pickled_and_used_again(ranks):
    ranks.run(pickled)


def shown_whole():
    holding = Fsdp2(seed=1)
    with torch.no_grad():
        holding.model(torch.ones(2, 5))
    assert not isinstance(holding.model.scale, DTensor)
    respread({name: on_rank(t) for name, t in tensors(2).items()}, holding.shards)
    same(holding.whole(), tensors(2))
    for kind in (Flat, FlatOriginal):
        holding = kind(seed=1)
        with FullyShardedDataParallel.summon_full_params(holding.model, writeback=False):
            found = holding.shards
        respread({name: on_rank(t) for name, t in tensors(2).items()}, found)
        same(holding.whole(), tensors(2))


@four
def test_parameters_that_are_shown_whole_for_a_while(ranks):
    ranks.run(shown_whole)


def ddp_of_some():
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    model = DistributedDataParallel(Net(mine), process_group=halves[mine])
    model.module.register_buffer("seen", torch.tensor(mine))
    found = named_shards(model, buffers=True)
    assert set(found) == {*Net(0).state_dict(), "seen"}
    assert all(each.spread.ranks.tolist() == [mine, mine + 2] for each in found.values())
    within = named_shards(model, halves[mine])
    assert all(each.spread.ranks.tolist() == [0, 1] for each in within.values())


@four
def test_a_model_on_some_of_the_ranks(ranks):
    ranks.run(ddp_of_some)


def sharded_attributes():
    """shard_parameter keeps a ShardedTensor as a parameter; others put it in its place as a mere attribute."""
    model = Net(1)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(4)])
    shard_parameter(model.inner[2], "weight", spec)
    value = Strips(seed=1).values["inner.0.weight"]
    del model.inner[0].weight
    model.inner[0].weight = value
    assert "inner.0.weight" not in dict(model.named_parameters())
    found = named_shards(model)
    assert set(found) == set(tensors(1))
    whole = {name: torch.zeros_like(t) for name, t in tensors(1).items()}
    respread(found, {name: on_rank(t) for name, t in whole.items()})
    if dist.get_rank() == 0:
        same(whole, tensors(1))


@four
def test_a_sharded_tensor_in_place_of_a_parameter(ranks):
    ranks.run(sharded_attributes)


def refused():
    value = Strips(seed=1).values["first.weight"]
    evens = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        with pytest.raises(LayoutError, match=r"'w' is also held by rank 1, 3 of its process group"):
            shards_of(value, evens, name="w")
    else:
        with pytest.raises(LayoutError, match=r"this process \(rank \d\) is not in the group"):
            named_shards(Net(0), evens)
    with pytest.raises(LayoutError, match=r"'w' was to be on rank 4 of a group that has 4"):
        on_rank(torch.zeros(2), 4, name="w")
    if dist.get_rank() == 1:
        with pytest.raises(LayoutError, match=r"'w' is on the meta device"):
            on_rank(torch.zeros(2, device="meta"), 1, name="w")
    elsewhere = Strips(seed=1).values["scale"]
    elsewhere.metadata().shards_metadata[0] = ShardMetadata([0, 0, 0], [1, 3, 5], "trainer/cpu")
    with pytest.raises(
        LayoutError, match=r"shard of 'scale' at \[0, 0, 0\] is placed on trainer/cpu.*rank:0/cpu"
    ):
        shards_of(elsewhere, name="scale")
    holding = Strips(seed=1)
    odd = holding.values["scale"]
    for shard in odd.local_shards():
        shard.tensor = torch.zeros(1)
        with pytest.raises(
            LayoutError, match=r"rank \d holds \[.*\] of 'scale', and there is one of shape \(1,\)"
        ):
            shards_of(odd, name="scale")


@four
def test_what_does_not_fit_is_refused_by_name(ranks):
    ranks.run(refused)
