"""Torch's functions for the optimizer state of FSDP models: what its own tests (fsdp/test_fsdp_optim_state.py) expect of them, for both generations.

Each test names the behaviour of torch's that it pins, and says so where torch's is wrong and ours is not. All runs on CPU and gloo.
"""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from farstep.errors import StateError, StateMismatch
from farstep.fsdp import (
    OptimStateKeyType,
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    load_optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from farstep.optim import KeyedOptimizerWrapper, NamedOptimizer
from farstep.state import neighbours
from state.nests import FSDP1, KINDS, SHARDED, Nested, adam, by_name, make, reference, same, train, wrap

OTHER = ("block0", "block2")  # another wrapping than the usual one


def whole(model):
    """The parameters in full, by torch's own means."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in model.named_parameters()
            }
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def goes_on(model, optimizer, wanted_model, wanted_optimizer, steps=2):
    """Both train on, and come to the same."""
    train(model, optimizer, steps, seed=7)
    train(wanted_model, wanted_optimizer, steps, seed=7)
    for name, value in whole(model).items():
        torch.testing.assert_close(
            value, dict(wanted_model.named_parameters())[name].detach(), rtol=1e-4, atol=1e-6
        )


def untrained(kind, trained_model, **options):
    """A wrapped model with the parameters of another, which is plain, and an optimizer without state."""
    model = Nested()
    model.load_state_dict(trained_model.state_dict())
    model = wrap(model, kind, **options)
    return model, adam(model.parameters())


# -- full_optim_state_dict --------------------------------------------------------------------------------


def full(rank0_only):
    plain, optimizer = reference()
    wanted = by_name(plain, optimizer)
    for kind in KINDS:
        model, optim = make(kind)
        before = copy.deepcopy(optim.state_dict()) if kind != "fully_shard" else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's warn that they may be removed
            found = full_optim_state_dict(model, optim, rank0_only=rank0_only)
        if dist.get_rank() and rank0_only:
            assert found == {}
        else:
            assert same(found, wanted)
        if before is not None:
            assert str(optim.state_dict()) == str(before)


@pytest.mark.parametrize("rank0_only", [True, False])
def test_a_full_state_is_that_of_the_unwrapped_model(two, rank0_only):
    # test_optim_state_dict_nested: equal to the state of the same model trained without FSDP; empty on others if rank0_only.
    two.run(full, rank0_only)


def as_torchs_own(kind):
    model, optim = make(kind)
    ours = full_optim_state_dict(model, optim, rank0_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    if kind == "original":
        # On CPU torch gathers all keys into one buffer here and returns views of it, so that exp_avg is exp_avg_sq, the last.
        assert all(torch.equal(each["exp_avg"], each["exp_avg_sq"]) for each in torchs["state"].values())
        for name, state in torchs["state"].items():
            state["exp_avg"] = ours["state"][name]["exp_avg"]
    assert same(ours, torchs, exactly=True)
    # What the two make of it for load_state_dict is the same too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = FSDP.shard_full_optim_state_dict(copy.deepcopy(ours), model, optim=optim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = FSDP.sharded_optim_state_dict(model, optim) if kind == "flat" else ours  # ShardedTensors
    for found in (
        optim_state_dict_to_load(model, optim, parts),
        shard_full_optim_state_dict(ours, model, optim=optim),
        shard_full_optim_state_dict(ours, model),
        scatter_full_optim_state_dict(ours if dist.get_rank() == 0 else None, model, optim=optim),
        flatten_sharded_optim_state_dict(sharded_optim_state_dict(model, optim), model, optim),
        optim_state_dict_to_load(model, optim, ours),
    ):
        assert set(found["state"]) == set(wanted["state"])
        for n, state in wanted["state"].items():
            for key, value in state.items():
                real = optim.state[optim.param_groups[0]["params"][n]][key]
                assert torch.equal(found["state"][n][key], real), (n, key)  # padding too
                assert found["state"][n][key].shape == value.shape
        assert found["param_groups"] == wanted["param_groups"]


@pytest.mark.parametrize("kind", ["flat", "original"])
def test_the_results_are_torchs_own(two, kind):
    # The same functions of FullyShardedDataParallel, on the same model.
    two.run(as_torchs_own, kind)


def groups_and_orders():
    """Two groups, other options, and another order on each rank."""
    for kind in SHARDED:
        model = wrap(Nested(), kind)
        parameters = list(model.parameters())
        small, rest = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        if kind != "flat" and dist.get_rank() == 1:
            small.reverse()
        optim = torch.optim.Adam(
            [{"params": small, "lr": 0.02}, {"params": rest, "weight_decay": 0.1}], lr=0.01
        )
        train(model, optim)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        names = [group["params"] for group in found["param_groups"]]
        assert sorted(itertools.chain(*names)) == sorted(name for name, _ in Nested().named_parameters())
        assert [group["lr"] for group in found["param_groups"]] == [0.02, 0.01]
        assert [group["weight_decay"] for group in found["param_groups"]] == [0, 0.1]
        plain = Nested()
        named = dict(plain.named_parameters())
        wanted = torch.optim.Adam(
            [
                {"params": [named[n] for n in names[0]], "lr": 0.02},
                {"params": [named[n] for n in names[1]], "weight_decay": 0.1},
            ],
            lr=0.01,
        )
        train(plain, wanted)
        assert same(found, by_name(plain, wanted))


def test_several_groups_and_another_order_on_each_rank(two):
    # test_optim_state_dict_nested with use_multiple_param_groups and use_diff_optim_inputs.
    two.run(groups_and_orders)


def only_what_has_state():
    for kind in ("original", "fully_shard", "ddp"):
        model = Nested()
        model.block0.linear.bias.requires_grad_(False)
        model = wrap(model, kind)
        optim = adam(model.parameters())
        assert full_optim_state_dict(model, optim, rank0_only=False)["state"] == {}
        train(model, optim)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        assert set(found["state"]) == {name for name, _ in Nested().named_parameters()} - {
            "block0.linear.bias"
        }
        assert "block0.linear.bias" in found["param_groups"][0]["params"]


def test_parameters_without_state_have_none(two):
    # test_full_optim_state_dict_keys, test_with_empty_optimizer_state, test_no_grad: frozen and not yet stepped ones are left out.
    # Torch's getter (get_optimizer_state_dict) steps a fresh optimizer to have something to return; nothing is stepped here.
    two.run(only_what_has_state)


def one_rank_differs():
    model, optim = make("fully_shard", steps=1)
    if dist.get_rank() == 1:
        del optim.state[model.block0.shift]
    with pytest.raises(StateError, match=r"block0\.shift.*rank"):
        full_optim_state_dict(model, optim)
    model, optim = make("flat", steps=1)
    if dist.get_rank() == 1:
        optim.state[optim.param_groups[0]["params"][0]]["step"] += 1
    with pytest.raises(StateError, match=r"'step' of parameter '\w+.*1\.0.* on rank 0; 2\.0.* on rank 1"):
        full_optim_state_dict(model, optim)


def test_ranks_that_have_different_states_are_named(two):
    # test_full_optim_state_dict_nested_invalid: a rank without the state that rank 0 has. Torch notices names only, not values.
    two.run(one_rank_differs)


# -- to be loaded -----------------------------------------------------------------------------------------


def loads(how):
    """What was saved under one wrapping goes on under another."""
    for saved_as, loaded_as in [
        ("flat", "original"),
        ("original", "fully_shard"),
        ("fully_shard", "flat"),
        ("ddp", "flat"),
    ]:
        model, optim = make(saved_as)
        plain, wanted = reference()
        new, new_optim = untrained(loaded_as, plain, **({} if loaded_as == "ddp" else {"at": OTHER}))
        if how == "flatten":
            state = flatten_sharded_optim_state_dict(sharded_optim_state_dict(model, optim), new, new_optim)
        elif how == "scatter":
            # The group's first rank has all; what the others give does not count.
            found = full_optim_state_dict(model, optim)
            state = scatter_full_optim_state_dict(found or None, new, optim=new_optim)
        elif how == "shard":
            state = shard_full_optim_state_dict(
                full_optim_state_dict(model, optim, rank0_only=False), new, optim=new_optim
            )
        else:
            state = optim_state_dict_to_load(
                new, new_optim, full_optim_state_dict(model, optim, rank0_only=False)
            )
        assert not new_optim.state
        new_optim.load_state_dict(state)
        assert same(full_optim_state_dict(new, new_optim, rank0_only=False), by_name(plain, wanted))
        goes_on(new, new_optim, plain, wanted)


@pytest.mark.parametrize("how", ["shard", "scatter", "flatten", "to_load"])
def test_a_state_goes_on_under_another_wrapping(two, how):
    # test_shard_full_, test_scatter_full_, test_flatten_sharded_optim_state_dict_nested: wrap_alt=True, and between the generations.
    two.run(loads, how)


def halved():
    pair = dist.new_group([0, 1])
    for saved_as, loaded_as in [("flat", "original"), ("original", "fully_shard"), ("fully_shard", "flat")]:
        model, optim = make(saved_as)
        everywhere = full_optim_state_dict(model, optim, rank0_only=False)
        parts = sharded_optim_state_dict(model, optim)
        gathered = [None] * 4
        dist.all_gather_object(gathered, parts) if saved_as != "fully_shard" else None
        if dist.get_rank() > 1:
            continue
        plain, wanted = reference()
        new, new_optim = untrained(loaded_as, plain, at=OTHER, group=pair)
        for state in (
            shard_full_optim_state_dict(everywhere, new, optim=new_optim),
            scatter_full_optim_state_dict(
                everywhere if dist.get_rank() == 0 else None, new, optim=new_optim, group=pair
            ),
            *([optim_state_dict_to_load(new, new_optim, gathered, group=pair)] if gathered[0] else []),
        ):
            new_optim.load_state_dict(state)
            found = full_optim_state_dict(new, new_optim, rank0_only=False, group=pair)
            assert same(found, everywhere, exactly=True)
        goes_on(new, new_optim, plain, wanted)


def test_half_the_ranks_take_over(four):
    # test_shard_full_ and test_scatter_full_optim_state_dict_nested_halve_world_size.
    four.run(halved)


def no_talk():
    """Rank 0 alone calls it, while the other does nothing."""
    model, optim = make("original")
    state = full_optim_state_dict(model, optim, rank0_only=False)
    neighbours._known.clear()  # as in a process that has exchanged nothing yet
    if dist.get_rank() == 0:
        found = shard_full_optim_state_dict(state, model, optim=optim)
        assert found["state"][0]["exp_avg"].shape == next(iter(model.parameters())).shape
    dist.barrier()


def test_sharding_a_full_state_asks_no_other_rank(two):
    # shard_full_optim_state_dict's contract: each rank shards by itself.
    two.run(no_talk)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.embed = nn.Linear(5, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return torch.tanh(self.middle(self.embed(x))) * self.head(x)


def tied():
    plain = Tied()
    wanted = adam(plain.parameters())
    train(plain, wanted)
    for kind in [*FSDP1, "ddp"]:
        model = wrap(Tied(), kind, at=("middle",))
        optim = adam(model.parameters())
        train(model, optim)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        assert same(found, by_name(plain, wanted))
        assert "head.weight" not in found["state"]
        # Under the other name it is the same parameter.
        found["state"]["head.weight"] = found["state"].pop("embed.weight")
        found["param_groups"][0]["params"] = [
            "head.weight" if name == "embed.weight" else name for name in found["param_groups"][0]["params"]
        ]
        again = shard_full_optim_state_dict(found, model, optim=optim)
        optim.load_state_dict(again)
        assert same(full_optim_state_dict(model, optim, rank0_only=False), by_name(plain, wanted))


def test_a_shared_parameter_is_saved_once(two):
    # test_shard_full_optim_state_dict_shared_params.
    two.run(tied)


def partly_wrapped():
    plain, wanted = reference()
    for kind in SHARDED:
        model = wrap(Nested(), kind, at=("block1",), root=False)
        optim = adam(model.parameters())
        train(model, optim)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        assert same(found, by_name(plain, wanted))
        fresh = wrap(Nested(), kind, at=("block0",), root=False)
        fresh_optim = adam(fresh.parameters())
        fresh_optim.load_state_dict(scatter_full_optim_state_dict(found, fresh, optim=fresh_optim))
        assert same(full_optim_state_dict(fresh, fresh_optim, rank0_only=False), by_name(plain, wanted))


def test_parameters_that_fsdp_does_not_manage(two):
    # test_shard_full_optim_state_dict_unmanaged_params: unwrapped ones, and a root that is no FSDP module.
    two.run(partly_wrapped)


def missing_in_a_flat_parameter():
    model, optim = make("flat")
    found = full_optim_state_dict(model, optim, rank0_only=False)
    del found["state"]["block0.shift"]
    with pytest.raises(StateMismatch, match=r"block0\.shift"):
        shard_full_optim_state_dict(found, model, optim=optim)
    with pytest.raises(StateMismatch, match=r"block0\.shift"):
        load_optim_state_dict(model, optim, found)
    # With parameters of their own there is a place for having none.
    model, optim = make("original")
    loaded = shard_full_optim_state_dict(found, model, optim=optim)
    optim.load_state_dict(loaded)
    assert "block0.shift" not in full_optim_state_dict(model, optim, rank0_only=False)["state"]


def test_missing_state_is_not_filled_with_zeros(two):
    # Torch puts zeros where one parameter of a flat one has no state, without a word. That trains on from a wrong state, so we refuse.
    two.run(missing_in_a_flat_parameter)


def first_without_state():
    for kind in ("original", "fully_shard"):
        model = Nested()
        model.block0.linear.weight.requires_grad_(False)
        model = wrap(model, kind)
        optim = adam(model.parameters())
        train(model, optim)
        saved = full_optim_state_dict(model, optim, rank0_only=False)
        train(model, optim)
        assert "block0.linear.weight" not in saved["state"]
        optim.load_state_dict(scatter_full_optim_state_dict(saved, model, optim=optim))
        assert same(full_optim_state_dict(model, optim, rank0_only=False), saved, exactly=True)


def test_the_first_parameter_may_have_no_state(two):
    # test_save_load_without_0th_param_state.
    two.run(first_without_state)


# -- to and from models that are not wrapped --------------------------------------------------------------


def rekeyed():
    plain, wanted = reference()
    for kind in SHARDED:
        model, optim = make(kind)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        other = Nested()
        other.load_state_dict(plain.state_dict())
        other_optim = adam(other.parameters())
        other_optim.load_state_dict(
            rekey_optim_state_dict(found, OptimStateKeyType.PARAM_ID, other, optim=other_optim)
        )
        assert same(by_name(other, other_optim), by_name(plain, wanted))
        names = rekey_optim_state_dict(wanted.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=wanted)
        fresh, fresh_optim = untrained(kind, plain)
        fresh_optim.load_state_dict(
            shard_full_optim_state_dict(copy.deepcopy(names), fresh, optim=fresh_optim)
        )
        goes_on(fresh, fresh_optim, other, other_optim)
    # One number for a flat parameter and many names: that is for other functions.
    model, optim = make("flat")
    with pytest.raises(StateMismatch, match=r"flat parameter.*full_optim_state_dict"):
        rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=optim)


def test_to_and_from_an_unwrapped_model(two):
    # test_rekey_optim_state_dict_to_ids and _to_names.
    two.run(rekeyed)


# -- named optimizers, settings, arguments ----------------------------------------------------------------


def named():
    plain, wanted = reference()
    for kind in ["original", "flat", "fully_shard"]:
        for make_optimizer in (
            lambda model: NamedOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.01),
            lambda model: KeyedOptimizerWrapper(dict(model.named_parameters()), adam),
        ):
            model = wrap(Nested(), kind)
            optim = make_optimizer(model)
            train(model, optim)
            found = full_optim_state_dict(model, optim, rank0_only=False)
            assert same({**found, "param_groups": []}, {**by_name(plain, wanted), "param_groups": []})
            new = wrap(Nested(), kind, at=OTHER)
            new_optim = make_optimizer(new)
            new_optim.init_state()  # a state is loaded into what is there, and a part that is empty has to be there too
            state = optim_state_dict_to_load(
                new, new_optim, found, is_named_optimizer=True, load_directly=True
            )
            assert set(state["state"]) <= set(new_optim.params)
            assert ("param_groups" in state) == isinstance(new_optim, NamedOptimizer)
            again = full_optim_state_dict(new, new_optim, rank0_only=False)
            assert same({**again, "param_groups": []}, {**found, "param_groups": []}, exactly=True)
        model, optim = make(kind)
        with pytest.raises(TypeError, match="Adam has none"):
            optim_state_dict_to_load(
                model, optim, full_optim_state_dict(model, optim, rank0_only=False), is_named_optimizer=True
            )


def test_named_and_keyed_optimizers(two):
    # test_compatible_with_named_optimizer, test_compatible_with_trec.
    two.run(named)


def without_groups():
    for kind in SHARDED:
        model, optim = make(kind)
        found = full_optim_state_dict(model, optim, rank0_only=False)
        before = copy.deepcopy(found)
        train(model, optim)
        optim.param_groups[0]["lr"] = 0.5
        del found["param_groups"]
        state = optim_state_dict_to_load(model, optim, found, load_directly=True)
        assert state.keys() == {"state"}  # as it was given
        again = full_optim_state_dict(model, optim, rank0_only=False)
        assert same({**again, "param_groups": []}, {**before, "param_groups": []}, exactly=True)
        assert again["param_groups"][0]["lr"] == 0.5  # the optimizer's own


def test_a_state_without_groups(two):
    # test_optim_state_without_param_groups.
    two.run(without_groups)


def only_rank0(kind):
    model, optim = make(kind)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    found = full_optim_state_dict(model, optim)
    before = copy.deepcopy(optim.state_dict())
    train(model, optim)
    assert optim_state_dict_to_load(model, optim, found, load_directly=True)
    assert str(optim.state_dict()["state"]) == str(before["state"])


def test_what_set_state_dict_type_says_counts(two):
    # test_optim_state_dict_nested with rank0_only; load_directly.
    two.run(only_rank0, "flat")
    two.run(only_rank0, "original")


class Strange(torch.optim.SGD):
    """Keeps None, a number, and a table that is no parameter's shape."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.state[p].update(
                        nothing=None,
                        count=self.state[p].get("count", 0) + 1,
                        mean=torch.zeros_like(p),
                        table=torch.arange(9.0),
                    )


def strange():
    for kind in SHARDED:
        model, optim = make(kind, optimizer=lambda parameters: Strange(parameters, lr=0.1))
        found = full_optim_state_dict(model, optim, rank0_only=False)
        for state in found["state"].values():
            assert state["nothing"] is None
            assert state["count"] == 2
            assert state["table"].tolist() == list(range(9))
        train(model, optim)
        optim.load_state_dict(shard_full_optim_state_dict(found, model, optim=optim))
        assert same(full_optim_state_dict(model, optim, rank0_only=False), found, exactly=True)


def test_state_that_is_none_a_number_or_of_another_shape(two):
    # test_state_dict_with_none_tensor_state, test_non_tensor state; torch fails on what is not shaped like its parameter.
    two.run(strange)


def refused():
    model, optim = make("original")
    found = full_optim_state_dict(model, optim, rank0_only=False)
    with pytest.raises(StateMismatch, match=r"whole state is wanted.*NoneType"):
        shard_full_optim_state_dict(None, model, optim=optim)
    with pytest.raises(StateMismatch, match="no state by the names"):
        shard_full_optim_state_dict({"params": []}, model, optim=optim)
    with pytest.raises(StateMismatch, match=r"numbers where parameters' names are wanted"):
        shard_full_optim_state_dict(optim.state_dict(), model, optim=optim)
    strange = {**found, "state": {**found["state"], "elsewhere": {"step": 1}}}
    with pytest.raises(StateMismatch, match="elsewhere"):
        shard_full_optim_state_dict(strange, model, optim=optim)
    found["state"]["block0.shift"]["exp_avg"] = torch.zeros(4, 2)
    with pytest.raises(StateMismatch, match=r"'exp_avg' of parameter 'block0.shift' has shape \(4, 2\)"):
        shard_full_optim_state_dict(found, model, optim=optim)


def test_mistakes_are_named(two):
    two.run(refused)
