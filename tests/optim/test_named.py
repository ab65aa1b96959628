"""NamedOptimizer: trains as the optimizer itself would; its state loads by name, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import Ranks
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from farstep.errors import OptimError, StateMismatch
from farstep.optim import DistributedOptimizer, KeyedOptimizerWrapper, NamedOptimizer, rekey

from .spread import Spread
from .test_init_state import CASES, IDS, AtTheEnd, Lazy, assert_equal, inner_of, make, train

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def step(module: nn.Module, optimizer: optim.Optimizer, seed: int = 2) -> None:
    optimizer.zero_grad()
    torch.manual_seed(seed)
    module(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def trained(*args: Any, steps: int = 2, **kwargs: Any) -> tuple[nn.Sequential, NamedOptimizer]:
    module = model()
    optimizer = NamedOptimizer(module.named_parameters(), *args, **kwargs)
    for i in range(steps):
        step(module, optimizer, i)
    return module, optimizer


def snapshot(optimizer: optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


# -- as the optimizer itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options", "keys"), CASES, ids=IDS)
def test_saved_and_loaded_training_goes_on_bit_for_bit(kind, options, keys):
    """Into an optimizer that has no state yet, and into one that has another."""
    params, first = make(kind, options)
    train(params, first)
    state, weights = snapshot(first), copy.deepcopy(params)
    train(params, first)
    for has_state in (False, True):
        again, second = make(kind, options)
        if has_state:
            train(again, second, 3)
        with torch.no_grad():
            for name, p in again.items():
                p.copy_(weights[name])
        second.load_state_dict(state)
        train(again, second)
        assert_equal(list(again.values()), list(params.values()))


def test_groups_with_options_of_their_own():
    module, plain = model(), model()
    named = dict(plain.named_parameters())
    groups = [{"params": NAMES[:2], "lr": 0.1, "weight_decay": 0.2}, {"params": NAMES[2:]}]
    optimizer = NamedOptimizer(module.named_parameters(), optim.AdamW, groups, lr=0.01)
    ordinary = optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in groups], lr=0.01)
    for i in range(3):
        step(module, optimizer, i)
        step(plain, ordinary, i)
    assert_equal(list(module.parameters()), list(plain.parameters()))
    expected = rekey(ordinary.state_dict(), NAMES)
    assert_equal(optimizer.state_dict()["state"], expected["state"])
    assert optimizer.state_dict()["param_groups"] == expected["param_groups"]
    assert optimizer.ordered_param_keys == NAMES
    assert list(optimizer.named_parameters) == NAMES


def test_groups_may_leave_parameters_out_and_take_them_in_later():
    module = model()
    named = dict(module.named_parameters())
    # By parameter, as in torch, by name, and both.
    optimizer = NamedOptimizer(named, optim.SGD, [{"params": [named["0.weight"]]}], lr=0.1, momentum=0.9)
    step(module, optimizer)
    assert list(optimizer.state_dict()["state"]) == ["0.weight"]
    optimizer.add_param_group({"params": ["0.bias", named["2.weight"]], "lr": 0.5})
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones(2)
    optimizer.step()
    groups = optimizer.state_dict()["param_groups"]
    assert [(g["params"], g["lr"]) for g in groups] == [
        (["0.weight"], 0.1),
        (["0.bias", "2.weight"], 0.5),
        (["late"], 0.1),
    ]
    assert_equal(late.data, torch.full((2,), 0.9))
    assert set(optimizer.state_dict()["state"]) == {"0.weight", "0.bias", "2.weight", "late"}


def test_conditional_training_leaves_no_state_where_there_was_no_gradient():
    module, optimizer = trained(optim.Adam, lr=0.1, steps=0)
    module[2](module[1](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    state = snapshot(optimizer)
    assert set(state["state"]) == {"2.weight", "2.bias"}
    _, other = trained(optim.Adam, lr=0.1, steps=3)
    other.load_state_dict(state)
    assert_equal(other.state_dict()["state"], state["state"])


def test_schedulers_hooks_closures_and_copies():
    module, optimizer = trained(optim.SGD, lr=0.1, momentum=0.9, steps=0)
    assert isinstance(optimizer, optim.Optimizer)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "mine"})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {k: v for k, v in state.items() if k != "note"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    wanted = module(torch.ones(1, 3)).square().sum().item()
    assert optimizer.step(closure).item() == wanted
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == inner_of(optimizer).param_groups[0]["lr"] == 0.05
    state = optimizer.state_dict()
    assert state["note"] == "mine"
    optimizer.load_state_dict(state)
    assert seen == ["before", "after", "loaded"]
    schedule.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.025
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_equal(other.state_dict()["state"], optimizer.state_dict()["state"])
        assert other.param_groups[0]["params"][0] is other.params["0.weight"]


# -- loading by name ------------------------------------------------------------------------------------------


def test_missing_and_unexpected_names_are_listed_and_nothing_is_changed():
    _, small = trained(optim.Adam, [{"params": NAMES[:3]}], lr=0.1)
    _, full = trained(optim.Adam, lr=0.2, steps=3)
    state, before = snapshot(small), snapshot(full)
    state["state"]["old.weight"] = state["state"].pop("0.bias")
    state["param_groups"][0]["params"][1] = "old.weight"
    with pytest.raises(StateMismatch) as caught:
        full.load_state_dict(state)
    assert "Missing in the state: 0.bias, 2.bias." in str(caught.value)
    assert "Unexpected in the state: old.weight." in str(caught.value)
    assert_equal(full.state_dict()["state"], before["state"])
    assert full.state_dict()["param_groups"] == before["param_groups"]
    full.load_state_dict(state, strict=False)
    assert_equal(full.state_dict()["state"]["0.weight"], state["state"]["0.weight"])
    assert_equal(full.state_dict()["state"]["2.bias"], before["state"]["2.bias"])
    assert full.param_groups[0]["lr"] == 0.1


def test_renamed_parameters():
    _, saved = trained(optim.Adam, lr=0.1)
    state = snapshot(saved)
    module = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    table = {
        "0.weight": "body.weight",
        "0.bias": "body.bias",
        "2.weight": "head.weight",
        "2.bias": "head.bias",
    }
    for rename in (table, lambda name: name.replace("0.", "body.").replace("2.", "head.")):
        optimizer = NamedOptimizer(module.named_parameters(), optim.Adam)
        optimizer.load_state_dict(state, rename=rename)
        for old, new in table.items():
            assert_equal(optimizer.state_dict()["state"][new], state["state"][old])
    with pytest.raises(
        StateMismatch,
        match=r"'0.weight' and '0.bias' of the state are one parameter here, 'x', and rename gives both",
    ):
        optimizer.load_state_dict(state, rename={"0.weight": "x", "0.bias": "x"})
    with pytest.raises(StateMismatch, match=r"rename has names that the state does not have: 0.wieght"):
        optimizer.load_state_dict(state, rename={"0.wieght": "body.weight"})
    with pytest.raises(
        StateMismatch, match=r"Missing in the state: body.bias.*Unexpected in the state: 0.bias"
    ):
        optimizer.load_state_dict(state, rename={k: v for k, v in table.items() if k != "0.bias"})


def test_names_that_change_places_within_one_optimizer():
    params = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}
    optimizer = NamedOptimizer(params, optim.Adam)
    params["a"].grad, params["b"].grad = torch.ones(2), torch.full((2,), 5.0)
    optimizer.step()
    before = snapshot(optimizer)["state"]
    optimizer.load_state_dict(optimizer.state_dict(), rename={"a": "b", "b": "a"})
    assert_equal(optimizer.state_dict()["state"], {"a": before["b"], "b": before["a"]})


def test_other_groups_load_where_their_options_agree():
    _, two = trained(optim.SGD, [{"params": NAMES[:2]}, {"params": NAMES[2:]}], lr=0.1, momentum=0.9)
    _, one = trained(optim.SGD, lr=0.5, momentum=0.5, steps=0)
    state = snapshot(two)
    one.load_state_dict(state)
    assert_equal(one.state_dict()["state"], state["state"])
    assert (one.param_groups[0]["lr"], one.param_groups[0]["momentum"]) == (0.1, 0.9)
    state["param_groups"][1]["lr"] = 0.7
    before = snapshot(one)
    with pytest.raises(
        StateMismatch, match=r"'0.weight' and '2.weight', which were saved in groups with different lr"
    ):
        one.load_state_dict(state)
    assert_equal(one.state_dict()["state"], before["state"])
    _, three = trained(optim.SGD, [{"params": [n]} for n in (NAMES[3], NAMES[0])], lr=0.5, steps=0)
    three.load_state_dict(state, strict=False)
    assert [g["lr"] for g in three.param_groups] == [0.7, 0.1]


def test_frozen_parameters():
    """They have no state, and it does not matter whether the optimizer that saved knew of them."""

    def make_frozen(everything: bool) -> tuple[nn.Module, NamedOptimizer]:
        module = model()
        module[0].requires_grad_(False)
        named = [(n, p) for n, p in module.named_parameters() if everything or p.requires_grad]
        return module, NamedOptimizer(named, optim.Adam, lr=0.1)

    module, saved = make_frozen(everything=False)
    step(module, saved)
    state = snapshot(saved)
    _, full = make_frozen(everything=True)
    full.load_state_dict(state)
    assert set(full.state_dict()["state"]) == {"2.weight", "2.bias"}
    _, part = make_frozen(everything=False)
    with pytest.raises(StateMismatch, match=r"Unexpected in the state: 0.weight, 0.bias"):
        part.load_state_dict(snapshot(full))
    part.load_state_dict(snapshot(full), strict=False)
    assert_equal(part.state_dict()["state"], state["state"])
    trainable = NamedOptimizer(model().named_parameters(), optim.Adam, lr=0.1)
    with pytest.raises(StateMismatch, match=r"Missing in the state: 0.weight, 0.bias"):
        trainable.load_state_dict(state)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_have_one_name_and_load_under_the_others():
    module = Tied()
    twice = dict(module.named_parameters(remove_duplicate=False))
    assert len(twice) == 2
    for optimizer in (
        NamedOptimizer(twice, optim.Adam),
        NamedOptimizer(module.named_parameters(), optim.Adam, None, module),
    ):
        assert optimizer.aliases == {"head.weight": "embed.weight"}
        module.embed.weight.grad = torch.ones(5, 3)
        optimizer.step()
        state = snapshot(optimizer)
        assert list(state["state"]) == ["embed.weight"]
        as_other = copy.deepcopy(state)
        as_other["state"] = {"head.weight": as_other["state"]["embed.weight"]}
        as_other["param_groups"][0]["params"] = ["head.weight"]
        step_before = optimizer.state[module.embed.weight]["step"].clone()
        optimizer.step()
        optimizer.load_state_dict(as_other)
        assert_equal(optimizer.state[module.embed.weight]["step"], step_before)
        both = copy.deepcopy(state)
        both["state"]["head.weight"] = copy.deepcopy(both["state"]["embed.weight"])
        both["param_groups"][0]["params"].append("head.weight")
        optimizer.load_state_dict(both)
        both["state"]["head.weight"]["step"] += 1
        with pytest.raises(
            StateMismatch, match=r"one parameter here, 'embed.weight', and they have different state"
        ):
            optimizer.load_state_dict(both)


def test_state_that_does_not_fit_is_refused_before_anything_is_changed():
    _, optimizer = trained(optim.Adam, lr=0.1)
    before = snapshot(optimizer)

    def refused(change: Any, match: str) -> None:
        state = snapshot(optimizer)
        state["state"]["0.weight"]["exp_avg"] += 1
        change(state)
        for target in (optimizer, trained(optim.Adam, lr=0.1, steps=0)[1]):
            old = snapshot(target)
            with pytest.raises(StateMismatch, match=match):
                target.load_state_dict(state)
            assert_equal(target.state_dict()["state"], old["state"])

    refused(lambda s: s["state"]["2.bias"].pop("exp_avg_sq"), "'2.bias' lacks 'exp_avg_sq'")
    refused(
        lambda s: s["state"]["2.bias"].update(exp_avg=torch.ones(7)),
        r"'exp_avg' of parameter '2.bias' has shape \(7,\)",
    )
    refused(lambda s: s["state"].update({"2.bias": 3}), "'2.bias' is a int, and not a dict")
    refused(lambda s: s["param_groups"][0].update(momentum=0.5), "options momentum, which Adam does not have")
    refused(
        lambda s: s.pop("param_groups"),
        'no state dict by names of parameters: it has "state" and "param_groups"',
    )
    refused(lambda s: s["param_groups"][0].update(amsgrad=True), "'0.weight' lacks 'max_exp_avg_sq'")
    assert_equal(optimizer.state_dict()["state"], before["state"])


class Fussy(AtTheEnd):
    """A user's own class, which looks at what it is given only when it is half done."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if any(state["step"] == 13 for state in self.state.values()):
            raise ValueError("thirteen steps")


def test_what_a_class_itself_refuses():
    _, optimizer = trained(Fussy)
    before = snapshot(optimizer)
    state = snapshot(optimizer)
    state["state"]["2.bias"]["step"] = 13
    state["param_groups"][0]["lr"] = 9.0
    with pytest.raises(ValueError, match="thirteen steps"):
        optimizer.load_state_dict(state)
    assert_equal(optimizer.state_dict()["state"], before["state"])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_loading_shares_no_memory_with_the_state_and_keeps_the_tensors():
    _, optimizer = trained(optim.Adam, lr=0.1)
    mine = optimizer.state_dict()["state"]["0.weight"]["exp_avg"]
    state = snapshot(optimizer)
    state["state"]["0.weight"]["exp_avg"].fill_(7.0)
    optimizer.load_state_dict(state)
    assert_equal(mine, torch.full((4, 3), 7.0))  # who held on to it sees what was loaded
    state["state"]["0.weight"]["exp_avg"].zero_()
    state["param_groups"][0]["lr"] = 3.0
    assert_equal(optimizer.state_dict()["state"]["0.weight"]["exp_avg"], torch.full((4, 3), 7.0))
    optimizer.state_dict()["state"]["0.weight"].clear()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state_dict()["state"]["0.weight"]) == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_read_right_into_the_state(tmp_path):
    module, optimizer = trained(optim.AdamW, lr=0.1)
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    again = model()
    again.load_state_dict(module.state_dict())
    other = NamedOptimizer(again.named_parameters(), optim.AdamW, lr=0.5)
    other.init_state()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    for i in range(2):
        step(module, optimizer, i)
        step(again, other, i)
    assert_equal(list(again.parameters()), list(module.parameters()))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.permutations(range(6)),
    st.booleans(),
)
def test_any_grouping_and_any_names_load_into_any_other(first, second, order, is_renamed):
    def of(grouping: list[int], names: list[str]) -> tuple[dict[str, nn.Parameter], NamedOptimizer]:
        params = {name: nn.Parameter(torch.ones(2)) for name in names}
        groups = [[n for n, g in zip(names, grouping, strict=True) if g == number] for number in range(3)]
        return params, NamedOptimizer(params, optim.Adam, [{"params": g} for g in groups if g], lr=0.1)

    old = [f"p{i}" for i in range(6)]
    params, saved = of(first, old)
    for i, p in enumerate(params.values()):
        p.grad = torch.full((2,), float(i))
    saved.step()
    rename = {f"p{i}": f"q{i}" for i in range(6)} if is_renamed else {n: n for n in old}
    _, loaded = of(second, [rename[f"p{i}"] for i in order])
    loaded.load_state_dict(saved.state_dict(), rename=rename)
    assert_equal(loaded.state_dict()["state"], {rename[n]: s for n, s in saved.state_dict()["state"].items()})


# -- states of other optimizers -------------------------------------------------------------------------------


def test_rekey_gives_names_to_an_ordinary_state():
    module, plain = model(), model()
    ordinary = optim.Adam(
        [{"params": list(plain[2].parameters())}, {"params": list(plain[0].parameters())}], lr=0.1
    )
    step(plain, ordinary)
    optimizer = NamedOptimizer(module.named_parameters(), optim.Adam)
    with pytest.raises(StateMismatch, match=r"names are wanted.*rekey"):
        optimizer.load_state_dict(ordinary.state_dict())
    named = rekey(ordinary.state_dict(), ["2.weight", "2.bias", "0.weight", "0.bias"])
    optimizer.load_state_dict(named)
    assert_equal(optimizer.state[module[2].bias], ordinary.state[plain[2].bias])
    with pytest.raises(ValueError, match="one name for each of the 4 parameters"):
        rekey(ordinary.state_dict(), ["2.weight"])
    with pytest.raises(ValueError, match="has no names of parameters"):
        rekey(ordinary.state_dict())
    knows_names = optim.Adam(plain.named_parameters())
    assert rekey(knows_names.state_dict())["param_groups"][0]["params"] == NAMES


def test_names_that_a_state_has_itself():
    module, plain = model(), model()
    ordinary = optim.Adam(plain.named_parameters(), lr=0.1)
    step(plain, ordinary)
    state = ordinary.state_dict()
    for optimizer in (
        NamedOptimizer(module.named_parameters(), optim.Adam),
        KeyedOptimizerWrapper(module.named_parameters(), optim.Adam),
    ):
        optimizer.load_state_dict(state)
        assert_equal(optimizer.state[module[2].bias], ordinary.state[plain[2].bias])
    assert list(rekey(state, plain.named_parameters())["state"]) == NAMES
    with pytest.raises(
        StateMismatch, match=r"the name '2.bias' for a parameter that the state dict calls '0.weight'"
    ):
        rekey(state, NAMES[::-1])
    other = optim.Adam([{"params": plain[2].parameters()}, {"params": plain[0].parameters()}])
    name_of = {p: n for n, p in plain.named_parameters()}
    names = [name_of[p] for g in other.param_groups for p in g["params"]]
    assert [g["params"] for g in rekey(other.state_dict(), names)["param_groups"]] == [NAMES[2:], NAMES[:2]]


def test_a_factory_that_gives_other_names():
    """What the wrapper calls the parameters counts."""
    module = model()
    optimizer = NamedOptimizer(
        [("m." + n, p) for n, p in module.named_parameters()], lambda _: optim.Adam(module.named_parameters())
    )
    step(module, optimizer)
    assert next(iter(optimizer.state_dict()["state"])) == "m.0.weight"
    optimizer.load_state_dict(optimizer.state_dict())


def test_the_state_of_another_class_without_strict():
    """What the class does not know is left out, and what it cannot step without must be there."""
    _, sgd = trained(optim.SGD, lr=0.1, momentum=0.9)
    module, adam = trained(optim.AdamW, lr=0.2)
    before = snapshot(adam)
    with pytest.raises(StateMismatch, match="which AdamW does not have: it was saved by another") as caught:
        adam.load_state_dict(sgd.state_dict())
    assert "strict" not in str(caught.value)
    with pytest.raises(StateMismatch, match=r"'0.weight' lacks 'exp_avg', 'exp_avg_sq', 'step'"):
        adam.load_state_dict(sgd.state_dict(), strict=False)
    assert_equal(adam.state_dict()["state"], before["state"])
    momentum = snapshot(sgd)["state"]
    sgd.load_state_dict(before, strict=False)
    assert_equal(sgd.state_dict()["state"], momentum)
    assert sgd.param_groups[0]["lr"] == 0.2
    _, nadam = trained(optim.NAdam, lr=0.3)
    adam.load_state_dict(nadam.state_dict(), strict=False)
    assert set(adam.state_dict()["state"]["0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    step(module, adam)


def test_no_name_in_common():
    _, optimizer = trained(optim.Adam, lr=0.1)
    params = {"module." + name: p for name, p in optimizer.params.items()}
    state = snapshot(NamedOptimizer(params, optim.Adam, lr=0.7))
    with pytest.raises(StateMismatch, match=r"no name of a parameter in common.*module.0.weight.*rename="):
        optimizer.load_state_dict(state, strict=False)
    with pytest.raises(
        StateMismatch, match=r"Missing.*Unexpected.*parameters were renamed: load_state_dict\(state, rename="
    ):
        optimizer.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"Whole names are wanted; for prefixes give a function"):
        optimizer.load_state_dict(state, rename={"module.": ""})
    with pytest.raises(TypeError, match=r"rename gave None for 'module.0.weight'"):
        optimizer.load_state_dict(state, rename=lambda name: None)
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(state, rename=lambda name: name.removeprefix("module."))


def test_a_named_state_loads_into_an_ordinary_optimizer_of_the_same_order():
    _, optimizer = trained(optim.Adam, lr=0.3)
    plain = model()
    ordinary = optim.Adam(plain.parameters())
    ordinary.load_state_dict(optimizer.state_dict())
    assert_equal(ordinary.state[plain[2].bias], optimizer.state_dict()["state"]["2.bias"])
    assert ordinary.param_groups[0]["lr"] == 0.3


def test_states_go_to_and_from_a_distributed_optimizer(three):
    spread = Spread([0, 1])
    distributed = DistributedOptimizer(optim.Adam, spread.rrefs, lr=0.1)
    params = {str(i): p for i, p in enumerate(spread.local)}
    optimizer = NamedOptimizer(params, optim.Adam, lr=0.2)
    for p in spread.local:
        p.grad = torch.ones_like(p)
    optimizer.step()
    distributed.load_state_dict(optimizer.state_dict())
    assert_equal(distributed.state_dict()["state"], snapshot(optimizer)["state"])
    optimizer.step()
    optimizer.load_state_dict(distributed.state_dict())
    assert_equal(distributed.state_dict()["state"], snapshot(optimizer)["state"])


# -- mistakes -------------------------------------------------------------------------------------------------


def test_mistakes_in_the_constructor():
    named = dict(model().named_parameters())
    for given_params, groups, error, match in (
        (model(), None, TypeError, r"give module.named_parameters\(\)"),
        (model().parameters(), None, TypeError, "a mapping of names to parameters"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], None, ValueError, "two parameters have the name 'a'"),
        (named, ["0.weight"], TypeError, "a parameter group is a dict, not a str"),
        (named, [{"lr": 1.0}], ValueError, 'needs "params"'),
        (named, [{"params": ["0.wieght"]}], ValueError, "of the name '0.wieght': did you mean '0.weight'"),
        (named, [{"params": [nn.Parameter(torch.ones(3))]}], ValueError, r"shape \(3,\) has no name"),
        (named, [{"params": [3]}], TypeError, "can only optimize Tensors"),
        (named, [{"params": set(named)}], TypeError, "give a list, not a set"),
        ({}, None, ValueError, "empty parameter list"),
    ):
        with pytest.raises(error, match=match):
            NamedOptimizer(given_params, optim.SGD, groups, lr=0.1)
    with pytest.raises(TypeError, match=r"made a list, and not a torch.optim.Optimizer"):
        NamedOptimizer(named, list)
    for args, match in (
        ((named, optim.SGD(named.values())), r"give the class, torch.optim.SGD, and its arguments"),
        ((optim.SGD, named), r"parameters first, then the class"),
        ((named, optim.SGD, 0.1), r"third argument is param_groups.*options are given by name: lr=0.1"),
        ((named, 0.1), r"second argument is a class of optimizers"),
    ):
        with pytest.raises(TypeError, match=match):
            NamedOptimizer(*args)


def test_mistakes_with_groups_change_nothing():
    _, optimizer = trained(optim.SGD, [{"params": NAMES[:2]}], lr=0.1, steps=0)
    for group, match in (
        ({"params": ["0.weight"]}, "more than one parameter group"),
        ({"params": [nn.Parameter(torch.ones(2))]}, "not in the module"),
        ({"params": [("0.weight", nn.Parameter(torch.ones(2)))]}, "another parameter of the name '0.weight'"),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer.add_param_group(group)
    assert optimizer.ordered_param_keys == NAMES[:2]
    assert list(optimizer.params) == NAMES


def test_state_that_belongs_to_no_parameter_is_said():
    _, optimizer = trained(Lazy)
    optimizer._optimizer.state["total"] = {"norm": 3}
    with pytest.raises(OptimError, match="Lazy keeps state under 'total'"):
        optimizer.state_dict()


# -- spread parameters ----------------------------------------------------------------------------------------


def on_dtensors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {"weight": torch.randn(5, 3), "bias": torch.randn(3)}
    spread = {"weight": [Shard(0)], "bias": [Replicate()]}
    found = []
    for kind, options in ((optim.Adam, {"lr": 0.1}), (optim.SGD, {"lr": 0.1, "momentum": 0.9}), (Lazy, {})):
        params = {n: nn.Parameter(distribute_tensor(t, mesh, spread[n])) for n, t in whole.items()}
        plain = {n: nn.Parameter(t.clone()) for n, t in whole.items()}
        optimizer = NamedOptimizer(params, kind, **options)
        ordinary = kind(list(plain.values()), **options)
        optimizer.init_state()
        for i in range(3):
            for name, p in plain.items():
                p.grad = torch.sin(p.detach() + i)
                params[name].grad = distribute_tensor(p.grad, mesh, spread[name])
            optimizer.step()
            ordinary.step()
            if i == 0:
                saved = copy.deepcopy(optimizer.state_dict())
        for name, p in plain.items():
            assert_equal(params[name].full_tensor().detach(), p.detach())
            for key, value in optimizer.state[params[name]].items():
                wanted = ordinary.state[p][key]
                assert_equal(value.full_tensor() if hasattr(value, "placements") else value, wanted)
                if getattr(wanted, "shape", ()) == p.shape:
                    assert value.placements == tuple(spread[name])
        optimizer.load_state_dict(saved)
        values = optimizer.state[params["weight"]]
        assert_equal(dict(values), saved["state"]["weight"])
        found.append(sorted(key for key, value in values.items() if hasattr(value, "placements")))
    optimizer = NamedOptimizer(params, optim.SGD, lr=0.1, momentum=0.9)
    saved["state"] = {"weight": {"momentum_buffer": whole["weight"]}}
    saved["param_groups"][0] = {"params": ["weight", "bias"]}
    with pytest.raises(StateMismatch, match="'momentum_buffer' of parameter 'weight' is whole"):
        optimizer.load_state_dict(saved)
    return found


def test_state_of_dtensors_stays_so():
    with Ranks(2) as ranks:
        assert ranks.run(on_dtensors)[0] == [
            ["exp_avg", "exp_avg_sq"],
            ["momentum_buffer"],
            ["average", "slow"],
        ]
