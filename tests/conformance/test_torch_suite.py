"""Each test of PyTorch's suite as one test of ours.

The first one that runs puts all the selected ones in the pool, so two of them are always under
way; each then only waits for its own outcome.  `make conformance` runs them without pytest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from . import catalogue
from .not_applicable import LEFT_OUT, PARTLY
from .pool import DEFAULT_LIMIT_S, Outcome, Pool

IMPL = os.environ.get("FARSTEP_CONFORMANCE_IMPL", "farstep.compat")
LANES = int(os.environ.get("FARSTEP_CONFORMANCE_LANES", "2"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(IMPL, LANES) as pool:
        yield pool


@pytest.fixture(scope="module")
def outcomes(pool: Pool, request: pytest.FixtureRequest) -> dict[str, Future[Outcome]]:
    selected = [
        item.callspec.params["label"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function is test_torch
        and not item.get_closest_marker("skip")
    ]
    return pool.submit(selected)


@pytest.mark.slow
@pytest.mark.conformance
@pytest.mark.timeout(DEFAULT_LIMIT_S * 3)  # its own limit, after a predecessor's and the imports
@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, id=label, marks=pytest.mark.skip(reason=LEFT_OUT[label]))
        if label in LEFT_OUT
        else pytest.param(label, id=label)
        for label in catalogue.tests()
    ],
)
def test_torch(label: str, outcomes: dict[str, Future[Outcome]]) -> None:
    result = outcomes[label].result()
    if result.outcome == "skipped":
        pytest.skip("torch itself skips it: " + result.detail)
    assert result.outcome == "passed", f"{result.outcome} after {result.seconds:.1f} s\n{result.detail}"


@pytest.mark.slow
@pytest.mark.conformance
def test_catalogue_is_complete(pool: Pool) -> None:
    assert pool.loaded_tests() == catalogue.tests()


def test_what_is_left_out_exists_and_says_why() -> None:
    assert set(LEFT_OUT) | set(PARTLY) <= set(catalogue.tests())
    assert all(len(reason) > 10 for reason in [*LEFT_OUT.values(), *PARTLY.values()])
    assert not set(LEFT_OUT) & set(PARTLY)
