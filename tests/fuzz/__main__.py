"""cd tests && python -m fuzz --inputs 1000000 [--target NAME] [--seed S]

Each target runs in a process of its own, so that a crash is seen, and told of with the case that caused it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz import targets
from fuzz.child import Record

__all__ = ["main", "run_child"]


def run_child(
    names: list[str], inputs: int, seed: int, timeout_s: float | None = None
) -> tuple[str, str | None]:
    """Run targets in one process. Returns what it printed, and how it failed, if it did."""
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "case"
        command = [sys.executable, "-m", "fuzz.child", *names]
        command += ["--inputs", str(inputs), "--seed", str(seed), "--record", str(record)]
        try:
            ran = subprocess.run(
                command,
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as exc:
            return str(exc.stdout or ""), f"it took more than {timeout_s} s; the last: {Record.read(record)}"
        if ran.returncode:
            why = f"it ended with {ran.returncode}; the last: {Record.read(record)}\n{ran.stderr[-20_000:]}"
            return ran.stdout, why
        return ran.stdout, None


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="over all targets")
    parser.add_argument("--target", action="append", help="only this one; may be given more than once")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    known = targets.names()
    for name in given.target or ():
        if name not in known:
            parser.error(f"there is no target {name!r}; there are {', '.join(known)}")
    names = given.target or known
    shares = {name: getattr(targets.load(name), "SHARE", 1.0) for name in names}
    failed = []
    for name in names:
        # Rounded up, so that all together are no fewer than was asked for.
        inputs = -(-int(given.inputs * shares[name] * 1000 + 1) // int(sum(shares.values()) * 1000))
        printed, failure = run_child([name], inputs, given.seed)
        print(printed, end="", flush=True)
        if failure is not None:
            failed.append(name)
            print(f"{name} FAILED (seed {given.seed}): {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
