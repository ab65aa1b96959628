"""The Report of a load with strict=False: everything that the checkpoint has and the load left out is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from farstep import checkpoint
from farstep.checkpoint import Report
from farstep.errors import CheckpointMismatch


def _made(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, kind(model.parameters(), lr=0.01, **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def _save_with_table(path: Path | str) -> torch.optim.Optimizer:
    model, optimizer = _made()
    _step(model, optimizer)
    optimizer.state[model[0].weight]["table"] = torch.arange(5)
    optimizer.state[model[0].weight]["hits"] = 3
    checkpoint.save({"model": model, "optim": optimizer}, path, no_dist=True)
    return optimizer


def _load(way: str, model: nn.Module, optimizer: Any, path: Path | str, strict: bool = False) -> Report:
    if way == "load_optimizer":
        return checkpoint.load_optimizer(model, optimizer, path, strict=strict)
    return checkpoint.load({"model": model, "optim": optimizer}, path, strict=strict)


@pytest.mark.parametrize("way", ["load", "load_optimizer"])
def test_an_extra_piece_that_a_new_optimizer_does_not_take(tmp_path: Path, way: str) -> None:
    _save_with_table(tmp_path)
    model, optimizer = _made()
    report = _load(way, model, optimizer, tmp_path)
    assert report
    assert report.unexpected == ["optim.state.0.weight.table"]
    assert not report.missing
    assert not report.reshaped
    assert optimizer.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq", "hits"}
    _step(model, optimizer)


@pytest.mark.parametrize("length", [5, 7])
def test_an_extra_piece_that_the_optimizer_has(tmp_path: Path, length: int) -> None:
    """One of the same shape is loaded, as with strict=True; one of another stays as it is."""
    _save_with_table(tmp_path)
    model, optimizer = _made()
    _step(model, optimizer)
    optimizer.state[model[0].weight]["table"] = torch.zeros(length, dtype=torch.int64)
    report = _load("load", model, optimizer, tmp_path)
    table = optimizer.state[model[0].weight]["table"]
    if length == 5:
        assert not report
        assert table.tolist() == [0, 1, 2, 3, 4]
    else:
        assert report.unexpected == ["optim.state.0.weight.table"]
        assert table.tolist() == [0] * 7


def test_state_and_options_of_another_class(tmp_path: Path) -> None:
    model, optimizer = _made()
    _step(model, optimizer)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other, target = _made(torch.optim.SGD, momentum=0.9)
    _step(other, target)
    before = {name: target.state[p]["momentum_buffer"].clone() for name, p in other.named_parameters()}
    report = _load("load", other, target, tmp_path)
    pieces = {f"{n}.{key}" for n, _ in model.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")}
    options = optimizer.param_groups[0].keys() - target.param_groups[0].keys()
    assert "betas" in options
    expected = {f"optim.state.{each}" for each in pieces}
    expected |= {f"optim.param_groups.0.{option}" for option in options}
    assert set(report.unexpected) == expected
    assert len(report.unexpected) == len(expected)
    for name, p in other.named_parameters():
        assert torch.equal(target.state[p]["momentum_buffer"], before[name])


def test_options_that_several_saved_groups_do_not_agree_on(tmp_path: Path) -> None:
    model, _ = _made()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other, target = _made(torch.optim.SGD)
    report = _load("load", other, target, tmp_path)
    assert report.unexpected == ["optim.param_groups.0.lr", "optim.param_groups.1.lr"]
    assert target.param_groups[0]["lr"] == 0.01


def test_parameters_that_the_optimizer_lacks(tmp_path: Path) -> None:
    model, optimizer = _made()
    _step(model, optimizer)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    other, _ = _made()
    target = torch.optim.AdamW(other[0].parameters())
    report = _load("load", other, target, tmp_path)
    assert report.unexpected == ["optim.state.1.bias", "optim.state.1.weight"]


@pytest.mark.parametrize("way", ["load", "load_optimizer"])
def test_what_is_beside_state_and_groups(tmp_path: Path, way: str) -> None:
    """Some classes' state dicts have more keys at their top."""
    model, _ = _made()
    names = [name for name, _ in model.named_parameters()]
    saved = {"state": {}, "param_groups": [{"params": names, "lr": 0.5}], "scale": torch.ones(2)}
    checkpoint.save({"model": model, "optim": saved}, tmp_path)
    other, target = _made(torch.optim.SGD)
    with pytest.raises(CheckpointMismatch, match=r"'optim\.scale'"):
        _load(way, other, target, tmp_path, strict=True)
    assert target.param_groups[0]["lr"] == 0.01
    assert _load(way, other, target, tmp_path).unexpected == ["optim.scale"]
    assert target.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("saved", [5, torch.ones(2)])
def test_a_value_where_the_state_has_a_dict(tmp_path: Path, saved: Any) -> None:
    checkpoint.save({"a": saved}, tmp_path)
    state: dict[str, Any] = {"a": {}}
    with pytest.raises(CheckpointMismatch, match="'a' is a dict in the state"):
        checkpoint.load(state, tmp_path)
    report = checkpoint.load(state, tmp_path, strict=False)
    assert report.reshaped == ["a"]
    assert state == {"a": {}}


def _load_sharded(path: str) -> tuple[list[str], list[str]]:
    model, _ = _made()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    report = checkpoint.load({"model": model, "optim": optimizer}, path, strict=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = checkpoint.load({"model": model, "optim": sgd}, path, strict=False)
    return report.unexpected, sorted(other.unexpected)


def test_every_rank_has_the_same_report(two: Ranks, tmp_path: Path) -> None:
    """Also a rank that holds none of a parameter (the last bias has one element)."""
    _save_with_table(tmp_path)
    first, second = two.run(_load_sharded, str(tmp_path))
    assert first == second
    assert first[0] == ["optim.state.0.weight.table"]
    assert "optim.state.1.bias.exp_avg" in first[1]


def test_a_report_in_words(tmp_path: Path) -> None:
    state: dict[str, Tensor] = {"w": torch.ones(2)}
    checkpoint.save(state, tmp_path)
    assert str(checkpoint.load(state, tmp_path)) == "everything was loaded"
    report = checkpoint.load({"w": torch.ones(2), "b": torch.ones(1)}, tmp_path, strict=False)
    assert str(report) == "missing in the checkpoint: 'b'"
