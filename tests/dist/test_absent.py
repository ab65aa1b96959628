"""A rank that stays away, dies, stops or calls something else is named by the others, soon; one that is slow is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.ranks import Ranks
from support.workers import eventually

from dist import acts
from farstep.checkpoint import read
from farstep.errors import CheckpointError, ExchangeError, OptimError, RankLost

OPERATIONS = {
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    "load_optimizer": "checkpoint.load_optimizer",
    "async_save": "checkpoint.async_save",
    "manager_save": "CheckpointManager.save",
    "manager_async_save": "CheckpointManager.async_save",
    "manager_resume": "CheckpointManager.resume",
    "optim_state_dict": "optim_state_dict",
    "load_optim_state_dict": "load_optim_state_dict",
    "fsdp_full": "full_optim_state_dict",
    "fsdp_scatter": "scatter_full_optim_state_dict",
    "fsdp_to_load": "optim_state_dict_to_load",
    "sharded_optimizer": "ShardedOptimizer",
    "step": "ShardedOptimizer.step",
    "step_by_messages": "ShardedOptimizer.step",
    "clip": "ShardedOptimizer.clip_grad_norm_",
    "state_dict": "ShardedOptimizer.state_dict",
    "load_state_dict": "ShardedOptimizer.load_state_dict",
    "combined_step": "CombinedOptimizer.step",
    "combined_load": "load_state_dict",
    "respread": "respread",
    "respread_unchecked": "respread",
    "exchange": "exchange",
}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Ranks 1, 2 and 3 of these are a group for each case, so that ranks within it have other numbers."""
    with Ranks(4, timeout_s=1800) as ranks:
        yield ranks


def test_all_operations_are_tried() -> None:
    assert OPERATIONS.keys() == acts.ACTS.keys()


def test_a_rank_that_stays_away_is_named(four: Ranks, tmp_path: Path) -> None:
    """From every operation, each in a group of its own, at the same time."""
    four.run(acts.set_deadline, 60)
    for act in OPERATIONS:
        four.run(acts.prepare, act, [1, 2, 3], str(tmp_path / act))
    four.run(acts.set_deadline, 4)
    pending = {(rank, act): four.workers[rank].start(acts.run, act) for act in OPERATIONS for rank in (1, 3)}
    for (rank, act), each in pending.items():
        error_class, text, ranks, operation = each.result()
        assert (error_class, ranks, operation) == (RankLost, (2,), OPERATIONS[act]), text
        assert f"rank {rank} waited" in text
        assert "): rank 2 has not called it" in text  # also where another rank found it
        assert "FARSTEP_RANK_TIMEOUT_S" in text
    # The late one is told at once, and not left to wait.
    late = {act: four.workers[2].start(acts.run, act) for act in OPERATIONS}
    for act, each in late.items():
        error_class, text, ranks, _ = each.result()
        assert (error_class, ranks) == (RankLost, (2,)), f"{act}: {text}"
        assert f"rank 2 came too late to {OPERATIONS[act]} (" in text
        assert "): ranks 1 and 3 gave up after" in text
    # The ranks that raised do not keep trying a group that is lost.
    _, text, ranks, _ = four.workers[1].run(acts.run, "save")
    assert "was given up before" in text
    assert ranks == (2,)


def test_a_lost_rank_is_an_error_of_every_kind() -> None:
    assert issubclass(RankLost, (CheckpointError, ExchangeError))
    assert issubclass(RankLost, OptimError)


def test_ranks_that_call_different_operations(four: Ranks, tmp_path: Path) -> None:
    """Both wait for the other two; nobody is absent."""
    four.run(acts.set_deadline, 60)
    four.run(acts.prepare, "respread_unchecked", [1, 2, 3], str(tmp_path))
    four.run(acts.prepare_in_the_group_of, "clip", "respread_unchecked")
    four.run(acts.set_deadline, 3)
    pending = [
        four.workers[rank].start(acts.run, "clip" if rank == 2 else "respread_unchecked") for rank in (1, 2, 3)
    ]
    for rank, each in zip((1, 2, 3), pending, strict=True):
        error_class, text, ranks, _ = each.result()
        assert error_class is RankLost, text
        assert ("respread" if rank == 2 else "ShardedOptimizer.clip_grad_norm_") in text
        assert ranks in ((2,), (1, 3))  # whoever says so first


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path, how: str) -> None:
    with Ranks(3, timeout_s=1800) as ranks:
        ranks.run(acts.set_deadline, 2)
        pending = ranks.start(acts.save_on_a_slow_disk, str(tmp_path), how)
        assert ranks.workers[2].run(acts.await_begun)
        # Others have looked for it long after their deadlines.
        for rank in (0, 1):
            eventually(lambda rank=rank: ranks.workers[rank].run(acts.waited_s) > 5, timeout_s=30)
        assert not any(each.done for each in pending)
        ranks.workers[2].run(acts.let_go)
        assert [each.result() for each in pending] == [(None, "")] * 3
    assert torch.equal(read(tmp_path)["own"], torch.zeros(3))


def test_a_rank_that_is_killed_is_told_from_one_that_is_late(tmp_path: Path) -> None:
    with Ranks(3, timeout_s=1800) as ranks:
        ranks.run(acts.prepare, "step", [0, 1, 2], str(tmp_path))
        pending = [ranks.workers[rank].start(acts.run, "step") for rank in (0, 1)]
        for rank in (0, 1):
            eventually(lambda rank=rank: ranks.workers[rank].run(acts.waited_s) > 0)
        ranks.workers[2].kill()
        for each in pending:
            error_class, text, lost, _ = each.result()
            assert (error_class, lost) == (RankLost, (2,)), text
            assert "rank 2 died or ended" in text
        assert [ranks.workers[rank].run(acts.leave) for rank in (0, 1)] == ["left", "left"]


def test_a_rank_that_is_stopped_in_the_middle_is_named(tmp_path: Path) -> None:
    with Ranks(3, timeout_s=1800) as ranks:
        ranks.run(acts.set_deadline, 2)
        pending = ranks.start(acts.save_on_a_slow_disk, str(tmp_path), "save")
        assert ranks.workers[2].run(acts.await_begun)
        eventually(lambda: ranks.workers[0].run(acts.notes, 2))
        ranks.workers[2].stop()
        for each in pending[:2]:
            error_class, text = each.result()
            assert error_class is RankLost
            assert "rank 2 called it and gave no sign of life" in text


SCRIPT = """
import os, sys, torch, torch.distributed as dist
import farstep.checkpoint as checkpoint
from farstep.errors import RankLost
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=3)
if rank == 2:
    sys.stdin.readline()
try:
    checkpoint.save({"w": torch.ones(3)}, sys.argv[3])
except RankLost as exc:
    print(exc.ranks, flush=True)
if rank != 1:
    dist.destroy_process_group()
print("ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)  # three processes that import torch
def test_processes_end_as_usual_after_it(tmp_path: Path) -> None:
    """With destroy_process_group and without, the late one too, and over a store that rank 0 serves."""
    where = f"tcp://127.0.0.1:{free_port()}"
    env = {**os.environ, "FARSTEP_RANK_TIMEOUT_S": "3"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), where, str(tmp_path / "checkpoint")],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in (*processes[:2], processes[2]):
            out, err = process.communicate("go\n" if process is processes[2] else None, timeout=200)
            assert process.returncode == 0, err
            assert out.split("\n")[1] == "ends", err
            assert process is processes[2] or out.startswith("(2,)"), err
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_time_in_which_the_job_was_stopped_does_not_count(tmp_path: Path) -> None:
    """As when a scheduler suspends it: nobody was absent then."""
    with Ranks(2) as ranks:
        ranks.run(acts.set_deadline, 60)
        ranks.run(acts.prepare, "save", [0, 1], str(tmp_path / "save"))
        ranks.run(acts.set_deadline, 3)
        first = ranks.workers[0].start(acts.run, "save")
        ranks.workers[0].stop()
        time.sleep(4)  # longer than the deadline
        ranks.workers[0].cont()
        second = ranks.workers[1].start(acts.run, "save")
        assert [first.result()[0], second.result()[0]] == [None, None]
