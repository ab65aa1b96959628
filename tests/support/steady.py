"""Repeat tests while every core is busy, to find the ones that pass on a quiet machine only.

    python -m support.steady --times 10 -- -k killed     what `make test-steady K=killed TIMES=10` runs

What stands behind `--` goes to pytest. The first run that fails ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["busy_cores", "main"]

_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep `count` processes computing. They end with this process, however it ends."""
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1, help="how often to run the tests")
    parser.add_argument(
        "--load", type=int, default=os.cpu_count(), help="busy processes beside them; default: a core each"
    )
    parser.add_argument("pytest", nargs="*", help="arguments for pytest")
    options = parser.parse_args(argv)
    with busy_cores(options.load):
        for run in range(1, options.times + 1):
            begin = time.monotonic()
            code = subprocess.call([sys.executable, "-m", "pytest", *options.pytest])
            print(f"run {run} of {options.times}: {time.monotonic() - begin:.0f} s, pytest ended with {code}")
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
