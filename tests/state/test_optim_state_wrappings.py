"""Arbitrary wrappings and groupings: whatever the state was saved under, it loads under another, and nothing of it is lost."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from farstep.state import load_optim_state_dict, optim_state_dict
from state.training import gradient

CPU = torch.device("cpu")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
PARTS = ["", "0", "1", "1.0", "1.1", "2"]


def net():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    return nn.Sequential(nn.Linear(4, 3), inner, nn.Linear(2, 7))


NAMES = [name for name, _ in net().named_parameters()]

wrappings = st.one_of(
    st.just(("plain",)),
    st.just(("ddp",)),
    st.tuples(st.just("fsdp2"), st.sets(st.sampled_from(PARTS), min_size=1).map(sorted)),
    st.tuples(
        st.just("fsdp1"),
        st.sets(st.sampled_from(PARTS)).map(sorted),
        st.booleans(),
        st.sampled_from(STRATEGIES),
    ),
)
# A number for each parameter: those with the same share a group. The order of parameters is another each time.
groupings = st.tuples(
    st.lists(st.integers(0, 2), min_size=len(NAMES), max_size=len(NAMES)), st.permutations(NAMES)
)


def wrapped(kind, parts=(), use_orig_params=True, strategy="FULL_SHARD"):
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        options = {
            "use_orig_params": use_orig_params,
            "sharding_strategy": ShardingStrategy[strategy],
            "device_id": CPU,
        }
        for part in sorted(filter(None, parts), key=len, reverse=True):
            *path, last = part.split(".")
            owner = model.get_submodule(".".join(path))
            owner[int(last)] = FullyShardedDataParallel(owner[int(last)], **options)
        return FullyShardedDataParallel(model, **options)
    if kind == "fsdp2":
        for part in sorted(parts, key=len, reverse=True):
            fully_shard(model.get_submodule(part))
    return model


def optimizer_of(model, wrapping, grouping):
    """All in one group where parameters lie together in flat ones."""
    if wrapping[0] == "fsdp1" and not wrapping[2]:
        return torch.optim.Adam(model.parameters(), lr=0.1)
    numbers, order = grouping
    named = {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p
        for name, p in model.named_parameters()
    }
    groups = {}
    for name in order:
        groups.setdefault(numbers[NAMES.index(name)], []).append(named[name])
    return torch.optim.Adam([{"params": each, "lr": 0.1} for each in groups.values()])


def step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = gradient(p.detach())
    optimizer.step()


def saved_and_loaded(here, there, grouping, other_grouping, full):
    wanted_model = net()
    reference = torch.optim.Adam(wanted_model.parameters(), lr=0.1)
    step(reference)
    model = wrapped(*here)
    optimizer = optimizer_of(model, here, grouping)
    step(optimizer)
    state = optim_state_dict(model, optimizer, full=full)
    target = wrapped(*there)
    other = optimizer_of(target, there, other_grouping)
    load_optim_state_dict(target, other, state)
    found = optim_state_dict(target, other, full=True)
    assert sorted(found["state"]) == sorted(NAMES)
    for name, p in wanted_model.named_parameters():
        for key, value in reference.state[p].items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=1e-6, atol=1e-8)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(here=wrappings, there=wrappings, grouping=groupings, other=groupings, full=st.booleans())
def test_any_wrapping_and_grouping(two, here, there, grouping, other, full):
    two.run(saved_and_loaded, here, there, grouping, other, full, timeout_s=20)
