"""Storage that is full, read-only, gone, broken or slow: a clear error, nothing lost, and the old checkpoint loads."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from support.workers import Worker, eventually

import farstep.checkpoint.ranks as ranks_module
from farstep.checkpoint import LocalDisk, PerRank, async_save, load, read, save
from farstep.checkpoint.manifest import MANIFEST, is_ours
from farstep.checkpoint.tools import verify
from farstep.errors import CheckpointBusy, CheckpointError, DamagedCheckpoint, NoCheckpoint, StorageFailed

OLD = {"a": torch.arange(1000), "n": 1}
NEW = {"a": torch.arange(1000) + 1, "n": 2, "more": torch.ones(2000)}


def _waited(state: Any, path: Any) -> None:
    async_save(state, path).wait(30)


def assert_old(path: Any) -> None:
    found = read(path)
    assert found["n"] == 1
    assert torch.equal(found["a"], OLD["a"])  # type: ignore[arg-type]


def assert_tidy(path: Path) -> None:
    """A save in the same place works, and leaves nothing of those that failed."""
    save(NEW, path)
    assert read(path)["n"] == 2
    assert sum(is_ours(each.name) for each in path.iterdir()) == 1


class Failing(LocalDisk):
    """Its `last`-th operation fails, and those after it do if it is `dead`."""

    def __init__(self, path: Any, last: int, dead: bool = False) -> None:
        super().__init__(path)
        self.left, self._dead = last, dead
        self.did: list[str] = []
        self._lock = threading.Lock()

    def do(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            self.left -= 1
            self.did.append(name)
            if self.left == 0 or (self._dead and self.left < 0):
                raise OSError(errno.EIO, "Input/output error")
        return function(*args)

    def prepare(self) -> None:
        self.do("prepare", super().prepare)

    def names(self) -> Any:
        return self.do("names", super().names)

    def read(self, name: str) -> Any:
        return self.do("read", super().read, name)

    def create(self, name: str, nbytes: int) -> Any:
        file = self.do("create", super().create, name, nbytes)
        write, finish = file.write, file.finish
        file.write = lambda buffers: self.do("write", write, buffers)
        file.finish = lambda: self.do("finish", finish)
        return file

    def replace(self, name: str, data: bytes) -> None:
        self.do("replace", super().replace, name, data)

    def delete(self, names: Any) -> None:
        self.do("delete", super().delete, list(names))


def _operations(tmp_path: Path) -> list[str]:
    disk = Failing(tmp_path / "whole", 10**6)
    save(OLD, disk)
    disk.did.clear()
    save(NEW, disk)
    return disk.did


@pytest.mark.parametrize("begin", [save, _waited])
@pytest.mark.parametrize("dead", [False, True])
def test_each_operation_in_turn(tmp_path: Path, begin: Any, dead: bool) -> None:
    operations = _operations(tmp_path)
    assert {"prepare", "names", "read", "create", "write", "finish", "replace", "delete"} <= set(operations)
    for last, name in enumerate(operations, 1):
        path = tmp_path / str(last)
        save(OLD, path)
        if last == len(operations):  # the files of the save before: the new one is whole already
            begin(NEW, Failing(path, last, dead))
            assert read(path)["n"] == 2
        else:
            with pytest.raises(
                StorageFailed, match=f"{path} failed: Input/output error.* before still is"
            ) as caught:
                begin(NEW, Failing(path, last, dead))
            assert caught.value.errno == errno.EIO, name
            assert_old(path)
        assert_tidy(path)


def test_after_the_rename_a_failure_leaves_the_new_one(tmp_path: Path) -> None:
    """What is told as a failure may have come about: then it is whole."""

    class Late(LocalDisk):
        def replace(self, name: str, data: bytes) -> None:
            super().replace(name, data)
            raise OSError(errno.EIO, "Input/output error")

    save(OLD, tmp_path)
    with pytest.raises(StorageFailed):
        save(NEW, Late(tmp_path))
    assert read(tmp_path)["n"] == 2
    assert_tidy(tmp_path)


# -- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "saved"
    save(OLD, path)
    for begin in (save, _waited):
        with pytest.raises(StorageFailed, match=r"bytes are to be written and .* are free") as caught:
            begin({"a": torch.ones(1 << 20)}, path)
        assert caught.value.errno == errno.ENOSPC
        assert_old(path)
        assert len(list(path.iterdir())) == 2
    assert_tidy(path)


def _limited(path: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        save({"a": torch.ones(1 << 20)}, path)
    except StorageFailed as exc:
        return str(exc)
    return ""


def test_a_file_that_may_not_be_so_large(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save(OLD, path)
    worker = Worker("limited", tmp_path / "log")
    try:
        assert "File too large" in worker.run(_limited, str(path))
    finally:
        worker.close()
    assert_old(path)
    assert len(list(path.iterdir())) == 2


# -- a place that cannot be written to


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="Not a directory"):
        save(OLD, tmp_path / "file" / "saved")
    with pytest.raises(NoCheckpoint):
        read(tmp_path / "file" / "saved")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageFailed):
        save(OLD, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_disk(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save(OLD, path)
    bound = subprocess.run(["mount", "--bind", "-o", "ro", str(path), str(path)], capture_output=True)
    if bound.returncode:
        if os.geteuid() == 0:
            pytest.skip(f"nothing can be made read-only here: {bound.stderr.decode().strip()}")
        path.chmod(0o500)
    try:
        with pytest.raises(StorageFailed, match=r"Read-only file system|Permission denied"):
            save(NEW, path)
        assert_old(path)
    finally:
        if bound.returncode:
            path.chmod(0o700)
        else:
            subprocess.run(["umount", str(path)], check=True)
    assert_tidy(path)


# -- files that are gone, or cannot be read


def test_a_file_that_vanished(tmp_path: Path) -> None:
    save(OLD, tmp_path)
    (data,) = (each for each in tmp_path.iterdir() if each.name != MANIFEST)
    data.unlink()
    state = {"a": torch.zeros(1000, dtype=torch.int64), "n": 0}
    with pytest.raises(DamagedCheckpoint, match=f"{data.name}.*'a'.*is missing"):
        load(state, tmp_path)
    assert_tidy(tmp_path)


def test_a_file_that_cannot_be_read_any_more(tmp_path: Path) -> None:
    class Unreadable(LocalDisk):
        def open(self, name: str) -> Any:
            file = super().open(name)
            file.read_into = _broken  # type: ignore[method-assign]
            return file

    save(OLD, tmp_path)
    with pytest.raises(DamagedCheckpoint, match="Input/output error"):
        read(Unreadable(tmp_path))


def _broken(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


# -- two at once


def test_two_saves_into_one_directory(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Held(LocalDisk):
        def create(self, name: str, nbytes: int) -> Any:
            entered.set()
            assert leave.wait(30)
            return super().create(name, nbytes)

    first = threading.Thread(target=save, args=(OLD, Held(tmp_path)))
    first.start()
    assert entered.wait(30)
    with pytest.raises(CheckpointBusy, match="wait until it is done, or save elsewhere"):
        save(NEW, tmp_path)
    leave.set()
    first.join(30)
    assert_old(tmp_path)
    assert_tidy(tmp_path)


def test_two_saves_where_there_are_no_locks(tmp_path: Path) -> None:
    """One takes what the other has just written for left-overs, and fails itself: what was there before stays."""

    class Unlocked(LocalDisk):
        def sole_writer(self) -> Any:
            return nullcontext()

    class Full(Unlocked):
        def create(self, name: str, nbytes: int) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Met(Unlocked):
        def create(self, name: str, nbytes: int) -> Any:
            file = super().create(name, nbytes)
            finish = file.finish

            def finished() -> None:
                finish()
                with pytest.raises(StorageFailed):
                    save(NEW, Full(self.path))

            file.finish = finished  # type: ignore[method-assign]
            return file

    save(OLD, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"is gone: another process saves there too.*Nothing has been saved"
    ):
        save(NEW, Met(tmp_path))
    assert_old(tmp_path)
    assert_tidy(tmp_path)


# -- ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _own(value: float) -> dict[str, Any]:
    return {f"own{dist.get_rank()}": torch.full((1000,), value), "shared": torch.full((10,), value)}


def _fails_on(path: str, bad: int, last: int) -> str:
    """`last` counts the operations of the rank whose disk fails."""
    state = _own(1.0)
    save(state, path)
    disk = Failing(path, last) if dist.get_rank() == bad else LocalDisk(path)
    try:
        save(_own(2.0), disk)
        said = ""
    except StorageFailed as exc:
        said = str(exc)
    load(state, path)
    assert (state["shared"] == (1.0 if said else 2.0)).all()
    assert (state[f"own{dist.get_rank()}"] == state["shared"][0]).all()
    save(_own(3.0), path)
    return said


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_whose_disk_fails(pair: Ranks, tmp_path: Path, bad: int) -> None:
    failed = 0
    for last in range(1, 9):
        path = tmp_path / str(last)
        said = pair.run(_fails_on, str(path), bad, last)
        assert bool(said[0]) == bool(said[1])
        if said[0]:
            assert f"because of rank {bad}" in said[1 - bad]
            assert "Input/output error" in said[bad]
            failed += 1
        names = [each.name for each in path.iterdir() if is_ours(each.name)]
        assert len(names) == 2
    assert failed >= (3 if bad else 7)


def _with_paths_of_their_own(path: str) -> str:
    with pytest.raises(
        CheckpointError,
        match=r"rank 0 is saving into .* and rank 1 is saving into .*\. All ranks give the same",
    ) as caught:
        save(_own(1.0), f"{path}/{dist.get_rank()}")
    return str(caught.value)


def test_ranks_that_do_not_share_a_directory(pair: Ranks, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    pair.run(_with_paths_of_their_own, str(tmp_path))
    assert not (tmp_path / "0" / MANIFEST).exists()
    assert not list((tmp_path / "1").iterdir())


def _slow_on(path: str) -> None:
    class Slow(LocalDisk):
        def create(self, name: str, nbytes: int) -> Any:
            threading.Event().wait(0.3)
            return super().create(name, nbytes)

    save(_own(4.0), Slow(path) if dist.get_rank() else path)


def test_a_slow_disk_is_waited_for(pair: Ranks, tmp_path: Path) -> None:
    pair.run(_slow_on, str(tmp_path))
    found = read(tmp_path)
    assert all((found[name] == 4).all() for name in ("own0", "own1", "shared"))


class Slow(LocalDisk):
    """Says when it has come to the manifest, and goes on when it may."""

    def replace(self, name: str, data: bytes) -> None:
        self.path.with_suffix(".reached").touch()
        eventually(self.path.with_suffix(".go").exists, timeout_s=30)
        super().replace(name, data)


def _saved_slowly(path: str, begin: Any) -> str:
    save({"own": PerRank(torch.full((100,), 1.0))}, path)
    if begin is _waited:  # so that its group is there
        begin({"own": PerRank(torch.full((100,), 1.0))}, path)
    if dist.get_rank() == 2:
        ranks_module.Ranks.to_first = _told_and_then_nothing  # type: ignore[method-assign]
    try:
        begin({"own": PerRank(torch.full((100,), 2.0))}, Slow(path))
    except CheckpointError as exc:
        return str(exc)
    return ""


def _told_and_then_nothing(ranks: Any, value: Any, to_first: Any = ranks_module.Ranks.to_first) -> Any:
    to_first(ranks, value)
    threading.Event().wait(60)  # it is killed here


@pytest.mark.parametrize("begin", [save, _waited])
def test_a_rank_that_loses_touch_leaves_what_it_has_handed_over(tmp_path: Path, begin: Any) -> None:
    """One dies when all have written, another hears of it, and the first puts the manifest in place all the same."""
    path = tmp_path / "saved"
    with Ranks(3) as ranks:
        pending = ranks.start(_saved_slowly, str(path), begin)
        eventually((tmp_path / "saved.reached").exists, timeout_s=30)
        ranks.workers[2].kill()
        assert pending[1].result(30)
        (tmp_path / "saved.go").touch()
        assert pending[0].result(30)
    assert not verify(path)
    assert (read(path)["own"] == 2).all()
    assert sum(is_ours(each.name) for each in path.iterdir()) >= 3
    assert_tidy(path)


class _Mine:
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("connection to my database timed out")
        return {}


def _raises_its_own(path: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        save({"mine": _Mine()}, path)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_an_error_of_the_state_is_not_the_loss_of_a_rank(pair: Ranks, tmp_path: Path) -> None:
    first, second = pair.run(_raises_its_own, str(tmp_path))
    assert "CheckpointError" in first
    assert "because of rank 1: RuntimeError: connection to my database" in first
    assert second == "RuntimeError: connection to my database timed out"
