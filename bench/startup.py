"""What a process pays before it does anything: the CPU time of its imports, in a process of its own for every one."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

from bench.group import Group

PAIRS = 3
TORCH = "torch.distributed"
IMPORTS = {
    "rpc": (("rpc",), ("rpc",)),
    "all": (("rpc", "autograd", "optim.optimizer"), ("rpc", "autograd", "optim")),
}
"""What a script imports of torch's, and of farstep's for the same."""
_turn = itertools.count()


def paired_imports(key: str) -> Callable[[Group], tuple[float, ...]]:
    """CPU seconds of `import torch` and torch's modules, and of the same with farstep's, in turn."""
    theirs, ours = IMPORTS[key]
    commands = (
        "import torch, " + ", ".join(f"{TORCH}.{name}" for name in theirs),
        "import torch, " + ", ".join(f"farstep.{name}" for name in ours),
    )

    def measure(group: Group) -> tuple[float, ...]:
        for command in commands:
            _warm(command)
        least = [float("inf"), float("inf")]
        for _ in range(PAIRS):
            first = next(_turn) % 2
            for side in (first, 1 - first):
                least[side] = min(least[side], _cpu_seconds(command=commands[side]))
        return tuple(least)

    return measure


@functools.cache
def _warm(command: str) -> None:
    """Have Python write its bytecode, as pip does when it installs, and the system read the files."""
    _cpu_seconds(command)


def _cpu_seconds(command: str) -> float:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen([sys.executable, "-c", command], env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"`python -c {command!r}` failed with {process.returncode}")
    return usage.ru_utime + usage.ru_stime
