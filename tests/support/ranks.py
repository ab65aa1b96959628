"""Processes of a gloo group for tests: real ones, forked quickly, which run the functions they are given."""

from __future__ import annotations

import datetime
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.workers import PATIENCE_S, Pending, Worker

__all__ = ["Ranks"]


class Ranks:
    """`world_size` processes in one default group. `with Ranks(2) as ranks: ranks.run(function, ...)`.

    `function` is of a module's top level and calls torch.distributed as any program does; it gets `args` alone.
    """

    def __init__(self, world_size: int, timeout_s: float = PATIENCE_S) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers = [Worker(f"rank{i}", self._folder / f"rank{i}.log") for i in range(world_size)]
        store = str(self._folder / "store")
        self._finish([w.start(_join, store, i, world_size, timeout_s) for i, w in enumerate(self.workers)])

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
        """The same on every rank at once; the results by rank. A rank that fails is shown with its log."""
        return self._finish(self.start(function, *args), timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> list[Pending]:
        """The same on every rank that is alive; go on at once."""
        return [worker.start(function, *args) for worker in self.workers if worker.is_alive]

    def log(self, rank: int) -> str:
        return self.workers[rank].log.read_text()

    def _finish(self, pending: list[Pending], timeout_s: float = PATIENCE_S) -> list[Any]:
        return [each.result(timeout_s) for each in pending]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _join(store: str, rank: int, world_size: int, timeout_s: float) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
