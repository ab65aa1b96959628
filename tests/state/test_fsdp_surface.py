"""farstep.fsdp where torch's functions are told what to give by FSDP.set_state_dict_type, and where one rank fails."""

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)

from farstep.errors import StateMismatch
from farstep.fsdp import (
    OptimStateKeyType,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
)
from farstep.optim import NamedOptimizer
from farstep.state import Shards
from state.training import bits_of, gradient


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout_s=10) as ranks:
        yield ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def fsdp1():
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)


def fsdp2():
    return fully_shard(net())


def stepped(model, steps=1):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        for p in model.parameters():
            p.grad = gradient(p.detach())
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def same(a, b):
    assert list(a["state"]) == list(b["state"])
    for name, state in a["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][name][key])), (name, key)


def kinds():
    """torch: the settings of FSDP.set_state_dict_type decide the kind; the default is a full state on every rank."""
    model = fsdp1()
    optimizer = stepped(model)
    expected = optim_state_dict(model, optimizer, full=True)
    for other in (model, fsdp2()):  # nothing is said
        found = optim_state_dict(other, optimizer if other is model else stepped(other))
        assert found["state"]["0.weight"]["exp_avg"].shape == (8, 8)
        same(found, expected)
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    found = optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        same(found, expected)
    else:
        assert found == {}
    assert optim_state_dict(model, optimizer, rank0_only=False)["state"]  # the argument counts more
    for kind, configs in (
        (StateDictType.SHARDED_STATE_DICT, (ShardedStateDictConfig(), ShardedOptimStateDictConfig())),
        (StateDictType.LOCAL_STATE_DICT, (LocalStateDictConfig(), LocalOptimStateDictConfig())),
    ):
        with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
            found = optim_state_dict(model, optimizer)
            assert isinstance(found["state"]["0.weight"]["exp_avg"], Shards)
            assert found["rank"] == dist.get_rank()


def test_the_kind_is_what_set_state_dict_type_says(two):
    two.run(kinds)


def of_a_state_dict():
    """torch: the third argument is turned into a state by names in place of the optimizer's own."""
    model = fsdp1()
    optimizer = stepped(model)
    saved = {
        "state": {
            n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()
        },
        "param_groups": [{**g, "lr": 0.7} for g in optimizer.state_dict()["param_groups"]],
    }
    expected = optim_state_dict(model, optimizer)
    for p in model.parameters():
        p.grad = gradient(p.detach())
    optimizer.step()
    bits = bits_of(optimizer)
    found = optim_state_dict(model, optimizer, saved)
    assert bits_of(optimizer) == bits
    same(found, expected)
    assert found["param_groups"][0]["lr"] == 0.7
    named = NamedOptimizer(model.named_parameters(), torch.optim.Adam)
    named.init_state()
    same(optim_state_dict(model, named, named.state_dict()), optim_state_dict(model, named))
    wrong = {"state": {99: {}}, "param_groups": saved["param_groups"]}
    with pytest.raises((StateMismatch, RuntimeError), match="99"):  # given on one rank
        optim_state_dict(model, optimizer, wrong if dist.get_rank() else saved)


def test_a_state_dict_of_the_optimizer_may_be_given(two):
    two.run(of_a_state_dict)


def only_on_rank0():
    for make in (fsdp1, fsdp2):
        model = make()
        optimizer = stepped(model)
        expected = optim_state_dict(model, optimizer)
        full = full_optim_state_dict(model, optimizer)
        assert bool(full) == (dist.get_rank() == 0)
        for given in (full, full or None):
            fresh = torch.optim.Adam(model.parameters())
            fresh.load_state_dict(optim_state_dict_to_load(model, fresh, given))
            same(optim_state_dict(model, fresh), expected)


def test_only_rank_0_has_the_state_that_is_to_be_loaded(two):
    two.run(only_on_rank0)


def advice():
    model = fsdp2()
    optimizer = stepped(model)
    full = full_optim_state_dict(model, optimizer, rank0_only=False)
    del full["state"]["0.weight"]
    full["param_groups"][0]["params"].remove("0.weight")
    for function in (
        lambda: scatter_full_optim_state_dict(full, model, optim=optimizer),
        lambda: optim_state_dict_to_load(model, optimizer, full),
    ):
        with pytest.raises(
            StateMismatch, match=r"0\.weight.*strict=False.*load_optim_state_dict\(\.\.\., rename="
        ):
            function()


def test_errors_advise_what_there_is(two):
    two.run(advice)


def one_hook_raises():
    model = fsdp1()
    optimizer = stepped(model)
    state = optim_state_dict(model, optimizer)
    for each in state["state"].values():
        each["exp_avg"] += 100
    named = NamedOptimizer(model.named_parameters(), torch.optim.Adam)
    named.init_state()

    def hook(*_):
        if dist.get_rank() == 1:
            raise ValueError("a hook of rank 1")

    for each in (optimizer, named):
        each.register_load_state_dict_post_hook(hook)  # when it has been loaded
        bits = bits_of(each)
        with pytest.raises(Exception, match="a hook of rank 1"):
            optim_state_dict_to_load(model, each, state, is_named_optimizer=each is named, load_directly=True)
        assert bits_of(each) == bits
    plain = torch.optim.Adam(model.parameters())
    optim_state_dict_to_load(model, plain, state, load_directly=True)
    same(optim_state_dict(model, plain), state)


def test_loaded_directly_on_all_ranks_or_on_none(two):
    two.run(one_hook_raises)


# -- one process ------------------------------------------------------------------------------------------


def test_rekey_does_not_lose_one_of_two_states():
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    model._orig_mod = nn.Module()
    model._orig_mod.w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full((2,), float(number))
    optimizer.step()
    with pytest.raises(StateMismatch, match="'w'"):
        rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optimizer)

    tied = nn.Module()
    tied.a, tied.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    tied.b.weight = tied.a.weight
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9)
    ones, zeros = {"momentum_buffer": torch.ones(2, 2)}, {"momentum_buffer": torch.zeros(2, 2)}
    groups = [{"params": ["a.weight", "b.weight"], "lr": 0.1}]
    with pytest.raises(StateMismatch, match=r"'b\.weight'.*'a\.weight'"):
        rekey_optim_state_dict(
            {"state": {"a.weight": ones, "b.weight": zeros}, "param_groups": groups},
            OptimStateKeyType.PARAM_ID,
            tied,
            optim=optimizer,
        )
    found = rekey_optim_state_dict(
        {"state": {"a.weight": ones, "b.weight": dict(ones)}, "param_groups": groups},
        OptimStateKeyType.PARAM_ID,
        tied,
        optim=optimizer,
    )
    assert list(found["state"]) == [0]
