"""What a person sees of `farstep demo`: a live picture on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

__all__ = ["Display"]

LOSS_LIMIT_S: Final = 1.0
COLOURS: Final = ("cyan", "magenta", "yellow")
CAPTION: Final = """\
Calls made and served; tensors in them, there and back, and their size; bytes
written to sockets and read from them (large tensors go through shared memory).
All share this machine's cores: bench/ measures, this only shows."""


@dataclass
class Act:
    """One part of the demo, as told by the workers that take part in it."""

    title: str
    began: bool = False
    progress: dict[str, float] = field(default_factory=dict)
    ended: dict[str, tuple[bool, str]] = field(default_factory=dict)
    expected: int = 3

    @property
    def is_over(self) -> bool:
        return len(self.ended) >= self.expected

    @property
    def is_right(self) -> bool:
        return self.is_over and all(right for right, _ in self.ended.values())

    @property
    def done(self) -> float:
        return 1.0 if self.is_over else sum(self.progress.values()) / self.expected


class Display:
    """Hears the workers, shows what they say, and decides whether all went well. Used by one thread."""

    def __init__(
        self, names: Sequence[str], titles: Mapping[str, str], console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._names = names
        self._colour = dict(zip(names, COLOURS, strict=True))
        self._acts = {key: Act(title, expected=len(names)) for key, title in titles.items()}
        self._acts["loss"].expected = len(names) - 1
        self._books: dict[str, dict[str, Any]] = {name: {} for name in names}
        self._traceback: tuple[str, str] | None = None
        self._killed: tuple[str, int, float] | None = None
        self._noticed: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=12)
            self._live.start()
        else:
            self._console.print(f"farstep demo: three workers on this machine, {', '.join(self._names)}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    # -- hearing

    def hear(self, name: str, kind: str, body: Any) -> None:
        if kind == "books":
            self._books[name] = body
        elif kind == "begin":
            self._acts[body].began = True
        elif kind == "progress":
            act, done = body
            self._acts[act].progress[name] = done
        elif kind == "end":
            act, right, said = body
            self._acts[act].ended[name] = (right, said)
            if self._live is None and self._acts[act].is_over:
                self._console.print(self._line(self._acts[act]))
        elif kind == "traceback":
            self._traceback = body
        elif kind == "noticed":
            _, at = body
            if self._killed is not None:
                self._noticed[name] = at - self._killed[2]

    def killed(self, name: str, pid: int, at: float) -> None:
        self._killed = (name, pid, at)

    def say(self, text: str) -> None:
        self._console.print(text)

    def fail(self, error: BaseException) -> None:
        self._console.print(Text(f"the demo failed: {type(error).__name__}: {error}", style="bold red"))
        if error.__cause__ is not None:
            self._console.print(Text(str(error.__cause__), style="red"))

    # -- the live picture

    def _picture(self) -> RenderableType:
        return Group(
            Text("farstep demo", style="bold").append("  three workers on this machine", style="dim"),
            Panel(self._pairs(), title="what crosses between them", title_align="left", border_style="dim"),
            Panel(self._programme(), title="what they do", title_align="left", border_style="dim"),
        )

    def _pairs(self) -> Table:
        table = Table(box=None, expand=True, padding=(0, 1))
        table.add_column("caller → callee", no_wrap=True)
        for title in ("calls", "tensors", "tensor bytes"):
            table.add_column(title, justify="right", width=13)
        table.add_column("", ratio=1)
        most = max((t[2] for b in self._books.values() for t in b.get("to", {}).values()), default=0)
        for caller in self._names:
            for callee in self._names:
                if caller != callee:
                    calls, tensors, nbytes = self._books[caller].get("to", {}).get(callee, (0, 0, 0))
                    bar = ProgressBar(
                        total=most or 1, completed=nbytes, complete_style=self._colour[caller], width=28
                    )
                    arrow = self._name(caller) + Text(" → ", style="dim") + self._name(callee)
                    table.add_row(arrow, f"{calls:,}", f"{tensors:,}", _size(nbytes), bar)
        return table

    def _name(self, name: str) -> Text:
        gone = self._killed is not None and name == self._killed[0]
        return Text(name, style=f"strike dim {self._colour[name]}" if gone else f"bold {self._colour[name]}")

    def _programme(self) -> Table:
        table = Table(box=None, expand=True, show_header=False, padding=(0, 1))
        table.add_column(width=1)
        table.add_column(width=30, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True)
        for act in self._acts.values():
            table.add_row(
                self._mark(act), Text(act.title, style="" if act.began else "dim"), self._state(act)
            )
        return table

    def _mark(self, act: Act) -> RenderableType:
        if act.is_over:
            return Text("✓", style="bold green") if act.is_right else Text("✗", style="bold red")
        return self._spinner if act.began else Text("·", style="dim")

    def _state(self, act: Act) -> RenderableType:
        if act.is_over:
            return Text(self._said(act), style="green" if act.is_right else "red")
        if act.began and act.progress:
            return ProgressBar(total=1.0, completed=act.done, width=40)
        if act is self._acts["loss"] and self._killed:
            return Text("killed; waiting for the others to notice", style="dim")
        return Text("")

    def _said(self, act: Act) -> str:
        """What the first worker found, or the first that found something wrong."""
        wrong = [f"{name}: {said}" for name, (right, said) in act.ended.items() if not right]
        said = wrong[0] if wrong else act.ended.get(self._names[0], (True, ""))[1]
        if act is self._acts["loss"] and self._noticed and not wrong:
            said += f" (after {max(self._noticed.values()) * 1000:.0f} ms)"
        return said

    def _line(self, act: Act) -> str:
        return f"  [{'ok' if act.is_right else 'WRONG'}] {act.title}: {self._said(act)}"

    # -- the end

    def finish(self) -> int:
        """Print the traceback and the summary; the exit code."""
        if self._traceback is not None:
            worker, text = self._traceback
            title = f"the exception, as {self._names[0]} got it from {worker}"
            self._console.print(Panel(Text(text), title=title, title_align="left", border_style="red"))
        self._console.print(self._summary())
        self._console.print(Text(CAPTION, style="dim"))
        problems = [act.title for act in self._acts.values() if not act.is_right]
        if not self._noticed or max(self._noticed.values()) > LOSS_LIMIT_S:
            problems.append(f"a killed worker was not noticed within {LOSS_LIMIT_S:g} s")
        if problems:
            self._console.print(Text(f"wrong: {'; '.join(problems)}", style="bold red"))
            return 1
        self._console.print(Text("Every result was checked, and right.", style="green"))
        return 0

    def _summary(self) -> Table:
        table = Table(
            title="summary",
            title_justify="left",
            title_style="bold",
            border_style="dim",
            box=SIMPLE,
            pad_edge=False,
        )
        table.add_column("worker", no_wrap=True)
        for title in ("made", "served", "tensors", "of size", "wrote", "read", "median"):
            table.add_column(title, justify="right", no_wrap=True)
        for name in self._names:
            books = self._books[name]
            mine = books.get("to", {}).values()
            served = sum(
                b.get("to", {}).get(name, (0,))[0] for other, b in self._books.items() if other != name
            )
            latency_s = books.get("latency_s")
            table.add_row(
                self._name(name),
                f"{sum(t[0] for t in mine):,}",
                f"{served:,}",
                f"{sum(t[1] for t in mine):,}",
                _size(sum(t[2] for t in mine)),
                _size(books.get("wire_sent", 0)),
                _size(books.get("wire_received", 0)),
                "" if latency_s is None else f"{latency_s * 1e6:,.0f} µs",
            )
        return table


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"
