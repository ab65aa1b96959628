"""What a load puts where: into optimizers with odd states, values of each rank, arrays, numbers, and states that are no dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from checkpoint.states import same
from farstep import checkpoint
from farstep.checkpoint import PerRank
from farstep.errors import CheckpointError, CheckpointMismatch

# -- optimizers -------------------------------------------------------------------------------------------


class Shampoo(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "factors": [torch.randn(n, n) for n in p.shape],
                    "more": {"mean": torch.randn(2), "n": 3},
                    "step": torch.tensor(4.0),
                }


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=3)


def _shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters())


def _stepped(make: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = make(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).cosh().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer, closure


@pytest.mark.parametrize("make", [_lbfgs, _shampoo])
@pytest.mark.parametrize("way", ["with its model", "load_optimizer"])
def test_state_of_lists_and_dicts_of_tensors(tmp_path: Path, make: Any, way: str) -> None:
    model, optimizer, closure = _stepped(make, 0)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other = nn.Linear(4, 3)
    target = make(other)
    checkpoint.load({"model": other}, tmp_path)
    if way == "load_optimizer":
        checkpoint.load_optimizer(other, target, tmp_path)
    else:
        checkpoint.load({"model": other, "optim": target}, tmp_path)
    same(
        [dict(target.state[p]) for p in other.parameters() if p in target.state],
        [dict(optimizer.state[p]) for p in model.parameters() if p in optimizer.state],
    )
    if make is _lbfgs:
        optimizer.step(closure)
        target.step(lambda: _loss(other))
        assert torch.equal(model.weight, other.weight)


def _loss(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = model(torch.ones(2, 4)).cosh().sum()
    loss.backward()
    return loss


def test_an_optimizers_dtypes_are_converted_only_when_asked(tmp_path: Path) -> None:
    model, optimizer, _ = _stepped(lambda m: torch.optim.Adam(m.parameters()), 0)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other = nn.Linear(4, 3).to(torch.bfloat16)
    target = torch.optim.Adam(other.parameters())
    with pytest.raises(
        CheckpointMismatch,
        match=r"torch.float32 in the checkpoint and torch.bfloat16 here.*convert_dtype=True",
    ):
        checkpoint.load_optimizer(other, target, tmp_path)
    assert not target.state
    checkpoint.load_optimizer(other, target, tmp_path, convert_dtype=True)
    assert target.state[other.weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["with its model", "load_optimizer"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_new_head_and_the_old_rest(tmp_path: Path, way: str, outputs: int) -> None:
    """As fine-tuning does: with strict=False the state of parameters of other shapes stays, and all else is loaded."""

    def made(outputs: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs))
        optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(outputs)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other, target = made(5)
    before = {key: value.clone() for key, value in target.state[other[1].weight].items()}
    state = {"model": other, "optim": target}
    if way == "load_optimizer":
        report = checkpoint.load_optimizer(other, target, tmp_path, strict=False)
    else:
        with pytest.raises(CheckpointMismatch):
            checkpoint.load(state, tmp_path)
        report = checkpoint.load(state, tmp_path, strict=False)
        assert torch.equal(other[0].weight, model[0].weight)
    assert {"optim.state.1.weight", "optim.state.1.bias"} <= set(report.reshaped)
    assert not report.missing
    assert f"({outputs}, 4) in the checkpoint" in report.differences["optim.state.1.weight"]
    same(dict(target.state[other[0].weight]), dict(optimizer.state[model[0].weight]))
    same(dict(target.state[other[1].weight]), before)


@pytest.mark.parametrize("places", [("train", "eval"), ("a.b", "a_b"), ("keys", "half"), ("~", "x~1y")])
def test_one_optimizer_over_models_of_any_names(tmp_path: Path, places: tuple[str, str]) -> None:
    def made(seed: int) -> tuple[dict[str, Any], torch.optim.Optimizer, list[Tensor]]:
        torch.manual_seed(seed)
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        params = [p for each in models for p in each.parameters()]
        optimizer = torch.optim.Adam(params)
        sum(each(torch.randn(3, 2)).sum() for each in models).backward()  # type: ignore[union-attr]
        optimizer.step()
        state: dict[str, Any] = {"optim": optimizer}
        for place, model in zip(places, models, strict=True):
            at = state
            *heads, last = place.split(".")
            for head in heads:
                at = at.setdefault(head, {})
            at[last] = model
        return state, optimizer, params

    state, optimizer, params = made(0)
    checkpoint.save(state, tmp_path)
    other, target, theirs = made(1)
    checkpoint.load(other, tmp_path)
    same([target.state[p]["exp_avg"] for p in theirs], [optimizer.state[p]["exp_avg"] for p in params])


def test_an_optimizer_over_two_models_goes_along_when_they_are_renamed(tmp_path: Path) -> None:
    def made(one: str, other: str) -> dict[str, Any]:
        models = {one: nn.Linear(2, 2), other: nn.Linear(2, 2)}
        optimizer = torch.optim.Adam([p for each in models.values() for p in each.parameters()])
        sum(each(torch.randn(3, 2)).sum() for each in models.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return {**models, "optim": optimizer}

    old, new = made("train", "critic"), made("actor", "eval")
    checkpoint.save(old, tmp_path)
    checkpoint.load(new, tmp_path, rename={"train": "actor", "critic": "eval"})
    for one, other in (("train", "actor"), ("critic", "eval")):
        same(dict(new["optim"].state[new[other].weight]), dict(old["optim"].state[old[one].weight]))


# -- what each rank has for itself ------------------------------------------------------------------------


class Loader:
    def __init__(self, at: int = 0) -> None:
        self.at, self.order = at, np.arange(at, at + 3)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["at"] < 0:
            raise KeyError("at")
        self.at, self.order = state["at"], state["order"]


def test_objects_of_each_rank_are_given_their_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save({"data": PerRank(Loader(5)), "own": PerRank({"m": model, "n": [1, 2]})}, tmp_path)
    loader, other = Loader(), nn.Linear(2, 2)
    state = {"data": PerRank(loader), "own": PerRank({"m": other, "n": [0, 0]})}
    assert not checkpoint.load(state, tmp_path)
    assert state["data"].value is loader
    assert loader.at == 5
    assert isinstance(loader.order, np.ndarray)
    assert loader.order.tolist() == [5, 6, 7]
    assert torch.equal(other.weight, model.weight)
    assert state["own"].value["n"] == [1, 2]


def test_what_each_rank_has_is_to_fit_too(tmp_path: Path) -> None:
    checkpoint.save({"rng": PerRank(torch.arange(3.0))}, tmp_path)
    for wrong, what in (
        (torch.zeros(7), r"'rng' is \(7,\) in the state and \(3,\) in the checkpoint"),
        (torch.zeros(3, dtype=torch.int8), r"'rng' is torch.int8 in the state and torch.float32"),
    ):
        state = {"rng": PerRank(wrong)}
        with pytest.raises(CheckpointMismatch, match=what):
            checkpoint.load(state, tmp_path)
        assert state["rng"].value is wrong
    anything = {"rng": PerRank(None)}
    checkpoint.load(anything, tmp_path)
    same(anything["rng"].value, torch.arange(3.0))
    tensor = torch.zeros(3)
    checkpoint.load({"rng": PerRank(tensor)}, tmp_path)
    same(tensor, torch.arange(3.0))


# -- values -----------------------------------------------------------------------------------------------


def test_arrays_are_filled_in_place(tmp_path: Path) -> None:
    saved = {"a": np.arange(6.0).reshape(2, 3), "fixed": np.arange(3), "turned": np.arange(4)}
    checkpoint.save(saved, tmp_path)
    array, fixed, turned = np.zeros((2, 3)), np.zeros(3, dtype=np.int64), np.zeros(8, dtype=np.int64)[::2]
    fixed.flags.writeable = False
    state: dict[str, Any] = {"a": array, "fixed": fixed, "turned": turned}
    checkpoint.load(state, tmp_path)
    assert state["a"] is array
    assert array.tolist() == saved["a"].tolist()
    assert state["turned"] is turned
    assert turned.tolist() == [0, 1, 2, 3]
    assert isinstance(state["fixed"], np.ndarray)
    assert (state["fixed"].tolist(), fixed.tolist()) == ([0, 1, 2], [0, 0, 0])
    with pytest.raises(CheckpointMismatch, match=r"'a' is \(2,\) in the state and \(2, 3\)"):
        checkpoint.load({"a": np.zeros(2)}, tmp_path)


@pytest.mark.parametrize(
    ("number", "dtype"), [(0.7, torch.int64), (300, torch.uint8), (2, torch.bool), (1e9, torch.float16)]
)
def test_a_number_becomes_no_other_in_a_tensor(tmp_path: Path, number: float, dtype: torch.dtype) -> None:
    checkpoint.save({"first": 1, "n": number}, tmp_path)
    state = {"first": 0, "n": torch.zeros((), dtype=dtype)}
    with pytest.raises(CheckpointMismatch, match=rf"'n' is {dtype} in the state and {number!r}"):
        checkpoint.load(state, tmp_path)
    assert state["first"] == 0
    if number in (300, 1e9):  # which it cannot have at all
        with pytest.raises(CheckpointMismatch, match="numbers do not fit: 'n'"):
            checkpoint.load(state, tmp_path, convert_dtype=True)


def test_a_number_into_a_tensor(tmp_path: Path) -> None:
    checkpoint.save({"lr": 0.1, "n": 3, "half": 0.5}, tmp_path)
    state = {"lr": torch.tensor(0.0), "n": torch.tensor(0.0), "half": torch.tensor(0)}
    checkpoint.load(state, tmp_path, convert_dtype=True)
    assert (state["lr"], state["n"], state["half"]) == (torch.tensor(0.1), 3, 0)


class Pair(NamedTuple):
    one: Any
    other: Any


def test_numbers_that_were_tensors(tmp_path: Path) -> None:
    numbers = (torch.tensor(2.0), torch.tensor(3))
    checkpoint.save({"t": numbers, "p": numbers, "r": PerRank(numbers)}, tmp_path)
    state = {"t": (0.0, 0), "p": Pair(0.0, 0), "r": PerRank((0.0, 0))}
    checkpoint.load(state, tmp_path)
    assert state == {"t": (2.0, 3), "p": Pair(2.0, 3), "r": PerRank((2.0, 3))}


@pytest.mark.parametrize("kind", [list, tuple])
def test_states_that_are_no_dict(tmp_path: Path, kind: Any) -> None:
    checkpoint.save(kind([torch.ones(2), nn.Linear(2, 2), {"n": 3}]), tmp_path)
    state = kind([torch.zeros(2), nn.Linear(2, 2), {"n": 0}])
    checkpoint.load(state, tmp_path)
    assert (state[0].tolist(), state[2]) == ([1, 1], {"n": 3})


def test_a_state_that_is_a_tensor_or_cannot_be_changed(tmp_path: Path) -> None:
    checkpoint.save(torch.ones(2), tmp_path / "tensor")
    tensor = torch.zeros(2)
    checkpoint.load(tensor, tmp_path / "tensor")
    assert tensor.tolist() == [1, 1]
    checkpoint.save((1, 2), tmp_path / "tuple")
    with pytest.raises(CheckpointMismatch, match="a tuple cannot be loaded into"):
        checkpoint.load((0, 0), tmp_path / "tuple")
    numbers = [0, 0]
    checkpoint.save([1, 2], tmp_path / "list")
    checkpoint.load(numbers, tmp_path / "list")
    assert numbers == [1, 2]
    with pytest.raises(CheckpointError, match="at the top"):
        checkpoint.save({"": 1}, tmp_path / "empty")


def test_an_object_that_does_not_take_its_state(tmp_path: Path) -> None:
    checkpoint.save({"data": Loader(-1)}, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"load_state_dict of 'data', a Loader, raised KeyError.*Load again"
    ):
        checkpoint.load({"data": Loader()}, tmp_path)


# -- tied weights -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def test_a_tied_weight_that_is_stored_under_one_name(tmp_path: Path) -> None:
    stored = torch.randn(5, 3)
    safetensors.torch.save_file({"embed.weight": stored}, tmp_path / "model.safetensors")
    model = Tied()
    assert not checkpoint.load(model, tmp_path)
    assert torch.equal(model.head.weight, stored)
    with pytest.raises(CheckpointMismatch, match=r"no 'head\.weight'"):
        checkpoint.load(Tied(False), tmp_path)


def test_one_memory_takes_no_two_contents(tmp_path: Path) -> None:
    one, other = torch.randn(5, 3), torch.randn(5, 3)
    checkpoint.save({"m": {"embed.weight": one, "head.weight": one.clone()}}, tmp_path / "alike")
    checkpoint.save({"m": {"embed.weight": one, "head.weight": other}}, tmp_path / "differ")
    model = Tied()
    checkpoint.load({"m": model}, tmp_path / "alike")
    assert torch.equal(model.embed.weight, one)
    for strict in (True, False):
        with pytest.raises(
            CheckpointMismatch, match=r"'m\.embed\.weight' and 'm\.head\.weight' are one memory"
        ):
            checkpoint.load({"m": model}, tmp_path / "differ", strict)
    assert torch.equal(model.embed.weight, one)
    checkpoint.load({"m": model}, tmp_path / "differ", rename={"m.embed.weight": "unused"})
    assert torch.equal(model.embed.weight, other)


# -- names and messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_a_prefix_for_all_names(tmp_path: Path, kind: str) -> None:
    stored = nn.Linear(2, 2)
    safetensors.torch.save_file(dict(stored.state_dict()), tmp_path / "model.safetensors")
    model = nn.Linear(2, 2)
    checkpoint.load(
        {"model": model if kind == "module" else model.state_dict()}, tmp_path, rename={"": "model"}
    )
    assert torch.equal(model.weight, stored.weight)


def test_a_prefix_goes_for_the_optimizer_too(tmp_path: Path) -> None:
    model, optimizer, _ = _stepped(lambda m: torch.optim.Adam(m.parameters()), 0)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path / "nested")
    found = checkpoint.read(tmp_path / "nested")
    checkpoint.save({**found["model"], "optim": found["optim"]}, tmp_path / "flat")
    other = nn.Linear(4, 3)
    target = torch.optim.Adam(other.parameters())
    checkpoint.load({"net": other, "optim": target}, tmp_path / "flat", rename={"": "net", "optim": "optim"})
    assert torch.equal(other.weight, model.weight)
    same(dict(target.state[other.weight]), dict(optimizer.state[model.weight]))


@pytest.mark.parametrize(
    ("rename", "what"),
    [(lambda name: {}[name], "rename= raised KeyError.*for 'a'"), (lambda name: None, "gave None for 'a'")],
)
def test_a_function_that_renames_badly(tmp_path: Path, rename: Any, what: str) -> None:
    checkpoint.save({"a": 1}, tmp_path)
    with pytest.raises(CheckpointError, match=what):
        checkpoint.load({"a": 0}, tmp_path, rename=rename)


def test_messages_stay_short(tmp_path: Path) -> None:
    checkpoint.save({f"t{i}": torch.zeros(2) for i in range(1000)}, tmp_path)
    for wrong, what in (
        (
            torch.zeros(2, dtype=torch.int8),
            r"dtypes differ: 't0' is torch.int8.*and 990 more \(convert_dtype",
        ),
        (
            torch.zeros(3),
            r"shapes differ: 't0' is \(3,\) in the state and \(2,\) in the checkpoint.*and 990 more",
        ),
    ):
        with pytest.raises(CheckpointMismatch, match=what) as caught:
            checkpoint.load({f"t{i}": wrong.clone() for i in range(1000)}, tmp_path)
        assert len(str(caught.value)) < 2000
    report = checkpoint.load({f"t{i}": torch.zeros(3) for i in range(1000)}, tmp_path, strict=False)
    assert report.differences["t7"] == "is (3,) in the state and (2,) in the checkpoint"
    assert "'t0' is (3,) in the state" in str(report)
    assert len(str(report)) < 2000
