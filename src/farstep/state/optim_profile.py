"""Where the time and the bytes of a conversion went, as plain data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PHASES", "Profile"]

PHASES = ("plan", "gather", "copy", "offload")


class Profile:
    """Fills a dict that the user gave, `{phase: {"time_s": ..., "bytes": ...}}`, or none."""

    def __init__(self, given: dict[str, Any] | None) -> None:
        self._phases = {} if given is None else given
        for phase in PHASES:
            self._phases[phase] = {"time_s": 0.0, "bytes": 0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name]["time_s"] += time.perf_counter() - begin

    def add(self, name: str, nbytes: int) -> None:
        self._phases[name]["bytes"] += nbytes
