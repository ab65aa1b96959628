"""The `farstep` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from farstep._version import __version__
from farstep.cli_checkpoint import add_checkpoint, run_checkpoint

__all__ = ["main"]

DESCRIPTION = """\
A PyTorch library for training in several processes, on one machine or many:
remote calls with gradients, optimizers for sharded and remote parameters, and
checkpoints that load on any number of ranks.
"""
EXAMPLES = """\
examples:
  farstep demo                         a transformer trained over three workers, in a minute
  farstep run -n 4 train.py --lr 0.1   four local copies of a script that calls init_rpc
  farstep compat train.py              a script for torch.distributed's rpc, unedited, on farstep
  farstep checkpoint list run          the checkpoints of a training; see also inspect

`farstep COMMAND --help` tells more of each.
"""
RUN = """\
Start N copies of a Python script on this machine. Each finds RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in its environment, so a plain

    rpc.init_rpc(f"worker{os.environ['RANK']}", world_size=int(os.environ['WORLD_SIZE']))

is all it needs to join the group. Lines of output are prefixed with the rank.
When a copy fails, the others are stopped, and its exit code is this command's.
With --max-restarts they are all started again, with the number of the restart
in FARSTEP_RESTART: a script that resumes from its newest checkpoint goes on
there. With --keep-going the others are not stopped, and what failed is said at
the end.
"""
RUN_EXAMPLES = """\
examples:
  farstep run train.py                 two copies
  farstep run -n 4 train.py --lr 0.1   four; everything after the script's name is the script's
  farstep run --compat old.py          a script for torch.distributed's rpc, unedited, on farstep

For several machines use torchrun, and set FARSTEP_SECRET to the same value on each.
"""
COMPAT = """\
Run a Python script that was written for torch.distributed's rpc, autograd and
DistributedOptimizer on farstep, unedited, and the processes that it starts. It
is `python -m farstep.compat`. For several copies of a script, with ranks,
there is `farstep run --compat`.
"""
MOST_STEPS = 1_000_000
DEMO_STEPS = 1200  # about a minute on two cores
DEMO = """\
Starts three worker processes on this machine and trains a small transformer over letters whose parts live on all
three: one loop, with gradients that find their way back, an optimizer that steps where the parameters are, a
learning-rate schedule and clipping. Saves the state, lets the model write, and compares its weights with those of the
same training in one process. Then one worker is killed; the two others load the state and train on.

Every result is checked; the exit code is 1 if one is wrong. The folder gets the state and the loss curve.
"""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["compat"] and given[1:2] not in (["-h"], ["--help"], []):
        # Its options are the script's, so argparse has no part in them.
        return _compat(given[1:])
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command == "demo":
        if not 1 <= args.steps <= MOST_STEPS:
            parser.error(f"demo: --steps is a number from 1 to {MOST_STEPS:,}, not {args.steps}")
        return _demo(args.steps, Path(args.out))
    if args.command == "run":
        return _run(args)
    if args.command == "checkpoint":
        return run_checkpoint(args)
    if args.command == "compat":
        parser.error("compat: which script? farstep compat script.py [args...]")
    parser.print_help()
    return 0


def _compat(args: list[str]) -> int:
    """This very process becomes `python -m farstep.compat`, so that nothing can differ."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "farstep.compat", *args])


def _demo(steps: int, folder: Path) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal has all the letters
    try:
        from farstep.demo import run_demo  # this takes a while, too
    except KeyboardInterrupt:
        print("interrupted before it began", file=sys.stderr)
        return 130
    return run_demo(steps, folder)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="farstep", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"farstep {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="see three workers train a model", description=DEMO, formatter_class=raw
    )
    demo.add_argument(
        "--steps", type=int, default=DEMO_STEPS, metavar="N", help="steps of training (default: %(default)s)"
    )
    demo.add_argument(
        "--out", default="farstep-demo", metavar="FOLDER", help="for what it makes (default: %(default)s)"
    )
    run = commands.add_parser(
        "run",
        help="start local copies of a script",
        description=RUN,
        epilog=RUN_EXAMPLES,
        formatter_class=raw,
    )
    run.add_argument("-n", "--workers", type=int, default=2, metavar="N", help="how many copies (default: 2)")
    run.add_argument(
        "--compat",
        action="store_true",
        help="the script is one for torch.distributed's rpc, autograd and optim: run it on farstep",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a copy fails, start all of them again, up to N times (default: 0)",
    )
    run.add_argument(
        "--keep-going",
        action="store_true",
        help="when a copy fails, let the others go on to their end",
    )
    run.set_defaults(parser=run)  # whose usage is shown with a mistake
    run.add_argument("script", help="the Python script")
    run.add_argument("args", nargs=argparse.REMAINDER, help="arguments for the script")
    commands.add_parser(
        "compat",
        help="run a script for torch.distributed's rpc on farstep",
        usage="farstep compat script.py [args...]\n       farstep compat -m module [args...]",
        description=COMPAT,
        formatter_class=raw,
    )
    add_checkpoint(commands)
    return parser


def _run(args: argparse.Namespace) -> int:
    from farstep.launch.script import run_script

    parser: argparse.ArgumentParser = args.parser
    if args.workers < 1:
        parser.error(f"-n must be at least 1, not {args.workers}")
    if not os.path.isfile(args.script):
        parser.error(f"there is no script {args.script!r}; give the path of a Python file")
    if args.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, not {args.max_restarts}")
    if args.max_restarts and args.keep_going:
        parser.error("--max-restarts starts all copies again and --keep-going lets them end: give one")
    width = len(str(args.workers - 1))

    def show(rank: int, line: str) -> None:
        print(f"[{rank:>{width}}] {line}", flush=True)

    def say(line: str) -> None:
        print(f"farstep: {line}", file=sys.stderr, flush=True)

    try:
        return run_script(
            args.script,
            args.args,
            args.workers,
            show,
            compat=args.compat,
            max_restarts=args.max_restarts,
            keep_going=args.keep_going,
            say=say,
        )
    except KeyboardInterrupt:
        print("farstep: interrupted; all copies have been stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
