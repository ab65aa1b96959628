"""Loads by several ranks: on more of them than saved, and where they do not do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from farstep import checkpoint
from farstep.checkpoint import CheckpointManager, PerRank
from farstep.errors import CheckpointError, NoCheckpoint


class Loader:
    def __init__(self, at: int, fails: bool = False) -> None:
        self.at, self.fails = at, fails

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("not this one")
        self.at = state["at"]


def _save(path: str) -> None:
    rank = dist.get_rank()
    own = torch.full((3,), float(rank))
    state = {"w": torch.ones(4), "rng": PerRank(own), "data": PerRank(Loader(10 + rank)), "n": PerRank(rank)}
    CheckpointManager(path).save(state, 1)


def _resume(path: str) -> tuple[Any, ...]:
    rng, loader = torch.full((3,), -1.0), Loader(-1)
    state = {"w": torch.zeros(4), "rng": PerRank(rng), "data": PerRank(loader), "n": PerRank(-1)}
    found = CheckpointManager(path).resume(state)
    assert found == 1
    assert found is not None
    assert state["w"].tolist() == [1] * 4
    plain = {"n": -1}
    assert checkpoint.load(plain, f"{path}/step_000000001").unsaved == (["n"] if state["n"].value < 0 else [])
    return rng[0].item(), loader.at, state["n"].value, plain["n"], found.report.unsaved, bool(found.report)


def test_more_ranks_than_have_saved(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """What a new rank has for itself stays; that is told, and is no mismatch."""
    two.run(_save, str(tmp_path))
    told = ["data", "n", "rng"]
    assert four.run(_resume, str(tmp_path)) == [
        (0.0, 10, 0, 0, [], False),
        (1.0, 11, 1, 1, [], False),
        (-1.0, -1, -1, -1, told, True),
        (-1.0, -1, -1, -1, told, True),
    ]


def _one_object_refuses(path: str) -> None:
    checkpoint.save({"data": Loader(5)}, path)
    with pytest.raises(CheckpointError, match="not this one"):
        checkpoint.load({"data": Loader(0, dist.get_rank() == 1)}, path)


def test_an_object_that_refuses_its_state_on_one_rank(two: Ranks, tmp_path: Path) -> None:
    two.run(_one_object_refuses, str(tmp_path))


def _different_arguments(path: str) -> None:
    first = dist.get_rank() == 0
    checkpoint.save({"a": torch.ones(2), "b": torch.ones(2)}, path)
    for options in (
        {"rename": {"a": "x"} if first else {"b": "x"}},
        {"rename": (lambda name: name.replace("a" if first else "b", "x"))},
        {"strict": first},
        {"convert_dtype": first},
        {"verify": first},
    ):
        state = {"x": torch.zeros(2)} if "rename" in options else {"a": torch.zeros(2)}
        with pytest.raises(CheckpointError, match="the ranks have given different arguments"):
            checkpoint.load(state, path, **options)  # type: ignore[arg-type]
        assert not any(each.any() for each in state.values())
    same = {"x": torch.zeros(2)}
    checkpoint.load(same, path, rename=lambda name: name.replace("a", "x"))
    assert same["x"].tolist() == [1, 1]


def test_ranks_that_load_differently(two: Ranks, tmp_path: Path) -> None:
    two.run(_different_arguments, str(tmp_path))


def _save_and_load(path: str) -> tuple[str, bool]:
    act = checkpoint.load if dist.get_rank() == 1 else checkpoint.save
    with pytest.raises(CheckpointError) as caught:
        act({"w": torch.ones(2)}, path)
    found = str(caught.value), isinstance(caught.value, NoCheckpoint | FileNotFoundError)
    checkpoint.save({"w": torch.ones(2)}, path)  # the group can still be used
    return found


def test_a_rank_that_loads_while_another_saves(two: Ranks, tmp_path: Path) -> None:
    """None of them takes it for a checkpoint that is not there yet, and starts afresh."""
    path = tmp_path / "new"
    expected = (
        f"rank 1 called checkpoint.load (loading from {path}) while rank 0 called checkpoint.save "
        f"(saving into {path})"
    )
    for message, starts_afresh in two.run(_save_and_load, str(path)):
        assert expected in message
        assert not starts_afresh
