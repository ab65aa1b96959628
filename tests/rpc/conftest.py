"""Groups of worker processes as a fixture, and their logs with a test that fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.workers import Group, Worker

for _name in ("FARSTEP_SECRET", "FARSTEP_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # a developer's own settings are not part of a test

_LOGS = pytest.StashKey[list[Path]]()


@pytest.fixture
def start_workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """`start_workers(n)`: n processes, not yet in any group. They are killed at the end of the test."""
    started: list[Worker] = []
    logs = request.node.stash.setdefault(_LOGS, [])

    def start(
        count: int,
        *,
        names: list[str] | None = None,
        env: dict[str, str] | None = None,
        setup: Callable[[], None] | None = None,
    ) -> Group:
        first = len(started)
        for i in range(count):
            name = names[i] if names else f"worker{first + i}"
            log = tmp_path / f"{len(started)}-{name}.log"
            logs.append(log)
            started.append(Worker(name, log, env, setup))
        return Group(started[first:])

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def workers(start_workers: Callable[..., Group], tmp_path: Path) -> Callable[..., Group]:
    """`workers(n, **options)`: n processes that have called init_rpc with one another."""

    def start(count: int, *, env: dict[str, str] | None = None, **options: Any) -> Group:
        group = start_workers(count, env=env)
        options.setdefault("init_method", f"file://{tmp_path}/rendezvous")
        group.init(**options)
        return group

    return start


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if report.failed and report.when == "call":
        for log in item.stash.get(_LOGS, []):
            text = log.read_text(errors="replace") if log.exists() else "(never started)"
            report.sections.append((f"log of {log.stem}", text[-20_000:]))
