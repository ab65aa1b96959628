"""A bar of progress on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from farstep.checkpoint.tools.units import size
from farstep.checkpoint.writing import Progress as Told

__all__ = ["bar"]


class _Bytes(ProgressColumn):
    """How many of all, and how many in a second."""

    def render(self, task: Task) -> Text:
        if not task.fields["is_known"]:
            return Text()
        speed = task.finished_speed or task.speed
        rate = f"  {size(speed)}/s" if speed else ""
        return Text(f"{size(task.completed)} of {size(task.total or 0)}{rate}", style="cyan")


@contextmanager
def bar(title: str) -> Iterator[Told | None]:
    """What is to be called with bytes done and bytes in all; None where nobody looks. The bar is gone at the end."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), _Bytes(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=1, is_known=False)  # empty until it is known how much there is
        yield lambda done, total: shown.update(task, completed=done, total=total or 1, is_known=total > 0)
