"""Runs targets in this process: python -m fuzz.child --inputs N --seed S --record FILE TARGET...

Before a case is run it is written to the record, so that whoever started this process can say which one ended it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz import targets

CASE_S = 5.0
"""No case may take more CPU time."""
STUCK_S = 60.0
"""A process that has not come to the next check of the clock by then writes its stacks and ends."""
GROWTH_BYTES = 700 << 20
"""A process may grow by so much while it runs a target."""
ROUND_CASES = 1000
"""Hypothesis remembers what it has tried; a new round forgets it."""
MAX_ROUNDS = 100_000


class Record:
    """The case that is being run, in a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def write(self, target: str, case: Any) -> None:
        try:
            data = pickle.dumps((target, case))
        except Exception as exc:  # too deep to be pickled
            data = pickle.dumps((target, f"a case that cannot be written: {type(exc).__name__}"))
        os.pwrite(self._file, len(data).to_bytes(8, "little") + data, 0)

    @staticmethod
    def read(path: Path) -> str:
        data = path.read_bytes() if path.exists() else b""
        if len(data) < 8:
            return "no case was begun"
        target, case = pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return f"target {target}, case {case!r}"[:4000]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run(target: ModuleType, inputs: int, first_seed: int, record: Record) -> int:
    """Run cases until so many inputs have been tried. Returns how many."""
    per_case = getattr(target, "INPUTS_PER_CASE", 1)
    tried = 0
    before = resident_bytes()

    def one(case: Any) -> None:
        nonlocal tried
        record.write(target.NAME, case)
        began = time.process_time()
        try:
            target.check(case)
        except BaseException as exc:
            exc.add_note(f"target {target.NAME}, case {case!r}"[:4000])
            raise
        took = time.process_time() - began  # waits are bounded by STUCK_S
        assert took < CASE_S, f"target {target.NAME}: a case took {took:.1f} s of CPU: {case!r}"[:4000]
        tried += per_case
        if tried % (50 * per_case) == 0:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            if resident_bytes() - before > GROWTH_BYTES:
                gc.collect()
                grown = resident_bytes() - before
                assert grown < GROWTH_BYTES, f"target {target.NAME}: the process grew by {grown >> 20} MB"

    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    for number in range(MAX_ROUNDS):
        if tried >= inputs:
            break
        cases = min(ROUND_CASES, -(-(inputs - tried) // per_case))
        _round(one, target.strategy, cases, first_seed + number)
    getattr(target, "stop", lambda: None)()
    faulthandler.cancel_dump_traceback_later()
    return tried


def _round(one: Callable[[Any], None], strategy: Any, cases: int, number: int) -> None:
    quiet = settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(quiet(given(strategy)(one)))()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True)
    given_ = parser.parse_args()
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    record = Record(given_.record)
    modules = [targets.load(name) for name in given_.targets]
    shares = [getattr(module, "SHARE", 1.0) for module in modules]
    for module, share in zip(modules, shares, strict=True):
        began = time.monotonic()
        tried = run(module, max(1, int(given_.inputs * share / sum(shares))), given_.seed, record)
        print(f"{module.NAME:16} {tried:9} inputs in {time.monotonic() - began:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
