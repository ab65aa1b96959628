"""Whatever ranks hold, from any form to any other, in real processes: compared with what torch itself reads back."""

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from farstep.errors import LayoutError
from farstep.state import Shards, like, local_tensors, named_shards, on_rank, respread, shards_of
from state.holdings import FORMS, KINDS, Chunks, Flat, Fsdp2, Net, Plain, Strips, TwoD, tensors


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def gathered():
    """From every kind to rank 0; the others' targets are left alone."""
    for kind in KINDS:
        holding = kind(seed=1)
        whole = {name: torch.full_like(t, -1) for name, t in tensors(1).items()}
        respread(holding.shards, {name: on_rank(t) for name, t in whole.items()})
        read = holding.whole()
        if dist.get_rank() == 0:
            same(whole, tensors(1))
            same(whole, read)
        else:
            assert all((t == -1).all() for t in whole.values())


def test_every_kind_is_gathered_to_one_rank(ranks):
    ranks.run(gathered)


def spread_from_one():
    """From the last rank to every kind; the other ranks know the whole's shape alone."""
    last = dist.get_world_size() - 1
    is_here = dist.get_rank() == last
    whole = {name: t if is_here else torch.empty_like(t, device="meta") for name, t in tensors(3).items()}
    for kind in KINDS:
        holding = kind(seed=4)
        respread({name: on_rank(t, last) for name, t in whole.items()}, holding.shards)
        same(holding.whole(), tensors(3))


def test_a_whole_is_spread_from_one_rank(ranks):
    ranks.run(spread_from_one)


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


def test_state_in_the_form_of_its_parameter(four):
    four.run(like_each)


def pickled():
    after = pickle.loads(pickle.dumps(Flat(seed=1).shards))
    whole = {name: torch.zeros_like(t) for name, t in tensors(1).items()}
    respread(after, {name: on_rank(t) for name, t in whole.items()})
    if dist.get_rank() == 0:
        same(whole, tensors(1))


def test_what_a_rank_holds_is_pickled_and_used_again(four):
    four.run(pickled)


def after_forward():
    holding = Fsdp2(seed=1)
    with torch.no_grad():
        holding.model(torch.ones(2, 5))
    assert not isinstance(holding.model.scale, DTensor)  # it shows the whole in place of its shard
    respread({name: on_rank(t) for name, t in tensors(2).items()}, holding.shards)
    same(holding.whole(), tensors(2))


def test_parameters_that_fsdp2_shows_whole_after_a_forward(four):
    four.run(after_forward)


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


def test_a_model_on_some_of_the_ranks(four):
    four.run(ddp_of_some)


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
    holding = Strips(seed=1)
    odd = holding.values["scale"]
    for shard in odd.local_shards():
        shard.tensor = torch.zeros(1)
        with pytest.raises(
            LayoutError, match=r"rank \d holds \[.*\] of 'scale', and there is one of shape \(1,\)"
        ):
            shards_of(odd, name="scale")


def test_what_does_not_fit_is_refused_by_name(four):
    four.run(refused)
