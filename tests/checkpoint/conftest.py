"""Worker processes, and ranks of a group, as fixtures."""

from rpc.conftest import pytest_runtest_makereport, start_workers, workers
from state.conftest import four, two

__all__ = ["four", "pytest_runtest_makereport", "start_workers", "two", "workers"]
