"""What is read of an optimizer, and what is refused: each on all ranks alike, and never without a word."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from farstep.errors import FarstepError, StateError
from farstep.state import RankOwned, load_optim_state_dict, optim_reading, optim_state_dict
from state.training import bits_of, gradient

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout_s=10) as ranks:
        yield ranks


class Mine(torch.optim.SGD):
    """A class that is not torch's own, so that nothing is known of what it keeps."""


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def fsdp1(model, **options):
    return FullyShardedDataParallel(model, device_id=CPU, **{"use_orig_params": True, **options})


def step(model, optimizer):
    for p in model.parameters():
        p.grad = gradient(p.detach())
    optimizer.step()
    optimizer.zero_grad()


def refused(said, function, *args, **options):
    """All ranks raise, and with the same cause."""
    with pytest.raises(FarstepError) as caught:
        function(*args, **options)
    for word in said:
        assert word in str(caught.value), str(caught.value)
    dist.barrier()


# -- one process ------------------------------------------------------------------------------------------


def test_state_that_is_no_parameters_is_not_lost_silently():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    optimizer.state["global_step"] = 17
    with pytest.raises(StateError, match="'global_step'"):
        optim_state_dict(model, optimizer)
    del optimizer.state["global_step"]
    optimizer.state[torch.ones(3)] = {"step": 1}
    with pytest.raises(StateError, match=r"shape \(3,\)"):
        optim_state_dict(model, optimizer, full=True)


def test_sparse_state_is_refused_by_name():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"state\['weight'\]\['momentum_buffer'\]"):
        optim_state_dict(model, optimizer, full=True)


def test_groups_with_options_that_only_print_alike_are_not_merged():
    model = net()
    parameters = list(model.parameters())
    options = [{"betas": (torch.tensor(0.9), torch.tensor(beta))} for beta in (0.99991, 0.99994)]
    groups = [{"params": parameters[:2], **options[0]}, {"params": parameters[2:], **options[1]}]
    optimizer = torch.optim.Adam(groups, foreach=False)
    step(model, optimizer)
    state = optim_state_dict(model, optimizer, full=True)
    with pytest.raises(FarstepError, match="betas"):
        load_optim_state_dict(model, torch.optim.Adam(model.parameters()), state)


def test_rank0_only_without_full_is_refused():
    model = net()
    with pytest.raises(ValueError, match="full=True"):
        optim_state_dict(model, torch.optim.SGD(model.parameters()), rank0_only=True)


def test_lists_of_tensors_are_read_as_they_are():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3)
    x = torch.randn(5, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    (before,) = optimizer.state.values()
    state = optim_state_dict(model, optimizer, full=True)["state"]["0.weight"]
    assert len(state["old_dirs"]) == len(before["old_dirs"]) > 1
    for ours, its in zip(state["old_dirs"], before["old_dirs"], strict=True):
        assert torch.equal(ours, its)
        assert ours.data_ptr() != its.data_ptr()


# -- two ranks --------------------------------------------------------------------------------------------


def nested():
    model = DistributedDataParallel(net())
    optimizer = Mine(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["past"] = {"of": [torch.ones(3), (torch.zeros(2), 5)]}
    state = optim_state_dict(model, optimizer, full=True, rank0_only=True)
    if dist.get_rank() == 0:
        past = state["state"]["0.weight"]["past"]
        assert past["of"][0].tolist() == [1, 1, 1]
        assert past["of"][1][0].tolist() == [0, 0]
        assert past["of"][1][1] == 5
    assert optim_state_dict(model, optimizer)["state"]["2.bias"]["past"]["of"][0].tolist() == [1, 1, 1]
    for p in model.parameters():  # alike when printed
        optimizer.state[p]["past"] = [torch.zeros(5000)]
        optimizer.state[p]["past"][0][2500] = dist.get_rank()
    refused(["past", "0.weight", "rank 0", "rank 1"], optim_state_dict, model, optimizer, full=True)


def test_lists_of_tensors_are_one_value_or_refused(two):
    two.run(nested)


def cut_lists():
    """The list is that of one rank's part, and would be taken for the parameter's."""
    model = fsdp1(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    optimizer = Mine(model.parameters(), lr=0.1)
    for p in model.parameters():
        if p.numel():
            optimizer.state[p]["past"] = [torch.full((p.numel(),), float(dist.get_rank()))]
    refused(["past", "weight"], optim_state_dict, model, optimizer, full=True)


def test_lists_of_tensors_of_one_ranks_part_are_refused(two):
    two.run(cut_lists)


def dtensor_of_another_shape():
    model = fully_shard(nn.Linear(4, 8, bias=False))
    optimizer = Mine(model.parameters(), lr=0.1)
    rows = distribute_tensor(torch.arange(4.0).repeat(2), model.weight.device_mesh, [Shard(0)])
    optimizer.state[model.weight]["rows"] = rows
    state = optim_state_dict(model, optimizer, full=True)["state"]["weight"]["rows"]
    assert isinstance(state, RankOwned)  # and not one half, because the other is the same
    assert {rank: each.tolist() for rank, each in state.tensors.items()} == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def test_equal_parts_of_a_dtensor_are_not_one_value(two):
    two.run(dtensor_of_another_shape)


def table(model, optimizer, numel):
    for p in model.parameters():
        if p.numel():
            optimizer.state[p] = {"table": torch.linspace(-1, 1, numel), "m": gradient(p.detach())}


def tables():
    """Each rank has 32 elements of the weight, and a table has as many: other parameters, or nobody, can tell."""
    both = fsdp1(
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False)), auto_wrap_policy=each_linear
    )
    optimizer = Mine(both.parameters(), lr=0.1)
    table(both, optimizer, 32)
    state = optim_state_dict(both, optimizer, full=True)["state"]
    for name, shape in (("0.weight", (8, 8)), ("1.weight", (5, 8))):
        assert torch.equal(state[name]["table"], torch.linspace(-1, 1, 32))
        assert state[name]["m"].shape == shape
    other = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False))
    fresh = Mine(other.parameters(), lr=0.1)
    load_optim_state_dict(other, fresh, {**optim_state_dict(both, optimizer, full=True)})
    assert torch.equal(fresh.state[other[0].weight]["table"], torch.linspace(-1, 1, 32))

    alone = fsdp1(nn.Linear(8, 8, bias=False))
    optimizer = Mine(alone.parameters(), lr=0.1)
    table(alone, optimizer, 32)
    refused(["table", "weight"], optim_state_dict, alone, optimizer, full=True)
    for p in alone.parameters():  # moments of gradients that are all one number are alike, and are no tables
        optimizer.state[p] = {"m": torch.ones(p.numel())}
    assert optim_state_dict(alone, optimizer, full=True)["state"]["weight"]["m"].shape == (8, 8)


def each_linear(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, nn.Linear)


def test_a_table_that_is_as_long_as_the_parameters_part(two):
    two.run(tables)


def scales():
    """0.weight lies on rank 0 and 1.weight on both, or so: what belongs to a part is a RankOwned wherever the cut falls."""
    model = fsdp1(nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(8, 8, bias=False)))
    optimizer = Mine(model.parameters(), lr=0.1)
    for number, p in enumerate(model.parameters()):
        if p.numel():
            optimizer.state[p] = {
                "scales": torch.rand(-(-p.numel() // 4)) + dist.get_rank() + number,
                "table": torch.arange(7.0),
            }
    state = optim_state_dict(model, optimizer, full=True)["state"]
    assert [type(each["scales"]) for each in state.values()] == [RankOwned, RankOwned]
    assert list(state["0.weight"]["scales"].tensors) == [0]
    assert [each["table"].tolist() for each in state.values()] == [list(range(7))] * 2


def test_what_belongs_to_a_part_does_not_depend_on_where_the_cut_falls(two):
    two.run(scales)


class Blocks(torch.optim.Optimizer):
    """Keeps nothing that is shaped like a parameter: blocks, their scales and a table, the same on all ranks."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                numel = p.numel()
                self.state[p] = {
                    "blocks": torch.arange(numel + 3).to(torch.uint8),
                    "scales": torch.linspace(0, 1, -(-numel // 4)),
                    "table": torch.arange(16.0),
                    "step": self.state[p].get("step", 0) + 1,
                }


def into_a_fresh_one():
    for make in (net, lambda: DistributedDataParallel(net()), lambda: fully_shard(net())):
        model, other = make(), make()
        optimizer, fresh = Blocks(model.parameters()), Blocks(other.parameters())
        optimizer.step()
        for full in (True, False):
            state = optim_state_dict(model, optimizer, full=full)
            load_optim_state_dict(other, fresh, state)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert list(fresh.state[b]) == ["blocks", "scales", "table", "step"]
                for key, value in optimizer.state[a].items():
                    assert torch.equal(torch.as_tensor(fresh.state[b][key]), torch.as_tensor(value))
            fresh.state.clear()
        state = optim_state_dict(model, optimizer, full=True)
        state["state"]["2.weight"]["blocks"] = torch.zeros(8, 4)  # that of another parameter
        refused(["2.weight", "(8, 4)"], load_optim_state_dict, other, fresh, state)


def test_state_that_all_ranks_have_alike_loads_into_a_fresh_optimizer(two):
    two.run(into_a_fresh_one)


def no_memory():
    model = fsdp1(net())
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    room = optim_reading.Room

    def none_left(*_):
        raise MemoryError("there is no room")

    if dist.get_rank() == 0:
        optim_reading.Room = none_left
    try:
        with pytest.raises((MemoryError, StateError), match="there is no room"):
            optim_state_dict(model, optimizer, full=True, rank0_only=True)
    finally:
        optim_reading.Room = room
    assert len(optim_state_dict(model, optimizer, full=True)["state"]) == 4


def test_a_rank_without_memory_for_it_is_heard_by_all(two):
    two.run(no_memory)


def uncopyable():
    model = fsdp1(net())
    optimizer = Mine(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lock"] = (each for each in ())  # a generator: neither copied nor pickled
    with pytest.raises((TypeError, StateError), match="generator"):
        optim_state_dict(model, optimizer)
    dist.barrier()


def test_an_option_that_cannot_be_copied_is_heard_by_all(two):
    two.run(uncopyable)


def left_out():
    """FSDP1 leaves parameters without elements on some ranks, and users leave those out."""
    model = fsdp1(net())
    whole = torch.optim.Adam(model.parameters())
    step(model, whole)
    expected = optim_state_dict(model, whole, full=True)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.numel()])
    for p in model.parameters():
        if p.numel():
            optimizer.state[p] = whole.state[p]
    found = optim_state_dict(model, optimizer, full=True)
    assert set(found["state"]) == set(expected["state"])
    assert set(found["param_groups"][0]["params"]) == set(expected["param_groups"][0]["params"])
    for name, state in expected["state"].items():
        assert torch.equal(found["state"][name]["exp_avg"], state["exp_avg"])
    optim_state_dict(model, optimizer)
    some = [p for p in model.parameters() if p.numel()]
    other = torch.optim.Adam(some[dist.get_rank() :])  # one that has elements is missing on rank 1
    refused(["rank 1", "group 0"], optim_state_dict, model, other, full=True)


def test_an_optimizer_may_leave_out_what_has_no_elements_here(two):
    two.run(left_out)


def between_forward_and_backward():
    model = fsdp1(net(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = optim_state_dict(model, optimizer, full=True)
    loss = model(torch.ones(1, 8)).sum()
    bits = bits_of(optimizer)
    after = optim_state_dict(model, optimizer, full=True)
    assert bits_of(optimizer) == bits
    loss.backward()
    for name, state in before["state"].items():
        assert torch.equal(after["state"][name]["exp_avg"], state["exp_avg"])


def test_reading_between_forward_and_backward(two):
    """SHARD_GRAD_OP shows views of the whole in place of the parameters then."""
    two.run(between_forward_and_backward)


def other_options():
    beta = torch.tensor(0.99991 if dist.get_rank() == 0 else 0.99994)
    model = fsdp1(net())
    optimizer = torch.optim.Adam(model.parameters(), betas=(torch.tensor(0.9), beta), foreach=False)
    refused(["betas", "0.99990", "0.99993"], optim_state_dict, model, optimizer)


def test_options_that_only_print_alike_are_told_apart_and_shown(two):
    two.run(other_options)
