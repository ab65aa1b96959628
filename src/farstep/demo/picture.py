"""The loss curve as a PNG. matplotlib draws it, and is asked for only here: it comes with `pip install 'farstep[plot]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw_curves"]

INK, BLUE, ORANGE = "#333333", "#2a78b5", "#e07b20"


def draw_curves(path: Path, spread: Sequence[float], alone: Sequence[float], rates: Sequence[float]) -> None:
    """Draw the losses of both trainings and the learning rate. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, schedule = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(spread, color=BLUE, linewidth=1.6, label="three workers, farstep")
    every = max(1, len(alone) // 40)
    at = range(0, len(alone), every)
    losses.plot(
        at, [alone[i] for i in at], "o", color=ORANGE, markersize=4.5, mfc="none", label="one process, torch"
    )
    losses.set_ylabel("loss (nats per letter)", color=INK)
    losses.set_ylim(bottom=0)
    losses.legend(frameon=False)
    losses.set_title(
        "One training, twice: spread over three workers, and in one process",
        loc="left",
        color=INK,
        fontsize=11,
    )
    schedule.plot(rates, color=INK, linewidth=1.2)
    schedule.set_ylabel("learning rate", color=INK)
    schedule.set_ylim(bottom=0)
    schedule.set_xlabel("step", color=INK)
    for axes in (losses, schedule):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path)
