"""Worker processes that have called nothing yet, as for the tests of RPC."""

from rpc.conftest import pytest_runtest_makereport, start_workers

__all__ = ["pytest_runtest_makereport", "start_workers"]
