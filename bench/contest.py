"""Contests: several ways to do one thing, by all ranks of a gloo group at once, in the same processes and in turn.

A group's ranks build all the ways over the same tensors, then in every round do each once, in a shuffled order. The time is from when all have begun until all
are done. Peak memory is measured apart from that, in a group of its own for every way.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import checkpoints, host_memory, optim_state, sharded
from bench.group import Group, GroupFailed
from bench.worker import obey, quiet

Say = Callable[[str], None]
ROUND_S = 300.0
"""The longest that a round may take: some write and read tens of GB, or a hundred thousand tensors by slow ways."""
CASES = {**sharded.CASES, **optim_state.CASES, **checkpoints.CASES}


@dataclass(frozen=True)
class Match:
    """One line of a table: how much faster the second way is than the first."""

    title: str
    baseline: str
    subject: str
    target: float | None = None


@dataclass(frozen=True)
class Contest:
    key: str
    case: str
    """A key of `CASES`."""
    world_size: int
    matches: Sequence[Match]
    most_rounds: int = 7
    """They take seconds each: more would tell little."""
    weighed: Sequence[str] = ()
    """The ways whose peak memory is measured too."""
    alone: Sequence[str] = ()
    """Ways that are measured and compared with nothing."""
    warm_up: bool = True
    """Whether each way is done once before it is timed."""
    fresh_bytes: int = 0
    """Memory that all ranks together may need anew: see `host_memory`."""

    @property
    def ways(self) -> list[str]:
        compared = (way for m in self.matches for way in (m.baseline, m.subject))
        return list(dict.fromkeys((*compared, *self.alone)))


@dataclass
class Outcome:
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of each way, by round."""
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Of each way, by rank: bytes before it was done, and the most meanwhile."""
    stored: dict[str, int] = field(default_factory=dict)
    """Bytes that a way has written, if it says so."""
    failure: str | None = None


@dataclass(frozen=True)
class Seat:
    rank: int
    world_size: int
    store: str
    log: str


def run(
    contests: Sequence[Contest], rounds: int, seed: int, context: ForkServerContext, scratch: Path, say: Say
) -> dict[str, Outcome]:
    shuffler = random.Random(seed)
    outcomes: dict[str, Outcome] = {}
    for contest in contests:
        count = min(rounds, contest.most_rounds)
        say(f"{contest.key}: {contest.world_size} ranks, {count} rounds")
        outcomes[contest.key] = outcome = Outcome({way: [] for way in contest.ways})
        try:
            _race(contest, outcome, count, shuffler, context, scratch)
            for way in contest.weighed:
                outcome.memory[way] = _weigh(contest, way, context, scratch)
        except GroupFailed as exc:
            outcome.failure = str(exc)
            say(f"{contest.key} failed: {exc}")
    return outcomes


def _race(
    contest: Contest,
    outcome: Outcome,
    rounds: int,
    shuffler: random.Random,
    context: ForkServerContext,
    scratch: Path,
) -> None:
    everyone = range(contest.world_size)
    with _prepared(contest, contest.ways, context, scratch) as group:
        for number in range(-1 if contest.warm_up else 0, rounds):
            order = shuffler.sample(contest.ways, len(contest.ways))
            (times, *_) = group.ask_all(
                everyone, [("round", order, contest.fresh_bytes)] * contest.world_size
            )
            for way, (seconds, nbytes) in times.items() if number >= 0 else ():
                outcome.seconds[way].append(seconds)
                outcome.stored[way] = nbytes


def _weigh(contest: Contest, way: str, context: ForkServerContext, scratch: Path) -> list[tuple[int, int]]:
    with _prepared(contest, [way], context, scratch) as group:
        return group.ask_all(range(contest.world_size), [("peak", way)] * contest.world_size)


@contextmanager
def _prepared(
    contest: Contest, ways: Sequence[str], context: ForkServerContext, scratch: Path
) -> Iterator[Group]:
    """Its ranks, with these ways made; gone afterwards, with all that they have written."""
    group = _group(context, scratch, contest.world_size)
    try:
        group.ask_all(range(contest.world_size), [("prepare", contest.case, ways)] * contest.world_size)
        yield group
    finally:
        group.close()
        checkpoints.clear()


_made = 0


def _group(context: ForkServerContext, scratch: Path, world_size: int) -> Group:
    global _made
    _made += 1
    store = str(scratch / f"store{_made}")
    seats = [
        Seat(rank, world_size, store, str(scratch / f"contest{_made}-{rank}.log"))
        for rank in range(world_size)
    ]
    return Group(context, [(serve, (seat,)) for seat in seats], ROUND_S)


# -- in a rank's process ----------------------------------------------------------------------------------


def serve(pipe: Connection, seat: Seat) -> None:
    quiet(seat.log)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        acts: dict[str, Callable[[], object]] = {}
        obey(
            pipe,
            enter=lambda: _join(seat),
            answer=lambda _, command: _answer(stack, acts, command),
            leave=lambda _: _leave(stack),
        )


def _join(seat: Seat) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(seat.store, seat.world_size),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=datetime.timedelta(seconds=ROUND_S),
    )


def _leave(stack: ExitStack) -> None:
    stack.close()
    dist.destroy_process_group()


def _answer(stack: ExitStack, acts: dict[str, Callable[[], object]], command: tuple[Any, ...]) -> Any:
    verb, *rest = command
    if verb == "prepare":
        case, ways = rest
        acts.update(stack.enter_context(CASES[case](ways)))
        return None
    if verb == "round":
        order, fresh_bytes = rest
        return {way: _timed(acts[way], fresh_bytes // dist.get_world_size()) for way in order}
    way = rest[0]
    sharded.forget_peak()
    before = sharded.peak_bytes()
    for _ in range(2):
        _ended(acts[way]())
    return before, sharded.peak_bytes()


def _timed(act: Callable[[], object], fresh_bytes: int) -> tuple[float, int]:
    """Seconds, and bytes that it has stored if it tells where."""
    if isinstance(act, checkpoints.Prepared):
        act = act.prepare()
    host_memory.warm(fresh_bytes)
    dist.barrier()
    start = time.perf_counter()
    result = act()
    dist.barrier()
    seconds = time.perf_counter() - start
    _ended(result)
    return seconds, result.nbytes if isinstance(result, checkpoints.Stored) else 0


def _ended(result: object) -> None:
    if isinstance(result, checkpoints.Begun):
        result.finish()
