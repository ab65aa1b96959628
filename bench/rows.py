"""The rows of the table: which case runs on how many workers, and how much faster it shall be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench import gradients, models, planning, startup, training
from bench.group import Group

Measure = Callable[[Group], tuple[float, ...]]
"""Gives one round's figure, or one for each of a row's columns: seconds, or CPU seconds per second."""

BUDGET_S = 1.5
GRADIENTS_BUDGET_S = 0.3
GROWTH_BUDGET_S = 0.15
CALLERS = 8
SETTLE_S = 0.3
IDLE_S = 1.0


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    key: str
    title: str
    measure: Measure
    world_size: int = 2
    target: float | None = None
    idle: bool = False
    section: str = "calls"
    alone: bool = False
    """Only the subject is measured: torch has nothing like it."""
    columns: tuple[str, str] | None = None
    """What is compared, where it is two ways of the subject's."""
    limit_s: float | None = None
    """A target for the time itself, where there is nothing to compare it with."""


def driven(case: str, iterations: int, warmup: int, budget_s: float = BUDGET_S) -> Measure:
    """The first worker runs the case; the figure is the median of its repetitions."""

    def measure(group: Group) -> tuple[float, ...]:
        samples: list[float] = group.ask(0, "run", case, warmup, iterations, budget_s)
        return (statistics.median(samples),)

    return measure


def alternating(first: str, second: str, iterations: int, warmup: int) -> Measure:
    """The first worker runs two cases in turn, repetition by repetition; each has its median."""

    def measure(group: Group) -> tuple[float, ...]:
        command = ("pair", (first, second), warmup, iterations, 2 * GRADIENTS_BUDGET_S)
        samples: tuple[list[float], list[float]] = group.ask(0, *command)
        return tuple(statistics.median(each) for each in samples)

    return measure


def crowded(case: str, iterations: int) -> Measure:
    """All workers but the first run a case with the first at once; the figure is wall time over repetitions."""

    def measure(group: Group) -> tuple[float, ...]:
        ranks = range(1, group.world_size)
        group.ask_all(ranks, [("run", case, 10, 1, BUDGET_S)] * len(ranks))
        start_ns = time.perf_counter_ns() + 20_000_000
        spans = group.ask_all(ranks, [("together", case, start_ns, iterations)] * len(ranks))
        seconds = (max(ended for _, ended in spans) - min(began for began, _ in spans)) / 1e9
        return (seconds / (iterations * len(ranks)),)

    return measure


def idle_cpu(group: Group) -> tuple[float, ...]:
    """CPU seconds that all workers together use in a second in which nobody calls."""
    time.sleep(SETTLE_S)
    used, start = group.cpu_seconds(), time.monotonic()
    time.sleep(IDLE_S)
    return ((group.cpu_seconds() - used) / (time.monotonic() - start),)


CALLS = [
    Row("empty", "empty call", driven("empty", 400, 50), target=3.0),
    Row("4B", "echo of 4 B", driven("4B", 400, 50), target=2.5),
    Row("4KiB", "echo of 4 KiB", driven("4KiB", 400, 50), target=2.5),
    Row("1MiB", "echo of 1 MiB", driven("1MiB", 100, 20), target=2.0),
    Row("64MiB", "echo of 64 MiB, warm", driven("64MiB", 8, 3), target=4.0),
    Row("64MiB+1", "64 MiB there, `x + 1` back, warm", driven("64MiB+1", 8, 3)),
    Row("async", "500 async calls, then wait for all", driven("async", 8, 2), target=8.0),
    Row("nested", "calls nested four deep", driven("nested", 150, 20)),
    Row("blocked", "empty call while another call to that worker blocks", driven("blocked", 300, 50)),
    Row("idle", "CPU use of 2 idle workers", idle_cpu, idle=True),
    Row("many", f"{CALLERS} workers call one, per call", crowded("empty", 60), world_size=CALLERS + 1),
    *(
        Row(
            f"group{size}",
            f"empty call to each in turn, {size} workers in the group",
            driven("round_robin", 4 * size + 200, 3 * size),
            world_size=size,
        )
        for size in (2, 8, 16, 32, 64)
    ),
]


def graded(case: str, iterations: int, warmup: int = 3) -> Measure:
    return driven(case, iterations, warmup, GRADIENTS_BUDGET_S)


def growing(case: str) -> Measure:
    return driven(case, 30, 2, GROWTH_BUDGET_S)


_MLP = f"MLP of {models.MLP_LAYERS} layers, {models.MLP_WIDTH} wide, on a peer"
_HOPS = f"{gradients.HOPS} calls, to two peers in turn"
_FAN_OUT = f"fan-out to {gradients.FAN_OUT} peers, one layer each"
_STAGE = f"transformer stage of about {gradients.STAGE_NODES} nodes on a peer"

GRADIENTS = [
    Row("mlp", _MLP, graded("mlp", 100, 5), target=1.5, section="gradients"),
    Row("hops", _HOPS, graded("hops", 40), world_size=3, target=2.0, section="gradients"),
    Row("fanout", _FAN_OUT, graded("fanout", 50), world_size=gradients.FAN_OUT + 1, section="gradients"),
    Row("stage", _STAGE, graded("stage", 10, 2), target=1.0, section="gradients"),
]

SMART_TARGET = 0.87
"""SMART takes at most 15% longer than FAST."""
MODES = [
    Row(
        f"{row.key}-modes",
        row.title,
        alternating(f"{row.key}-fast", f"{row.key}-smart", iterations, 3),
        world_size=row.world_size,
        target=SMART_TARGET,
        section="modes",
        alone=True,
        columns=("FAST", "SMART"),
    )
    for row, iterations in zip(GRADIENTS, (100, 40, 50, 10), strict=True)
]

GROWTH = [
    *(
        Row(f"nodes{count}", f"{count} nodes", growing(f"nodes{count}"), section="growth")
        for count in gradients.NODES
    ),
    *(
        Row(f"hops{count}", f"{count} calls", growing(f"hops{count}"), world_size=3, section="growth")
        for count in gradients.MORE_HOPS
    ),
    *(
        Row(
            f"agents{count}",
            f"{count} agents in one process",
            growing(f"agents{count}"),
            world_size=1,
            section="growth",
            alone=True,
        )
        for count in gradients.AGENTS
    ),
]

_LAYER = f"one layer, {models.LAYER_WIDTH} wide, on a peer"
_BIG = f"{training.BIG_PARAMETERS // 1_000_000} million parameters on {training.BIG_OWNERS} owners, the Adam step alone"
TRAINING = [
    *(
        Row(
            f"{model}-{key}",
            f"{title}, {name}",
            graded(f"{model}-{key}", 60, 5),
            target=target,
            section="training",
        )
        for model, title, target in (("layer", _LAYER, 2.0), ("mlp", _MLP, 1.5))
        for key, name in (("sgd", "SGD"), ("adam", "Adam"))
    ),
    Row(
        "trainers",
        f"{training.TRAINERS} trainers at once, one layer on one server, SGD, per step",
        crowded("shared-sgd", 40),
        world_size=training.TRAINERS + 1,
        section="training",
    ),
    Row("big", _BIG, graded("big", 6, 2), world_size=training.BIG_OWNERS + 1, target=2.0, section="training"),
]
LOCAL_TARGET = 0.83
"""At most 1.2 times as long as without any workers."""
LOCAL = [
    Row(
        "big-local",
        _BIG,
        alternating("big-here", "big", 6, 2),
        world_size=training.BIG_OWNERS + 1,
        target=LOCAL_TARGET,
        section="local",
        alone=True,
        columns=("in one process, fused", "farstep"),
    ),
]
STARTUP_TARGET = 0.95
"""At most 5 % more CPU time than torch's own."""
STARTUP = [
    Row(
        f"startup-{key}",
        title,
        startup.paired_imports(key),
        world_size=1,
        target=STARTUP_TARGET,
        section="startup",
        alone=True,
        columns=("torch alone", "farstep"),
    )
    for key, title in (
        ("rpc", "`import torch`, then rpc"),
        ("all", "`import torch`, then rpc, autograd and DistributedOptimizer"),
    )
]

PLANNING_BUDGET_S = 1.0
_SHARDS = f"{planning.TENSORS:,} tensors of {planning.SHARDS:,} shards into {planning.NEW_SHARDS:,}"
PLANNING = [
    Row(
        key,
        title,
        driven(key, 5, 1, PLANNING_BUDGET_S),
        world_size=1,
        section="planning",
        alone=True,
        limit_s=limit_s,
    )
    for key, title, limit_s in (
        ("plan", f"{_SHARDS}: all copies", 0.3),
        ("plan-rank", f"{_SHARDS}: one rank's", 0.01),
        ("plan-first", f"{_SHARDS}: one rank's, of layouts seen for the first time", None),
        ("plan-grids", f"{planning.GRIDS} tensors, a grid of 32 x 32 shards into 24 x 48: all copies", None),
        *((f"plan-tensors{count}", f"{count} tensors", None) for count in planning.MORE_TENSORS),
        *((f"plan-shards{count}", f"{count} shards", None) for count in planning.MORE_SHARDS),
    )
]
PLANNING_SERIES: dict[str, dict[int, str]] = {
    f"tensors of {planning.FEW_SHARDS} shards, all copies": {
        count: f"plan-tensors{count}" for count in planning.MORE_TENSORS
    },
    f"shards of each of {planning.FEW_TENSORS} tensors, all copies": {
        count: f"plan-shards{count}" for count in planning.MORE_SHARDS
    },
}

SERIES: dict[str, dict[int, str]] = {
    "graph nodes on a peer": {count: f"nodes{count}" for count in gradients.NODES},
    "calls to two peers in turn": dict(
        sorted([(gradients.HOPS, "hops"), *((count, f"hops{count}") for count in gradients.MORE_HOPS)])
    ),
    "agents in one process, fan-out to all": {count: f"agents{count}" for count in gradients.AGENTS},
}
"""What the cost is shown to grow with: the keys of rows, by how much of it they have."""

ROWS = [*CALLS, *GRADIENTS, *MODES, *GROWTH, *TRAINING, *LOCAL, *STARTUP, *PLANNING]
SECTIONS = list(dict.fromkeys(row.section for row in ROWS))
