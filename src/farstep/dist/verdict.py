"""Who is to blame for a wait: decided from the ranks' notes alone, and put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from farstep.dist.notes import Activity, Failure, Note
from farstep.dist.options import VARIABLE

__all__ = ["Sight", "Verdict", "busy_among", "judge", "named"]

_SILENT_AFTER_S = 5.0
"""However short the deadline is: a busy machine may stop a thread for seconds."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A rank's note, and what watching it has told."""

    note: Note | None
    silent_s: float = 0.0
    """For how long the rank has not written at all."""
    still_s: float = 0.0
    """For how long it has written the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a wait is given up, by the ranks of the job that are the cause."""

    absent: tuple[int, ...] = ()
    """They have not called the operation."""
    dead: tuple[int, ...] = ()
    """Their connections are closed."""
    silent: tuple[int, ...] = ()
    """They are in an operation, and their processes do not run."""
    elsewhere: Mapping[int, Activity] = field(default_factory=dict)
    """They wait in something else."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """They gave up before, for the cause that is told."""
    busy: tuple[int, ...] = ()
    """They work in an operation, and the process group's timeout has passed."""

    @property
    def found(self) -> set[int]:
        """The ranks that this one found itself; those that others found are at best the same."""
        return {*self.absent, *self.dead, *self.silent, *self.elsewhere}

    @property
    def ranks(self) -> tuple[int, ...]:
        told = (rank for failure in self.failures.values() for rank in failure.ranks)
        return tuple(sorted(self.found or set(told)))

    def with_closed(self, closed: Sequence[int]) -> Verdict:
        """Tell those that died from those that are only absent. `closed` are ranks of the job."""
        gone = set(closed) - self.failures.keys()
        return replace(
            self,
            absent=tuple(rank for rank in self.absent if rank not in gone),
            silent=tuple(rank for rank in self.silent if rank not in gone),
            dead=tuple(sorted(gone)),
            elsewhere={rank: each for rank, each in self.elsewhere.items() if rank not in gone},
        )

    def cause(self, operation: str, deadline_s: float) -> str:
        causes = []
        if self.dead:
            causes.append(f"{named(self.dead)} died or ended (the connection is closed)")
        if self.absent:
            has = "has" if len(self.absent) == 1 else "have"
            causes.append(f"{named(self.absent)} {has} not called it")
        if self.silent:
            causes.append(
                f"{named(self.silent)} called it and gave no sign of life for {deadline_s:g} s "
                f"(the process is stopped, or its host cannot be reached)"
            )
        for rank, activity in self.elsewhere.items():
            causes.append(f"rank {rank} waits in {activity.operation} ({activity.what})")
        if self.busy:
            causes.append(f"{named(self.busy)} still worked on it when the process group's timeout passed")
        if not causes:
            for rank, failure in [*self.failures.items()][:1]:
                where = "" if failure.operation == operation else f"in {failure.operation}, "
                causes.append(f"{where}{failure.cause} (as rank {rank} found)")
        return "; ".join(causes)

    def too_late(self, own_rank: int, operation: str, what: str) -> str:
        """Return what to say on a rank that the others gave up waiting for; "" on others."""
        waited = [rank for rank, each in self.failures.items() if own_rank in each.ranks]
        if self.found or not waited:
            return ""
        failure = self.failures[waited[0]]
        gave_up = f"gave up after {_rounded(failure.after_s)} s"
        if failure.operation == operation:
            return f"rank {own_rank} came too late to {operation} ({what}): {named(waited)} {gave_up}"
        return (
            f"rank {own_rank} called {operation} ({what}), but {named(waited)} waited for it in "
            f"{failure.operation} and {gave_up}"
        )

    def advice(self, members: Sequence[int], operation: str, deadline_s: float) -> str:
        group = f"({', '.join(map(str, members))})" if len(members) <= 16 else f"of {len(members)}"
        if self.dead or self.silent:
            return "Restart the job from its last checkpoint"
        if self.busy:
            return "Give init_process_group a longer timeout"
        if self.elsewhere:
            return f"All ranks of the group {group} must call the same operations in the same order"
        late = f"If one is only late, set {VARIABLE} above {deadline_s:g} on all ranks"
        return f"All ranks of the group {group} must call {operation}. {late}"


def judge(
    group: str,
    own: Activity,
    sights: Mapping[int, Sight],
    waited_s: float,
    deadline_s: float,
) -> Verdict | None:
    """Return who is to blame for a wait, or None if it should go on.

    `own` is this rank's wait in the process group of the name `group`; `sights` are those of the group's other
    ranks. A rank that works inside some operation is not absent, however long it takes.
    """
    gave_up = {
        rank: sight.note.failures[group]
        for rank, sight in sights.items()
        if sight.note is not None and group in sight.note.failures
    }
    if gave_up:
        return Verdict(failures=gave_up)
    if waited_s < deadline_s:
        return None
    absent: list[int] = []
    silent: list[int] = []
    elsewhere: dict[int, Activity] = {}
    together: dict[int, Activity] = {}
    is_any_busy = False
    for rank in _waited_for(own, group, sights):
        sight = sights[rank]
        activities = () if sight.note is None else sight.note.activities
        activity = _concerning(group, activities)
        if activity is None:
            absent.append(rank)
        elif sight.silent_s >= max(deadline_s, _SILENT_AFTER_S):
            silent.append(rank)
        elif not activity.waits_for or (activity.group != group and waited_s < 2 * deadline_s):
            is_any_busy = True  # it works; or waits in another group, where it will find out for whom
        elif activity.group == group and activity.operation == own.operation:
            together[rank] = activity
        else:
            elsewhere[rank] = activity
    if absent or silent or elsewhere:
        return Verdict(tuple(absent), (), tuple(silent), elsewhere)
    # All wait in the same operation. If they wait for the same, data are under way; if not, and nobody
    # comes through its wait, they wait for one another.
    others = {rank: each for rank, each in together.items() if each.what != own.what}
    if is_any_busy or not others or any(sights[rank].still_s < deadline_s for rank in together):
        return None
    return Verdict(elsewhere=others)


def busy_among(group: str, sights: Mapping[int, Sight]) -> tuple[int, ...]:
    """Return the ranks that are in an operation and do not wait."""
    found = []
    for rank, sight in sights.items():
        activity = None if sight.note is None else _concerning(group, sight.note.activities)
        if activity is not None and not activity.waits_for:
            found.append(rank)
    return tuple(found)


def named(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 1 and 2"."""
    numbers = [*map(str, ranks)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _waited_for(own: Activity, group: str, sights: Mapping[int, Sight]) -> list[int]:
    """Return the ranks that this one waits for, and those that these wait for in turn."""
    found: set[int] = set()
    ahead = [*own.waits_for]
    while ahead:
        rank = ahead.pop()
        if rank in found or rank not in sights:
            continue
        found.add(rank)
        note = sights[rank].note
        for activity in () if note is None else note.activities:
            if activity.group == group:
                ahead += activity.waits_for
    return sorted(found)


def _concerning(group: str, activities: Sequence[Activity]) -> Activity | None:
    """Return the operation of another rank that a wait in the group has to do with."""
    known = [each for each in activities if each.home in ("", group)]
    waiting_here = [each for each in known if each.group == group]
    return next(iter(waiting_here or known), None)
