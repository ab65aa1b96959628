"""Names for numbers and numbers for names, against torch's own function and against training that goes on."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from farstep.errors import StateMismatch
from farstep.fsdp import OptimStateKeyType, rekey_optim_state_dict

NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def train(model, optimizer, steps=2):
    torch.manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


def grouped(model, groups, cls=torch.optim.Adam):
    named = dict(model.named_parameters())
    return cls(
        [{"params": [named[n] for n in names], "lr": 0.01 * (i + 1)} for i, names in enumerate(groups)]
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(itertools.starmap(same, zip(a, b, strict=True)))
    return a == b


@pytest.mark.parametrize("how", ["optim", "optim_input", "all parameters"])
@pytest.mark.filterwarnings("ignore:The `optim_input` argument is deprecated")
def test_as_torch_does_it(how):
    # test_rekey_optim_state_dict_to_ids / _to_names: a state by numbers and by names are made of each other.
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    given = {"optim": {"optim": optimizer}, "optim_input": {"optim_input": list(model.parameters())}}.get(
        how, {}
    )
    by_number = optimizer.state_dict()
    by_name = rekey_optim_state_dict(by_number, NAME, model, **given)
    torchs = FSDP.rekey_optim_state_dict(by_number, NAME, model, **given)
    assert by_name["state"].keys() == torchs["state"].keys() == dict(model.named_parameters()).keys()
    assert all(by_name["state"][name] is torchs["state"][name] for name in torchs["state"])
    # Where torch's are sorted by name, ours stay in the optimizer's order: by it a torch optimizer would load them.
    assert [sorted(group["params"]) for group in by_name["param_groups"]] == [
        g["params"] for g in torchs["param_groups"]
    ]
    assert by_name["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    again = rekey_optim_state_dict(by_name, ID, model, **given)
    assert same(again, by_number)
    assert same(again, FSDP.rekey_optim_state_dict(torchs, ID, model, **given))


def test_what_is_so_already_is_returned():
    model = small()
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    assert rekey_optim_state_dict(state, ID, model) is state
    by_name = rekey_optim_state_dict(state, NAME, model)
    assert rekey_optim_state_dict(by_name, NAME, model) is by_name
    assert (
        by_name["param_groups"][0]["params"][0] == "0.weight"
    )  # though there is no state to tell the kind by


def test_the_given_state_dict_is_left_as_it_is():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    by_name = rekey_optim_state_dict(state, NAME, model, optim=optimizer)
    by_name["param_groups"][0]["lr"] = 7
    assert same(state, before)


NAMES = [name for name, _ in small().named_parameters()]


@st.composite
def groupings(draw):
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=2)))
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]


@settings(deadline=None, max_examples=25)
@given(groupings(), st.data())
def test_groups_in_any_other_order_go_on_as_if_never_saved(groups, data):
    # torch matches groups by their place alone, and with another order of groups it loads the wrong state without a word.
    model = small()
    optimizer = grouped(model, groups)
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())  # else both would step the same state
    saved = rekey_optim_state_dict(state, NAME, model, optim=optimizer)
    other = small()
    other.load_state_dict(model.state_dict())
    # lr is the saved group's, so those with the same one stay together; within and between groups all is shuffled.
    reordered = [data.draw(st.permutations(group)) for group in data.draw(st.permutations(groups))]
    loaded = grouped(other, reordered)
    loaded.load_state_dict(rekey_optim_state_dict(saved, ID, other, optim=loaded))
    train(model, optimizer)
    train(other, loaded)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=0, msg=name)


def test_groups_that_cannot_be_joined_are_named():
    model = small()
    saved = rekey_optim_state_dict(
        (o := grouped(model, [NAMES[:2], NAMES[2:]])).state_dict(), NAME, model, optim=o
    )
    one = grouped(model, [NAMES])
    with pytest.raises(StateMismatch, match=r"group 0 .* '0.weight' and '2.weight'.* different lr"):
        rekey_optim_state_dict(saved, ID, model, optim=one)


def test_wrappers_leave_no_trace_in_names():
    # Names of torch.compile and of activation checkpointing.
    model = small()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, plain)
    wanted = rekey_optim_state_dict(plain.state_dict(), NAME, model)
    wrapped = small()
    wrapped[2] = checkpoint_wrapper(wrapped[2])
    compiled = torch.compile(wrapped, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.1)
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    optimizer.load_state_dict(rekey_optim_state_dict(wanted, ID, compiled))
    assert same(rekey_optim_state_dict(optimizer.state_dict(), NAME, compiled), wanted)


def test_a_tied_parameter_is_found_by_each_of_its_names():
    # test_shared_params: one state, under the first name; a state that has it under another loads too.
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model["embed"].weight.grad = torch.ones(5, 4)
    optimizer.step()
    saved = rekey_optim_state_dict(optimizer.state_dict(), NAME, model)
    assert list(saved["state"]) == ["embed.weight"]
    renamed = {
        "state": {"head.weight": saved["state"]["embed.weight"]},
        "param_groups": [{**saved["param_groups"][0], "params": ["head.weight"]}],
    }
    assert same(rekey_optim_state_dict(renamed, ID, model, optim=optimizer), optimizer.state_dict())


def test_a_part_of_the_parameters():
    # Not all parameters of a model are given to its optimizer.
    model = small()
    optimizer = torch.optim.Adam(list(model[2].parameters()), lr=0.1)
    train(model, optimizer)
    saved = rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=optimizer)
    assert list(saved["state"]) == ["2.weight", "2.bias"]
    assert same(rekey_optim_state_dict(saved, ID, model, optim=optimizer), optimizer.state_dict())


def test_mistakes_are_named():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = optimizer.state_dict()
    saved = rekey_optim_state_dict(state, NAME, model)
    with pytest.raises(StateMismatch, match=r"names or numbers.*both"):
        rekey_optim_state_dict({**saved, "state": {**saved["state"], 0: {}}}, NAME, model)
    with pytest.raises(StateMismatch, match=r"the state has '0.weight'.*which the optimizer does not step"):
        rekey_optim_state_dict(saved, ID, model, optim=torch.optim.SGD(model[2].parameters(), lr=1))
    with pytest.raises(StateMismatch, match=r"parameter numbers .*2.* and the optimizer has 2 parameters"):
        rekey_optim_state_dict(state, NAME, model, optim_input=list(model[2].parameters()))
    with pytest.raises(StateMismatch, match=r"shape \(2, 6\) that the model does not have"):
        rekey_optim_state_dict(state, NAME, nn.Linear(1, 1), optim_input=[model[4].weight])
    less = {"state": {}, "param_groups": [{**saved["param_groups"][0], "params": NAMES[:-1]}]}
    with pytest.raises(StateMismatch, match=r"group 0 of the optimizer has '4.bias', which is in no group"):
        rekey_optim_state_dict(less, ID, model, optim=optimizer)
    with pytest.raises(ValueError, match="PARAM_NAME or PARAM_ID"):
        rekey_optim_state_dict(saved, "name", model)
    with pytest.raises(StateMismatch, match='no "state"'):
        rekey_optim_state_dict({}, ID, model)
    with pytest.raises(TypeError, match=r"list of parameters, or of groups"):
        rekey_optim_state_dict(state, NAME, model, optim_input=[model[0].weight, {"params": []}])
    with pytest.raises(ValueError, match="optim_input has no parameters"):
        rekey_optim_state_dict(state, NAME, model, optim_input=[])
