"""Run PyTorch's own tests by hand.

    python -m conformance                    all that apply, against farstep
    python -m conformance -k 'rref.*timeout' those whose Suite.test_name matches
    python -m conformance --impl torch       the control: every test, against torch itself
    python -m conformance --all              also those listed as not applicable

Run it from tests/, or as `make conformance K=... IMPL=...`.  Prints the workers' output for each
test that did not pass, then one line of counts.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time

from .catalogue import tests
from .not_applicable import LEFT_OUT
from .pool import DEFAULT_LIMIT_S, Pool


def main() -> int:
    cli = argparse.ArgumentParser(
        prog="conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("-k", default="", metavar="REGEX", help="only tests that match")
    cli.add_argument("--impl", default="farstep.compat", help="module to test, or torch")
    cli.add_argument("--all", action="store_true", help="also what does not apply")
    cli.add_argument("--lanes", type=int, default=2, help="tests at a time (default 2)")
    cli.add_argument("--limit", type=float, default=DEFAULT_LIMIT_S, help="seconds for one test")
    cli.add_argument("--list", action="store_true", help="only name the tests, with the reasons")
    cli.add_argument("-v", action="store_true", help="a line for each test")
    args = cli.parse_args()

    found = [test for test in tests() if re.search(args.k, test)]
    if args.list:
        for test in found:
            print(f"{test}  # {LEFT_OUT[test]}" if test in LEFT_OUT else test)
        return 0
    if not args.all and args.impl != "torch":
        found = [test for test in found if test not in LEFT_OUT]

    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    with Pool(args.impl, args.lanes, args.limit) as pool:
        for test, future in pool.submit(found).items():
            result = future.result()
            counts[result.outcome] += 1
            if args.v or result.outcome in ("failed", "timeout"):
                print(f"{result.outcome:8} {test} ({result.seconds:.1f} s)", flush=True)
            if result.outcome in ("failed", "timeout"):
                print(result.detail, flush=True)
    summary = ", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "timeout", "skipped"))
    print(f"{summary} in {time.monotonic() - began:.0f} s")
    return 1 if counts["failed"] or counts["timeout"] else 0


if __name__ == "__main__":
    sys.exit(main())
