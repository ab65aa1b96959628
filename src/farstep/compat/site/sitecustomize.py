"""Found first on the path of processes that `python -m farstep.compat` starts: installs farstep there as well.

Scripts that start their workers with multiprocessing's spawn, or as subprocesses, would otherwise run torch's own RPC
in them. Nothing happens until torch is imported, which imports its RPC itself.
"""

from __future__ import annotations

import importlib.util
import os
import sys

TARGET = "torch"


class _AfterLoading:
    """Loads torch's module as its own loader does, then puts farstep in its place."""

    def __init__(self, loader):  # type: ignore[no-untyped-def]
        self._loader = loader

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        self._loader.exec_module(module)
        from farstep.compat import install

        install()


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != TARGET:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader)  # type: ignore[assignment, no-untyped-call]
        return spec


sys.meta_path.insert(0, _Finder)

# Give way to another sitecustomize, which this one stands in front of.
_here = os.path.dirname(os.path.abspath(__file__))
_path = list(sys.path)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
_mine = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ImportError:
    pass
finally:
    if _mine is not None:
        sys.modules["sitecustomize"] = _mine
    sys.path[:] = _path
