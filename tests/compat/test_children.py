"""Processes that a script starts under `python -m farstep.compat` have farstep too, whatever they import first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
"""Written for torch.distributed.rpc, by someone who imports farstep as well."""

import importlib
import multiprocessing
import os
import sys

importlib.import_module(os.environ.get("IMPORT_FIRST", "torch"))

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

FIRST = ["farstep.compat", "farstep.optim"]


def work(rank):
    """Forms a group with the others, and calls the next."""
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=len(FIRST),
                 rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1]))
    assert rpc.rpc_sync(f"w{(rank + 1) % len(FIRST)}", torch.add, args=(torch.ones(2), rank)).sum() == 2 + 2 * rank
    rpc.shutdown()
    say(rank)
    if rank == 0:
        os.environ["IMPORT_FIRST"] = "torch.distributed.rpc"
        mp.spawn(nested)


def nested(_):
    say("nested")


def say(who):
    sys.stdout.write(f"{who}: {os.environ['IMPORT_FIRST']} first, then {rpc.__name__}\\n")
    sys.stdout.flush()


if __name__ == "__main__":
    workers = []
    for rank, first in enumerate(FIRST):
        os.environ["IMPORT_FIRST"] = first
        workers.append(multiprocessing.get_context("spawn").Process(target=work, args=(rank,)))
        workers[-1].start()
    for worker in workers:
        worker.join()
    sys.exit(any(worker.exitcode for worker in workers))
'''


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=150)


@pytest.mark.slow
@pytest.mark.timeout(180)  # four times `import torch`, one after another, where others compute
def test_a_script_that_imports_farstep_first_can_spawn(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ("-m", "farstep.cli", "run", "--compat", "-n", "1", str(script))
    done = run(*command, f"file://{tmp_path}/rendezvous")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0: farstep.compat first, then farstep.compat.rpc",
        "[0] 1: farstep.optim first, then farstep.compat.rpc",
        "[0] nested: torch.distributed.rpc first, then farstep.compat.rpc",
    ]


def test_a_command_line_is_run_as_python_runs_it() -> None:
    """-c, with its arguments; and the module keeps the loader that others read sources and data with."""
    code = "import sys, torch, torch.distributed.rpc as r; print(r.__name__, sys.argv, __name__, vars(torch.__loader__))"
    done = run("-m", "farstep.compat", "-c", code, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    name, rest = done.stdout.split(" ", 1)
    assert name == "farstep.compat.rpc"
    assert rest.startswith("['-c', '--lr', '0.1'] __main__ {'name': 'torch'")
