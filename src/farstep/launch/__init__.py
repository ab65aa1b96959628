"""Starting workers: local processes for tests, experiments and one machine."""

from farstep.launch.local import LocalWorkers, run_local, tell
from farstep.launch.script import run_script

__all__ = ["LocalWorkers", "run_local", "run_script", "tell"]
