"""Which rank holds what, and sizes by layer: as a PNG, which matplotlib draws, and as text.

matplotlib is asked for only here: it comes with `pip install 'farstep[plot]'`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from farstep.checkpoint.tools.layers import OTHERS, Layers
from farstep.checkpoint.tools.screens import plain_table
from farstep.checkpoint.tools.units import printable, short, size

__all__ = ["draw", "text_picture"]

INK, GREY = "#333333", "#999999"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Of Okabe and Ito, who chose them for all kinds of eyes."""
MAP = "YlGnBu"
TERMINAL = ("blue", "yellow", "green", "magenta", "cyan", "red")
SHADES = " ░▒▓█"
FILLS = "█░#=+·"
"""Of kinds, without colours."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"
"""Of workers."""
LABEL_LETTERS = 36
WITH_NUMBERS = 8
"""Of so many ranks each cell has its number."""
MOST_TICKS = 16
TEXT_RANKS = 32


def colours(layers: Layers, palette: tuple[str, ...], grey: str) -> dict[str, str]:
    return {kind: grey if kind == OTHERS else palette[i % len(palette)] for i, kind in enumerate(layers.kinds)}  # fmt: skip


def draw(layers: Layers, title: str, path: str | os.PathLike[str]) -> None:
    """Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, ranks = max(1, len(layers.rows)), len(layers.ranks)
    if ranks == 1:  # who holds what needs no picture
        figure = Figure(figsize=(9.0, 1.1 + 0.27 * rows), dpi=120, layout="constrained")
        bars = figure.add_subplot()
        bars.invert_yaxis()
    else:
        left = 0.9 + (0.55 * ranks if ranks <= WITH_NUMBERS else min(7.0, 2.5 + 0.12 * ranks))
        figure = Figure(figsize=(left + 7.5, 2.1 + 0.27 * rows), dpi=120, layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=[left, 5.0], height_ratios=[0.7, 0.27 * rows + 0.2])
        cells = figure.add_subplot(grid[1, 0])
        totals = figure.add_subplot(grid[0, 0], sharex=cells)
        bars = figure.add_subplot(grid[1, 1], sharey=cells)
        _draw_cells(figure, cells, layers)
        _draw_totals(totals, layers)
    FigureCanvasAgg(figure)
    _draw_bars(bars, layers, with_labels=ranks == 1)
    figure.suptitle(_plain(title), x=0.01, ha="left", color=INK, fontsize=11)
    figure.savefig(Path(path))


def _draw_cells(figure: Any, axes: Any, layers: Layers) -> None:
    shares = _shares(layers)
    most = float(shares.max(initial=0.01))
    image = axes.imshow(np.ma.masked_equal(shares, 0), cmap=MAP, vmin=0, vmax=most, aspect="auto")
    _label_rows(axes, layers)
    step = -(-len(layers.ranks) // MOST_TICKS)
    axes.set_xticks(range(0, len(layers.ranks), step), layers.ranks[::step])
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.set_xlabel(f"{layers.noun} (share of each row that it holds)", color=INK, fontsize=9)
    for edge in (0.5 + np.arange(-1, len(layers.rows))).tolist():
        axes.axhline(edge, color="white", linewidth=1.2)
    if len(layers.ranks) <= WITH_NUMBERS:
        for edge in (0.5 + np.arange(-1, len(layers.ranks))).tolist():
            axes.axvline(edge, color="white", linewidth=1.2)
        for (y, x), share in np.ndenumerate(shares):
            if share:
                shown = f"{share:.0%}" if share >= 0.005 else "<1%"
                ink = "white" if share > 0.55 * most else INK
                axes.text(x, y, shown, ha="center", va="center", fontsize=7, color=ink)
    else:
        scale = figure.colorbar(image, ax=axes, location="bottom", aspect=40, fraction=0.05)
        scale.ax.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.2g}%")
        scale.ax.tick_params(labelsize=8, colors=INK)
        scale.outline.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _label_rows(axes: Any, layers: Layers) -> None:
    axes.set_yticks(range(len(layers.rows)), [_plain(short(row.label, LABEL_LETTERS)) for row in layers.rows])


def _plain(text: str) -> str:
    """matplotlib takes what is between two dollars for a formula."""
    return printable(text).replace("$", r"\$")


def _draw_totals(axes: Any, layers: Layers) -> None:
    totals = sum((row.by_rank for row in layers.rows), np.zeros(len(layers.ranks), dtype=np.int64))
    axes.bar(range(len(totals)), totals, color=INK, width=0.75)
    axes.tick_params(length=0, labelbottom=False, labelsize=8, colors=INK)
    top = int(totals.max(initial=0))
    axes.set_yticks([0, top] if top else [0], ["0", size(top)] if top else ["0"])
    axes.set_title(f"written by each {layers.noun}", loc="left", fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(axes: Any, layers: Layers, with_labels: bool) -> None:
    at = np.zeros(len(layers.rows))
    palette = colours(layers, COLOURS, GREY)
    for kind in layers.kinds:
        wide = np.array([row.by_kind[kind] for row in layers.rows], dtype=np.float64)
        axes.barh(range(len(wide)), wide, left=at, height=0.72, color=palette[kind], label=_plain(kind))
        at += wide
    for y, row in enumerate(layers.rows):
        axes.annotate(size(row.nbytes), (at[y], y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
    if with_labels:
        _label_rows(axes, layers)
    axes.tick_params(length=0, labelleft=with_labels, labelbottom=False, labelsize=8, colors=INK)
    axes.set_xlim(0, max(1.0, float(at.max(initial=0))) * 1.14)
    axes.set_ylim(max(1, len(layers.rows)) - 0.5, -0.5)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    if layers.kinds:
        axes.legend(frameon=False, fontsize=8, ncols=min(6, len(layers.kinds)), loc="lower left", bbox_to_anchor=(0, 1))  # fmt: skip


def _shares(layers: Layers) -> Any:
    found = np.zeros((len(layers.rows), len(layers.ranks)))
    for y, row in enumerate(layers.rows):
        if row.nbytes:
            found[y] = row.by_rank / row.nbytes
    return found


def text_picture(layers: Layers, width: int, has_colour: bool) -> list[RenderableType]:
    """The same for a terminal: a letter for each rank, the fuller the more it holds, and a bar,
    of letters that differ where there are no colours."""
    ranks = len(layers.ranks)
    is_shown = 1 < ranks <= TEXT_RANKS
    title = (
        f"ranks 0-{ranks - 1}"
        if layers.noun == "rank"
        else f"workers A-{LETTERS[ranks - 1]}"
        if is_shown
        else ""
    )
    table = plain_table("layer", title if is_shown else "", "size", "", left=(0, 1, 3))
    fills = {kind: "█" if has_colour else FILLS[i % len(FILLS)] for i, kind in enumerate(layers.kinds)}
    palette = colours(layers, TERMINAL, "bright_black")
    labels = min(LABEL_LETTERS, max((len(row.label) for row in layers.rows), default=0))
    room = max(10, min(width, 120) - labels - (max(ranks, 10) if is_shown else 0) - 20)
    largest = max((row.nbytes for row in layers.rows), default=0) or 1
    found = _shares(layers)
    most = float(found.max(initial=0.0)) or 1.0
    for row, shares in zip(layers.rows, found, strict=True):
        letters = "".join(SHADES[math.ceil(4 * share / most)] for share in shares.tolist())
        bar, done, at = Text(), 0, 0
        for kind in layers.kinds:
            at += row.by_kind[kind]
            end = round(room * at / largest)
            bar.append(fills[kind] * (end - done), style=palette[kind])
            done = end
        table.add_row(short(row.label, LABEL_LETTERS), letters if is_shown else "", size(row.nbytes), bar)
    legend = Text()
    if ranks > TEXT_RANKS:
        legend.append(
            f"what each of the {ranks} {layers.noun}s holds is not shown: the PNG has it\n", style="dim"
        )
    elif is_shown and layers.noun == "worker":
        names = (f"{letter} {printable(name)}" for letter, name in zip(LETTERS, layers.ranks, strict=False))
        legend.append("   ".join(names) + "\n")
    for kind in layers.kinds:
        legend.append(f"{fills[kind]} ", style=palette[kind]).append(f"{printable(kind)}   ")
    return [table, Text(), legend]
