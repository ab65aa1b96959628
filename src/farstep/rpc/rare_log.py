"""A log for what strangers can cause: whatever they do, it stays short."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Final

__all__ = ["RareLog"]

AT_ONCE: Final = 5
INTERVAL_S: Final = 10.0


class RareLog:
    """Writes the first warnings of each kind in each interval and counts the others. Any thread."""

    def __init__(self, log: logging.Logger, at_once: int = AT_ONCE, interval_s: float = INTERVAL_S) -> None:
        self._log = log
        self._at_once = at_once
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._written: Counter[str] = Counter()
        self._left_out = 0

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Write it, or count it; the count is told with the first one of the next interval, or by `flush`."""
        with self._lock:
            now = time.monotonic()
            if now - self._began >= self._interval_s:
                left_out, self._left_out = self._left_out, 0
                self._began = now
                self._written.clear()
            else:
                left_out = 0
            if self._written[kind] >= self._at_once:
                self._left_out += 1
                return
            self._written[kind] += 1
        self._tell(left_out)
        self._log.warning(message, *args)

    def flush(self) -> None:
        """At the end: tell of what was counted."""
        with self._lock:
            left_out, self._left_out = self._left_out, 0
        self._tell(left_out)

    def _tell(self, left_out: int) -> None:
        if left_out:
            self._log.warning("... and %d more warnings of this kind, which were left out", left_out)
