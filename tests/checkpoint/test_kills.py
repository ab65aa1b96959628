"""kill -9 at any moment of a save: what loads is whole, old or new, never a mix; and the next save cleans up."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from support.workers import Worker

from farstep.checkpoint import LocalDisk, async_save, read, save
from farstep.checkpoint.manifest import MANIFEST
from farstep.errors import CheckpointError, NoCheckpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RANDOM_KILLS = 92
"""By each of two workers."""
OPERATIONS = 10


def state_of(version: int, numel: int) -> dict[str, Any]:
    """Every value tells the version; names and sizes change with it, so that a mix would not even fit."""
    return {
        "version": version,
        "large": [torch.full((numel + version % 3,), version) for _ in range(2)],
        "small": {f"{version % 2}.{i}": torch.full((i,), version, dtype=torch.int32) for i in range(5)},
    }


def version_of(path: Path | str) -> int | None:
    """The version of a checkpoint, of which everything has been compared; None if there is none."""
    try:
        found = read(path)
    except NoCheckpoint:
        return None
    version: int = found["version"]
    wanted = state_of(version, len(found["large"][0]) - version % 3)
    assert found["small"].keys() == wanted["small"].keys()
    for one, other in ((found["large"][i], wanted["large"][i]) for i in range(2)):
        assert torch.equal(one, other)
    assert all(torch.equal(found["small"][key], each) for key, each in wanted["small"].items())
    return version


def assert_clean(path: Path) -> None:
    """A save leaves what the manifest names, and nothing else."""
    save(state_of(10**6, 10), path)
    assert version_of(path) == 10**6
    names = sorted(each.name for each in path.iterdir())
    assert len(names) == 2
    assert MANIFEST in names


def killed(work: Callable[[], None], moment_s: float) -> bool:
    """Do the work in a process of its own and kill that when it has been at it for so long. Returns whether it was still at work."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ours, b".")
            work()
        finally:
            os._exit(1)
    os.read(theirs, 1)
    time.sleep(moment_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(theirs)
    os.close(ours)
    return os.WIFSIGNALED(status)


# -- at random moments


def _duration_s(numel: int, path: Path) -> float:
    """Of one save, as this machine does it now."""
    began = time.monotonic()
    for version in range(3):
        save(state_of(version, numel), path)
    return (time.monotonic() - began) / 3


def _killed_at_random(folder: str, seed: int, kills: int) -> tuple[int, int]:
    """Returns how many kills there were, and how many of them came when there was something new."""
    chance = random.Random(seed)
    made = renewed = 0
    for round in range(4):
        path = Path(folder, f"{seed}.{round}")
        numel = (10, 200_000, 10, 600_000)[round]  # of 8 bytes, twice: up to 10 MiB
        begin = async_save if round >= 2 else save
        usual_s = _duration_s(numel, Path(folder, f"{seed}.{round}.timed"))
        version = 0
        before: int | None = None
        for _ in range(kills // 4):

            def work(
                begin: Any = begin, path: Path = path, version: int = version, numel: int = numel
            ) -> None:
                while True:
                    version += 1
                    begin(state_of(version, numel), path)

            assert killed(work, chance.uniform(0, 3 * usual_s)), "a save failed by itself"
            made += 1
            now = version_of(path)
            assert now is not None or before is None, "the old checkpoint is gone"
            assert before is None or (now is not None and now >= before), "an older checkpoint is back"
            renewed += now != before
            before, version = now, (now or 0) + 1
        assert_clean(path)
    return made, renewed


def test_at_random_moments(tmp_path: Path) -> None:
    workers = [Worker(f"killer{i}", tmp_path / f"{i}.log") for i in range(2)]
    try:
        pending = [
            w.start(_killed_at_random, str(tmp_path), 20 + i, RANDOM_KILLS) for i, w in enumerate(workers)
        ]
        results = [each.result(150) for each in pending]
    finally:
        for each in workers:
            each.close()
    assert sum(made for made, _ in results) == 2 * RANDOM_KILLS
    assert sum(renewed for _, renewed in results) > 0  # so they came in the midst of saves


# -- at each operation


class Dying(LocalDisk):
    """Kills its process just before or just after its `last`-th operation."""

    def __init__(self, path: Any, last: int, before: bool) -> None:
        super().__init__(path)
        self._left, self._before = last, before

    def _did(self, function: Callable[..., Any], *args: Any) -> Any:
        self._left -= 1
        if self._left == 0 and self._before:
            os.kill(os.getpid(), signal.SIGKILL)
        found = function(*args)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def prepare(self) -> None:
        self._did(super().prepare)

    def names(self) -> Any:
        return self._did(super().names)

    def read(self, name: str) -> Any:
        return self._did(super().read, name)

    def create(self, name: str, nbytes: int) -> Any:
        file = self._did(super().create, name, nbytes)
        file.write, file.finish = _wrapped(self, file.write), _wrapped(self, file.finish)
        return file

    def replace(self, name: str, data: bytes) -> None:
        self._did(super().replace, name, data)

    def delete(self, names: Any) -> None:
        self._did(super().delete, list(names))


def _wrapped(disk: Dying, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: disk._did(function, *args)


def _killed_at_each_operation(folder: str) -> list[int | None]:
    versions = []
    for last in range(1, OPERATIONS + 1):
        for before in (True, False):
            path = Path(folder, f"{last}.{before}")
            save(state_of(1, 1000), path)
            child = os.fork()
            if child == 0:
                try:
                    save(state_of(2, 1000), Dying(path, last, before))
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"a save has less than {last} operations"
            versions.append(version_of(path))
            assert_clean(path)
    return versions


def test_at_each_operation(tmp_path: Path) -> None:
    worker = Worker("killer", tmp_path / "log")
    try:
        versions = worker.start(_killed_at_each_operation, str(tmp_path)).result(60)
    finally:
        worker.close()
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}  # old up to the rename, new from there on


# -- ranks


def _save_for_ever(path: str, version: int) -> None:
    rank = dist.get_rank()
    while True:
        version += 1
        begin: Any = async_save if version % 2 else save
        begin(
            {
                "version": version,
                "shared": torch.full((3,), version),
                f"own{rank}": torch.full((100_000,), version),
            },
            path,
        )


def _saved_once(path: str) -> None:
    """The group for the background is there after this: while it is being made, how long a rank waits for another is torch's affair."""
    async_save({"version": 0, "shared": 0, f"own{dist.get_rank()}": 0}, path).wait(30)


def _waited(path: str) -> str:
    try:
        _save_for_ever(path, 0)
    except CheckpointError as exc:
        return str(exc)
    raise AssertionError("it went on")


@pytest.mark.parametrize("round", range(10))
def test_a_rank_that_is_killed(tmp_path: Path, round: int) -> None:
    """The other raises, in bounded time, and what is there is of one version."""
    chance = random.Random(round)
    dead = chance.randrange(2)
    with Ranks(2, timeout_s=3.0) as ranks:  # which the other may wait for more than once
        path = tmp_path / "saved"
        ranks.run(_saved_once, str(path))
        pending = ranks.start(_waited, str(path))
        time.sleep(chance.uniform(0, 0.2))
        for rank in range(2):
            if rank == dead or round % 3 == 0:
                ranks.workers[rank].kill()
        if round % 3:
            said = pending[1 - dead].result(45)
            assert any(each in said for each in ("died or ended", "because of rank"))
    found = read(path)
    version = torch.tensor(found["version"])
    assert all((torch.as_tensor(found[name]) == version).all() for name in ("shared", "own0", "own1"))
    assert_clean(path)


def _dies_while_the_group_is_made(path: str) -> str:
    if dist.get_rank() == 0:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return _waited(path)


def test_a_rank_that_is_killed_at_the_first_call(tmp_path: Path) -> None:
    """The group for the background is being made then, and waits no longer for a rank than the group that was given."""
    with Ranks(2, timeout_s=2.0) as ranks:
        assert "has died" in ranks.start(_dies_while_the_group_is_made, str(tmp_path))[1].result(30)
