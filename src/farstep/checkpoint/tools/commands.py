"""What the commands of `farstep checkpoint` do: call a function, show what it gave, return the exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from farstep.checkpoint.tools.bars import bar
from farstep.checkpoint.tools.comparing import diff
from farstep.checkpoint.tools.contents import matcher, opened, writers_of
from farstep.checkpoint.tools.diff_screen import diff_screen
from farstep.checkpoint.tools.inspecting import as_json, folded, tree_of
from farstep.checkpoint.tools.layers import layers_of
from farstep.checkpoint.tools.picture import draw, text_picture
from farstep.checkpoint.tools.resharding import reshard
from farstep.checkpoint.tools.screens import damages_screen, overview, ranks_table, tree_table
from farstep.checkpoint.tools.steps import steps_in, steps_screen
from farstep.checkpoint.tools.units import count, printable, size
from farstep.checkpoint.tools.verifying import examine
from farstep.errors import DamagedCheckpoint, FarstepError

__all__ = ["run"]

FINE, WRONG, FAILED, PIPE_CLOSED, INTERRUPTED = 0, 1, 2, 141, 130
_LEFT_OUT = 20
_WITHOUT_END = 10_000
"""Columns where there is no terminal: nothing is cut that a program might look for."""
_OPTIONS = {
    "select=": "--select",
    "strict=False": "--leave-out",
    "overwrite=True": "--overwrite",
    "farstep.checkpoint.convert makes": "farstep checkpoint convert SOURCE TARGET makes",
}
"""What errors say of arguments, in the words of this command."""


def run(args: argparse.Namespace) -> int:
    """One command. What is to be expected is a line on standard error, and never a traceback."""
    try:
        code = _COMMANDS[args.action](args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        _forget_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except DamagedCheckpoint as exc:
        return _complain(str(exc), WRONG)
    except (FarstepError, OSError) as exc:
        return _complain(_words(exc), FAILED)
    except Exception as exc:
        if not any("://" in str(value) for value in vars(args).values()):
            raise
        return _complain(f"{type(exc).__name__}: {exc}", FAILED)  # each remote storage has errors of its own


def _complain(text: str, code: int) -> int:
    for keyword, option in _OPTIONS.items():
        text = text.replace(keyword, option)
    print(f"farstep checkpoint: {printable(' '.join(text.split()))}", file=sys.stderr)
    return code


def _words(exc: Exception) -> str:
    if isinstance(exc, OSError) and not isinstance(exc, FarstepError) and exc.strerror:
        return f"{exc.filename}: {exc.strerror}" if exc.filename is not None else exc.strerror
    return str(exc) or type(exc).__name__


def _forget_output() -> None:
    """What is left in the buffer would fail again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


class _Screen:
    """Standard output: as wide as the terminal, or without end."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, markup=False, width=_WITHOUT_END)
        self.width = self._console.width
        self.has_colour = self._console.color_system is not None and not self._console.no_color

    def show(self, *what: RenderableType) -> None:
        if self._console.is_terminal:
            self._console.print(*what, sep="\n")
            return
        with self._console.capture() as captured:
            self._console.print(*what, sep="\n")
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _say(text: str) -> None:
    print(printable(text))


def _print_json(found: Any) -> None:
    json.dump(found, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return dict(args.storage_option)


# -- the commands -----------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    with bar("verifying") if args.verify else nullcontext() as progress:
        found = steps_in(
            args.dir,
            best=args.best,
            verify=args.verify,
            progress=progress,
            storage_options=_options(args),
        )
    bad = any(each.status == "damaged" for each in found)
    if args.json:
        _print_json({"path": args.dir, "steps": [asdict(each) for each in found]})
    else:
        _Screen().show(*steps_screen(found, args.dir))
    return WRONG if bad else FINE


def _inspect(args: argparse.Namespace) -> int:
    storage, manifest = opened(args.path, _options(args))
    wanted = matcher(args.filter)
    if args.json:
        _print_json(as_json(manifest, str(storage), wanted))
        return FINE
    screen, root = _Screen(), tree_of(manifest, wanted)
    root = root if args.no_fold else folded(root)
    screen.show(overview(manifest, str(storage)), "")
    if root.below:
        screen.show(tree_table(root, manifest, screen.width, args.depth, args.boxes))
    else:
        screen.show(Text("nothing has such a name" if args.filter else "nothing is in it", style="dim"))
    if args.filter:
        screen.show("", f"{size(root.nbytes)} in {count(root.tensors, 'tensor')} of these names")
    elif len(set(writers_of(manifest).of_files.tolist())) > 1:
        screen.show("", ranks_table(manifest))
    return FINE


def _verify(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with bar("verifying") as progress:
        found = examine(args.path, threads=args.threads, progress=progress, storage_options=_options(args))
    seconds = time.monotonic() - began
    bad = bool(found.damages or (args.strict and found.strays))
    if args.json:
        damages = [
            {
                "kind": d.kind,
                "file": d.file,
                "tensor": d.tensor,
                "box": d.box,
                "spans": d.spans,
                "what": d.what,
            }
            for d in found.damages
        ]
        _print_json({"path": args.path, "whole": not bad, "damages": damages, "strays": found.strays})
        return WRONG if bad else FINE
    _Screen().show(damages_screen(found, args.path, seconds, args.strict))
    return WRONG if bad else FINE


def _diff(args: argparse.Namespace) -> int:
    with bar("comparing") as progress:
        found = diff(
            args.a,
            args.b,
            tolerance=args.tolerance,
            names=matcher(args.filter),
            progress=progress,
            storage_options=_options(args),
        )
    if args.filter and not found.tensors and not found.values and not found.equal_values:
        return _complain("nothing in either has such a name", FAILED)
    if args.json:
        _print_json({"a": args.a, "b": args.b, "tolerance": args.tolerance, **found.as_json()})
    else:
        _Screen().show(diff_screen(found, args.a, args.b, args.limit))
    return WRONG if found else FINE


def _convert(args: argparse.Namespace) -> int:
    from farstep.checkpoint.convert import convert

    with bar("converting") as progress:
        found = convert(
            args.source,
            args.target,
            to=args.to,
            select=args.select,
            strict=not args.leave_out,
            overwrite=args.overwrite,
            progress=progress,
            storage_options=_options(args),
        )
    if args.json:
        _print_json({"source": args.source, "target": args.target, **asdict(found)})
        return FINE
    for name in found.left_out[:_LEFT_OUT]:
        print(printable(f"left out, as {found.format} has no place for it: {name}"), file=sys.stderr)
    if len(found.left_out) > _LEFT_OUT:
        print(f"left out: {len(found.left_out) - _LEFT_OUT:,} more; --json lists all", file=sys.stderr)
    what = f"{count(found.tensors, 'tensor')}, {size(found.nbytes)}"
    _say(f"{args.target} is {args.source} as {found.format}, which was {found.source_format}: {what}")
    return FINE


def _reshard(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with bar("resharding") as progress:
        reshard(
            args.path,
            args.target,
            args.ranks,
            overwrite=args.overwrite,
            progress=progress,
            storage_options=_options(args),
        )
    _, made = opened(args.target, _options(args))
    seconds = time.monotonic() - began
    if args.json:
        numbers = {"ranks": made.ranks, "tensors": len(made.tensors), "nbytes": made.nbytes}
        _print_json(
            {"path": args.path, "target": args.target, **numbers, "files": [file.name for file in made.files]}
        )
        return FINE
    _say(
        f"{args.target} is whole: {size(made.nbytes)} in {count(len(made.tensors), 'tensor')}, as if saved by "
        f"{count(args.ranks, 'rank')}, in {count(len(made.files), 'file')}; {seconds:.1f} s"
    )
    return FINE


def _plot(args: argparse.Namespace) -> int:
    storage, manifest = opened(args.path, _options(args))
    layers = layers_of(manifest, matcher(args.filter))
    if args.filter and not layers.rows:
        return _complain("no tensor has such a name", FAILED)
    if args.text:
        screen = _Screen()
        screen.show(
            overview(manifest, str(storage)), "", *text_picture(layers, screen.width, screen.has_colour)
        )
        return FINE
    writers = writers_of(manifest)
    title = f"{storage}: {size(manifest.nbytes)} in {count(len(manifest.tensors), 'tensor')}, saved by {count(len(writers.names), writers.noun)}"
    try:
        draw(layers, title, args.out)
    except ImportError:
        return _complain(
            "a PNG is drawn by matplotlib, which is not installed: pip install 'farstep[plot]', or draw in the terminal with --text",
            FAILED,
        )
    except ValueError as exc:  # a name that ends in what no picture is
        return _complain(f"{args.out} cannot be written: {exc}", FAILED)
    _say(f"{args.out} shows which {writers.noun} holds what, and sizes by layer")
    return FINE


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "convert": _convert,
    "reshard": _reshard,
    "plot": _plot,
}
