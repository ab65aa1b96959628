"""Notes in the job's store, one for each rank: which operation it is in, and whether it waits there."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

from farstep.dist.adapters import Store, connected_anew

__all__ = ["Activity", "Board", "Failure", "Note"]

_STORE_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Activity:
    """An operation that a rank is in."""

    operation: str
    home: str = ""
    """The name of the only process group that it concerns; "" if any may wait for it."""
    group: str = ""
    """The name of the process group that it waits in; "" while it works."""
    what: str = ""
    """What it waits for, in words; "" while it works."""
    waits_for: tuple[int, ...] = ()
    """The ranks of the job that it waits for; none while it works."""
    waits: int = 0
    """How many waits came before this one."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank gave up a process group."""

    operation: str
    cause: str
    ranks: tuple[int, ...]
    """The ranks of the job that caused it."""
    after_s: float = 0.0
    """How long the rank had waited."""


@dataclass(frozen=True, slots=True)
class Note:
    beat: int
    """Grows each time the rank writes: a rank whose beat stands still is not running."""
    activities: tuple[Activity, ...] = ()
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """By the name of the group that was given up."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Note | None:
        """Return None for what is not a note."""
        try:
            found = json.loads(text)
            activities = [Activity(**each) for each in found["activities"]]
            return cls(
                int(found["beat"]),
                tuple(replace(each, waits_for=tuple(each.waits_for)) for each in activities),
                {
                    group: Failure(
                        each["operation"], each["cause"], tuple(each["ranks"]), float(each["after_s"])
                    )
                    for group, each in found["failures"].items()
                },
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class Board:
    """The notes of all ranks, in the store of the job. Any thread may use it.

    It talks to the store over a connection of its own, made at the first use: a thread that blocks in the
    store holds up all others that share its connection.
    """

    def __init__(self, store: Store | None) -> None:
        self._shared = store
        self._own: Store | None = None
        self._lock = threading.Lock()

    def write(self, rank: int, note: Note) -> bool:
        """Return False if the store cannot be reached."""
        with self._lock:
            try:
                store = self._opened()
                if store is not None:
                    store.set(_key(rank), note.encode())
            except RuntimeError:
                return False
        return store is not None

    def read(self, rank: int) -> Note | None:
        """Return None if the rank has written nothing, or the store cannot be reached."""
        with self._lock:
            try:
                store = self._opened()
                if store is None or not store.check([_key(rank)]):
                    return None
                return Note.decode(store.get(_key(rank)))
            except RuntimeError:
                return None

    def _opened(self) -> Store | None:
        if self._own is None and self._shared is not None:
            shared, self._shared = self._shared, None  # tried once: to connect to a host that is gone takes long
            shared.check([_key(0)])  # raises at once if the process that serves the store has ended
            self._own = connected_anew(shared)
            self._own.set_timeout(_STORE_TIMEOUT)
        return self._own


def _key(rank: int) -> str:
    return f"farstep/rank/{rank}"
