"""What a person sees of `farstep demo`: a live picture on a terminal, plain lines elsewhere, a report at the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from farstep.demo.events import Began, Ended, Event, Kill, Stepped, Workers, WorkerState, Wrote
from farstep.demo.plot import plot

__all__ = ["Display"]

COLOURS: Final = ("cyan", "magenta", "yellow")
TITLE: Final = "one model, three workers, one training loop"
HOLDS: Final = {"embedding": "embedding", "first": "first stage", "second": "second stage"}
WIDTH: Final = 80
PLOT_ROWS: Final = 9
OTHER_ROWS: Final = 18
"""Lines of the live picture that are not the plot's own rows."""
RECENT_S: Final = 2.0
LINES: Final = {"train": 10, "alone": 5}
"""How many lines tell of a training where there is no terminal."""


@dataclass
class Act:
    """One part of the demo, and how far it has come."""

    title: str
    began: bool = False
    steps: int = 0
    taken: list[Stepped] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def losses(self) -> list[float]:
        return [stepped.step.loss for stepped in self.taken]

    @property
    def is_right(self) -> bool:
        return self.ended is not None and self.ended.right

    def steps_per_s(self, recent_s: float | None = None) -> float:
        """Of the last seconds, or of the whole."""
        if not self.taken:
            return 0.0
        last = self.taken[-1].seconds
        before = [] if recent_s is None else [s for s in self.taken if s.seconds < last - recent_s]
        took_s = last - (before[-1].seconds if before else 0.0)
        return (len(self.taken) - len(before)) / max(took_s, 1e-9)


class Display:
    """Hears what the workers tell, shows it, and knows at the end whether all was right. Used by one thread."""

    def __init__(
        self,
        names: Sequence[str],
        titles: Mapping[str, str],
        tokens_per_step: int,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(highlight=False, markup=False)
        self._width = min(WIDTH, self._console.width)
        self._colour = dict(zip(names, COLOURS, strict=True))
        self._tokens_per_step = tokens_per_step
        self._workers = {name: WorkerState((), 0, 0, 0) for name in names}
        self._trainers = dict(self._workers)
        self._killed: dict[str, float] = {}
        self.acts = {key: Act(title) for key, title in titles.items()}
        self._wrote: Wrote | None = None
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._picture, console=self._console, refresh_per_second=10, transient=True
            )
            self._live.start()
        else:
            self._console.print(f"farstep demo: {TITLE}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    # -- hearing

    def hear(self, event: Event) -> None:
        match event:
            case Began(act, steps):
                self.acts[act].began, self.acts[act].steps = True, steps
                if self._live is None and act in LINES:
                    self.say(f"  {self.acts[act].title}: {steps} steps")
            case Stepped(act):
                self.acts[act].taken.append(event)
                if self._live is None and act in LINES:
                    self._tell_step(self.acts[act], LINES[act])
            case Ended(act):
                self.acts[act].ended = event
                if self._live is None:
                    found = self.acts[act]
                    self.say(f"  [{'ok' if found.is_right else 'WRONG'}] {found.title}: {self._said(found)}")
            case Workers(states):
                self._workers.update(states)
                if self.acts["train"].ended is None:
                    self._trainers = dict(self._workers)
            case Wrote():
                self._wrote = event
            case Kill():
                pass

    def killed(self, name: str, at: float) -> None:
        self._killed[name] = at

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def fail(self, error: BaseException) -> None:
        self._console.print(Text(f"the demo failed: {type(error).__name__}: {error}", style="bold red"))
        if error.__cause__ is not None:
            self._console.print(Text(str(error.__cause__), style="red"))

    # -- pieces of the picture

    def _picture(self) -> RenderableType:
        rows = max(3, min(PLOT_ROWS, self._console.height - OTHER_ROWS))
        holders = self._holders(self._workers, self._killed)
        return Group(self._title(), holders, Text(), *self._curve(rows), Text(), self._programme())

    def _title(self) -> Text:
        return Text("farstep demo", style="bold").append(f"  {TITLE}\n", style="dim")

    def _holders(self, workers: Mapping[str, WorkerState], killed: Collection[str] = ()) -> Table:
        table = Table(box=None, padding=(0, 1), width=self._width, header_style="dim")
        table.add_column("worker", no_wrap=True)
        table.add_column("holds", no_wrap=True, ratio=1)
        for title in ("parameters", "sent", "received"):
            table.add_column(title, justify="right", no_wrap=True, width=11)
        for name, state in workers.items():
            gone = name in killed
            holds = ", ".join(HOLDS[part] for part in state.parts)
            table.add_row(
                Text(name, style=("strike dim " if gone else "bold ") + self._colour[name]),
                Text("killed" if gone else holds, style="dim" if gone else ""),
                f"{state.parameters:,}" if state.parts and not gone else "",
                size(state.sent) if state.sent else "",
                size(state.received) if state.received else "",
            )
        return table

    def _curve(self, rows: int) -> list[Text]:
        act = self.acts["train"]
        lines = plot(act.losses, width=self._width - 2, height=rows, count=act.steps)
        heading = Text(" loss", style="bold")
        if act.taken:
            heading.append(f"  {self._rate(act)}", style="dim")
        return [heading, *(Text(f" {line}", style="cyan", no_wrap=True) for line in lines)]

    def _rate(self, act: Act) -> str:
        latest = act.taken[-1].step
        recent_s = None if act.ended else RECENT_S
        return (
            f"{latest.loss:.3f}  {act.steps_per_s(recent_s) * self._tokens_per_step:,.0f} tokens/s  "
            f"learning rate {latest.rate:.1e}  gradient norm {latest.norm:.2f}"
        )

    def _programme(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1), width=self._width)
        table.add_column(width=1)
        table.add_column(width=27, no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for act in self.acts.values():
            table.add_row(
                self._mark(act), Text(act.title, style="" if act.began else "dim"), self._state(act)
            )
        return table

    def _mark(self, act: Act) -> RenderableType:
        if act.ended:
            return Text("✓", style="bold green") if act.is_right else Text("✗", style="bold red")
        return self._spinner if act.began else Text("·", style="dim")

    def _state(self, act: Act) -> RenderableType:
        if act.ended:
            return Text(self._said(act), style="green" if act.is_right else "red")
        if not act.began or not act.steps:
            return Text("")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=act.steps, completed=len(act.taken), width=30),
            Text(f"{len(act.taken)} of {act.steps}", style="dim"),
        )
        return bar

    def _said(self, act: Act) -> str:
        assert act.ended is not None
        said = act.ended.said
        if act is self.acts["loss"] and self._killed and act.is_right:
            said += f", {(act.ended.at - max(self._killed.values())) * 1000:.0f} ms later"
        return said

    def _tell_step(self, act: Act, lines: int) -> None:
        done, every = len(act.taken), max(1, act.steps // lines)
        if done % every == 0 or done == act.steps:
            self.say(f"    {done:>{len(str(act.steps))}}  loss {self._rate(act)}")

    # -- the end

    def finish(self) -> int:
        """Print the report; the exit code."""
        self._console.print(Text() if self._live is None else self._title())
        self._console.print(self._holders(self._trainers), Text())
        self._console.print(*self._curve(PLOT_ROWS), sep="\n")
        if self._live is not None:
            self._console.print(Text(), self._programme())
        if self._wrote is not None:
            text = Text(self._wrote.start, style="bold").append(
                self._wrote.text.removeprefix(self._wrote.start) + " ...", style="not bold"
            )
            self._console.print(
                Padding(
                    Panel(
                        text,
                        title="what it writes",
                        title_align="left",
                        border_style="dim",
                        width=self._width,
                    ),
                    (1, 0),
                )
            )
        wrong = [act.title for act in self.acts.values() if not act.is_right]
        if wrong:
            self._console.print(Text(f"wrong: {'; '.join(wrong)}", style="bold red"))
        else:
            self._console.print(Text("Every result was checked, and right.", style="green"))
        return 1 if wrong else 0


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.2f} GiB"
