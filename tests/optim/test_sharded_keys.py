"""Which pieces of state and which names a load takes: those that the class knows, by the names that the state has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from farstep.errors import StateMismatch
from farstep.optim import NamedOptimizer, ShardedOptimizer, rekey
from optim.replicas import Scaled, assert_same_state, give_mean


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def seven() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"a": nn.Parameter(torch.randn(7)), "b": nn.Parameter(torch.randn(300))}


def adam(*, steps: int = 0) -> ShardedOptimizer:
    optimizer = ShardedOptimizer(seven(), torch.optim.Adam, lr=0.1)
    for _ in range(steps):
        for p in optimizer.named_params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


SGD_STATE = {
    "state": {"a": {"momentum_buffer": torch.ones(7)}, "b": {"momentum_buffer": torch.ones(300)}},
    "param_groups": [{"lr": 0.5, "momentum": 0.9, "params": ["a", "b"]}],
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"exp_avg_sq": ...}, "the state of parameter 'a' lacks 'exp_avg_sq'"),
    "none": ({"exp_avg": None}, "the state 'exp_avg' of parameter 'a' is None"),
    "number": ({"exp_avg": 0.5}, "the state 'exp_avg' of parameter 'a' is 0.5"),
    # A piece that another of torch's classes has; names that none has are the user's own, and load.
    "unknown": (
        {"momentum_buffer": torch.ones(7)},
        "the state of parameter 'a' has unexpected 'momentum_buffer'",
    ),
    "steps": ({"step": torch.ones(7)}, r"the state 'step' of parameter 'a' has shape \(7,\)"),
    "no step": ({"step": None}, "the state 'step' of parameter 'a' is None"),
}


def changed(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    new = {**state["state"]["a"], **change}
    return {
        **state,
        "state": {**state["state"], "a": {k: v for k, v in new.items() if v is not ...}},
    }


def refuses_wrong_pieces() -> None:
    good = adam(steps=2).state_dict(full=True)
    for optimizer in (adam(), adam(steps=1)):
        before = optimizer.state_dict(full=True)
        for change, words in WRONG.values():
            with pytest.raises(StateMismatch, match=f"{words}.*nothing has been loaded"):
                optimizer.load_state_dict(changed(good, change))
        with pytest.raises(StateMismatch, match="'a' lacks 'exp_avg'"):
            optimizer.load_state_dict(SGD_STATE, strict=False)
        after = optimizer.state_dict(full=True)
        assert after["param_groups"] == before["param_groups"]
        for name, state in before["state"].items():
            assert all(torch.equal(after["state"][name][key], value) for key, value in state.items())
    # Not strictly, what the class does not know is left out.
    optimizer.load_state_dict(changed(good, WRONG["unknown"][0]), strict=False)
    assert sorted(optimizer.state_dict(full=True)["state"]["a"]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_sharded_optimizer_refuses_pieces_by_name(two: Ranks) -> None:
    two.run(refuses_wrong_pieces)


def test_so_it_does_in_one_process() -> None:
    refuses_wrong_pieces()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("case", WRONG)
def test_a_named_optimizer_refuses_them_too(case: str, steps: int) -> None:
    good = adam(steps=2).state_dict(full=True)
    parameters = seven()
    optimizer = NamedOptimizer(parameters, torch.optim.Adam, lr=0.1)
    for _ in range(steps):
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    change, words = WRONG[case]
    with pytest.raises(StateMismatch, match=f"{words}.*nothing has been loaded"):
        optimizer.load_state_dict(changed(good, change))


def test_what_torch_itself_saves_without_a_value() -> None:
    """SGD's momentum before it has any, as older versions saved it."""
    state = {
        "state": {name: {"momentum_buffer": None} for name in seven()},
        "param_groups": [{"lr": 0.5, "momentum": 0.9, "params": ["a", "b"]}],
    }
    for kind in (ShardedOptimizer, NamedOptimizer):
        optimizer = kind(seven(), torch.optim.SGD, lr=0.1)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()


def names_of_an_ordinary_state() -> None:
    model, twin = Scaled(), Scaled()
    plain = torch.optim.AdamW(twin.named_parameters(), lr=0.05)
    give_mean(twin, 0, 1)
    plain.step()
    sharded = ShardedOptimizer(dict(reversed(list(model.named_parameters()))), torch.optim.AdamW)
    sharded.load_state_dict(plain.state_dict())
    assert sharded.param_groups[0]["lr"] == 0.05
    assert_same_state(sharded.state_dict(full=True), plain, twin)
    numbers = torch.optim.AdamW(twin.parameters()).state_dict()
    with pytest.raises(StateMismatch, match=r"farstep.optim.rekey\(state_dict, names\)"):
        sharded.load_state_dict(numbers)
    sharded.load_state_dict(rekey(numbers, twin.named_parameters()))
    assert dist.get_world_size() == 2
    assert not sharded.state


def test_a_sharded_optimizer_takes_the_names_that_an_ordinary_state_has(two: Ranks) -> None:
    two.run(names_of_an_ordinary_state)
