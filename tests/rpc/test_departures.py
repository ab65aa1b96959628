"""Workers that leave early: who is reported, what the others are told, and how long a shutdown takes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from support.workers import Group, eventually

import farstep.compat.rpc
from farstep import rpc
from farstep.errors import ShutdownTimeout, WorkerLost
from farstep.launch import run_local
from farstep.rpc.current import current_agent
from farstep.rpc.group import _close_all_at_exit

pytestmark = pytest.mark.slow
Workers = Callable[..., Group]
CAUSE = "the true cause"


# -- under torch's spawn: the first process to end is the one that is reported


def fail_or_wait(rank: int, folder: str, api: str, how: str) -> None:
    """Rank 1 raises; the others are in `shutdown`, in a call to it, or at a barrier with it."""
    module: Any = farstep.compat.rpc if api == "compat" else rpc
    options = rpc.RpcOptions(init_method=f"file://{folder}/store")
    module.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 1:
        rpc.barrier()
        raise ValueError(CAUSE)
    rpc.barrier()
    try:
        if how == "call":
            module.rpc_sync("w1", time.sleep, args=(60,))
        elif how == "gather":
            rpc.all_gather(rank, ["w0", "w1", "w2"])
    except Exception as exc:
        path = Path(folder, f"new{rank}")
        path.write_text(f"{type(exc).__name__}: {exc}")
        path.rename(Path(folder, f"error{rank}"))  # whole or not at all: this process may be killed now
        raise
    module.shutdown()


@pytest.mark.parametrize("api", ["farstep", "compat"])
@pytest.mark.parametrize("how", ["shutdown", "call", "gather"])
def test_the_worker_that_raised_is_the_one_that_spawn_reports(tmp_path: Path, api: str, how: str) -> None:
    with pytest.raises(mp.ProcessRaisedException, match=f"ValueError: {CAUSE}"):
        mp.start_processes(fail_or_wait, (str(tmp_path), api, how), nprocs=3, start_method="forkserver")
    for told in tmp_path.glob("error*"):
        assert (
            told.read_text() == f"WorkerLost: worker 'w1' is lost: its process ended with ValueError: {CAUSE}"
        )


@pytest.mark.parametrize("api", ["farstep", "compat"])
def test_a_graceful_shutdown_does_not_fail_because_another_worker_has_raised(
    start_workers: Workers, tmp_path: Path, api: str
) -> None:
    group = start_workers(3)
    group.init(f"file://{tmp_path}/store")
    shut_down = farstep.compat.rpc.shutdown if api == "compat" else rpc.shutdown
    pending = [group[rank].start(shut_down) for rank in (0, 2)]
    assert not any(p.done for p in pending)
    group[1].kill()
    assert group.finish(pending) == [None, None]


# -- what the others are told


def end(url: str, how: str) -> None:
    options = rpc.RpcOptions(init_method=url)
    rpc.init_rpc("leaver", rank=1, world_size=2, rpc_backend_options=options)
    rpc.barrier()
    if how == "exception":
        raise KeyError("lost key")
    if how == "exit":
        sys.exit(3)
    if how == "finally":
        try:
            raise KeyError("lost key")
        finally:
            rpc.shutdown(graceful=False)


REASONS = {
    "exception": "its process ended with KeyError: 'lost key'",
    "nothing": "its process ended without shutdown",
    "exit": "its process ended without shutdown, by sys.exit(3)",
    "finally": "it left because of KeyError: 'lost key'",
}


@pytest.mark.parametrize("how", REASONS)
def test_why_a_process_has_ended_is_told_to_those_who_call_it(
    start_workers: Workers, tmp_path: Path, how: str
) -> None:
    (worker,) = start_workers(1)
    url = f"file://{tmp_path}/store"
    pending = worker.start(call_until_lost, url)
    process = multiprocessing.get_context("forkserver").Process(target=end, args=(url, how))
    process.start()
    assert pending.result() == f"worker 'leaver' is lost: {REASONS[how]}"
    process.join(30)


def test_so_is_why_a_script_has_ended(start_workers: Workers, tmp_path: Path) -> None:
    (worker,) = start_workers(1)
    url = f"file://{tmp_path}/store"
    script = tmp_path / "script.py"
    script.write_text(
        "from farstep import rpc\n"
        f"options = rpc.RpcOptions(init_method={url!r})\n"
        "rpc.init_rpc('leaver', rank=1, world_size=2, rpc_backend_options=options)\n"
        "rpc.barrier()\n"
        "raise KeyError('lost key')\n"
    )
    pending = worker.start(call_until_lost, url)
    subprocess.run([sys.executable, str(script)], capture_output=True, timeout=50)
    assert pending.result() == f"worker 'leaver' is lost: {REASONS['exception']}"


def call_until_lost(url: str) -> str:
    options = rpc.RpcOptions(init_method=url)
    rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    rpc.barrier()
    try:
        rpc.rpc_sync("leaver", time.sleep, args=(60,), timeout=50)
    except WorkerLost as exc:
        return str(exc)
    finally:
        rpc.shutdown()
    raise AssertionError("it returned")


def fail_or_call(rank: int) -> None:
    if rank == 1:
        rpc.barrier()
        raise ValueError(CAUSE)
    rpc.barrier()
    rpc.rpc_sync("worker1", time.sleep, args=(60,))


def test_run_local_raises_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=CAUSE) as caught:
        run_local(fail_or_call, 3)
    assert caught.value.remote_worker == "worker1"  # type: ignore[attr-defined]


def test_those_without_a_connection_are_told_the_cause_by_others(
    start_workers: Workers, tmp_path: Path
) -> None:
    """In a ring of five, worker0 has no connection to worker2; worker1 tells it."""
    group = start_workers(5)
    group.init(f"file://{tmp_path}/store")
    group[0].run(watch_losses)
    with pytest.raises(AssertionError):
        group[2].run(leave_because_of, CAUSE)
    reason = eventually(lambda: group[0].run(losses).get("worker2"), "the loss being told")
    assert CAUSE in reason, reason


lost: dict[str, str] = {}


def watch_losses() -> None:
    rpc.on_worker_lost(lambda info, reason: lost.update({info.name: reason}))


def losses() -> dict[str, str]:
    return dict(lost)


def leave_because_of(text: str) -> None:
    """As Python ends a process whose main thread raised."""
    try:
        raise ValueError(text)
    except ValueError:
        _close_all_at_exit()
        os._exit(1)


# -- a shutdown ends within its timeout


def shut_down_within(timeout_s: float, api: str) -> tuple[float, str, str]:
    began = time.monotonic()
    try:
        (farstep.compat.rpc if api == "compat" else rpc).shutdown(timeout=timeout_s)
    except ShutdownTimeout as exc:
        return time.monotonic() - began, type(exc).__name__, str(exc)
    return time.monotonic() - began, "", ""


calls: list[Any] = []


def start_long_call(to: str) -> None:
    calls.append(rpc.rpc_async(to, time.sleep, args=(30,), timeout=0))


@pytest.mark.parametrize("api", ["farstep", "compat"])
def test_a_shutdown_ends_within_its_timeout_and_says_what_still_ran(workers: Workers, api: str) -> None:
    group = workers(2)
    group[0].run(start_long_call, "worker1")
    pending = group.start_all(shut_down_within, 2.0, api)
    (caller_s, _, caller_said), (callee_s, _, callee_said) = group.finish(pending)
    assert max(caller_s, callee_s) < 2.0 + 4.0  # the called function was waited for 5 s more
    assert "sleep on 'worker1'" in caller_said
    assert "sleep called by 'worker0'" in callee_said


@pytest.mark.parametrize("api", ["farstep", "compat"])
def test_a_shutdown_says_which_calls_the_end_of_another_ones_time_cut_off(workers: Workers, api: str) -> None:
    """worker1 runs out of time and leaves; worker0 has plenty, and will never have its answer."""
    group = workers(2)
    group[0].run(start_long_call, "worker1")
    pending = [group[0].start(shut_down_within, 60.0, api), group[1].start(shut_down_within, 2.0, api)]
    (_, error, said), (_, _, callee_said) = group.finish(pending)
    assert error == "ShutdownTimeout"
    assert "'worker0' got no answer to sleep on 'worker1'" in said
    assert "the timeout of its shutdown, 2 s, had passed" in said
    assert "2 s" in callee_said  # as it was asked for
    assert "1.8 s" not in callee_said


@pytest.mark.parametrize("api", ["farstep", "compat"])
def test_it_does_not_fail_for_calls_to_a_worker_that_left_for_another_reason(
    workers: Workers, api: str
) -> None:
    group = workers(2)
    group[0].run(start_long_call, "worker1")
    pending = group[0].start(shut_down_within, 60.0, api)
    group[1].run(rpc.shutdown, False)
    assert pending.result()[1:] == ("", "")


def who_is_missing_at_shutdown() -> list[str]:
    return current_agent().links.gatherings.missing(("join/*", 0))


def test_it_says_who_is_missing_and_what_still_runs(workers: Workers) -> None:
    group = workers(2)
    pending = group[1].start(shut_down_within, 5.0, "farstep")
    eventually(lambda: group[0].run(who_is_missing_at_shutdown), "worker1 waiting for worker0")
    group[0].run(start_long_call, "worker1")
    _, error, said = pending.result()
    assert error == "ShutdownTimeout"
    assert "Missing: worker0" in said
    assert "more than 5 s" in said
    assert "'worker1' still runs sleep called by 'worker0'" in said
