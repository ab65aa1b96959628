"""Saves that go on in the background: what they save, what they hold, and where their errors come up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from support.workers import Worker
from torch import Tensor, nn

import farstep.checkpoint.staging as staging_module
from farstep.checkpoint import LocalDisk, async_save, load, read, release_staging, save
from farstep.checkpoint.manifest import MANIFEST
from farstep.errors import CheckpointError, NoCheckpoint, StorageFailed

pytestmark = pytest.mark.timeout(240)


class Gate(LocalDisk):
    """A disk on which nothing is written before it is opened."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.opened = threading.Event()

    def create(self, name: str, nbytes: int) -> Any:
        assert self.opened.wait(30)
        return super().create(name, nbytes)


class Broken(LocalDisk):
    def create(self, name: str, nbytes: int) -> Any:
        raise OSError(5, "Input/output error")


def state_of(value: float) -> dict[str, Any]:
    return {
        "large": torch.full((3 << 20,), value),
        "small": [torch.full((n,), value, dtype=dtype) for n in (0, 1, 7) for dtype in (torch.float32, torch.int8, torch.complex128)],
        "transposed": torch.full((300, 200), value).t(),
        "conjugate": torch.full((40,), complex(value, 1)).conj(),
        "expanded": torch.full((1,), value).expand(50, 3),
        "float8": torch.full((9,), value).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(value),
        "parameter": nn.Parameter(torch.full((5,), value)),
        "values": [1, 2],
    }  # fmt: skip


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(tensors_in(found), tensors_in(wanted), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.resolve_conj().float() if one.itemsize == 1 else one.resolve_conj(), other.float() if other.itemsize == 1 else other.resolve_conj())  # fmt: skip


def test_what_is_changed_after_the_call_is_saved_as_it_was(tmp_path: Path) -> None:
    disk, state = Gate(tmp_path), state_of(3.0)
    handle = async_save(state, disk)
    for tensor in tensors_in(state):
        if tensor.numel():
            (tensor[:1] if tensor.shape == (50, 3) else tensor).as_strided((1,), (1,)).zero_()
            if not tensor.is_conj() and 0 not in tensor.stride():
                tensor.zero_()
    state["values"][0] = 9
    assert not handle.done()
    assert handle.progress.bytes_done == 0
    disk.opened.set()
    handle.wait(30)
    assert handle.done()
    assert handle.progress.bytes_done == handle.progress.bytes_total > 12 << 20
    found = read(tmp_path)
    assert_same(found, state_of(3.0))
    assert found["values"] == [1, 2]


def test_memory_is_used_again_for_states_of_other_sizes(tmp_path: Path) -> None:
    for round, numel in enumerate((10, 4 << 20, 1 << 20, 5 << 20)):
        state = {"a": torch.full((numel,), float(round)), "b": torch.arange(numel)}
        async_save(state, tmp_path)
        state["a"].fill_(-1)
        if round == 2:
            release_staging()
        # The next save waits for this one, so what it copies does not get into it.
        async_save({"a": torch.full((2 * numel,), 7.0), "b": torch.zeros(numel)}, tmp_path / "next").wait(30)
        found = read(tmp_path)
        assert torch.equal(found["a"], torch.full((numel,), float(round)))
        assert torch.equal(found["b"], torch.arange(numel))


def test_one_copy_at_a_time(tmp_path: Path) -> None:
    disk = Gate(tmp_path / "one")
    first = async_save({"a": torch.ones(5)}, disk)
    began = threading.Event()

    def second() -> None:
        began.set()
        async_save({"a": torch.zeros(5)}, tmp_path / "two").wait()

    thread = threading.Thread(target=second)
    thread.start()
    assert began.wait(30)
    thread.join(0.05)
    assert thread.is_alive()
    assert not (tmp_path / "two").exists()
    with pytest.raises(TimeoutError, match=r"0 of 20 bytes .* wait again"):
        first.wait(0.01)
    disk.opened.set()
    thread.join(30)
    assert first.done()
    assert torch.equal(read(tmp_path / "one")["a"], torch.ones(5))
    assert torch.equal(read(tmp_path / "two")["a"], torch.zeros(5))


class Slow(LocalDisk):
    """Tells that a save has come to its files, and writes each when it may."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.reached, self.opened = threading.Event(), threading.Event()

    def create(self, name: str, nbytes: int) -> Any:
        file = super().create(name, nbytes)
        write = file.write

        def wait_and_write(buffers: Any) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            write(buffers)

        file.write = wait_and_write
        return file


def _ones(value: int) -> dict[str, Tensor]:
    return {"a": torch.full((4 << 20,), value, dtype=torch.uint8)}


def test_a_wait_that_is_interrupted_does_not_forget_the_save_under_way(tmp_path: Path) -> None:
    """The copy that is being written is not written over by the next one."""
    disk = Slow(tmp_path / "one")
    first = async_save(_ones(1), disk)
    assert disk.reached.wait(30)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            async_save(_ones(2), tmp_path / "two")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    third = _on_a_thread(async_save, _ones(3), tmp_path / "three")
    third.join(0.1)
    assert third.is_alive()  # it waits for the first
    disk.opened.set()
    third.join(30)
    first.wait(30)
    assert read(tmp_path / "one")["a"].unique().tolist() == [1]


def test_a_save_that_waits_does_not_let_an_async_save_pass(tmp_path: Path) -> None:
    disk = Slow(tmp_path / "one")
    first = async_save(_ones(1), disk)
    assert disk.reached.wait(30)
    others = [_on_a_thread(begin, _ones(2), tmp_path / begin.__name__) for begin in (save, async_save)]
    for each in others:
        each.join(0.1)
        assert each.is_alive()
    disk.opened.set()
    for each in others:
        each.join(30)
    first.wait(30)
    assert read(tmp_path / "one")["a"].unique().tolist() == [1]
    assert read(tmp_path / "save")["a"].unique().tolist() == [2]


def _on_a_thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def test_a_directory_that_is_left_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    disk = Gate("latest")
    handle = async_save({"a": torch.ones(3)}, disk)
    monkeypatch.chdir(tmp_path / "there")
    disk.opened.set()
    handle.wait(30)
    assert torch.equal(read(tmp_path / "here" / "latest")["a"], torch.ones(3))
    assert not list((tmp_path / "there").iterdir())
    assert str(disk) == "latest"  # as it was given, for messages
    assert str(disk.at("in")) == "latest/in"
    assert os.fspath(disk) == str(tmp_path / "here" / "latest")
    assert MANIFEST in os.listdir(disk)


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    worker = Worker("forking", tmp_path / "log")
    try:
        worker.run(_fork_while_saving, str(tmp_path / "saved"))
    finally:
        worker.close()


def _fork_while_saving(path: str) -> None:
    disk = Slow(path)
    handle = async_save({"a": torch.ones(3)}, disk)
    assert disk.reached.wait(30)
    end, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.read(end, 1)
        os._exit(0)
    try:
        disk.opened.set()
        handle.wait(30)
        save({"a": torch.ones(3)}, path)
    finally:
        os.close(ours)
        os.waitpid(child, 0)


def test_no_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the call does it itself, and the next save does not wait for a thread that never was."""

    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        handle = async_save({"a": torch.ones(3)}, tmp_path)
    assert handle.done()
    save({"a": torch.zeros(3)}, tmp_path / "next")
    assert torch.equal(read(tmp_path)["a"], torch.ones(3))


def test_errors_are_raised_by_wait_each_time(tmp_path: Path) -> None:
    save({"a": torch.ones(5)}, tmp_path)
    handle = async_save({"a": torch.zeros(5)}, Broken(tmp_path))
    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"saving into .* failed: Input/output error"):
            handle.wait(30)
    assert handle.done()
    assert "failed" in repr(handle)
    save({"a": torch.zeros(5)}, tmp_path)  # which has nothing to tell: it is known
    assert torch.equal(read(tmp_path)["a"], torch.zeros(5))


@pytest.mark.parametrize("again", [save, async_save])
def test_an_error_nobody_has_seen_is_raised_by_the_next_save(tmp_path: Path, again: Any) -> None:
    save({"a": torch.ones(5)}, tmp_path)
    async_save({"a": torch.zeros(5)}, Broken(tmp_path))
    with pytest.raises(
        StorageFailed,
        match=r"in the background has failed.*Input/output error.*other has not been begun: try again",
    ) as caught:
        again({"a": torch.zeros(5)}, tmp_path / "other")
    assert caught.value.errno == 5
    assert isinstance(caught.value.__cause__, StorageFailed)
    assert not (tmp_path / "other").exists()
    assert torch.equal(read(tmp_path)["a"], torch.ones(5))
    again({"a": torch.zeros(5)}, tmp_path / "other")


def test_what_cannot_be_saved_is_raised_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'bad'"):
        async_save({"bad": object()}, tmp_path)
    async_save({"good": 1}, tmp_path).wait(30)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    async_save({"a": torch.ones(3 << 20)}, tmp_path, progress=lambda *each: told.append(each)).wait(30)
    assert told[-1] == (12 << 20, 12 << 20)
    assert told == sorted(told)


_EXIT = """
import sys, time, torch
import farstep.checkpoint.staging as staging_module
from farstep.checkpoint import LocalDisk, async_save
class Slow(LocalDisk):
    def create(self, name, nbytes):
        time.sleep(0.3)
        if "fail" in sys.argv:
            raise OSError(28, "No space left on device")
        return super().create(name, nbytes)
async_save({"a": torch.ones(20 << 20), "b": torch.ones(20 << 20)}, Slow(sys.argv[1]))
"""


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *args], capture_output=True, text=True, timeout=60)


def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    done = run_script(_EXIT, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert torch.equal(read(tmp_path / "out")["b"], torch.ones(20 << 20))


def test_the_end_of_the_process_tells_of_an_error(tmp_path: Path) -> None:
    done = run_script(_EXIT, str(tmp_path / "out"), "fail")
    assert "nobody had waited for it: StorageFailed" in done.stderr
    assert "No space left" in done.stderr
    assert done.stderr.count("before") == 1


# -- ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _saved_while_computing(path: str) -> float:
    rank = dist.get_rank()
    state = {"shared": torch.arange(1 << 20), f"own{rank}": torch.full((100_000,), float(rank))}
    handle = async_save(state, path)
    for tensor in state.values():
        tensor.zero_()
    for _ in range(50):  # the group is free for others
        total = torch.ones(1000)
        dist.all_reduce(total)
    handle.wait(30)
    load(state, path)
    assert torch.equal(state["shared"], torch.arange(1 << 20))
    assert (state[f"own{rank}"] == rank).all()
    return float(total[0])


def test_collectives_go_on_meanwhile(pair: Ranks, tmp_path: Path) -> None:
    assert pair.run(_saved_while_computing, str(tmp_path)) == [2.0, 2.0]


def _one_disk_fails(path: str) -> list[str]:
    rank = dist.get_rank()
    state = {f"own{rank}": torch.full((1000,), 1.0)}
    save(state, path)
    said = []
    handle = async_save({f"own{rank}": torch.zeros(1000)}, Broken(path) if rank else path)
    if rank == 0:  # one sees it, the other not: both hear of it at the next save
        with pytest.raises(StorageFailed, match="because of rank 1") as caught:
            handle.wait(30)
        said.append(str(caught.value))
    with pytest.raises(StorageFailed) as caught:
        save({f"own{rank}": torch.zeros(1000)}, path)
    said.append(str(caught.value))
    load(state, path)
    assert (state[f"own{rank}"] == 1).all()
    async_save({f"own{rank}": torch.full((1000,), 2.0)}, path).wait(30)
    load(state, path)
    assert (state[f"own{rank}"] == 2).all()
    return said


def test_an_error_on_one_rank_is_heard_of_by_all(pair: Ranks, tmp_path: Path) -> None:
    first, second = pair.run(_one_disk_fails, str(tmp_path))
    assert "rank 1" in first[-1]
    assert "nobody had waited" in second[-1]


def _no_room(path: str) -> str:
    rank = dist.get_rank()
    save({"a": torch.ones(3)}, path)
    if rank == 1:
        release_staging()
        staging_module.mmap.mmap = _refused  # type: ignore[assignment,misc]
    handle = async_save({"a": torch.zeros(3), f"own{rank}": torch.zeros(2 << 20)}, path)
    with pytest.raises(CheckpointError, match="there is no room for a copy") as caught:
        handle.wait(30)
    state = {"a": torch.zeros(3)}
    load(state, path)
    assert (state["a"] == 1).all()
    return str(caught.value)


def _refused(*_: Any, **__: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


def test_a_rank_that_has_no_room_for_a_copy(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        first, _ = ranks.run(_no_room, str(tmp_path))
    assert "because of rank 1" in first


def _alone(path: str) -> None:
    if dist.get_rank() == 1:
        async_save({"a": torch.ones(3)}, path, no_dist=True).wait(30)


def test_one_rank_by_itself(pair: Ranks, tmp_path: Path) -> None:
    pair.run(_alone, str(tmp_path))
    assert torch.equal(read(tmp_path)["a"], torch.ones(3))


def _in_a_group(path: str) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    rank = dist.get_rank()
    async_save({"a": torch.full((3,), float(rank))}, f"{path}/{rank}", group=groups[rank]).wait(30)


def test_groups_of_some_ranks(pair: Ranks, tmp_path: Path) -> None:
    pair.run(_in_a_group, str(tmp_path))
    assert [read(tmp_path / str(rank))["a"][0] for rank in (0, 1)] == [0, 1]


def test_nothing_is_there_before_it_is_whole(tmp_path: Path) -> None:
    disk = Gate(tmp_path)
    handle = async_save({"a": torch.ones(3)}, disk)
    with pytest.raises(NoCheckpoint):
        read(tmp_path)
    disk.opened.set()
    handle.wait(30)
    read(tmp_path)
