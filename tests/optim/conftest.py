"""Agents in one process, worker processes and gloo ranks, as fixtures."""

import pytest
from autograd.conftest import agents_of, pytest_runtest_makereport, start_workers, three, workers
from support.ranks import Ranks

__all__ = ["agents_of", "on_ranks", "pytest_runtest_makereport", "start_workers", "three", "workers"]


@pytest.fixture(scope="package")
def on_ranks():
    """`on_ranks(3, body, ...)` runs it on three ranks at once, which are there for later tests too, unless it fails."""
    groups = {}

    def run(world_size, body, *args):
        if world_size not in groups:
            groups[world_size] = Ranks(world_size)
        try:
            return groups[world_size].run(body, *args)
        except BaseException:
            for rank in range(world_size):
                print(f"-- log of rank {rank}\n{groups[world_size].log(rank)[-4000:]}")
            groups.pop(world_size).close()
            raise

    yield run
    for ranks in groups.values():
        ranks.close()
