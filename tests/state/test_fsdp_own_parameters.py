"""Ranks with parameters of their own beside an FSDP model, as TorchRec's embedding tables are."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from farstep import checkpoint
from farstep.errors import StateError
from farstep.fsdp import (
    full_optim_state_dict,
    load_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    scatter_full_optim_state_dict,
)
from farstep.optim import NamedOptimizer

TABLES = {0: "first", 1: "second"}


class Tables(nn.Module):
    """Each rank has one table; `everything` has both, as one process would."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        dense = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        tables = {name: nn.Parameter(torch.randn(4 + rank, 3)) for rank, name in TABLES.items()}
        own = TABLES.values() if kind == "everything" else [TABLES[dist.get_rank()]]
        self.tables = nn.ParameterDict({name: tables[name] for name in own})
        if kind == "fully_shard":
            dense = fully_shard(dense)
        elif kind != "everything":
            dense = FullyShardedDataParallel(
                dense, device_id=torch.device("cpu"), use_orig_params=kind == "original"
            )
        self.dense = dense


def optimizer_of(model, form="one group"):
    tables = list(model.tables.values())
    if form == "one group":
        return torch.optim.Adam([*model.dense.parameters(), *tables], lr=0.1)
    if form == "named":
        return NamedOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1)
    groups = [{"params": list(model.dense.parameters())}]
    if form == "own options":
        own = [{"params": [table], "lr": 0.1 * (2 + table.shape[0])} for table in tables]
        return torch.optim.Adam([*groups, *own], lr=0.1)
    assert form == "own groups"  # one rank has a group more than the other
    own = [{"params": [table]} for table in tables if len(model.tables) > 1 or dist.get_rank()]
    if own:
        return torch.optim.Adam([*groups, *own], lr=0.1)
    return torch.optim.Adam([{"params": [*model.dense.parameters(), *tables]}], lr=0.1)


def train(model, optim, steps=2):
    for step in range(steps):
        torch.manual_seed(step)
        optim.zero_grad()
        loss = model.dense(torch.randn(2, 6)).square().mean()
        for table in model.tables.values():
            loss = loss + (table * (step + 1)).square().mean()
        loss.backward()
        optim.step()


def one_process(form):
    model = Tables("everything")
    optim = optimizer_of(model, "one group" if form == "named" else form)
    train(model, optim)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: state for p, state in optim.state.items()}, optim


def is_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, state in wanted.items():
        assert found[name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-6)


def read_and_loaded(kind, form):
    wanted, _ = one_process(form)
    model = Tables(kind)
    optim = optimizer_of(model, form)
    train(model, optim)
    full = full_optim_state_dict(model, optim, rank0_only=False)
    is_same(full["state"], wanted)
    assert sorted(name for group in full["param_groups"] for name in group["params"]) == sorted(wanted)
    if form == "own options":
        rates = {name: group["lr"] for group in full["param_groups"] for name in group["params"]}
        assert (rates["tables.first"], rates["tables.second"]) == pytest.approx((0.6, 0.7))
    on_first = full_optim_state_dict(model, optim)
    assert bool(on_first) == (dist.get_rank() == 0)

    parts = optim_state_dict(model, optim, full=False)
    for state in (copy.deepcopy(full), parts):
        other = Tables(kind)
        new = optimizer_of(other, form)
        train(other, new, 1)
        load_optim_state_dict(other, new, state)
        again = full_optim_state_dict(other, new, rank0_only=False)
        is_same(again["state"], wanted)
        assert again["param_groups"] == full["param_groups"]
    if form != "named":
        other = Tables(kind)
        new = optimizer_of(other, form)
        ready = [optim_state_dict_to_load(other, new, full)]
        ready.append(scatter_full_optim_state_dict(on_first, other, optim=new))
        for each in ready:
            new.load_state_dict(each)
            is_same(full_optim_state_dict(other, new, rank0_only=False)["state"], wanted)


@pytest.mark.parametrize("form", ["one group", "own groups", "own options", "named"])
@pytest.mark.parametrize("kind", ["flat", "original", "fully_shard"])
def test_they_are_read_and_loaded_with_the_rest(two, kind, form):
    two.run(read_and_loaded, kind, form)


def from_one_process(kind):
    """A state of one process, which has all tables, and back."""
    wanted, optim = one_process("one group")
    names = [*wanted]
    state = {"state": wanted, "param_groups": [{**optim.state_dict()["param_groups"][0], "params": names}]}
    model = Tables(kind)
    new = optimizer_of(model)
    load_optim_state_dict(model, new, state if dist.get_rank() == 0 else None, broadcast_from_rank0=True)
    is_same(full_optim_state_dict(model, new, rank0_only=False)["state"], wanted)


def test_a_state_of_one_process_is_spread_to_them(two):
    two.run(from_one_process, "fully_shard")
    two.run(from_one_process, "flat")


def one_name_for_two():
    model = nn.Module()
    model.table = nn.Parameter(torch.ones(3 + dist.get_rank()))
    optim = torch.optim.Adam(model.parameters())
    model.table.grad = torch.ones_like(model.table)
    optim.step()
    with pytest.raises(StateError, match="table"):
        full_optim_state_dict(model, optim)


def test_two_parameters_of_one_name_are_refused(two):
    two.run(one_name_for_two)


def saved(folder):
    model = Tables("fully_shard")
    optim = optimizer_of(model)
    train(model, optim)
    wanted = full_optim_state_dict(model, optim, rank0_only=False)
    checkpoint.save({"model": model, "optim": optim}, folder)
    other = Tables("fully_shard")
    new = optimizer_of(other)
    report = checkpoint.load({"model": other, "optim": new}, folder, strict=False)
    others = TABLES[1 - dist.get_rank()]  # the other rank's table, which this one leaves where it is
    assert sorted(report.unexpected) == [f"model.tables.{others}", f"optim.state.tables.{others}"]
    assert not report.missing
    is_same(full_optim_state_dict(other, new, rank0_only=False)["state"], wanted["state"])


def test_a_checkpoint_of_them(two, tmp_path):
    two.run(saved, str(tmp_path / "saved"))
