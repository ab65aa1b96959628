"""Measure farstep's calls, gradients and optimizers beside torch's, and write RESULTS.md."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench import contest, contests, peers, report, rounds
from bench.rounds import Figures, Side
from bench.rows import ROWS, SECTIONS

RESULTS = Path(__file__).with_name("RESULTS.md")
CHECKPOINTS = Path(__file__).with_name("CHECKPOINTS.md")
# In a large group of torch's, all workers dial the first at once, and its shared memory transport refuses
# some of them. Its socket transport doesn't, so it's what is measured where the default won't start.
BASELINE = Side("torch", "torch.distributed.rpc", spare={"_transports": ["uv"]})
MIN_ROUNDS = 7


def main() -> int:
    args = parse()
    say(f"{len(args.rows)} rows, {len(args.contests)} contests, {args.rounds} rounds")
    begun, load = time.monotonic(), os.getloadavg()[0]
    remarks: list[str] = []
    sides = [BASELINE, args.subject]
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    context = fork_server()
    try:
        outcomes = contest.run(args.contests, args.rounds, args.seed, context, scratch, say)
        results = rounds.run(args.rows, sides, args.rounds, args.seed, context, scratch, say)
        names: list[str] = []
        if args.peers:
            for name, there in peers.installed().items():
                names += [name] if there else []
                remarks += [] if there else [f"{name} is not installed, so it has no column."]
            for figures in results.values():
                figures.update({name: Figures() for name in names})
            peers.run(results, names, args.rows, args.rounds, context, scratch, say, args.seed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    facts = report.Facts(
        baseline=BASELINE.name,
        subject=args.subject.name,
        peers=names,
        rounds=args.rounds,
        seed=args.seed,
        load=load,
        seconds=time.monotonic() - begun,
        remarks=remarks,
        more=contests.report(args.contests, outcomes),
    )
    text = report.write(args.rows, results, facts)
    print(text)
    if args.out:
        args.out.write_text(text)
        say(f"written to {args.out}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="add Ray and gRPC, where they are installed")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of every row (default: %(default)s)")
    parser.add_argument(
        "--checkpoints", action="store_true", help="measure these instead, and write CHECKPOINTS.md"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help=f"only these of {' '.join(r.key for r in ROWS)} {' '.join(c.key for c in contests.CONTESTS)}, "
        f"or all rows of {' '.join(SECTIONS)} sharded; of checkpoints {' '.join(c.key for c in contests.CHECKPOINTS)}",
    )
    parser.add_argument(
        "--impl", default="farstep", choices=("farstep", "torch"), help="torch measures it against itself"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling")
    parser.add_argument(
        "--out", type=Path, help="where to write (default: RESULTS.md, for a run of everything)"
    )
    args = parser.parse_args()
    rows = [] if args.checkpoints else ROWS
    known_contests = contests.CHECKPOINTS if args.checkpoints else contests.CONTESTS
    known = {row.key for row in rows} | {c.key for c in known_contests} | {*SECTIONS, "sharded"}
    unknown = set(args.only or ()) - known
    if unknown:
        parser.error(f"no such row: {' '.join(sorted(unknown))}")
    if args.rounds < 1:
        parser.error("at least one round")
    args.rows = [
        row
        for row in rows
        if (not args.only or row.key in args.only or row.section in args.only)
        and (args.impl == "farstep" or not row.alone)
    ]
    args.contests = [
        each
        for each in known_contests
        if args.impl == "farstep" and (not args.only or {each.key, "sharded"} & set(args.only))
    ]
    if not args.rows and not args.contests:
        parser.error(f"{args.impl} has none of these rows")
    args.subject = (
        Side("farstep", "farstep.rpc")
        if args.impl == "farstep"
        else Side("torch again", BASELINE.module, BASELINE.spare)
    )
    if args.impl == "farstep" and importlib.util.find_spec("farstep") is None:
        parser.error(
            "farstep is not installed here; `pip install -e .`, or `--impl torch` to try the harness"
        )
    if args.out is None and args.impl == "farstep" and not args.only and args.rounds >= MIN_ROUNDS:
        args.out = CHECKPOINTS if args.checkpoints else RESULTS
    return args


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Processes that start in milliseconds, because torch is loaded once, with one compute thread each.

    So is what torch loads when a gradient is first passed on: several hundred modules.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "torch.distributed.rpc",
            "torch.fx.experimental.symbolic_shapes",
            "farstep.rpc",
            "farstep.autograd",
            "farstep.optim",
            "torch.distributed.optim",
            "torch.distributed.fsdp",
            "torch.distributed.checkpoint.state_dict",
            "farstep.checkpoint",
            "bench.worker",
            "bench.contest",
            "bench.peers",
        ]
    )
    return context


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Asked to end, leave through the `finally` clauses, which end the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
