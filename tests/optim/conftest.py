"""Agents in one process and worker processes, as fixtures."""

from autograd.conftest import agents_of, pytest_runtest_makereport, start_workers, three, workers

__all__ = ["agents_of", "pytest_runtest_makereport", "start_workers", "three", "workers"]
