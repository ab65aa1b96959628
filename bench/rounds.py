"""Runs all rows on both sides in turn.

Rows that need the same number of workers share a pair of groups, one of each side, both alive all the
time; the one whose turn it isn't is stopped. Rows with gradients have groups of their own, since what a
worker needs for them would make its plain calls a little slower. In every round the order of the rows is shuffled, and for
every row the order of the sides, so that neither warmth nor drift of the machine favours one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from bench.group import Group, GroupFailed, rpc_group
from bench.rows import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """One implementation under its name in the table, and options to try if it doesn't start without."""

    name: str
    module: str
    spare: dict[str, Any] = field(default_factory=dict)


@dataclass
class Figures:
    """What one side did in one row: a figure for every round, or why there is none."""

    rounds: list[float] = field(default_factory=list)
    failure: str | None = None
    note: str | None = None


Results = dict[str, dict[str, Figures]]
"""By the row's key, then by the side's name or the row's own column."""


def run(
    rows: list[Row],
    sides: list[Side],
    rounds: int,
    seed: int,
    context: ForkServerContext,
    scratch: Path,
    say: Say,
) -> Results:
    shuffler = random.Random(seed)
    results: Results = {
        row.key: {name: Figures() for side in sides for name in columns(row, side, sides)} for row in rows
    }

    def kind(row: Row) -> tuple[bool, int]:
        return row.section != "calls", row.world_size

    for (_, size), alike in groupby(sorted(rows, key=kind), kind):
        _Stage(list(alike), sides, size, context, scratch, results, say).run(rounds, shuffler)
    return results


def columns(row: Row, side: Side, sides: list[Side]) -> tuple[str, ...]:
    """Under which names a row has figures of this side: none, if it is only about the subject, the last."""
    if row.alone and side is not sides[-1]:
        return ()
    return row.columns or (side.name,)


class _Stage:
    """All rows on one number of workers."""

    def __init__(
        self,
        rows: list[Row],
        sides: list[Side],
        size: int,
        context: ForkServerContext,
        scratch: Path,
        results: Results,
        say: Say,
    ) -> None:
        self._rows, self._sides, self._size = rows, sides, size
        self._context, self._scratch = context, scratch
        self._results, self._say = results, say
        self._groups: dict[str, Group] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def run(self, rounds: int, shuffler: random.Random) -> None:
        try:
            for number in range(rounds):
                self._say(f"{self._size} workers: round {number + 1} of {rounds}")
                for row in shuffler.sample(self._rows, len(self._rows)):
                    for side in shuffler.sample(self._sides, len(self._sides)):
                        if self._figures(row, side):
                            self._measure(row, side)
        finally:
            for group in self._groups.values():
                group.close()

    def _figures(self, row: Row, side: Side) -> list[Figures]:
        return [self._results[row.key][name] for name in columns(row, side, self._sides)]

    def _measure(self, row: Row, side: Side) -> None:
        """One row on one side. A failure ends this pair; a broken group is started anew for the next row."""
        figures = self._figures(row, side)
        if any(each.failure for each in figures):
            return
        try:
            group = self._group(side)
        except GroupFailed as exc:
            self._give_up(side, str(exc))
            return
        try:
            group.resume()
            for each, value in zip(figures, row.measure(group), strict=True):
                each.rounds.append(value)
            group.pause()
        except GroupFailed as exc:
            for each in figures:
                each.failure = str(exc)
            self._say(f"{side.name}, {row.title}: failed: {exc}")
            group.kill()
            del self._groups[side.name]

    def _group(self, side: Side) -> Group:
        if side.name not in self._groups:
            self._groups[side.name] = self._start(side)
        return self._groups[side.name]

    def _start(self, side: Side) -> Group:
        """Start a group with the defaults or, failing that, with the side's spare options, and say so."""
        if side.name not in self._options:
            try:
                return self._try(side, {})
            except GroupFailed as exc:
                if not side.spare:
                    raise
                self._options[side.name] = side.spare
                words = ", ".join(f"{key}={value!r}" for key, value in side.spare.items())
                note = f"failed by default ({exc}), so the figure is with `{words}`"
                self._say(f"{side.name}, {self._size} workers: {note}")
                for figures in (each for row in self._rows for each in self._figures(row, side)):
                    figures.note = note
        return self._try(side, self._options[side.name])

    def _try(self, side: Side, options: dict[str, Any]) -> Group:
        """Twice, since a start may fail by chance."""
        try:
            return rpc_group(self._context, self._scratch, side.module, self._size, options)
        except GroupFailed:
            return rpc_group(self._context, self._scratch, side.module, self._size, options)

    def _give_up(self, side: Side, reason: str) -> None:
        self._say(f"{side.name}, {self._size} workers: failed: {reason}")
        for figures in (each for row in self._rows for each in self._figures(row, side)):
            figures.failure = reason
