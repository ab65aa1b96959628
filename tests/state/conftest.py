"""Ranks for the tests of a module: real processes, started once for all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ranks import Ranks

from state.spreads import set_same_host


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=[None, False], ids=["memory", "messages"])
def four_ways(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks on one host, which by default read large regions from each other's memory, and four that send them."""
    with Ranks(4) as ranks:
        ranks.run(set_same_host, request.param)
        yield ranks
