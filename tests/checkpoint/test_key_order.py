"""Ranks that have built their dicts in different orders, with objects that communicate while they are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn

from farstep import checkpoint
from farstep.checkpoint import CheckpointManager


class Talking:
    """Sums its number over all ranks whenever it is asked or told. Of two that are called crosswise neither gets its own sum."""

    def __init__(self, number: int) -> None:
        self.number, self.sums = number, []

    def _sum(self) -> None:
        total = torch.tensor(self.number)
        dist.all_reduce(total)
        self.sums.append(int(total))

    def state_dict(self) -> dict[str, int]:
        self._sum()
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        self._sum()


class Model(nn.Linear):
    """Communicates in its own `state_dict`, and in `load_state_dict`, which gets what is no parameter."""

    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.talking = Talking(number)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), **self.talking.state_dict()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.talking.load_state_dict({"number": state["number"]})


def turned(state: dict[str, Any]) -> dict[str, Any]:
    """In another order on every other rank, at all depths."""
    items = [(key, turned(value) if isinstance(value, dict) else value) for key, value in state.items()]
    return dict(reversed(items) if dist.get_rank() % 2 else items)


def objects(factor: int) -> tuple[list[Talking], dict[str, Any]]:
    """Numbers that differ, so that a sum tells who took part."""
    talking = [Talking(factor * 10**i) for i in range(5)]
    model = Model(factor * 10**5)
    tied = torch.ones(2)
    state = turned(
        {
            "B": talking[0],
            "A": talking[1],
            "step": 5,
            "nested": {"y": talking[2], "x": {"z": talking[3]}, "list": [talking[4], 1]},
            "model": model,
            "shared": {"tensor": tied},
            "again": {"tensor": tied},
        }
    )
    return [*talking, model.talking], state


def check(talking: list[Talking], factor: int) -> None:
    ranks = dist.get_world_size()
    for i, each in enumerate(talking):
        assert each.number == factor * 10**i
        assert set(each.sums[-1:]) == {ranks * factor * 10**i}, (i, each.sums)


def _act(path: str) -> None:
    manager = CheckpointManager(f"{path}/steps")
    for save in (
        lambda state: checkpoint.save(state, f"{path}/saved"),
        lambda state: checkpoint.async_save(state, f"{path}/behind").wait(),
        lambda state: manager.save(state, 1),
        lambda state: manager.async_save(state, 2).wait(),
    ):
        talking, state = objects(3)
        save(state)
        check(talking, 3)
    for load in (
        lambda state: checkpoint.load(state, f"{path}/saved"),
        lambda state: checkpoint.load(state, f"{path}/behind"),
        lambda state: manager.resume(state).report,
    ):
        talking, state = objects(0)
        assert not load(state)
        check(talking, 3)


def test_objects_are_called_in_one_order(two: Ranks, tmp_path: Path) -> None:
    two.run(_act, str(tmp_path))
    state = checkpoint.read(tmp_path / "saved")
    assert list(state) == ["B", "A", "step", "nested", "model", "shared", "again"]  # as the first rank has it
    assert list(state["nested"]) == ["y", "x", "list"]


def _some_have_more(path: str) -> None:
    """What only some ranks have goes between what all have."""
    rank = dist.get_rank()
    talking = [Talking(1), Talking(10)]
    state = turned({"c": talking[0], "a": talking[1], f"b{rank}": {"rank": rank}, f"d{rank}": torch.ones(2)})
    checkpoint.save(state, path)
    check(talking, 1)
    assert not checkpoint.load(turned({"c": talking[0], "a": talking[1]}), path)
    check(talking, 1)


def test_ranks_with_keys_of_their_own(two: Ranks, tmp_path: Path) -> None:
    two.run(_some_have_more, str(tmp_path))
