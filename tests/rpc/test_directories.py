"""What killed processes leave in the temporary folder is gone after the next start, and nothing that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import HashStore

from farstep import rpc
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.directories import Hold, PrivateDirectory, sweep

RUN = """
import threading
from farstep.launch import run_local, tell

def work(rank):
    tell("working")
    threading.Event().wait()

if __name__ == "__main__":
    run_local(work, 2, on_message=lambda _, text: print(text, flush=True))
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own, whose path is short enough for sockets; pytest has made its own before."""
    with tempfile.TemporaryDirectory(prefix="fs-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(directory)


def left_in(base: Path) -> set[str]:
    return {path.name for path in base.glob("farstep-*")}


@contextmanager
def started(store: HashStore, name: str, rank: int) -> Iterator[Agent]:
    agent = rpc.join_group(store, name, rank, None, RpcOptions(rpc_timeout=30))
    try:
        yield agent
    finally:
        rpc.leave_group(agent, graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(180)  # a process imports torch, where others compute
def test_the_next_start_removes_what_killed_processes_left(base: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RUN)
    runs = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) for _ in "12"]
    try:
        for run in runs:
            assert run.stdout is not None
            assert [run.stdout.readline(), run.stdout.readline()] == ["working\n"] * 2
        store = HashStore()
        with started(store, "alive", 0) as alive:
            in_use = left_in(base)
            assert len(in_use) == 3, "two runs and an agent"
            for run, how in zip(runs, (signal.SIGTERM, signal.SIGKILL), strict=True):
                run.send_signal(how)
                assert run.wait() == -how
                assert run.stdout is not None
                assert run.stdout.read() == ""  # the end of it comes with the end of the last worker
            assert left_in(base) == in_use
            with started(store, "next", 1) as new:
                assert len(left_in(base)) == 2, "the two agents'"
                assert alive.call_sync("next", max, (1, 2), {}, 30.0) == 2
                assert new.call_sync("alive", max, (3, 2), {}, 30.0) == 3
        assert left_in(base) == set()
    finally:
        for run in runs:
            run.kill()
            run.wait()


def test_a_directory_stays_while_anybody_holds_it(base: Path) -> None:
    directory = PrivateDirectory("farstep-run-", str(base))
    of_a_worker = Hold.of(directory.path)
    assert of_a_worker is not None
    directory._hold.release()  # as the kernel does when the one that made it is killed
    sweep(str(base))
    assert os.path.isdir(directory.path)
    of_a_worker.release()
    sweep(str(base))
    assert left_in(base) == set()
    assert Hold.of(directory.path) is None, "it is gone, and not made again"


def test_a_forked_child_neither_holds_nor_removes_it(base: Path) -> None:
    directory = PrivateDirectory("farstep-rpc-", str(base))
    end_read, end_write = os.pipe()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end_write)
        directory.close()
        os.write(ready_write, b"!")
        os.read(end_read, 1)
        os._exit(0)
    try:
        os.read(ready_read, 1)
        sweep(str(base))
        assert os.path.isdir(directory.path), "it is the parent's"
        directory._hold.release()
        sweep(str(base))
        assert not os.path.exists(directory.path), "the child has kept no lock"
    finally:
        os.close(end_write)
        os.waitpid(child, 0)
        for fd in (end_read, ready_read, ready_write):
            os.close(fd)


def test_what_is_not_ours_is_left_alone(base: Path, tmp_path: Path) -> None:
    (base / "farstep-demo").mkdir()
    (base / "farstep-run-notes").mkdir()
    (base / "farstep-run-notes" / "thoughts.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (base / "farstep-run-link").symlink_to(tmp_path / "elsewhere")
    (base / "farstep-run-file").touch()
    (base / "farstep-rpc-killed0").mkdir()  # by one that was killed before it had made the lock
    before = left_in(base)
    sweep(str(base))
    assert before - left_in(base) == {"farstep-rpc-killed0"}
    assert (tmp_path / "elsewhere" / "lock").exists()


def test_many_may_start_at_once(base: Path) -> None:
    """Whoever sweeps may come between the making of a directory and its lock: then another is made."""
    wrong: list[str] = []

    def start_and_end() -> None:
        for _ in range(50):
            directory = PrivateDirectory("farstep-rpc-", str(base))
            sweep(str(base))
            if not os.path.exists(os.path.join(directory.path, "lock")):
                wrong.append(directory.path)
            directory.close()

    threads = [threading.Thread(target=start_and_end) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert left_in(base) == set()
