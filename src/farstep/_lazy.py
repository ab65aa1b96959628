"""Public names of a package that are imported when they are first used, so that importing the package costs little."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["import_when_used"]


def import_when_used(package: str, names: Mapping[str, str]) -> None:
    """Give the package names: for each of its modules, those that it defines, with spaces in between.

    A type checker can't see them: the package also imports them under `if TYPE_CHECKING`.
    """
    homes = {name: f"{package}.{module}" for module, listed in names.items() for name in listed.split()}

    class Package(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in homes:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(importlib.import_module(homes[name]), name)
            super().__setattr__(name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            """Python binds a module that has been imported in its package: not where a public name is the same."""
            if not (name in homes and isinstance(value, types.ModuleType)):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *homes})

    sys.modules[package].__class__ = Package
