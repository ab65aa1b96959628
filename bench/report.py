"""Writes the tables, and the lines around them that say what their figures are worth."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench import startup
from bench.rounds import Figures, Results
from bench.rows import PLANNING_SERIES, SERIES, Row

IDLE_LIMIT = 0.01
"""CPU seconds per second up to which a group counts as using none: one tick of the kernel's clock."""


@dataclass(frozen=True)
class Facts:
    """The run: who was measured, how often, and how it went."""

    baseline: str
    subject: str
    peers: Sequence[str]
    rounds: int
    seed: int
    load: float
    seconds: float
    remarks: Sequence[str]
    more: Sequence[str] = ()
    """Further tables, as they shall be written."""


def write(rows: Sequence[Row], results: Results, facts: Facts) -> str:
    """The whole of RESULTS.md."""
    verdicts = {row.key: verdict(row, results[row.key], facts) for row in rows}
    title = [
        f"# {facts.subject} beside {facts.baseline}",
        f"Written by `python -m bench` on {datetime.date.today().isoformat()}; every run replaces it.",
    ]
    if not rows:  # groups of ranks alone, which say themselves how they were measured
        return "\n\n".join([*title, *facts.more, machine(facts), *facts.remarks]) + "\n"
    parts = [
        *title,
        *tables(rows, results, facts, verdicts),
        *notes(rows, results),
        *facts.more,
        "## What the figures mean",
        *meaning(rows, facts, verdicts),
        "## How it was measured",
        machine(facts),
        method(facts),
        *facts.remarks,
    ]
    return "\n\n".join(parts) + "\n"


def tables(rows: Sequence[Row], results: Results, facts: Facts, verdicts: dict[str, str]) -> list[str]:
    """Those that have rows, each but the first under its title."""

    def of(section: str) -> list[Row]:
        return [row for row in rows if row.section == section]

    parts: list[str] = []
    if of("calls"):
        parts += [table(of("calls"), results, facts, verdicts, facts.peers)]
    if of("gradients"):
        parts += [
            "## Gradients",
            "One pass: open a context, forward, backward, close the context.",
            table(of("gradients"), results, facts, verdicts),
        ]
    if of("modes"):
        parts += [
            "## SMART against FAST",
            f"Two modes of {facts.subject}'s. The target is for FAST's time divided by SMART's.",
            table(of("modes"), results, facts, verdicts),
        ]
    if of("training"):
        parts += [
            "## Training",
            "One step: open a context, forward, backward, step of a `DistributedOptimizer`, close the context; "
            f"{facts.subject}'s with `step(context_id, close=True)`, which torch's has not.",
            table(of("training"), results, facts, verdicts),
        ]
    if of("local"):
        parts += [
            "## A step against the same update in one process",
            "The target is for the time in one process, with all cores, divided by that of the step.",
            table(of("local"), results, facts, verdicts),
        ]
    if of("startup"):
        parts += [
            "## Start",
            "CPU time of a process that imports these and ends, with bytecode on the disk: the least of "
            f"{startup.PAIRS} in a round.",
            table(of("startup"), results, facts, verdicts),
        ]
    if of("growth"):
        parts += ["## How the cost of a pass grows", *growths(SERIES, rows, results, facts)]
    if of("planning"):
        grown = {key for series in PLANNING_SERIES.values() for key in series.values()}
        parts += [
            "## Planning",
            "Which copies lead from one layout to another, every tensor cut along its first side but in the grids.",
            limits([row for row in of("planning") if row.key not in grown], results, facts, verdicts),
            *growths(PLANNING_SERIES, rows, results, facts),
        ]
    return parts


def growths(
    all_series: dict[str, dict[int, str]], rows: Sequence[Row], results: Results, facts: Facts
) -> list[str]:
    """The series of which there are rows."""
    by_key = {row.key: row for row in rows}
    kept = {
        what: {count: by_key[key] for count, key in series.items() if key in by_key}
        for what, series in all_series.items()
    }
    return [growth(what, series, results, facts) for what, series in kept.items() if series]


def names(row: Row, facts: Facts) -> tuple[str, str]:
    """What a row compares: the measure, then what is measured by it."""
    return row.columns or (facts.baseline, facts.subject)


def ratios(row: Row, figures: dict[str, Figures], facts: Facts) -> list[float]:
    """How many times faster the subject was, in each round; none where a side failed or used nothing."""
    if row.alone and not row.columns:
        return []
    base, subject = (figures[name] for name in names(row, facts))
    if base.failure or subject.failure or any(value <= 0 for value in subject.rounds):
        return []
    return [b / s for b, s in zip(base.rounds, subject.rounds, strict=True)]


def verdict(row: Row, figures: dict[str, Figures], facts: Facts) -> str:
    """`met` or `MISS` for a row with a target. A target is missed too when there is no figure for it."""
    subject = figures[names(row, facts)[1]]
    if row.idle:
        return "met" if not subject.failure and statistics.median(subject.rounds) <= IDLE_LIMIT else "MISS"
    if row.limit_s is not None:
        return "met" if not subject.failure and statistics.median(subject.rounds) < row.limit_s else "MISS"
    if row.target is None:
        return "MISS" if subject.failure else ""
    times = ratios(row, figures, facts)
    return "met" if times and statistics.median(times) >= row.target else "MISS"


def table(
    rows: Sequence[Row],
    results: Results,
    facts: Facts,
    verdicts: dict[str, str],
    peers: Sequence[str] = (),
) -> str:
    """Rows that all compare the same."""
    base, subject = names(rows[0], facts)
    head = ["", base, subject, "times faster", "min to max", "target", "", *peers]
    lines = [head, ["---", *["---:"] * 5, "---", *["---:"] * len(peers)]]
    for row in rows:
        figures = results[row.key]
        times = ratios(row, figures, facts)
        lines.append(
            [
                row.title,
                cell(row, figures[base]),
                cell(row, figures[subject]),
                f"**{statistics.median(times):.2f}**" if times else "-",
                f"{min(times):.2f} to {max(times):.2f}" if times else "-",
                target(row),
                verdicts[row.key],
                *(cell(row, figures[peer]) for peer in peers),
            ]
        )
    return ruled(lines)


def limits(rows: Sequence[Row], results: Results, facts: Facts, verdicts: dict[str, str]) -> str:
    """Rows of the subject alone, whose targets are times."""
    lines = [["", facts.subject, "min to max", "target", ""], ["---", *["---:"] * 3, "---"]]
    for row in rows:
        figures = results[row.key][facts.subject]
        spread = (
            f"{duration(min(figures.rounds))} to {duration(max(figures.rounds))}" if figures.rounds else "-"
        )
        lines.append([row.title, cell(row, figures), spread, target(row), verdicts[row.key]])
    return ruled(lines)


def growth(what: str, series: dict[int, Row], results: Results, facts: Facts) -> str:
    """One kind of growth. What each more costs is the difference to the line before, shared out."""
    alone = all(row.alone for row in series.values())
    sides = [facts.subject] if alone else [facts.baseline, facts.subject]
    head = [what, *sides, *([] if alone else ["times faster", "min to max"])]
    lines = [head + [f"each more, {side}" for side in sides], ["---:"] * (len(head) + len(sides))]
    last: dict[str, tuple[int, float]] = {}
    for count, row in series.items():
        figures, times = results[row.key], ratios(row, results[row.key], facts)
        line = [str(count), *(cell(row, figures[side]) for side in sides)]
        if not alone:
            line.append(f"**{statistics.median(times):.2f}**" if times else "-")
            line.append(f"{min(times):.2f} to {max(times):.2f}" if times else "-")
        for side in sides:
            extra = 0.0
            if figures[side].rounds:
                now = statistics.median(figures[side].rounds)
                if side in last:
                    extra = (now - last[side][1]) / (count - last[side][0])
                last[side] = count, now
            line.append(duration(extra) if extra > 0 else "")
        lines.append(line)
    return ruled(lines)


def ruled(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def target(row: Row) -> str:
    if row.idle:
        return "none used"
    if row.limit_s is not None:
        return f"< {row.limit_s:g} s"
    return "" if row.target is None else f"{row.target:g}"


def cell(row: Row, figures: Figures) -> str:
    if figures.failure:
        return "failed: " + figures.failure.replace("|", "/")
    if not figures.rounds:
        return ""
    value = statistics.median(figures.rounds)
    text = f"{value:.2f} CPU s/s" if row.idle else duration(value)
    return text + " \\*" if figures.note else text


def duration(seconds: float) -> str:
    """Three digits, in the unit that suits."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def notes(rows: Sequence[Row], results: Results) -> list[str]:
    found = [
        f"\\* {name}, {row.world_size} workers: {figures.note}."
        for row in rows
        for name, figures in results[row.key].items()
        if figures.note
    ]
    return list(dict.fromkeys(found))


def meaning(rows: Sequence[Row], facts: Facts, verdicts: dict[str, str]) -> list[str]:
    missed = [
        f"{row.title}, SMART against FAST" if row.section == "modes" else row.title
        for row in rows
        if verdicts[row.key] == "MISS"
    ]
    asked = sum(bool(verdict) for verdict in verdicts.values())
    if missed:
        summary = f"**{len(missed)} of {asked} targets missed (MISS): {'; '.join(missed)}.**"
    else:
        summary = f"All {asked} targets are met."
    return [
        summary,
        f"Above 1, `times faster` is in favour of {facts.subject}: it is the median over the rounds of "
        f"{facts.baseline}'s time divided by its own. So it need not be the quotient of the two times beside it, which are "
        "medians by themselves. Where `min to max` reaches across 1 there is no difference to speak of.",
        "All workers share one machine, so nothing here tells of a network. With more workers than cores, "
        "the rows of large groups show the cost of idle workers more than that of a call. The 64 MiB rows "
        "are warm: a process's first such calls, which take fresh memory, are slower and are not counted. An "
        "echo doesn't touch its tensor; the `x + 1` row does, so it holds passes over memory that no "
        "transport can save. A call beside a blocked one is to be read against the empty call.",
        "The gradients of every row are compared with those of one process before it is timed. A pass ends "
        f"when its context is closed; {facts.subject} then waits until every worker has let go of it, and "
        f"{facts.baseline} does not. The MLP and the transformer stage are mostly arithmetic, which is the "
        "same for both. The growth with nodes is that of products, sums and tanh of 64 numbers, two in five "
        "nodes being leaves. Agents in one process share one interpreter, so they show work and not waiting.",
    ]


def machine(facts: Facts) -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "farstep", *(("ray", "grpcio") if facts.peers else ())):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return (
        f"{os.cpu_count()} cores ({processor()}), {platform.system()} {platform.release()}, "
        f"{', '.join(versions)}. Load average at the start: {facts.load:.2f}. "
        f"The run took {facts.seconds:.0f} s."
    )


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def method(facts: Facts) -> str:
    peers = " The other columns are measured alone, afterwards, and have no ratio." if facts.peers else ""
    return (
        f"{facts.rounds} rounds (seed {facts.seed}). In each, the rows come in a shuffled order, and both "
        "sides run every row one right after the other, in a shuffled order too. Workers are processes with "
        "one compute thread each. Both groups live all the time, and the one whose turn it isn't is stopped "
        "with SIGSTOP, because an idle group of torch's polls; once resumed it makes warm-up calls that "
        "don't count. A round's figure is the median of its repetitions, a cell's the median of its rounds. "
        "SMART and FAST are measured in one group, pass by pass in turn. Rows with gradients have groups of "
        "their own. Many to one is wall time over calls answered. CPU use is that of all workers of the group together, "
        "from `/proc`." + peers
    )
