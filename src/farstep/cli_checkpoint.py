"""The arguments of `farstep checkpoint`. What the commands do is in checkpoint/tools, which is imported when one is run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

__all__ = ["add_checkpoint", "run_checkpoint"]

ABOUT = """\
Look into checkpoints, verify, compare, convert and redistribute them.
A PATH is the directory of a checkpoint, or a URL such as s3://bucket/run/step_000000100.
"""
CODES = """\
exit codes:
  0    done, and all is well
  1    the checkpoint is damaged, or two checkpoints differ
  2    it could not be done: wrong usage, no checkpoint there, no permission, a full disk
  130  interrupted by Ctrl-C; nothing half-written is left that would load

Bars of progress are on standard error, and only where that is a terminal.
"""
LIST = """\
List the checkpoints in a CheckpointManager's directory: steps, ages, sizes and
metrics, which is the newest that is whole and which is the best, and what is
wrong with the others. The manifests are read, and the lengths of files.
"""
INSPECT = """\
Show what is in a checkpoint: a tree by the parts of names, with shapes,
dtypes, sizes and the ranks that wrote each tensor. Layers that are alike are
shown as one, and so is what an optimizer keeps for a parameter: `weight: step,
exp_avg, exp_avg_sq` is a line with the shape of exp_avg and the size of all.
`cut 4x1` is a tensor in four boxes, cut along its first dimension. Only the
manifest is read.
"""
VERIFY = """\
Read every byte of a checkpoint and compare it with its checksum, and each file's own header with the
manifest. All damages are listed, by file and tensor.
"""
DIFF = """\
Compare two checkpoints, tensor by tensor and value by value, however either is cut over ranks. For a tensor
that differs: the largest absolute difference, how many elements differ, and the norms of both and of the
difference. NaN is the same as NaN here. Memory is bounded, however large the tensors are.
"""
CONVERT = """\
Convert a checkpoint from one format to another. That of the source is found out by looking at it.
  farstep       a directory with manifest.json
  dcp           a directory that torch.distributed.checkpoint reads
  torch         one file for torch.load
  safetensors   files as on Hugging Face
"""
RESHARD = """\
Write a checkpoint anew as if M ranks had saved it: each tensor is cut along its first dimension as FSDP and
DTensor do it, and each rank has one file. Any checkpoint loads on any number of ranks; after this, each of M
ranks reads one file. It is verified on the way, and there whole or not at all.
"""
PLOT = """\
Draw which rank holds what, and sizes by layer, as a PNG (with matplotlib) or as text.
"""

Commands = Any  # argparse keeps the class of its subparsers to itself


def add_checkpoint(commands: Commands) -> None:
    """Add it to the commands of `farstep`."""
    raw = argparse.RawDescriptionHelpFormatter
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look into checkpoints, verify and convert them",
        description=ABOUT,
        epilog=CODES,
        formatter_class=raw,
    )
    checkpoint.set_defaults(parser=checkpoint)
    actions = checkpoint.add_subparsers(dest="action", title="commands", metavar="COMMAND")

    def add(name: str, help: str, description: str, *paths: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=help, description=description, epilog=CODES, formatter_class=raw
        )
        made.set_defaults(parser=made)
        for path in paths:
            made.add_argument(path.lower(), metavar=path)
        made.add_argument(
            "--storage-option",
            action="append",
            default=[],
            type=_option,
            metavar="KEY=VALUE",
            help="for fsspec, where a path is a URL; VALUE is JSON or text; may be repeated",
        )
        return made

    steps = add("list", "the checkpoints of a training", LIST, "DIR")
    steps.add_argument(
        "--best",
        choices=("min", "max"),
        default="min",
        help="which metric is the best: the least or the greatest (default: %(default)s)",
    )
    steps.add_argument("--verify", action="store_true", help="read every byte of each, as verify does")
    _add_json(steps)
    inspect = add("inspect", "what is in one", INSPECT, "PATH")
    inspect.add_argument("--depth", type=_at_least_1, metavar="N", help="show N levels of names")
    _add_filter(inspect)
    inspect.add_argument("--boxes", action="store_true", help="show each box, with its file and place")
    inspect.add_argument(
        "--no-fold",
        action="store_true",
        help="show alike layers, and what an optimizer keeps for each parameter, one by one",
    )
    _add_json(inspect)
    verify = add("verify", "whether every byte is as it was saved", VERIFY, "PATH")
    verify.add_argument("--strict", action="store_true", help="files of unfinished saves count as damage")
    verify.add_argument("--threads", type=_at_least_1, metavar="N", help="how many read at once")
    _add_json(verify)
    diff = add("diff", "where two differ", DIFF, "A", "B")
    diff.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="X",
        help="elements whose absolute difference is at most X are taken as equal (default: 0)",
    )
    _add_filter(diff)
    diff.add_argument(
        "--limit",
        type=_at_least_0,
        default=40,
        metavar="N",
        help="show the N largest differences; 0 for all (default: %(default)s)",
    )
    _add_json(diff)
    convert = add("convert", "from and to DCP, torch.save and safetensors", CONVERT, "SOURCE", "TARGET")
    convert.add_argument(
        "--to",
        choices=("farstep", "dcp", "torch", "safetensors"),
        help="by default what TARGET's name says: .safetensors, .pt .pth .bin .ckpt for torch, else farstep",
    )
    convert.add_argument("--select", metavar="NAME", help="a part of the state alone, such as model")
    convert.add_argument(
        "--leave-out", action="store_true", help="what the format has no place for; else that is an error"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is at TARGET")
    _add_json(convert)
    reshard = add("reshard", "as if another number of ranks had saved it", RESHARD, "PATH", "TARGET")
    reshard.add_argument("--ranks", type=_at_least_1, required=True, metavar="M", help="how many")
    reshard.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is at TARGET")
    _add_json(reshard)
    plot = add("plot", "a picture of which rank holds what", PLOT, "PATH")
    plot.add_argument(
        "--out",
        default="checkpoint.png",
        metavar="FILE",
        help="the PNG, or by its name SVG or PDF (default: %(default)s)",
    )
    plot.add_argument("--text", action="store_true", help="draw in the terminal; needs no matplotlib")
    _add_filter(plot)


def run_checkpoint(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    if args.action is None:
        args.parser.print_help()
        return 0
    try:
        from farstep.checkpoint.tools.commands import run  # this takes a while
    except KeyboardInterrupt:
        print("farstep: interrupted", file=sys.stderr)
        return 130
    return run(args)


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only names that match, such as '*.weight', or that contain it, such as layers.0; may be repeated",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _at_least(least: int, text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return found


def _at_least_0(text: str) -> int:
    return _at_least(0, text)


def _at_least_1(text: str) -> int:
    return _at_least(1, text)


def _tolerance(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return found


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
