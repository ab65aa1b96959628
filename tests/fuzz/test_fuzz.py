"""A taste of `make fuzz`: as many inputs as there is time for among the other tests."""

from __future__ import annotations

import pytest

from fuzz import targets
from fuzz.__main__ import run_child

INPUTS = 20_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inputs_that_nobody_meant() -> None:
    printed, failure = run_child(targets.names(), INPUTS, seed=1, timeout_s=280)
    assert failure is None, printed + failure
    tried = sum(int(line.split()[1]) for line in printed.splitlines() if " inputs in " in line)
    assert tried >= INPUTS * 0.99
