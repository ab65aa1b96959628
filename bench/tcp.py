"""Measure calls over TCP on loopback: torch's, which are in the clear, beside farstep's encrypted ones, and write TCP.md.

    python -m bench.tcp [--rounds 9] [--before PATH/TO/ANOTHER/src]

Every side has two workers, all alive all the time; those whose turn it isn't are stopped. In every round the order of the rows and of the sides is
shuffled. `--before` adds columns with the farstep of another checkout, and with unix sockets and shared memory, which both have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.group import Group, rpc_group

TABLE = Path(__file__).with_name("TCP.md")
SECRET = {"secret": "a secret for measuring with", "host": "127.0.0.1", "transport": "tcp"}
BUDGET_S = 2.0
ROWS = {
    "empty": ("empty call", 400, 30),
    "1MiB": ("echo of 1 MiB", 100, 5),
    "64MiB": ("echo of 64 MiB", 12, 2),
}
"""Case -> its title, repetitions in a round at the most, and repetitions before them."""


@dataclass(frozen=True)
class Side:
    name: str
    module: str
    options: dict[str, Any]
    source: str | None = None


SIDES = [
    Side("torch, in the clear", "torch.distributed.rpc", {"_transports": ["uv"], "_channels": ["basic"]}),
    Side("farstep, TLS 1.3", "farstep.rpc", SECRET),
    Side("farstep, MAC only", "farstep.rpc", {**SECRET, "dangerously_unencrypted_tcp": True}),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tcp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", help="the src directory of an earlier farstep, for one more column")
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    sides = list(SIDES)
    if args.before:
        source = str(Path(args.before).resolve())
        sides.append(Side("farstep before, in the clear", "farstep.rpc", SECRET, source))
        sides.append(Side("farstep, unix sockets", "farstep.rpc", {"transport": "unix"}))
        sides.append(Side("farstep before, unix sockets", "farstep.rpc", {"transport": "unix"}, source))
    load = os.getloadavg()[0]
    figures = measure(sides, args.rounds)
    text = table(sides, figures, args.rounds, load)
    print(text)
    args.out.write_text(text)
    return 0


def measure(sides: list[Side], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round, by row and side."""
    os.environ["OMP_NUM_THREADS"] = "1"
    shuffler = random.Random(0)
    figures: dict[tuple[str, str], list[float]] = {(row, side.name): [] for row in ROWS for side in sides}
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    groups: dict[str, Group] = {}
    try:
        for side in sides:
            with first_in_path(side.source):
                context: Any = multiprocessing.get_context("spawn")
                groups[side.name] = rpc_group(context, scratch, side.module, 2, side.options)
            groups[side.name].pause()
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for row in shuffler.sample(list(ROWS), len(ROWS)):
                _, iterations, warmup = ROWS[row]
                for side in shuffler.sample(sides, len(sides)):
                    group = groups[side.name]
                    group.resume()
                    samples = group.ask(0, "run", row, warmup, iterations, BUDGET_S)
                    group.pause()
                    figures[row, side.name].append(statistics.median(samples))
    finally:
        for group in groups.values():
            group.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return figures


@contextmanager
def first_in_path(source: str | None) -> Iterator[None]:
    """Processes that are spawned meanwhile import from there first."""
    if source is not None:
        sys.path.insert(0, source)
    try:
        yield
    finally:
        if source is not None:
            sys.path.remove(source)


def table(sides: list[Side], figures: dict[tuple[str, str], list[float]], rounds: int, load: float) -> str:
    lines = [
        "# Calls over TCP, on loopback",
        "",
        f"Made by `make bench-tcp`: {rounds} rounds, two workers a side on {os.cpu_count()} cores, {platform.machine()}, load before it",
        f"{load:.1f}. Each figure is the median of the rounds' medians, in milliseconds; in brackets the lowest and the highest round.",
        "Torch's RPC does not encrypt, and asks nobody who they are.",
        "",
        "| | " + " | ".join(side.name for side in sides) + " |",
        "|---" * (len(sides) + 1) + "|",
    ]
    for row, (title, _, _) in ROWS.items():
        cells = []
        for side in sides:
            times = [1e3 * t for t in figures[row, side.name]]
            cells.append(f"{statistics.median(times):.3g} ({min(times):.3g} to {max(times):.3g})")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "How many times as long as farstep with TLS, by the medians:", ""]
    for row, (title, _, _) in ROWS.items():
        ours = statistics.median(figures[row, SIDES[1].name])
        others = [side for side in sides if side is not SIDES[1]]
        ratios = [f"{side.name} {statistics.median(figures[row, side.name]) / ours:.2f}" for side in others]
        lines.append(f"- {title}: " + "; ".join(ratios))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
