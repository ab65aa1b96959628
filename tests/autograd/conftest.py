"""Agents in one process and worker processes, as fixtures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from rpc.conftest import pytest_runtest_makereport, start_workers, workers
from support.workers import eventually, speaking_for

from farstep import rpc
from farstep.rpc import Agent, RpcOptions

__all__ = ["pytest_runtest_makereport", "speaking_for", "start_workers", "workers"]

OPTIONS = RpcOptions(rpc_timeout=60)
Agents = Callable[[int], list[Agent]]


@pytest.fixture(scope="module")
def agents_of() -> Iterator[Agents]:
    """`agents_of(n)`: n agents in this process, the same for every test of a module."""
    with contextlib.ExitStack() as stack:
        groups: dict[int, list[Agent]] = {}

        def get(count: int) -> list[Agent]:
            if count not in groups:
                groups[count] = stack.enter_context(rpc.local_agents(count, OPTIONS))
            return groups[count]

        yield get


@pytest.fixture
def three(agents_of: Agents) -> Iterator[list[Agent]]:
    """Three agents. This thread speaks for the first; no context may be left on any at the end."""
    agents = agents_of(3)
    with speaking_for(agents[0]):
        yield agents
    nothing_left_on(agents)


def contexts_on(agents: list[Agent]) -> dict[str, list[int]]:
    """The contexts that are open, by worker."""
    found = {a.info.name: [c.id for c in a.extension.contexts()] for a in agents if a.has_extension}  # type: ignore[attr-defined]
    return {
        name: new for name, ids in found.items() if (new := [id for id in ids if (name, id) not in _left])
    }


_left: set[tuple[str, int]] = set()
"""What an earlier test has been blamed for, as (worker, context)."""


def nothing_left_on(agents: list[Agent]) -> None:
    """A call that nobody waits for may end after its context."""
    try:
        eventually(lambda: not contexts_on(agents), timeout_s=5.0)
    except AssertionError:
        found = contexts_on(agents)
        _left.update((name, id) for name, ids in found.items() for id in ids)
        raise AssertionError(f"contexts are left: {found}") from None
