"""State by name: saved, and loaded onto other workers."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch import optim

from farstep import autograd, rpc
from farstep.errors import OptimError, RRefError, StateMismatch
from farstep.optim import DistributedOptimizer, parameter_rrefs

from .spread import Spread, train
from .test_classes import CASES, Slowing

NAMES = ["enc.weight", "enc.bias", "dec.weight", "dec.bias"]


def pairs(spread, order=range(4)):
    return [(NAMES[i], spread.rrefs[i]) for i in order]


def moved(spread, where):
    """The same parameters, as they are now, on other workers."""
    other = Spread(where, [p.shape for p in spread.remote])
    for new, old in zip(other.remote, spread.remote, strict=True):
        new.data.copy_(old.data)
    return other


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=[f"{k.__name__}-{'-'.join(o)}" for k, o in CASES])
def test_training_goes_on_elsewhere_as_if_nothing_had_happened(three, kind, options, sharded):
    shapes = [(3, 4), (4, 2), (2, 3), (5, 2)]  # Muon takes matrices only
    spread = Spread([0, 1, 2, 1], shapes)
    optimizer, ordinary = DistributedOptimizer(kind, pairs(spread), **options), kind(spread.local, **options)
    train(spread, optimizer, ordinary, 3)
    state = optimizer.state_dict(sharded=sharded)
    elsewhere = moved(spread, [2, 2, 0, 1])
    spread.step(optimizer, 7)  # what was saved stays as it was
    fresh = DistributedOptimizer(kind, pairs(elsewhere), **{**options, "lr": 7.0})
    fresh.load_state_dict(state if sharded else through_a_file(state))
    assert fresh.param_groups[0]["lr"] == ordinary.param_groups[0]["lr"]
    for step in range(3):
        elsewhere.step(fresh, step)
        spread.step_here(ordinary, step)
    for new, old in zip(elsewhere.remote, spread.local, strict=True):
        torch.testing.assert_close(new, old)


def test_the_format(three):
    spread = Spread([0, 1, 2, 1])
    groups = [{"params": pairs(spread)[:2]}, {"params": pairs(spread)[2:], "lr": 0.5}]
    optimizer = DistributedOptimizer(optim.Adam, groups, lr=0.1)
    assert optimizer.state_dict()["state"] == {}
    spread.step(optimizer)
    state = optimizer.state_dict()
    assert list(state) == ["state", "param_groups"]
    assert list(state["state"]) == NAMES
    assert [group["params"] for group in state["param_groups"]] == [NAMES[:2], NAMES[2:]]
    assert [group["lr"] for group in state["param_groups"]] == [0.1, 0.5]
    ordinary = optim.Adam(spread.local, lr=0.1)
    spread.step_here(ordinary)
    for name, theirs in zip(NAMES, ordinary.state_dict()["state"].values(), strict=True):
        torch.testing.assert_close(state["state"][name], theirs)


def test_a_saved_state_is_a_copy_and_loading_takes_one(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.Adam, pairs(spread), lr=0.1)
    spread.step(optimizer)
    state = optimizer.state_dict()
    before = through_a_file(state)
    spread.step(optimizer)
    optimizer.load_state_dict(state)
    spread.step(optimizer)
    torch.testing.assert_close(state["state"], before["state"])


def test_sharded_state_stays_with_its_owners(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.Adam, pairs(spread), lr=0.1)
    spread.step(optimizer)
    state = optimizer.state_dict(sharded=True)
    assert [state["state"][name].owner_name() for name in NAMES] == spread.where
    torch.testing.assert_close(
        {name: rref.to_here() for name, rref in state["state"].items()}, optimizer.state_dict()["state"]
    )


def test_groups_may_differ_as_long_as_their_options_agree(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.Adam, pairs(spread), lr=0.1, weight_decay=0.1)
    spread.step(optimizer)
    state = optimizer.state_dict()
    first, second = pairs(spread, [3, 0]), pairs(spread, [1, 2])
    apart = DistributedOptimizer(optim.Adam, [{"params": first}, {"params": second}], lr=0.3)
    apart.load_state_dict(state)
    assert [group["lr"] for group in apart.param_groups] == [0.1, 0.1]
    torch.testing.assert_close(apart.state_dict()["state"], {n: state["state"][n] for n, _ in first + second})
    apart.param_groups[1]["lr"] = 0.7
    with pytest.raises(
        StateMismatch, match=r"group 0 has 'enc.weight' and 'enc.bias'.*different lr; nothing"
    ):
        optimizer.load_state_dict(apart.state_dict())


def test_strict_lists_what_is_missing_and_unexpected(three):
    spread = Spread([0, 1, 2, 1])
    some = DistributedOptimizer(optim.Adam, pairs(spread, [0, 1, 2]), lr=0.1)
    others = DistributedOptimizer(optim.Adam, pairs(spread, [1, 2, 3]), lr=0.2)
    spread.step(some)
    spread.step(others, 1)
    kept = others.state_dict()["state"]["dec.bias"]
    state = some.state_dict()
    with pytest.raises(StateMismatch) as caught:
        others.load_state_dict(state)
    assert "Missing in the state: dec.bias. Unexpected in the state: enc.weight." in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert others.param_groups[0]["lr"] == 0.2
    others.load_state_dict(state, strict=False)
    now = others.state_dict()
    assert now["param_groups"][0]["lr"] == 0.1
    torch.testing.assert_close(now["state"]["enc.bias"], state["state"]["enc.bias"])
    torch.testing.assert_close(now["state"]["dec.bias"], kept)


@pytest.mark.parametrize("kind", [optim.Adam, Slowing], ids=lambda kind: kind.__name__)
def test_a_shape_that_does_not_fit_changes_nothing_anywhere(three, kind):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(kind, pairs(spread), lr=0.1)
    spread.step(optimizer)
    before = optimizer.state_dict()
    state = through_a_file(before)
    state["param_groups"][0]["lr"] = 9.0
    for each in state["state"].values():
        for key, value in each.items():
            each[key] = value + 1
    broken = state["state"]["dec.weight"]
    key = next(key for key, value in broken.items() if value.dim())
    broken[key] = torch.zeros(7, 7)
    with pytest.raises(
        StateMismatch, match=rf"'{key}' of parameter 'dec.weight' has shape \(7, 7\).*'worker2'"
    ):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]


def test_what_is_no_state_of_this_kind(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    ordinary = optim.Adam(spread.local, lr=0.1)
    with pytest.raises(StateMismatch, match="numbers where parameters' names are wanted"):
        optimizer.load_state_dict(ordinary.state_dict())
    with pytest.raises(StateMismatch, match='it has "state" and "param_groups"'):
        optimizer.load_state_dict({"weights": 1})


class Plain(optim.SGD):
    """A user's own class, without options of its own."""


@pytest.mark.parametrize("kind", [optim.SGD, Plain], ids=lambda kind: kind.__name__)
def test_the_state_of_another_class_is_refused(three, kind):
    spread = Spread([0, 1])
    adam = DistributedOptimizer(optim.AdamW, spread.rrefs, lr=0.3)
    optimizer = DistributedOptimizer(kind, spread.rrefs, lr=0.1, momentum=0.9)
    options = list(optimizer.param_groups[0])
    state = adam.state_dict()
    state["param_groups"][0]["param_names"] = ["0", "1"]  # no option: torch's own states have it
    with pytest.raises(StateMismatch) as caught:
        optimizer.load_state_dict(state)
    assert re.search(
        rf"the options betas, eps, amsgrad, capturable\b.*, which {kind.__name__} does not", str(caught.value)
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(state, strict=False)
    assert list(optimizer.param_groups[0]) == options
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.3, 0.9)
    spread.step(optimizer)
    assert list(optimizer.state_dict()["param_groups"][0]) == [*options[2:], "params"]


def test_a_users_options_are_not_those_of_torchs_classes(three):
    spread = Spread([1])
    slowing = DistributedOptimizer(Slowing, spread.rrefs, lr=0.1)
    with pytest.raises(StateMismatch, match="options slowing, which SGD does not have"):
        DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1).load_state_dict(slowing.state_dict())


@pytest.mark.parametrize("key", ["initial_lr", "swa_lr", "max_momentum"])
def test_what_schedules_keep_in_groups_is_loaded(three, key):
    spread = Spread([1])
    old, new = (DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1) for _ in range(2))
    old.param_groups[0][key] = 0.7
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0][key] == 0.7


def test_an_ordinary_optimizer_loads_the_state(three):
    """By position: torch takes whatever the parameters are called by."""
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.AdamW, pairs(spread), lr=0.1)
    twin = optim.AdamW(spread.local, lr=0.1)
    train(spread, optimizer, twin, 3)
    ordinary = optim.AdamW(spread.local, lr=9.0)
    ordinary.load_state_dict(through_a_file(optimizer.state_dict()))
    assert ordinary.param_groups[0]["lr"] == 0.1
    spread.step(optimizer, 5)
    spread.step_here(ordinary, 5)
    spread.assert_same()


def test_a_sharded_state_says_that_no_file_takes_it(three):
    spread = Spread([0, 1])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    spread.step(optimizer)
    with pytest.raises(RRefError, match=r"state_dict\(\) gives a state that can be saved"):
        torch.save(optimizer.state_dict(sharded=True), io.BytesIO())


def test_hooks_of_state_dicts_are_run(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "epoch": 3})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append(state.pop("epoch")))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saving", 3, "loaded"]


class Worldly(optim.SGD):
    """Keeps state that is no parameter's."""

    def step(self, closure=None):
        super().step()
        self.state["the world"] = {"age": 7}


def test_state_that_belongs_to_no_parameter_is_refused(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(Worldly, spread.rrefs, lr=0.1)
    spread.step(optimizer)
    with pytest.raises(OptimError, match="under 'the world', which belongs to no parameter"):
        optimizer.state_dict()


class Tiring(optim.SGD):
    """Changes its own options as it goes; with `by_size`, differently for each parameter."""

    def __init__(self, params, lr, by_size=False):
        super().__init__(params, lr)
        self.by_size = by_size

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] *= 1 / group["params"][0].numel() if self.by_size else 0.5
            group["steps"] = group.get("steps", 0) + 1


def test_options_that_the_class_itself_changes_are_saved(three):
    spread = Spread([0, 1, 2, 1])
    optimizer, ordinary = (
        DistributedOptimizer(Tiring, pairs(spread), lr=0.1),
        Tiring(spread.local, lr=0.1),
    )
    train(spread, optimizer, ordinary, 2)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.025
    assert state["param_groups"][0]["steps"] == 2
    fresh = DistributedOptimizer(Tiring, pairs(spread), lr=9.0)
    fresh.load_state_dict(state)
    train(spread, fresh, ordinary, 2)
    spread.assert_same()
    assert fresh.state_dict()["param_groups"][0]["steps"] == 4


def test_options_that_differ_between_owners_cannot_be_saved(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(Tiring, pairs(spread), lr=0.1, by_size=True)
    spread.step(optimizer)
    with pytest.raises(OptimError, match=r"changes the option 'lr' of group 0 itself.*on one worker"):
        optimizer.state_dict()


# -- finding parameters


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def test_parameters_are_found_in_one_call(three):
    rref = rpc.remote("worker1", two_layers)
    rref.to_here()
    sent = three[0].tally.sent
    found = parameter_rrefs(rref, prefix="net")
    assert three[0].tally.sent == sent + 1
    assert [name for name, _ in found] == ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"]
    assert [tuple(r.to_here().shape) for _, r in found] == [(3, 2), (3,), (1, 3), (1,)]
    assert {r.owner_name() for _, r in found} == {"worker1"}
    assert parameter_rrefs(rref, recurse=False) == []
    here = rpc.RRef(two_layers())
    assert [name for name, _ in parameter_rrefs(here)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_of_a_remote_module(three):
    module = rpc.RemoteModule("worker2/cpu", torch.nn.Linear, args=(2, 3))
    found = parameter_rrefs(module)
    assert [name for name, _ in found] == ["weight", "bias"]
    optimizer = DistributedOptimizer(optim.SGD, found, lr=1.0)
    positions = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    before = found[1][1].to_here().clone()
    for each in (optimizer, positions):
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
            each.step(context_id)
    torch.testing.assert_close(found[1][1].to_here(), before - 2)


def test_what_has_no_parameters(three):
    with pytest.raises(TypeError, match=r"to a torch.nn.Module, and this one is to a int"):
        parameter_rrefs(rpc.remote("worker1", int))
    with pytest.raises(TypeError, match="wants a module, an RRef to one, or a RemoteModule, not type"):
        parameter_rrefs(torch.nn.Linear)


def test_parameters_of_a_module_that_is_here(three):
    module = two_layers()
    sent = three[0].tally.sent
    found = parameter_rrefs(module, "net")
    assert three[0].tally.sent == sent
    assert [name for name, _ in found] == ["net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"]
    assert all(a.local_value() is b for (_, a), b in zip(found, module.parameters(), strict=True))


def test_the_names_that_an_ordinary_optimizers_state_has(three):
    spread = Spread([1, 2, 1, 0])
    plain = optim.Adam(zip(NAMES, spread.local, strict=True), lr=0.3)
    spread.step_here(plain)
    optimizer = DistributedOptimizer(optim.Adam, pairs(spread, [2, 0, 3, 1]), lr=0.1)
    optimizer.load_state_dict(plain.state_dict())
    found = optimizer.state_dict()
    assert found["param_groups"][0]["lr"] == 0.3
    for number, name in enumerate(NAMES):
        expected = plain.state_dict()["state"][number]
        assert all(torch.equal(found["state"][name][key], value) for key, value in expected.items())
