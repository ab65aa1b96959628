"""Groups of worker processes, and certificates."""

from __future__ import annotations

from pathlib import Path

import pytest
from rpc.conftest import pytest_runtest_makereport, start_workers, workers

from security.attackers import make_certificates

__all__ = ["pytest_runtest_makereport", "start_workers", "workers"]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_certificates`."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
