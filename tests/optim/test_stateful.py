"""Objects with state_dict and load_state_dict inside an optimizer's state: TorchRec's stateful protocol."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from farstep import checkpoint
from farstep.errors import StateMismatch
from farstep.fsdp import optim_state_dict_to_load
from farstep.optim import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, NamedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict


class Average:
    """A running average that saves and loads itself."""

    def __init__(self, like: torch.Tensor) -> None:
        self.total, self.count = torch.zeros_like(like), 0

    def add(self, value: torch.Tensor) -> torch.Tensor:
        self.total, self.count = self.total + value, self.count + 1
        return self.total / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["total"].shape != self.total.shape:
            raise ValueError("a total of another shape")
        self.total, self.count = state["total"], state["count"]


class Averaged(optim.Optimizer):
    """Steps by averages of the gradients, which are objects in its state: one by itself, others in a dict and a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"] = 0
                    state["average"] = Average(p)
                    state["more"] = {"square": Average(p), "scale": 0.5}
                    state["list"] = [Average(p)]
                state["steps"] += 1
                update = state["average"].add(p.grad) + state["list"][0].add(p.grad.abs())
                root = state["more"]["square"].add(p.grad.square()).sqrt() + 1
                p -= group["lr"] * state["more"]["scale"] * update / root


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for i in range(first, first + steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def named(model: nn.Module) -> Any:
    return NamedOptimizer(model.named_parameters(), Averaged)


def wrapper(model: nn.Module) -> Any:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), Averaged)


def combined(model: nn.Module) -> Any:
    first, second = model.children()
    return CombinedOptimizer(
        [
            ("0", NamedOptimizer(first.named_parameters(), Averaged)),
            ("1", NamedOptimizer(second.named_parameters(), Averaged)),
        ]
    )


class Keyed(KeyedOptimizer):
    """A subclass with a step of its own, over state that it was given."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = Averaged(model.parameters())
        super().__init__(dict(model.named_parameters()), self.inner.state, self.inner.param_groups)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


MAKERS = [named, wrapper, combined, Keyed]


def objects(optimizer: Any) -> list[Any]:
    return [
        each
        for state in optimizer.state.values()
        for each in (state["average"], state["more"]["square"], state["list"][0])
    ]


def unbroken() -> nn.Module:
    model = net()
    train(model, Averaged(model.parameters()), 4)
    return model


def goes_on(model: nn.Module, optimizer: Any) -> None:
    """Trained on from step 2 to 4, as if never interrupted."""
    train(model, optimizer, 2, first=2)
    for found, wanted in zip(model.parameters(), unbroken().parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("make", MAKERS)
def test_they_are_saved_as_their_state_dicts_and_loaded_by_themselves(make):
    model = net()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    one = optimizer.state[model[0].weight]
    assert saved["state"]["0.weight"] == {
        "steps": 2,
        "average": {"total": one["average"].total, "count": 2},
        "more": {"square": {"total": one["more"]["square"].total, "count": 2}, "scale": 0.5},
        "list": [{"total": one["list"][0].total, "count": 2}],
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)  # no class of ours in it

    other = net()
    new = make(other)
    train(other, new, 1, first=9)
    other.load_state_dict(model.state_dict())
    before = objects(new)
    new.load_state_dict(read)
    assert all(a is b for a, b in zip(objects(new), before, strict=True))
    goes_on(other, new)
    assert read["state"]["0.weight"]["average"]["count"] == 2  # what was given is left alone

    if make is Keyed:
        return  # its state is another object's, so nobody can foresee what a step puts there
    other = net()
    new = make(other)  # without a step, so that it has no objects yet
    other.load_state_dict(model.state_dict())
    new.load_state_dict(read)
    goes_on(other, new)


@pytest.mark.parametrize("make", MAKERS)
def test_what_an_object_refuses_changes_nothing(make):
    model = net()
    optimizer = make(model)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    for change, match in (
        (lambda state: state["average"].update(total=torch.ones(7)), "'average'.*1.bias.*another shape"),
        (lambda state: state["more"].pop("square"), "'more'.*1.bias.*other entries"),
        (lambda state: state.update(list=3), "'list'.*1.bias.*a int"),
    ):
        saved = copy.deepcopy(before)
        saved["state"]["0.weight"]["average"]["count"] = 99
        change(saved["state"]["1.bias"])
        # A part of several calls the parameter by its own name.
        with pytest.raises(StateMismatch, match=match.replace("1.bias", "bias")):
            optimizer.load_state_dict(saved)
        assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("make", [*MAKERS, lambda model: Averaged(model.parameters())])
def test_by_names_and_through_checkpoints(make, tmp_path):
    model = net()
    optimizer = make(model)
    train(model, optimizer, 2)
    state = optim_state_dict(model, optimizer, full=True)
    assert state["state"]["0.bias"]["average"]["count"] == 2
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path / "both")
    if make is not Keyed:
        fresh = net()
        without_state = make(fresh)
        checkpoint.load({"model": fresh, "optim": without_state}, tmp_path / "both")
        goes_on(fresh, without_state)

    def trained_otherwise() -> tuple[nn.Module, Any]:
        other = net()
        new = make(other)
        train(other, new, 1, first=9)
        return other, new

    other, new = trained_otherwise()
    before = objects(new)
    checkpoint.load({"model": other, "optim": new}, tmp_path / "both")
    assert all(a is b for a, b in zip(objects(new), before, strict=True))
    goes_on(other, new)

    other, new = trained_otherwise()
    other.load_state_dict(model.state_dict())
    before = objects(new)
    load_optim_state_dict(other, new, state)
    assert all(a is b for a, b in zip(objects(new), before, strict=True))
    goes_on(other, new)


@pytest.mark.parametrize("make", MAKERS)
def test_a_checkpoint_of_the_optimizer_alone(make, tmp_path):
    model = net()
    optimizer = make(model)
    train(model, optimizer, 2)
    checkpoint.save({"optim": optimizer}, tmp_path / "alone")
    other = net()
    new = make(other)
    train(other, new, 1, first=9)
    other.load_state_dict(model.state_dict())
    checkpoint.load({"optim": new}, tmp_path / "alone")
    goes_on(other, new)


def test_a_state_to_load_later_leaves_the_objects_alone():
    model = net()
    optimizer = Averaged(model.parameters())
    train(model, optimizer, 2)
    state = optim_state_dict(model, optimizer, full=True)
    other = net()
    new = Averaged(other.parameters())
    train(other, new, 1, first=9)
    other.load_state_dict(model.state_dict())
    ready = optim_state_dict_to_load(other, new, state)
    assert {each.count for each in objects(new)} == {1}
    new.load_state_dict(ready)
    goes_on(other, new)


def on_two_ranks(folder: str) -> None:
    model = DistributedDataParallel(net())
    optimizer = NamedOptimizer(model.named_parameters(), Averaged)
    train(model, optimizer, 2)
    checkpoint.save({"model": model, "optim": optimizer}, folder)
    other = DistributedDataParallel(net())
    new = NamedOptimizer(other.named_parameters(), Averaged)
    train(other, new, 1, first=9)
    before = objects(new)
    checkpoint.load({"model": other, "optim": new}, folder)
    assert all(a is b for a, b in zip(objects(new), before, strict=True))
    goes_on(other, new)


def test_replicas_save_and_load_them_together(tmp_path):
    with Ranks(2) as ranks:
        ranks.run(on_two_ranks, str(tmp_path / "saved"))


class Uncopied(Average):
    """One that cannot be tried on a copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it cannot be copied")


def test_an_object_that_cannot_be_tried_and_fails_is_named():
    model = net()
    optimizer = Averaged(model.parameters())
    train(model, optimizer, 2)
    saved = optim_state_dict(model, optimizer)
    optimizer.state[model[1].bias]["average"] = Uncopied(torch.zeros(7))
    with pytest.raises(StateMismatch, match=r"'average'.*1\.bias.*another shape.*load again before use"):
        load_optim_state_dict(model, optimizer, saved)
