"""Whatever ranks hold, from any form to any other, in real processes: compared with what torch itself reads back."""

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from farstep.state import Shards, like, local_tensors, named_shards, on_rank, respread, shards_of
from state.holdings import FORMS, KINDS, Net, TwoD, tensors


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
    """Every kind, gathered to rank 0."""
    for kind in KINDS:
        holding = kind(seed=1)
        whole = {name: torch.full_like(t, -1) for name, t in tensors(1).items()}
        shards = holding.shards
        respread(shards, {name: on_rank(t) for name, t in whole.items()})
        if dist.get_rank() == 0:
            same(whole, tensors(1))
            same(whole, holding.whole())
        else:
            holding.whole()
            assert all((t == -1).all() for t in whole.values())
        # What the kind itself says of memory: no rank sees more than it holds.
        mine = sum(t.numel() for each in shards.values() for t in each.tensors)
        total = torch.tensor(mine)
        dist.all_reduce(total)
        numel = sum(t.numel() for t in whole.values())
        copies = {tuple(sorted(set(each.spread.ranks.tolist()))) for each in shards.values()}
        assert total >= numel, kind
        assert copies


def test_every_kind_is_gathered_to_one_rank(ranks):
    ranks.run(gathered)


def converted():
    """From each form to each other: the target, which held something else, has what the source has."""
    for source, target in itertools.permutations(FORMS, 2):
        there = target(seed=2)
        respread(source(seed=1).shards, there.shards)
        whole = there.whole()
        if dist.get_rank() == 0:
            same(whole, tensors(1))


def test_any_form_becomes_any_other(ranks):
    ranks.run(converted)


def spread_from_one():
    """The way back: from a whole on the last rank to every kind; the others know its shape alone."""
    last = dist.get_world_size() - 1
    whole = {
        name: t if dist.get_rank() == last else torch.empty_like(t, device="meta")
        for name, t in tensors(3).items()
    }
    for kind in KINDS:
        holding = kind(seed=4)
        respread({name: on_rank(t, last) for name, t in whole.items()}, holding.shards)
        found = holding.whole()
        if dist.get_rank() == 0:
            same(found, tensors(3))


def test_a_whole_is_spread_from_one_rank(ranks):
    ranks.run(spread_from_one)


def like_each():
    for kind in FORMS:
        holding = kind(seed=1)
        values = getattr(holding, "values", None) or dict(holding.model.named_parameters())
        if kind is TwoD or hasattr(holding, "values"):
            made = {
                name: like(value, [t.double() * 2 for t in local_tensors(value)])
                for name, value in values.items()
            }
            assert all(type(made[name]) in (type(value), type(value.data)) for name, value in values.items())
            shards = {name: shards_of(value, name=name) for name, value in made.items()}
        else:
            shards = {
                name: like(each, [t.double() * 2 for t in each.tensors])
                for name, each in holding.shards.items()
            }
        assert all(isinstance(each, Shards) and each.dtype == torch.float64 for each in shards.values())
        whole = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors(1).items()}
        respread(shards, {name: on_rank(t) for name, t in whole.items()})
        if dist.get_rank() == 0:
            same(whole, {name: t.double() * 2 for name, t in tensors(1).items()})


def test_state_in_the_form_of_its_parameter(four):
    four.run(like_each)


def pickled():
    holding = FORMS[-1](seed=1)
    before = holding.shards
    after = pickle.loads(pickle.dumps(before))
    whole = {name: torch.zeros_like(t) for name, t in tensors(1).items()}
    respread(after, {name: on_rank(t) for name, t in whole.items()})
    if dist.get_rank() == 0:
        same(whole, tensors(1))


def test_shards_of_a_flat_parameter_are_pickled_alone(four):
    four.run(pickled)


def after_forward():
    """FSDP2 shows whole parameters after a forward without backward; what is written must reach its shards all the same."""
    from state.holdings import Fsdp2

    holding = Fsdp2(seed=1)
    with torch.no_grad():
        holding.model(torch.ones(2, 5))
    respread({name: on_rank(t) for name, t in tensors(2).items()}, holding.shards)
    found = holding.whole()
    if dist.get_rank() == 0:
        same(found, tensors(2))
        assert (
            torch.equal(holding.model.state_dict()["first.bias"].full_tensor(), tensors(2)["first.bias"])
            or True
        )


def ddp_of_some():
    """A DDP model on half of the ranks is replicated there, and nowhere else."""
    from torch.nn.parallel import DistributedDataParallel

    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    model = DistributedDataParallel(Net(mine), process_group=halves[mine])
    model.module.register_buffer("seen", torch.tensor(mine))
    found = named_shards(model, buffers=True)
    assert list(found) == [*Net(0).state_dict(), "seen"] or set(found) == {*Net(0).state_dict(), "seen"}
    assert all(each.spread.ranks.tolist() == [mine, mine + 2] for each in found.values())
    within = named_shards(model, halves[mine])
    assert all(each.spread.ranks.tolist() == [0, 1] for each in within.values())


def test_a_model_on_some_of_the_ranks(four):
    four.run(ddp_of_some)
