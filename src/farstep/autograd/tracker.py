"""When a backward pass is over, and what to do when it is not and nothing moves any more.

The worker that runs `backward` hears of every step: which keys a worker has dealt with, and which keys it has passed on to whom. A key is
what a worker is told to do: a send that fires, or a command. The pass has come to rest when all keys that were passed on
have been dealt with, and all that were dealt with have been passed on, for word of the two may come in either order:

    a key that is under way was passed on in some step, which was caused by a key before it, and so on back to the roots;
    the first of these steps that has not been told of was caused by a key which is known, and is not known to be dealt with.

At rest, and with no gradient waiting anywhere, it is over. If gradient waits somewhere it waits for sends that have not fired. In SMART mode
a *wave* goes out then: from where gradient waits, each worker marks the recvs below and tells their peers which
sends will fire, and so on. When that has come to rest, the sends that were not marked never fire; the blocked
workers are told so, and the pass goes on. One wave is enough, for it marks all that can be reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from farstep.autograd.passes import ROOTS, Key, Settings
from farstep.errors import AutogradError, BackwardTimeout

__all__ = ["Command", "Phase", "Report", "Tracker"]


class Phase(Enum):
    FLOWING = "flowing"  # from the start
    WAVE = "wave"  # it came to rest with gradient waiting somewhere
    SETTLED = "settled"  # the wave came to rest
    OVER = "over"  # it came to rest with nothing waiting, or failed


@dataclass
class Report:
    """One step of one worker."""

    worker: int
    done: list[Key]
    passed_on: list[tuple[Key, int]]
    is_blocked: bool | None = None
    """None: as before."""
    number: int = 0


Command = tuple[int, str, Key]
"""A worker, what it is told ("wave": to start one, "settle": that it is over), and the key of that."""


class Tracker:
    """The view of the worker that runs `backward`. Any thread."""

    def __init__(self, settings: Settings, me: int, name_of: Callable[[int], str]) -> None:
        self.settings = settings
        self._name_of = name_of
        self._lock = threading.Lock()
        self._phase = Phase.FLOWING
        self._outstanding: dict[Key, int] = {ROOTS: me}
        self._early: dict[Key, set[int]] = {}
        """Keys that workers have dealt with, before there was word that they had been passed on."""
        self._blocked: dict[int, tuple[int, bool]] = {}
        self._heard_at = time.monotonic()
        self._over = threading.Lock()
        self._over.acquire()
        self.participants: set[int] = {me}
        self.error: BaseException | None = None

    def report(self, report: Report) -> list[Command]:
        """Word of a step. Returns what workers are to be told now. Does not block."""
        with self._lock:
            if self._phase is Phase.OVER:
                return []
            self._heard_at = time.monotonic()
            self.participants.add(report.worker)
            if (
                report.is_blocked is not None
                and report.number > self._blocked.get(report.worker, (0, False))[0]
            ):
                self._blocked[report.worker] = (report.number, report.is_blocked)
            for key in report.done:  # only by whom it was passed on to
                if key not in self._outstanding:
                    self._early.setdefault(key, set()).add(report.worker)
                elif self._outstanding[key] == report.worker:
                    del self._outstanding[key]
            for key, worker in report.passed_on:
                self.participants.add(worker)
                if worker not in self._early.pop(key, ()):
                    self._outstanding[key] = worker
            return [] if self._outstanding or self._early else self._at_rest()

    def _at_rest(self) -> list[Command]:
        """Under the lock."""
        blocked = sorted(worker for worker, (_, is_blocked) in self._blocked.items() if is_blocked)
        if self._phase is Phase.WAVE:
            self._phase = Phase.SETTLED
            verb = "settle"
        elif not blocked:
            self._end(None)
            return []
        elif self._phase is Phase.FLOWING and self.settings.mode == "smart":
            self._phase = Phase.WAVE
            verb = "wave"
        else:
            names = ", ".join(self._name_of(worker) for worker in blocked)
            self._end(
                AutogradError(
                    f"backward of context {self.settings.context_id}: gradient waits on {names} for outputs that crossed "
                    f"workers and are not used in the loss. mode='fast' counts on every one of them being used; "
                    f"mode='smart', the default, does not"
                )
            )
            return []
        commands: list[Command] = [(worker, verb, (verb, worker)) for worker in blocked]
        self._outstanding.update({key: worker for worker, _, key in commands})
        return commands

    # -- the end

    def _end(self, error: BaseException | None) -> None:
        """Under the lock."""
        if self._phase is not Phase.OVER:
            self._phase = Phase.OVER
            self.error = error
            self._over.release()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._end(error)

    @property
    def is_over(self) -> bool:
        return self._phase is Phase.OVER

    def expected_from(self) -> list[int]:
        """The workers that something may come from soon."""
        with self._lock:
            return sorted(self.participants)

    def concerns(self, worker: int) -> bool:
        return worker in self.participants

    def wait(self, timeout_s: float) -> None:
        """Until it is over. `timeout_s`: how long nothing may be heard; 0 for ever."""
        if not timeout_s:
            self._over.acquire()
            return
        while not self._over.acquire(timeout=max(0.0, self._heard_at + timeout_s - time.monotonic())):
            with self._lock:
                if time.monotonic() < self._heard_at + timeout_s:
                    continue
                waits_for = {self._name_of(worker) for worker in self._outstanding.values()}
                self._end(
                    BackwardTimeout(
                        f"backward of context {self.settings.context_id}: nothing was heard for {timeout_s:g} s from "
                        f"{', '.join(sorted(waits_for)) or 'anyone'}. Pass a larger timeout (0 for none), or see what they do"
                    )
                )

    def __repr__(self) -> str:
        waits: Any = {key: self._name_of(worker) for key, worker in self._outstanding.items()}
        return f"<Tracker {self.settings.id} {self._phase.value}, under way: {waits}>"
