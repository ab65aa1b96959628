"""Ranks that disagree, states that do not fit: found before anything moves, named, and nothing is changed."""

import copy

import pytest
import torch
import torch.distributed as dist

from farstep.errors import StateError, StateMismatch
from farstep.state import load_optim_state_dict, optim_state_dict
from state.holdings import Net
from state.training import Flat, FlatOriginal, Fsdp2, Plain, bits_of, gradient


def trained():
    model = Net(0)
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = gradient(p.detach())
    optimizer.step()
    return model, optimizer, optim_state_dict(model, optimizer, full=True)


def without(state):
    del state["state"]["scale"]
    state["param_groups"][0]["params"].remove("scale")


def with_more(state):
    state["state"]["tail.weight"] = state["state"]["scale"]


def of_another_shape(state):
    state["state"]["scale"]["exp_avg"] = torch.zeros(2, 3)


def of_another_class(state):
    state["param_groups"][0]["momentum"] = 0.9


def by_numbers(state):
    state["state"] = dict(enumerate(state["state"].values()))


def of_no_kind(state):
    del state["state"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without, r"Missing in the state: scale\."),
        (with_more, r"Unexpected in the state: tail\.weight\."),
        (
            of_another_shape,
            r"'exp_avg' of parameter 'scale' has shape \(2, 3\), which does not fit .* \(2, 3, 5\)",
        ),
        (of_another_class, r"has the options momentum, which Adam does not have"),
        (by_numbers, r"has numbers where parameters' names are wanted"),
        (of_no_kind, r"a dict with the keys 'param_groups', and no state by the names of parameters"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, said):
    model, optimizer, state = trained()
    fresh = torch.optim.Adam(model.parameters())
    for each in (optimizer, fresh):
        before = bits_of(each)
        spoilt = copy.deepcopy(state)
        spoil(spoilt)
        with pytest.raises(StateMismatch, match=said):
            load_optim_state_dict(model, each, spoilt)
        assert bits_of(each) == before


def test_what_fits_is_loaded_if_not_strict():
    model, optimizer, state = trained()
    without(state)
    state["state"]["tail.weight"] = {}
    state["state"]["first.bias"]["exp_avg"].fill_(5)
    kept = copy.deepcopy(optimizer.state[model.scale])
    load_optim_state_dict(model, optimizer, state, strict=False)
    assert (optimizer.state[model.first.bias]["exp_avg"] == 5).all()
    assert torch.equal(optimizer.state[model.scale]["exp_avg"], kept["exp_avg"])


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer, in which the state is."""

    def __init__(self, inner, consolidated=True):
        super().__init__(inner.param_groups, {})
        self._inner, self._consolidated = inner, consolidated

    def state_dict(self):
        if not self._consolidated:
            raise RuntimeError("not consolidated")
        return self._inner.state_dict()


@pytest.mark.parametrize(
    ("consolidated", "said"), [(True, "keeps its state elsewhere"), (False, "RuntimeError: not consolidated")]
)
def test_an_optimizer_whose_state_is_in_another(consolidated, said):
    """torch's ZeroRedundancyOptimizer is one."""
    model, optimizer, state = trained()
    wrapping = Wrapping(optimizer, consolidated)
    with pytest.raises(StateError, match=f"{said}.*give the optimizer that it wraps"):
        optim_state_dict(model, wrapping)
    with pytest.raises(StateError, match="give the optimizer that it wraps"):
        load_optim_state_dict(model, wrapping, state)


def test_an_optimizer_of_another_model():
    model, _, _ = trained()
    stranger = torch.optim.Adam(Net(1).parameters())
    with pytest.raises(
        StateError, match=r"parameter 0 of group 0 of Adam, of shape \(2, 3, 5\), is none of the model's"
    ):
        optim_state_dict(model, stranger)
    with pytest.raises(TypeError, match="a list or dict of optimizers"):
        optim_state_dict(model, 3)


# -- ranks that disagree ----------------------------------------------------------------------------------


def different_states():
    rank = dist.get_rank()
    each = Fsdp2()
    each.train(2)
    name = "inner.0.weight"
    p = each.model.inner[0].weight
    good = dict(each.optimizer.state[p])

    def refused(said, state):
        each.optimizer.state[p] = state
        before = bits_of(each.optimizer)
        with pytest.raises(StateError, match=said):
            optim_state_dict(each.model, each.optimizer, full=True)
        assert bits_of(each.optimizer) == before

    refused(
        rf"'step' of parameter '{name}' is 2.0 \(torch.float32\) on rank 0; 7.0 \(torch.float32\) on rank 1",
        {**good, "step": torch.tensor(7.0 if rank else 2.0)},
    )
    less = {key: value for key, value in good.items() if key != "exp_avg"}
    refused(rf"'exp_avg' of parameter '{name}' is .* on rank 0; absent on rank 1", less if rank else good)
    half = {**good, "exp_avg": good["exp_avg"].bfloat16()}
    refused(
        rf"'exp_avg' of parameter '{name}' is torch.float32 .* rank 0; torch.bfloat16 .* rank 1",
        half if rank else good,
    )
    each.optimizer.state[p] = good
    each.optimizer.param_groups[0]["lr"] = 0.5 + rank
    with pytest.raises(StateError, match=r"'lr' of group 0 is 0.5 on rank 0 and 1.5 on rank 1"):
        optim_state_dict(each.model, each.optimizer)


def test_ranks_with_different_states_are_found_when_reading(two):
    two.run(different_states)


def different_given():
    rank = dist.get_rank()
    each, source = Flat(), Plain()
    source.train(1)
    each.train(2)
    state = optim_state_dict(source.model, source.optimizer, full=True)

    def refused(said, change, **options):
        mine = copy.deepcopy(state)
        if rank == 1:
            mine = change(mine) or mine
        before = bits_of(each.optimizer)
        with pytest.raises(StateMismatch, match=said):
            load_optim_state_dict(each.model, each.optimizer, mine, **options)
        assert bits_of(each.optimizer) == before

    def other_step(state):
        state["state"]["scale"]["step"] = torch.tensor(9.0)

    def no_moment(state):
        del state["state"]["scale"]["exp_avg"]

    def other_dtype(state):
        state["state"]["scale"]["exp_avg"] = state["state"]["scale"]["exp_avg"].double()

    def other_lr(state):
        state["param_groups"][0]["lr"] = 0.7

    refused(r"'step' of parameter 'scale' is 1.0 .* on rank 0; 9.0 .* on rank 1", other_step)
    refused(r"'exp_avg' of parameter 'scale' is .* on rank 0; absent on rank 1", no_moment)
    refused(
        r"'exp_avg' of parameter 'scale' is torch.float32 .* on rank 0; torch.float64 .* on rank 1",
        other_dtype,
    )
    refused(r"'lr' of group 0 differs between rank 0 and rank 1", other_lr)
    refused(r"broadcast_from_rank0=True", lambda _: {"nothing": 0})
    load_optim_state_dict(each.model, each.optimizer, state if rank == 0 else {}, broadcast_from_rank0=True)


def test_ranks_that_were_given_different_states(two):
    two.run(different_given)


def one_rank_fails():
    """What only one rank finds is raised on all."""
    source, each = Plain(), FlatOriginal()
    source.train(1)
    state = optim_state_dict(source.model, source.optimizer, full=True)
    if dist.get_rank() == 1:
        state["state"] = {**state["state"], "scale": 3}
    before = bits_of(each.optimizer)
    said = "the state of parameter 'scale' is a int, and not a dict"
    with pytest.raises(
        StateMismatch, match=said if dist.get_rank() else f"because of rank 1: StateMismatch: {said}"
    ):
        load_optim_state_dict(each.model, each.optimizer, state)
    assert bits_of(each.optimizer) == before


def test_an_error_of_one_rank_is_raised_on_all(two):
    two.run(one_rank_fails)


def test_a_part_that_nobody_has(two):
    with pytest.raises(StateMismatch, match="absent on rank 1"):
        two.run(missing_part)
    two.run(gaps_of_tensors)


def missing_part():
    each = Flat()
    each.train(1)
    state = optim_state_dict(each.model, each.optimizer)
    load_optim_state_dict(each.model, each.optimizer, {**state, "state": {}} if dist.get_rank() else state)


def gaps_of_tensors():
    each = Flat()
    each.train(1)
    state = optim_state_dict(each.model, each.optimizer)
    for values in state["state"].values():
        if dist.get_rank() == 1:
            del values["exp_avg"]
    target = Fsdp2()
    before = bits_of(target.optimizer)
    with pytest.raises(StateError, match=r"no rank of the source has .* of .*exp_avg"):
        load_optim_state_dict(target.model, target.optimizer, state)
    assert bits_of(target.optimizer) == before
