"""What users of torch's functions for optimizer state expect: each compared with torch's own on the same objects."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from farstep import fsdp
from farstep.errors import StateMismatch
from farstep.optim import init_state
from farstep.state import load_optim_state_dict, optim_state_dict
from state.nests import SHARDED, Nested, adam, by_name, make, reference, same, train, wrap


def torchs(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def numbers_of(state):
    return {key: sorted(value) if key == "state" else len(value) for key, value in state.items()}


# -- states that lack something ---------------------------------------------------------------------------


def without_groups():
    for kind in ("flat", "original"):
        model, optim = make(kind)
        full = torchs(FSDP.full_optim_state_dict, model, optim, rank0_only=False)
        del full["param_groups"]
        on_first = full if dist.get_rank() == 0 else None
        ours = fsdp.sharded_optim_state_dict(model, optim)
        theirs = torchs(FSDP.sharded_optim_state_dict, model, optim)
        del ours["param_groups"], theirs["param_groups"]
        for name, ours_first, theirs_first in (
            ("shard_full_optim_state_dict", full, copy.deepcopy(full)),
            ("scatter_full_optim_state_dict", on_first, copy.deepcopy(on_first)),
            ("flatten_sharded_optim_state_dict", ours, theirs),
        ):
            found = getattr(fsdp, name)(ours_first, model, optim=optim)
            wanted = torchs(getattr(FSDP, name), theirs_first, model, optim=optim)
            assert numbers_of(found) == numbers_of(wanted), name
        found = fsdp.optim_state_dict_to_load(model, optim, full)
        wanted = torchs(FSDP.optim_state_dict_to_load, model, optim, copy.deepcopy(full))
        assert numbers_of(found) == numbers_of(wanted)


def test_a_state_without_groups_gets_none(two):
    two.run(without_groups)


def lacking(kind):
    """A state of another training lacks a block, which keeps the state it has; else it has none."""
    plain, plain_optim = reference(steps=3)
    wanted = by_name(plain, plain_optim)
    part = copy.deepcopy(wanted)
    for name in [name for name in part["state"] if name.startswith("block1.0")]:
        del part["state"][name]
        part["param_groups"][0]["params"].remove(name)
    model, optim = make(kind, steps=1)
    before = fsdp.full_optim_state_dict(model, optim, rank0_only=False)
    sharded = fsdp.sharded_optim_state_dict(*make(kind, steps=3))
    for name in [name for name in sharded["state"] if name.startswith("block1.0")]:
        del sharded["state"][name]
        sharded["param_groups"][0]["params"].remove(name)
    on_first = part if dist.get_rank() == 0 else None
    for make_ready in (
        lambda **strict: fsdp.shard_full_optim_state_dict(part, model, optim=optim, **strict),
        lambda **strict: fsdp.scatter_full_optim_state_dict(on_first, model, optim=optim, **strict),
        lambda **strict: fsdp.flatten_sharded_optim_state_dict(sharded, model, optim, **strict),
        lambda **strict: fsdp.optim_state_dict_to_load(model, optim, part, **strict),
    ):
        with pytest.raises(StateMismatch, match=r"block1\.0.*strict=False"):
            make_ready()
        optim.load_state_dict(make_ready(strict=False))
        found = fsdp.full_optim_state_dict(model, optim, rank0_only=False)
        for name, state in found["state"].items():
            source = before if name.startswith("block1.0") else wanted
            for key, value in state.items():
                torch.testing.assert_close(value, source["state"][name][key], rtol=1e-4, atol=1e-6)
    fresh = adam(model.parameters())
    fresh.load_state_dict(fsdp.shard_full_optim_state_dict(part, model, optim=fresh, strict=False))
    assert fsdp.full_optim_state_dict(model, fresh, rank0_only=False)["state"].keys() == part["state"].keys()


@pytest.mark.parametrize("kind", SHARDED)
def test_parameters_that_the_state_lacks_may_be_left_out(two, kind):
    two.run(lacking, kind)


# -- part of a mesh ---------------------------------------------------------------------------------------


def on_one_dimension():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))
    plain, plain_optim = reference()
    wanted = by_name(plain, plain_optim)
    for use_orig_params, group in (
        (True, {"device_mesh": mesh["shard"]}),
        (False, {"process_group": mesh.get_group("shard")}),
    ):
        options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        model = FSDP(Nested(), **options, **group)
        optim = adam(model.parameters())
        train(model, optim)
        for found in (
            fsdp.optim_state_dict(model, optim),
            fsdp.full_optim_state_dict(model, optim, rank0_only=False),
        ):
            assert same(found, wanted)
        on_first = fsdp.full_optim_state_dict(model, optim)
        if "device_mesh" in group:
            assert bool(on_first) == bool(torchs(FSDP.full_optim_state_dict, model, optim))
        else:  # of a process group nobody knows which other ranks have the same
            assert bool(on_first) == (mesh.get_local_rank("shard") == 0)
        other = FSDP(Nested(), **options, **group)
        new = adam(other.parameters())
        new.load_state_dict(fsdp.scatter_full_optim_state_dict(on_first, other, optim=new))
        assert same(fsdp.optim_state_dict(other, new), wanted)
        if "device_mesh" in group:  # all ranks know then who has the same
            new = adam(other.parameters())
            load_optim_state_dict(other, new, optim_state_dict(model, optim))
            assert same(optim_state_dict(other, new, full=True), wanted)


def test_fsdp_on_one_dimension_of_a_mesh(four):
    four.run(on_one_dimension)


# -- by number --------------------------------------------------------------------------------------------


def by_number():
    plain, plain_optim = reference()
    wanted, numbered = by_name(plain, plain_optim), plain_optim.state_dict()
    for kind in ("original", "fully_shard", "ddp", "plain"):
        model = wrap(Nested(), kind)
        optim = adam(model.parameters())
        load_optim_state_dict(model, optim, numbered)
        assert same(optim_state_dict(model, optim, full=True), wanted)
        optim = adam(model.parameters())
        state = numbered if dist.get_rank() == 0 else None
        load_optim_state_dict(model, optim, state, broadcast_from_rank0=True)
        assert same(optim_state_dict(model, optim, full=True), wanted)
    groups = [{"params": list(model.block0.parameters())}, {"params": list(model.block1.parameters())}]
    with pytest.raises(
        StateMismatch, match=r"groups have \[12\] parameters.*\[3, 6\].*rekey_optim_state_dict"
    ):
        load_optim_state_dict(model, adam(groups), numbered)
    flat = wrap(Nested(), "flat")
    with pytest.raises(StateMismatch, match=r"flat parameters.*rekey_optim_state_dict"):
        load_optim_state_dict(flat, adam(flat.parameters()), numbered)


def test_a_state_by_number_goes_by_the_order_of_the_optimizer(two):
    two.run(by_number)


# -- StateDictOptions -------------------------------------------------------------------------------------


def flat_form(kind):
    model, optim = make(kind)
    for options in ({"full_state_dict": True}, {}):
        full = "full_state_dict" in options
        if kind == "original" and not full:
            continue  # torch gives ShardedTensors
        theirs = get_optimizer_state_dict(
            model, optim, options=StateDictOptions(flatten_optimizer_state_dict=True, **options)
        )
        ours = optim_state_dict(model, optim, full=full, flatten=True)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert type(ours[key]) is type(value), key
            if isinstance(value, torch.Tensor):
                a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (ours[key], value))
                if kind == "fully_shard":  # torch's own are wrong for use_orig_params on CPU
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
            else:
                assert ours[key] == value, key
        wanted = optim_state_dict(model, optim, full=True)
        other, new = make(kind, steps=1)
        load_optim_state_dict(other, new, ours)
        assert same(optim_state_dict(other, new, full=True), wanted, exactly=True)
        if kind == "fully_shard" and not full:
            other, new = make(kind, steps=1)
            set_optimizer_state_dict(
                other, new, ours, options=StateDictOptions(flatten_optimizer_state_dict=True, **options)
            )
            assert same(optim_state_dict(other, new, full=True), wanted, exactly=True)


def test_flattened_states_are_torchs(two):
    two.run(flat_form, "fully_shard")
    two.run(flat_form, "original")


def only_some(kind):
    model, optim = make(kind)
    inner = model.module if kind == "ddp" else model
    everything = optim_state_dict(model, optim, full=True)
    for submodules, prefixes in (
        ([inner.block0], ("block0.",)),
        ({inner.block1[0], inner.block2}, ("block1.0.", "block2.")),
    ):
        found = optim_state_dict(model, optim, full=True, submodules=submodules)
        names = {name for name in everything["state"] if name.startswith(prefixes)}
        wanted = {
            "state": {name: everything["state"][name] for name in names},
            "param_groups": [{**everything["param_groups"][0], "params": list(names)}],
        }
        assert same(found, wanted, exactly=True)
        other, new = make(kind, steps=1)
        load_optim_state_dict(other, new, found, strict=False)
        again = optim_state_dict(other, new, full=True)["state"]
        for name, state in again.items():
            moments = everything["state"][name]["exp_avg"]
            assert torch.equal(state["exp_avg"], moments) == (name in names), name
    with pytest.raises(ValueError, match="Linear that is not a module of this model"):
        optim_state_dict(model, optim, submodules=[nn.Linear(1, 1)])
    with pytest.raises(TypeError, match="submodules is a set or list"):
        optim_state_dict(model, optim, submodules=inner.block0)


@pytest.mark.parametrize("kind", ["flat", "original", "fully_shard", "ddp"])
def test_only_some_submodules(two, kind):
    two.run(only_some, kind)


def frozen(kind):
    model, optim = make(kind)
    everything = optim_state_dict(model, optim, full=True)
    parameter = model.block2.shift
    parameter.requires_grad_(False)
    found = optim_state_dict(model, optim, full=True, ignore_frozen_params=True)
    assert everything["state"].keys() - found["state"].keys() == {"block2.shift"}
    assert "block2.shift" not in found["param_groups"][0]["params"]
    train(model, optim, 1)
    for state in (everything, found):
        load_optim_state_dict(model, optim, state, ignore_frozen_params=True)
        assert same(optim_state_dict(model, optim, full=True, ignore_frozen_params=True), found, exactly=True)
    optim.state[parameter]["step"] += 5  # not loaded: it stays
    load_optim_state_dict(model, optim, everything, ignore_frozen_params=True)
    assert optim.state[parameter]["step"] == 7


def test_frozen_parameters_may_be_ignored(two):
    two.run(frozen, "fully_shard")
    two.run(frozen, "plain")


# -- before the first step --------------------------------------------------------------------------------


def initialised():
    for kind in ("fully_shard", "ddp", "original"):
        model = wrap(Nested(), kind)
        optim = adam(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        init_state(optim)
        found = optim_state_dict(model, optim, full=True)
        assert len(found["state"]) == 12
        assert {float(state["step"]) for state in found["state"].values()} == {0}
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        train(model, optim)
        plain, plain_optim = reference()
        assert same(optim_state_dict(model, optim, full=True), by_name(plain, plain_optim))


def test_a_plain_optimizer_has_its_state_before_the_first_step(two):
    two.run(initialised)
