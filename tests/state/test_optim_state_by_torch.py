"""Torch's own readers and writers on the same objects: they find what farstep finds, and each
loads what the other has read.
"""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from farstep.state import load_optim_state_dict, optim_state_dict
from state import uneven

FULL = StateDictOptions(full_state_dict=True)


def get_by_dcp(each):
    return get_optimizer_state_dict(each.model, each.optimizer, options=FULL)["state"]


def set_by_dcp(each, state):
    """Strictly, torch refuses parameters that were never trained."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_optimizer_state_dict(each.model, each.optimizer, state, options=options)


def _whole(model):
    return FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )


def get_by_fsdp(each):
    with _whole(each.model):
        return FullyShardedDataParallel.optim_state_dict(each.model, each.optimizer)["state"]


def set_by_fsdp(each, state):
    with _whole(each.model):
        FullyShardedDataParallel.optim_state_dict_to_load(
            each.model, each.optimizer, state, load_directly=True
        )


def the_same(found, wanted, what):
    found = {name: state for name, state in found.items() if state}
    assert set(found) == set(wanted), what
    for name, state in wanted.items():
        assert set(found[name]) == set(state), f"{what} {name}"
        for key, value in state.items():
            torch.testing.assert_close(
                found[name][key],
                value,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, text=f"{what} {name} {key}": f"{text}: {m}",
            )


def _of(names, state):
    """Torch makes state for parameters that are never trained; it is left out."""
    return {name: state[name] for name in names}


def there_and_back(kind, get, set_):
    """Farstep reads, torch writes and trains on; torch reads, farstep writes and trains on."""
    reference = uneven.Reference()
    one = kind(seed=0)
    for step in range(3):
        one.train(step)
    _, wanted = reference.after(3)
    ours = optim_state_dict(one.model, one.optimizer, full=True)
    the_same(ours["state"], wanted, "before")
    the_same(get(one), wanted, "torch, before")

    other = kind(seed=1)
    other.take_parameters(one)
    set_(other, ours)
    other.train(3)
    parameters, wanted = reference.after(4)
    the_same({"": other.whole()}, {"": parameters}, "written by torch")
    read = optim_state_dict(other.model, other.optimizer, full=True)["state"]
    the_same(_of(wanted, read), wanted, "written by torch")

    theirs = {"state": _of(wanted, get(other)), "param_groups": ours["param_groups"]}
    last = kind(seed=2)
    last.take_parameters(other)
    load_optim_state_dict(last.model, last.optimizer, theirs)
    for step in (4, 5):
        last.train(step)
    parameters, wanted = reference.after(6)
    the_same({"": last.whole()}, {"": parameters}, "read by torch")
    the_same(optim_state_dict(last.model, last.optimizer, full=True)["state"], wanted, "read by torch")
    the_same(get(last), wanted, "read by torch, and again")


DCP = [uneven.Plain, uneven.Ddp, uneven.Fsdp2, uneven.Hsdp2, uneven.Tp, uneven.FlatOriginal]


@pytest.mark.parametrize("kind", DCP, ids=lambda kind: kind.__name__)
def test_by_dcps_functions(two, kind):
    two.run(there_and_back, kind, get_by_dcp, set_by_dcp)


def test_by_fsdps_functions(two):
    two.run(there_and_back, uneven.Flat, get_by_fsdp, set_by_fsdp)
    # Of original parameters on the CPU, FSDP.optim_state_dict gives exp_avg_sq as exp_avg too
    # (torch 2.13). DCP's reader does not.
    two.run(there_and_back, uneven.FlatOriginal, get_by_dcp, set_by_fsdp)
