"""What `optim_state_dict` gives, in shards, as a part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state import training
from state.holdings import Net
from state.training import Trained, gradient, reference
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farstep import checkpoint
from farstep.errors import CheckpointMismatch
from farstep.state import RankOwned, Spread, load_optim_state_dict, optim_state_dict

KINDS = {kind.__name__: kind for kind in (training.Ddp, training.Fsdp2, training.Flat)}


def trained(kind: str, steps: int = 2, seed: int = 0) -> Trained:
    made = KINDS[kind](seed=seed)
    made.train(steps)
    return made


def whole_state(each: Trained) -> dict[str, Any]:
    return optim_state_dict(each.model, each.optimizer, full=True)["state"]


def same_state(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        for key, value in values.items():
            torch.testing.assert_close(found[name][key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")


def _saved(folder: str) -> None:
    for kind in KINDS:
        each = trained(kind)
        state = {"model": each.model, "optim": optim_state_dict(each.model, each.optimizer)}
        checkpoint.save(state, f"{folder}/{kind}")


def _loaded(folder: str) -> None:
    parameters, state = reference(3)
    for kind in KINDS:
        path = f"{folder}/{kind}"
        # into the optimizer
        each = trained(kind, 0, seed=1)
        assert not checkpoint.load({"model": each.model, "optim": each.optimizer}, path)
        each.train(1)
        same_state(whole_state(each), state)
        # by hand, after reading
        each = trained(kind, 0, seed=1)
        load_optim_state_dict(each.model, each.optimizer, checkpoint.read(path)["optim"])
        assert not checkpoint.load({"model": each.model}, path)
        each.train(1)
        same_state(whole_state(each), state)
        found = each.whole()
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value)
        # into shards, which are the optimizer's own memory
        each = trained(kind, 1, seed=1)
        shards = optim_state_dict(each.model, each.optimizer)
        assert not checkpoint.load({"model": each.model, "optim": shards}, path)
        assert shards["rank"] == dist.get_rank()
        load_optim_state_dict(each.model, each.optimizer, shards)
        each.train(1)
        same_state(whole_state(each), state)


@pytest.mark.timeout(240)
def test_on_as_many_ranks_and_on_others(two: Ranks, tmp_path: Path) -> None:
    two.run(_saved, str(tmp_path), timeout_s=55)
    two.run(_loaded, str(tmp_path), timeout_s=55)
    model = Net(1)  # in one process
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert not checkpoint.load({"model": model, "optim": optimizer}, tmp_path / "Flat")
    saved = {"model": model, "optim": optim_state_dict(model, optimizer)}
    checkpoint.save(saved, tmp_path / "Plain")
    for p in model.parameters():
        p.grad = gradient(p.detach())
    optimizer.step()
    same_state(optim_state_dict(model, optimizer)["state"], reference(3)[1])
    two.run(_from_one_process, str(tmp_path))


def _from_one_process(folder: str) -> None:
    each = trained("Fsdp2", 0, seed=1)
    assert not checkpoint.load({"model": each.model, "optim": each.optimizer}, f"{folder}/Plain")
    each.train(1)
    same_state(whole_state(each), reference(3)[1])


def _owned_by_each(path: str) -> None:
    """State of another shape than the parameter's, of which each rank has its own."""
    rank = dist.get_rank()
    spread = Spread.whole((3, 2), torch.float32, [0, 1])
    checkpoint.save({"table": RankOwned(spread, {rank: torch.full((3,), float(rank))})}, path)
    into = RankOwned(spread, {rank: torch.zeros(3)})
    found = {"table": into}
    assert not checkpoint.load(found, path)
    assert found["table"] is into
    assert into.tensors[rank].tolist() == [rank] * 3


def test_state_that_belongs_to_each_ranks_part(two: Ranks, tmp_path: Path) -> None:
    two.run(_owned_by_each, str(tmp_path))
    into = RankOwned(Spread.whole((3, 2), torch.float32, [0]), {0: torch.zeros(3)})
    with pytest.raises(CheckpointMismatch, match="'table' belongs to the parts that 2 ranks had"):
        checkpoint.load({"table": into}, tmp_path)
    assert into.tensors[0].tolist() == [0] * 3


def test_a_rank_that_is_a_value_of_its_own_is_kept(tmp_path: Path) -> None:
    checkpoint.save({"rank": 3, "lora": {"rank": 8, "state": 1}}, tmp_path)
    assert checkpoint.read(tmp_path) == {"rank": 3, "lora": {"rank": 8, "state": 1}}


def _is_plain(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optim_state_dict(model, optimizer, group=group)["state"]
    for values in state.values():
        assert all(type(value) is Tensor for value in values.values()), values
    own = optimizer.state[next(model.parameters())]["exp_avg"]
    assert state["weight"]["exp_avg"].data_ptr() == own.data_ptr()  # not a copy


def _is_plain_in_ddp() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    _is_plain(DistributedDataParallel(nn.Linear(3, 2), process_group=group), group)


def test_one_process_has_plain_tensors(two: Ranks) -> None:
    _is_plain(nn.Linear(3, 2))
    two.run(_is_plain_in_ddp)
