"""What the workers of the demo tell the process that shows it. All are picklable and none is large."""

from __future__ import annotations

from dataclasses import dataclass

from farstep.demo.training import Step

__all__ = ["Began", "Ended", "Event", "Kill", "Stepped", "WorkerState", "Workers", "Wrote"]


@dataclass(frozen=True)
class Began:
    """An act has begun; `steps` is how many steps it will take, if it trains."""

    act: str
    steps: int = 0


@dataclass(frozen=True)
class Stepped:
    """A step of the act was taken, `seconds` after its first began."""

    act: str
    number: int
    step: Step
    seconds: float


@dataclass(frozen=True)
class Ended:
    """An act is over. `said` is one line about what was found; `at` is of the machine's monotonic clock."""

    act: str
    right: bool
    said: str
    at: float


@dataclass(frozen=True)
class WorkerState:
    """A worker, what it holds, and the bytes that it has written to sockets and read from them."""

    parts: tuple[str, ...]
    parameters: int
    sent: int
    received: int


@dataclass(frozen=True)
class Workers:
    """The workers that live, by name."""

    states: dict[str, WorkerState]


@dataclass(frozen=True)
class Kill:
    """Please end this worker, with SIGKILL."""

    worker: str


@dataclass(frozen=True)
class Wrote:
    """What the trained model wrote, and the beginning that it was given."""

    start: str
    text: str


Event = Began | Stepped | Ended | Workers | Kill | Wrote
