"""The checkpoints of a CheckpointManager's directory: `farstep checkpoint list`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from farstep.checkpoint.local_disk import LocalDisk
from farstep.checkpoint.manager import CheckpointManager, check_files
from farstep.checkpoint.manifest import MANIFEST
from farstep.checkpoint.remote import RemoteStorage
from farstep.checkpoint.retention import Retention
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tools.contents import opened, storage_at
from farstep.checkpoint.tools.units import count, printable, size
from farstep.checkpoint.tools.verifying import examine
from farstep.checkpoint.writing import Progress
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

__all__ = ["Step", "age", "steps_in", "steps_screen"]

_UNITS = ((1, 60, "s"), (60, 3600, "min"), (3600, 48 * 3600, "h"))


@dataclass
class Step:
    """One checkpoint of the directory."""

    step: int
    path: str
    status: str
    """`whole`, `damaged` or `unfinished`."""
    problem: str = ""
    """What is wrong with it."""
    nbytes: int = 0
    metric: float | None = None
    saved: float | None = None
    """When, in seconds since 1970; None where the storage does not say."""
    is_newest: bool = False
    """What `resume` loads."""
    is_best: bool = False


def steps_in(
    directory: str | os.PathLike[str] | Storage,
    *,
    best: Any = "min",
    verify: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[Step]:
    """All of them, the oldest first. With `verify` every byte is read; else manifests and the
    lengths of files.

    `best` is whether the least metric ("min") or the greatest ("max") is the best one.
    """
    storage = storage_at(directory, storage_options)
    manager = CheckpointManager(storage, best=best, no_dist=True)
    found = {step: _step(manager, step, verify, progress, storage_options) for step in manager.steps()}
    for step in manager.unfinished():
        found[step] = Step(step, str(manager.path(step)), "unfinished", "no save has finished there")
    if not found:
        raise _nothing_in(storage)
    whole = [each for each in found.values() if each.status == "whole"]
    if whole:
        max(whole, key=lambda each: each.step).is_newest = True
    for step in Retention(best=best).ranked({each.step: each.metric for each in whole})[:1]:
        found[step].is_best = True
    return [found[step] for step in sorted(found)]


def _step(
    manager: CheckpointManager,
    step: int,
    verify: bool,
    progress: Progress | None,
    options: dict[str, Any] | None,
) -> Step:
    storage = manager.path(step)
    made = Step(step, str(storage), "whole", saved=_modified(storage))
    try:
        manifest = check_files(storage)
        made.nbytes, made.metric = manifest.nbytes, manager.metric(step)
        if verify:
            damages = examine(storage, progress=progress, storage_options=options).damages
            files = sorted({each.file for each in damages})
            if damages:
                made.status = "damaged"
                others = " and others" if len(files) > 2 else ""
                made.problem = f"{count(len(damages), 'damage')} in {', '.join(files[:2])}{others}"
    except (DamagedCheckpoint, NoCheckpoint) as exc:
        made.status, made.problem = "damaged", str(exc).removeprefix(f"{storage}: ")
    return made


def _modified(storage: Storage) -> float | None:
    try:
        if isinstance(storage, LocalDisk):
            return os.stat(os.path.join(storage.path, MANIFEST)).st_mtime
        if isinstance(storage, RemoteStorage):
            return storage.modified(MANIFEST)
    except Exception:
        pass  # not every storage can tell
    return None


def _nothing_in(storage: Storage) -> CheckpointError:
    try:
        opened(storage)
    except CheckpointError:
        return NoCheckpoint(
            f"{storage} has no checkpoints of a CheckpointManager, which are directories called "
            f"step_000000100 and so on"
        )
    return CheckpointError(
        f"{storage} is itself a checkpoint: farstep checkpoint inspect shows what is in it, and "
        f"list takes the directory of a CheckpointManager"
    )


def age(seconds: float) -> str:
    """`40 s`, `3 min`, `5 h`, `2 d`."""
    for unit_s, most_s, unit in _UNITS:
        if seconds < most_s:
            return f"{max(0.0, seconds) // unit_s:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def steps_screen(steps: Sequence[Step], where: str) -> list[RenderableType]:
    whole = [each for each in steps if each.status == "whole"]
    total = sum(each.nbytes for each in steps)
    head = Text(printable(where), style="bold")
    others = [each.status for each in steps if each.status != "whole"]
    told = ", ".join(f"{others.count(status)} {status}" for status in dict.fromkeys(others))
    summary = f"\n{count(len(steps), 'checkpoint')}, {size(total)}"
    head.append(f"{summary}; {told}" if told else summary, style="not bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("step", "age", "size", "metric"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    now = time.time()
    for each in steps:
        saved = "" if each.saved is None else age(now - each.saved)
        metric = "" if each.metric is None else f"{each.metric:.6g}"
        has_size = each.status == "whole" or each.nbytes
        table.add_row(f"{each.step:,}", saved, size(each.nbytes) if has_size else "", metric, _notes(each))
    lines: list[RenderableType] = [head, Text(), table]
    if not whole:
        lines += [Text(), Text("none is whole: there is nothing that resume could load", style="red")]
    return lines


def _notes(step: Step) -> Text:
    return Text(", ").join(list(_note(step)))


def _note(step: Step) -> Iterator[Text]:
    if step.is_newest:
        yield Text("newest", style="green")
    if step.is_best:
        yield Text("best", style="cyan")
    if step.status != "whole":
        style = "red" if step.status == "damaged" else "yellow"
        yield Text(f"{step.status}: {printable(step.problem)}", style=style)
