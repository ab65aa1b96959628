"""Ranks that hold nothing of a parameter: they keep no state of it, and what they once had of it
is not believed.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from farstep import checkpoint
from farstep.optim import NamedOptimizer, ShardedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict

FULL = StateDictOptions(full_state_dict=True)


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_in_one_process(steps):
    model = layers(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(steps))
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def wrapped(seed):
    return FullyShardedDataParallel(layers(seed), use_orig_params=True, device_id=torch.device("cpu"))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def named(model):
    return NamedOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.01)


def local(model):
    return ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam, shard="local", lr=0.01)


def load_state(model, optimizer, full, path):
    load_optim_state_dict(model, optimizer, full)


def load_checkpoint(model, optimizer, full, path):
    checkpoint.load({"model": model, "optim": optimizer}, path)


def load_from_checkpoint(model, optimizer, full, path):
    checkpoint.load_optimizer(model, optimizer, path)


def load_by_torch(model, optimizer, full, path):
    """Torch's own function makes state on every rank, whatever the rank holds."""
    set_optimizer_state_dict(model, optimizer, full, options=FULL)


def the_same(found, wanted):
    assert set(found) == set(wanted)
    for name, state in wanted.items():
        assert set(found[name]) == set(state), name
        for key, value in state.items():
            torch.testing.assert_close(found[name][key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")


def trained_on(folder, make, load):
    """Three steps, saved; loaded by another, which takes three more; read, saved, and loaded
    again.
    """
    first = wrapped(0)
    optimizer = adam(first)
    train(first, optimizer, range(3))
    checkpoint.save({"model": first, "optim": optimizer}, f"{folder}/three")
    full = optim_state_dict(first, optimizer, full=True)
    the_same(full["state"], trained_in_one_process(3))

    second = wrapped(1)
    optimizer = make(second)
    checkpoint.load({"model": second}, f"{folder}/three", strict=False)
    load(second, optimizer, full, f"{folder}/three")
    train(second, optimizer, range(3, 6))
    wanted = trained_in_one_process(6)
    read = optim_state_dict(second, optimizer, full=True)
    the_same(read["state"], wanted)
    if make is adam:
        theirs = get_optimizer_state_dict(second, optimizer, options=FULL)
        if dist.get_rank() == 0:  # torch gives the whole to the first rank
            the_same(theirs["state"], wanted)
    alone = optim_state_dict(second, optimizer)["state"]
    steps = {name: state["step"].item() for name, state in alone.items()}
    assert set(steps.values()) == {6.0}, steps
    checkpoint.save({"model": second, "optim": optimizer}, f"{folder}/six")
    the_same(checkpoint.read(f"{folder}/six")["optim"]["state"], wanted)

    third = wrapped(2)
    optimizer = make(third)
    checkpoint.load({"model": third, "optim": optimizer}, f"{folder}/six")
    train(third, optimizer, range(6, 8))
    the_same(optim_state_dict(third, optimizer, full=True)["state"], trained_in_one_process(8))


CASES = [
    (adam, load_state),
    (named, load_checkpoint),
    (local, load_from_checkpoint),
    (adam, load_by_torch),
    (adam, load_checkpoint),
    (adam, load_from_checkpoint),
    (named, load_state),
    (local, load_state),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1].__name__}")
def test_steps_go_on_after_a_load(two, tmp_path, case):
    two.run(trained_on, str(tmp_path), *case)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: f"{case[0].__name__}-{case[1].__name__}")
def test_steps_go_on_where_most_ranks_hold_nothing(four, tmp_path, case):
    four.run(trained_on, str(tmp_path), *case)
