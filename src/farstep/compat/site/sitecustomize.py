"""Found first on the path of processes that `python -m farstep.compat` starts: installs farstep there as well.

Scripts that start their workers with multiprocessing's spawn, or as subprocesses, would otherwise run torch's own RPC
in them. Nothing happens until torch or farstep is imported. Whichever comes first, torch is imported whole before any
module of farstep is begun: installing while one of them is half imported would import it in a circle.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys


def _install() -> None:
    from farstep.compat import install

    install()


def _import_torch() -> None:
    importlib.import_module("torch")


_AFTER = {"torch": _install, "farstep": _import_torch}


class _Finder:
    """Finds each of these two once, as Python would, and has something done when it has been loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        after = _AFTER.pop(name, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, after)  # type: ignore[no-untyped-call]
        return spec


def _follow(loader, after):  # type: ignore[no-untyped-def]
    """The loader stays the module's own; only this one load does more."""
    load = loader.exec_module

    def load_and_follow(module):  # type: ignore[no-untyped-def]
        del loader.exec_module
        load(module)
        after()

    loader.exec_module = load_and_follow


if "torch" in sys.modules:  # a .pth file has imported it
    _install()
else:
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
