"""How much is under way at a worker, so that a group can end when nothing is."""

from __future__ import annotations

import threading
import time

__all__ = ["Tally"]


class Tally:
    """Counts calls sent, answered, received and served. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        self.sent = 0
        self.ended = 0
        self.received = 0
        self.served = 0

    def send(self) -> None:
        with self._lock:
            self.sent += 1

    def unsend(self) -> None:
        """It was counted and then could not be sent."""
        with self._lock:
            self.sent -= 1
            self._tell()

    def unsend_ended(self) -> None:
        """The same, of a call that has its outcome already."""
        with self._lock:
            self.sent -= 1
            self.ended -= 1
            self._tell()

    def end(self, count: int = 1) -> None:
        """Calls that were sent have their outcome."""
        with self._lock:
            self.ended += count
            self._tell()

    def receive(self, count: int = 1) -> None:
        with self._lock:
            self.received += count

    def serve(self) -> None:
        with self._lock:
            self.served += 1
            self._tell()

    def _tell(self) -> None:
        if self._waiters:
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        return self.sent == self.ended and self.received == self.served

    @property
    def serving(self) -> int:
        return self.received - self.served

    def totals(self) -> tuple[int, int]:
        with self._lock:
            return self.sent, self.received

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Until no call of this worker's and none for it is under way."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._waiters += 1
            try:
                while not self.is_idle:
                    left = None if deadline is None else deadline - time.monotonic()
                    if (left is not None and left <= 0) or not self._changed.wait(left):
                        return False
                return True
            finally:
                self._waiters -= 1

    def __str__(self) -> str:
        return f"{self.sent - self.ended} sent without an answer, {self.serving} being served"
