"""The forms in which a state is given: parts of ranks that are no more, other names, torch's forms; and what is refused of them."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from farstep import checkpoint
from farstep.errors import CheckpointMismatch, StateMismatch
from farstep.state import load_optim_state_dict, optim_state_dict
from state.holdings import Net
from state.training import Flat, FlatOriginal, Fsdp2, Hsdp2, Plain, TwoD, bits_of, gradient


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout_s=20) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What four ranks saved, each its part, and the whole of it."""
    folder = tmp_path_factory.mktemp("parts")
    with Ranks(4, timeout_s=20) as ranks:
        ranks.run(save, str(folder))
    return str(folder)


KINDS = [FlatOriginal, Fsdp2, Hsdp2, TwoD]


def save(folder):
    for kind in KINDS:
        each = kind()
        each.train(2)
        torch.save(
            optim_state_dict(each.model, each.optimizer), f"{folder}/{kind.__name__}.{dist.get_rank()}"
        )
        whole = optim_state_dict(each.model, each.optimizer, full=True)
        if dist.get_rank() == 0:
            torch.save(whole, f"{folder}/{kind.__name__}")


def read(folder, kind, *ranks):
    return [torch.load(f"{folder}/{kind}.{rank}", weights_only=False) for rank in ranks]


def same(a, b):
    assert a["state"].keys() == b["state"].keys()
    for name, state in a["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][name][key])), (name, key)


def load_elsewhere(folder):
    rank = dist.get_rank()
    for kind in (each.__name__ for each in KINDS):
        whole = torch.load(f"{folder}/{kind}")
        for given in (
            read(folder, kind, 0, 1, 2, 3),
            read(folder, kind, 3, 1, 0, 2),
            read(folder, kind, 2 * rank, 2 * rank + 1),
            read(folder, kind, 3 - rank, 1 - rank),
            read(folder, kind, 0, 1, 2, 3) if rank else [],
            read(folder, kind, 0, 1, 2, 3) if rank else None,
            whole if rank else {},
        ):
            for target in (Fsdp2(seed=1), Plain(seed=1)):
                load_optim_state_dict(target.model, target.optimizer, given)
                same(optim_state_dict(target.model, target.optimizer, full=True), whole)


def test_parts_load_on_another_number_of_ranks_in_any_order(two, parts):
    two.run(load_elsewhere, parts)


@pytest.mark.parametrize("kind", [each.__name__ for each in KINDS])
def test_parts_load_where_there_are_no_ranks_at_all(parts, kind):
    target = Net(1)
    optimizer = torch.optim.AdamW(target.parameters())
    load_optim_state_dict(target, optimizer, read(parts, kind, 2, 0, 3, 1))
    same(optim_state_dict(target, optimizer, full=True), torch.load(f"{parts}/{kind}"))


def test_parts_of_different_saves(parts):
    target = Net(1)
    optimizer = torch.optim.AdamW(target.parameters())
    before = bits_of(optimizer)
    first = read(parts, "Fsdp2", 0, 1, 2, 3)

    def refused(said, change):
        again = read(parts, "Fsdp2", 1)[0]
        change(again)
        with pytest.raises(StateMismatch, match=said):
            load_optim_state_dict(target, optimizer, [*first, again])
        assert bits_of(optimizer) == before

    def other_elements(part):
        part["state"]["first.weight"]["exp_avg"].to_local().add_(1)

    def other_step(part):
        part["state"]["first.weight"]["step"].add_(1)

    def other_lr(part):
        part["param_groups"][0]["lr"] = 7

    refused(
        r"of state\['first.weight'\]\['exp_avg'\] is in several parts, with different elements",
        other_elements,
    )
    refused(r"'step' of parameter 'first.weight' is 2.0 .* in one part and 3.0 .* in another", other_step)
    refused(r"'lr' of group 0 differs between the first part and part 4", other_lr)


def trained(make=torch.optim.Adam, **options):
    model = Net(0)
    optimizer = make(model.parameters(), **options)
    for p in model.parameters():
        p.grad = gradient(p.detach())
    optimizer.step()
    return model, optimizer, optim_state_dict(model, optimizer, full=True)


def test_renaming():
    model, optimizer, state = trained()

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.extra = Net(1), nn.Linear(2, 2)

    holder = Holder()
    for rename in (lambda name: f"base.{name}", {name: f"base.{name}" for name in state["state"]}):
        fresh = torch.optim.Adam(holder.base.parameters(), lr=9)
        load_optim_state_dict(holder, fresh, state, rename=rename)
        for old, new in zip(model.parameters(), holder.base.parameters(), strict=True):
            assert torch.equal(optimizer.state[old]["exp_avg"], fresh.state[new]["exp_avg"])
        assert fresh.param_groups[0]["lr"] == 1e-3
    with pytest.raises(StateMismatch, match=r"no name of the state .*'scale', .* rename="):
        load_optim_state_dict(holder, torch.optim.Adam(holder.parameters()), state, strict=False)
    with pytest.raises(
        StateMismatch, match=r"'scale' and 'first.weight' of the state are one parameter here"
    ):
        load_optim_state_dict(model, optimizer, state, rename={"first.weight": "scale"})
    with pytest.raises(StateMismatch, match=r"rename gives None for 'scale'"):
        load_optim_state_dict(model, optimizer, state, rename=lambda _: None)


def test_torchs_flattened_form():
    model, optimizer, state = trained()
    flattened = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert "state.first.weight.exp_avg" in flattened
    fresh = torch.optim.Adam(model.parameters(), lr=9)
    load_optim_state_dict(model, fresh, flattened)
    same(optim_state_dict(model, fresh, full=True), state)
    assert fresh.param_groups[0]["lr"] == 1e-3


def test_the_state_of_an_optimizer_that_has_names():
    model = Net(0)
    named = torch.optim.Adam(model.named_parameters())
    for p in model.parameters():
        p.grad = gradient(p.detach())
    named.step()
    fresh = torch.optim.Adam(list(model.parameters())[::-1])
    load_optim_state_dict(model, fresh, named.state_dict())
    for p in model.parameters():
        assert torch.equal(fresh.state[p]["exp_avg"], named.state[p]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: {"optim": s, "epoch": 3},
            r"the keys 'optim', 'epoch' \(under 'optim' there is one: give that\)",
        ),
        (lambda s: {**s, "state": [1]}, r'a list as its "state"'),
        (lambda s: {**s, "param_groups": 5}, r'"param_groups" is a list of groups, not a int'),
        (lambda s: {**s, "param_groups": [{"lr": 1}]}, r'group 0 of "param_groups" .* without them'),
        (lambda s: {**s, "rank": "x"}, r'the "rank" of a part .* not \'x\''),
        (lambda _: 7, "this is a int, and no state"),
        (lambda _: None, "this is None, and no state"),
        (lambda _: {}, "this is empty, and no state"),
    ],
)
def test_what_is_no_state(change, said):
    model, optimizer, state = trained()
    before = bits_of(optimizer)
    with pytest.raises(StateMismatch, match=said):
        load_optim_state_dict(model, optimizer, change(state))
    assert bits_of(optimizer) == before


# -- pieces that a class does not have, or cannot use -----------------------------------------------------


@pytest.mark.parametrize(
    "value", ["text", None, torch.tensor(5.0), [1, 2], torch.ones(2, 3, 5, dtype=torch.int64), {"a": 1}, 3.5]
)
def test_torchs_classes_take_tensors_alone(value):
    model, optimizer, state = trained()
    state["state"]["scale"]["exp_avg"] = value
    for each in (optimizer, torch.optim.Adam(model.parameters())):
        before = bits_of(each)
        with pytest.raises(StateMismatch, match="'exp_avg' of parameter 'scale' is "):
            load_optim_state_dict(model, each, state)
        assert bits_of(each) == before


def test_a_missing_piece_and_one_of_another_class():
    model, _, state = trained(torch.optim.AdamW)
    less = copy.deepcopy(state)
    del less["state"]["scale"]["exp_avg"]
    for strict in (True, False):
        with pytest.raises(StateMismatch, match="the state of parameter 'scale' lacks 'exp_avg'"):
            load_optim_state_dict(model, torch.optim.AdamW(model.parameters()), less, strict=strict)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(StateMismatch, match="options betas"):
        load_optim_state_dict(model, sgd, state)
    del state["param_groups"]
    with pytest.raises(StateMismatch, match="'scale' has unexpected 'exp_avg', 'exp_avg_sq', 'step'"):
        load_optim_state_dict(model, sgd, state)
    load_optim_state_dict(model, sgd, state, strict=False)
    assert not any(sgd.state.values())


def adafactor_of_flat_parameters():
    source = Flat(torch.optim.Adafactor)
    source.train(1)
    state = optim_state_dict(source.model, source.optimizer, full=True)
    target = Plain(torch.optim.Adafactor)
    with pytest.raises(StateMismatch, match="lacks 'col_var', 'row_var' and has unexpected 'variance'"):
        load_optim_state_dict(target.model, target.optimizer, state)


def test_what_a_class_keeps_of_a_line_is_not_what_it_keeps_of_a_matrix(two):
    two.run(adafactor_of_flat_parameters)


class Scaled(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("saved", "old"), [(torch.tensor(0.75), 1), (0.75, torch.tensor(1)), (0.75, torch.tensor(True))]
)
def test_a_number_is_not_truncated_to_the_kind_that_was_there(saved, old):
    model = nn.Linear(2, 2)
    source, target = (Scaled(model.parameters(), lr=0.1) for _ in range(2))
    for p in model.parameters():
        source.state[p]["scale"], target.state[p]["scale"] = saved, old
    load_optim_state_dict(model, target, optim_state_dict(model, source, full=True))
    assert all(float(target.state[p]["scale"]) == 0.75 for p in model.parameters())


def test_a_load_that_a_class_refuses_leaves_no_trace_in_it():
    class Loud(torch.optim.Adam):
        def __init__(self, params):
            super().__init__(params)
            self.log = []

        def __setstate__(self, state):
            self.log.append(1)
            super().__setstate__(state)
            raise RuntimeError("no")

    model, _, state = trained()
    loud = Loud(model.parameters())
    with pytest.raises(StateMismatch, match=r"Loud does not take this state \(RuntimeError: no\)"):
        load_optim_state_dict(model, loud, state)
    assert loud.log == []


def test_labels_of_groups_do_not_keep_them_apart():
    model = Net(0)
    some = list(model.parameters())
    labelled = torch.optim.Adam([{"params": some[:2], "name": "a"}, {"params": some[2:], "name": "b"}])
    one = torch.optim.Adam(some, lr=9)
    load_optim_state_dict(model, one, optim_state_dict(model, labelled, full=True))
    assert one.param_groups[0]["lr"] == 1e-3
    assert "name" not in one.param_groups[0]
    back = torch.optim.Adam([{"params": some[2:], "name": "x"}, {"params": some[:2], "name": "y"}])
    load_optim_state_dict(model, back, optim_state_dict(model, labelled, full=True))
    assert [group["name"] for group in back.param_groups] == ["b", "a"]
    labelled.param_groups[1]["lr"] = 0.5
    state = optim_state_dict(model, labelled, full=True)
    one.param_groups[0]["lr"] = 9
    with pytest.raises(StateMismatch, match=r"were saved in groups with different lr; .* strict=False keeps"):
        load_optim_state_dict(model, one, state)
    load_optim_state_dict(model, one, state, strict=False)
    assert one.param_groups[0]["lr"] == 9


def test_tied_names_with_other_parts():
    class Two(nn.Module):
        def __init__(self, is_tied):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            if is_tied:
                self.b.weight = self.a.weight

    apart, tied = Two(False), Two(True)
    source = torch.optim.SGD(apart.parameters(), lr=0.1, momentum=0.9)
    apart.a.weight.grad, apart.b.weight.grad = torch.ones(2, 2), torch.full((2, 2), 5.0)
    source.step()
    target = torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9)
    for full in (False, True):
        with pytest.raises(
            StateMismatch, match=r"'a.weight' and 'b.weight' of the state are one parameter here"
        ):
            load_optim_state_dict(tied, target, optim_state_dict(apart, source, full=full))


def test_a_state_by_number_in_another_order_says_how_it_was_matched(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    checkpoint.save({"optim": optim.state_dict()}, tmp_path)
    other = torch.optim.Adam(list(model.parameters())[::-1])
    by_order = r"'exp_avg' of parameter '1.bias'.*numbers instead of names.*order of the parameters"
    with pytest.raises(StateMismatch, match=by_order):
        load_optim_state_dict(model, other, optim.state_dict())
    with pytest.raises(CheckpointMismatch, match=by_order):
        checkpoint.load_optimizer(model, other, tmp_path)
    named = optim_state_dict(model, optim)
    named["state"]["1.bias"], named["state"]["0.weight"] = (
        named["state"]["0.weight"],
        named["state"]["1.bias"],
    )
    with pytest.raises(StateMismatch, match="does not fit the parameter") as caught:
        load_optim_state_dict(model, other, named)
    assert "numbers" not in str(caught.value)
