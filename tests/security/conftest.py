"""Worker processes, as fixtures."""

from rpc.conftest import pytest_runtest_makereport, start_workers, workers

__all__ = ["pytest_runtest_makereport", "start_workers", "workers"]
