"""Optimizer state by name, as torch's checkpoint/test_state_dict.py and fsdp/test_fsdp_dsd.py expect it of get_ and set_optimizer_state_dict.

Each test names the behaviour of torch's that it pins, and says so where torch's is wrong and ours is not. All runs on CPU and gloo.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from farstep.errors import StateMismatch
from farstep.fsdp import (
    full_optim_state_dict,
    load_optim_state_dict,
    optim_state_dict,
    sharded_optim_state_dict,
)
from state.nests import SHARDED, Nested, adam, by_name, make, reference, same, train, wrap


def everywhere(model, optimizer):
    return optim_state_dict(model, optimizer, full=True)


def torchs(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))


def as_torchs():
    for kind in ("fully_shard", "ddp", "flat"):
        model, optimizer = make(kind)
        ours = everywhere(model, optimizer)
        theirs = torchs(model, optimizer)
        assert same(ours, theirs, exactly=True)
        # Each loads what the other gave.
        train(model, optimizer)
        load_optim_state_dict(model, optimizer, theirs)
        assert same(everywhere(model, optimizer), ours, exactly=True)
        train(model, optimizer)
        set_optimizer_state_dict(
            model, optimizer, copy.deepcopy(ours), options=StateDictOptions(full_state_dict=True)
        )
        found = everywhere(model, optimizer)
        for group in found["param_groups"]:
            group["betas"] = tuple(group["betas"])  # torch's setter makes a list of it
        assert same(found, ours, exactly=True)


def test_as_torchs_getter_and_setter(two):
    # test_fsdp, test_fsdp2, test_ddp: the full state is the same, and each side loads what the other saved.
    two.run(as_torchs)


def reading_changes_nothing():
    for kind in ("fully_shard", "ddp", "plain"):
        model = wrap(Nested(), kind)
        optimizer = adam(model.parameters())
        assert everywhere(model, optimizer)["state"] == {}
        assert not optimizer.state
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torchs(model, optimizer)
        assert optimizer.state  # torch has stepped it
        # With gradients there is a state all the same, and they stay.
        model, optimizer = make(kind)
        model(torch.randn(2, 5)).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        assert len(everywhere(model, optimizer)["state"]) == 12
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_reading_leaves_the_optimizer_as_it_is(two):
    # get_optimizer_state_dict steps a fresh optimizer to make its state, and leaves it stepped. Reading here changes nothing.
    two.run(reading_changes_nothing)


def rank0_alone():
    plain, optimizer = reference()
    wanted = by_name(plain, optimizer)
    for kind in [*SHARDED, "ddp"]:
        model, optim = make(kind)
        found = optim_state_dict(model, optim, full=True, rank0_only=True, cpu_offload=True)
        assert (found == {}) == (dist.get_rank() != 0)
        new = wrap(Nested(), kind, **({} if kind == "ddp" else {"at": ("block0",)}))
        new_optim = adam(new.parameters())
        load_optim_state_dict(new, new_optim, found, broadcast_from_rank0=True)
        assert same(everywhere(new, new_optim), wanted)


def test_a_state_that_only_the_first_rank_has(two):
    # test_cpu_offload_full_state_dict, test_broadcast_from_rank0, test_broadcast_from_rank0_fsdp.
    two.run(rank0_alone)


class Sides(nn.Module):
    """Both parts are wrapped by users in their own way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def bare_names():
    plain = Sides()
    wanted = adam(plain.parameters())
    train(plain, wanted)
    for kind in [*SHARDED, "ddp", "plain"]:
        model = Sides()
        model.second = checkpoint_wrapper(model.second)
        model = wrap(model, kind, at=("first",))
        if kind != "flat":
            model = torch.compile(model, backend="eager")
        optimizer = adam(model.parameters())
        train(model, optimizer)
        found = everywhere(model, optimizer)
        assert same(found, by_name(plain, wanted))
        load_optim_state_dict(model, optimizer, found)
        # What another program saved with its wrappers' names loads as well.
        rename = "_orig_mod.module.{}".format
        wrapped = {
            "state": {rename(name): state for name, state in found["state"].items()},
            "param_groups": [
                {**g, "params": [rename(n) for n in g["params"]]} for g in found["param_groups"]
            ],
        }
        load_optim_state_dict(model, optimizer, wrapped)
        assert same(everywhere(model, optimizer), found, exactly=True)


def test_names_are_those_of_the_bare_model(two):
    # test_compiled_fsdp, test_activation_ckpt_fqns_ddp, test_activation_ckpt_fqns_fsdp1.
    two.run(bare_names)


def partly_frozen():
    for kind in ("original", "fully_shard", "ddp"):
        model = Nested()
        for p in model.block1.parameters():
            p.requires_grad_(False)
        model = wrap(model, kind)
        for parameters in (model.parameters(), [p for p in model.parameters() if p.requires_grad]):
            optimizer = adam(parameters)
            train(model, optimizer)
            found = everywhere(model, optimizer)
            assert {name.partition(".")[0] for name in found["state"]} == {"block0", "block2"}
            before = copy.deepcopy(found)
            train(model, optimizer)
            load_optim_state_dict(model, optimizer, found)
            assert same(everywhere(model, optimizer), before, exactly=True)


def test_frozen_parameters(two):
    # test_frozen_parameters: none for them, whether the optimizer was given them or not.
    two.run(partly_frozen)


def in_backward():
    """One optimizer for each parameter, as those that step during backward."""
    plain, optimizer = reference()
    for kind in ("original", "fully_shard", "ddp"):
        model = wrap(Nested(), kind)
        optimizers = [adam([p]) for p in model.parameters()]

        class All:
            def zero_grad(self, all_of_them=optimizers):
                [each.zero_grad() for each in all_of_them]

            def step(self, all_of_them=optimizers):
                [each.step() for each in all_of_them]

        train(model, All())
        found = optim_state_dict(model, optimizers, full=True)
        assert same({**found, "param_groups": []}, {**by_name(plain, optimizer), "param_groups": []})
        assert len(found["param_groups"]) == 12
        fresh = [adam([p]) for p in model.parameters()]
        load_optim_state_dict(model, fresh, found)
        again = optim_state_dict(model, fresh, full=True)
        assert same(again, found, exactly=True)


def test_one_optimizer_for_each_parameter(two):
    # test_apply_optimizer_in_backward.
    two.run(in_backward)


def groups(model, order):
    """Two groups by name, which come in this order."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    parts = {
        "shifts": {"params": [p for name, p in named.items() if "shift" in name], "lr": 0.02},
        "rest": {"params": [p for name, p in named.items() if "shift" not in name], "lr": 0.03},
    }
    return torch.optim.Adam([parts[each] for each in order])


def other_groups():
    for kind in ("fully_shard", "ddp"):
        model = wrap(Nested(), kind)
        optimizer = groups(model, ["shifts", "rest"])
        train(model, optimizer)
        found = everywhere(model, optimizer)
        other = groups(model, ["rest", "shifts"])
        load_optim_state_dict(model, other, found)
        assert [group["lr"] for group in other.param_groups] == [0.03, 0.02]
        again = everywhere(model, other)
        assert same({**again, "param_groups": again["param_groups"][::-1]}, found, exactly=True)
        with pytest.raises(StateMismatch, match=r"saved in groups with different lr"):
            load_optim_state_dict(model, adam(model.parameters()), found)


def test_groups_in_another_order(two):
    # test_optim_state_dict_param_matching, test_multi_param_groups.
    two.run(other_groups)


def strictness():
    model, optimizer = make("fully_shard")
    found = everywhere(model, optimizer)
    before = copy.deepcopy(found)
    train(model, optimizer)
    now = everywhere(model, optimizer)
    less = copy.deepcopy(found)
    del less["state"]["block0.shift"]
    less["param_groups"][0]["params"].remove("block0.shift")
    more = copy.deepcopy(found)
    more["state"]["elsewhere"] = more["state"]["block0.shift"]
    more["param_groups"][0]["params"].append("elsewhere")
    with pytest.raises(StateMismatch, match=r"Missing in the state: block0\.shift"):
        load_optim_state_dict(model, optimizer, less)
    with pytest.raises(StateMismatch, match="Unexpected in the state: elsewhere"):
        load_optim_state_dict(model, optimizer, more)
    assert same(everywhere(model, optimizer), now, exactly=True)  # nothing was changed
    load_optim_state_dict(model, optimizer, less, strict=False)
    wanted = {**before["state"], "block0.shift": now["state"]["block0.shift"]}
    assert same(everywhere(model, optimizer), {**before, "state": wanted}, exactly=True)
    load_optim_state_dict(model, optimizer, more, strict=False)
    assert same(everywhere(model, optimizer), before, exactly=True)


def test_names_that_are_missing_or_unknown(two):
    # test_strict.
    two.run(strictness)


def from_meta():
    plain, optimizer = reference()
    with torch.device("meta"):
        model = Nested()
    model = wrap(model, "fully_shard")
    model.to_empty(device="cpu")
    optim = adam(model.parameters())
    state = by_name(plain, optimizer)
    load_optim_state_dict(model, optim, state if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
    assert same(everywhere(model, optim), state, exactly=True)


def test_a_model_that_was_made_on_the_meta_device(two):
    # test_setting_meta_device: a model without memory of its own until it is sharded.
    two.run(from_meta)


def between_generations():
    plain, optimizer = reference()
    for saved_as in ("flat", "original"):
        model, optim = make(saved_as)
        new = wrap(Nested(), "fully_shard")
        new_optim = adam(new.parameters())
        load_optim_state_dict(new, new_optim, sharded_optim_state_dict(model, optim))
        assert same(everywhere(new, new_optim), by_name(plain, optimizer))
        back = wrap(Nested(), saved_as, at=("block2",))
        back_optim = adam(back.parameters())
        load_optim_state_dict(back, back_optim, sharded_optim_state_dict(new, new_optim))
        assert same(full_optim_state_dict(back, back_optim, rank0_only=False), by_name(plain, optimizer))


def test_saved_with_one_generation_and_loaded_with_the_other(two):
    # fsdp/test_fsdp_dsd.py: test_save_with_fsdp1_and_load_with_fsdp2, and the other way round. Tensor parallel and 2-D models are in the matrix
    # of test_optim_state_matrix.py.
    two.run(between_generations)


def other_dtype():
    model = wrap(Nested().bfloat16(), "fully_shard")
    optimizer = adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = everywhere(model, optimizer)
    assert {state["exp_avg"].dtype for state in found["state"].values()} == {torch.bfloat16}
    assert {state["step"].dtype for state in found["state"].values()} == {torch.float32}
    fresh = adam(model.parameters())
    load_optim_state_dict(model, fresh, found)
    assert same(everywhere(model, fresh), found, exactly=True)


def test_state_in_low_precision(two):
    # test_fsdp with MixedPrecision-like dtypes: state keeps its dtype.
    two.run(other_dtype)
