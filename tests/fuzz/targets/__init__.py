"""Whatever is in here is a target."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

__all__ = ["load", "names"]


def names() -> list[str]:
    """The modules in here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
