"""What a person sees of a checkpoint and of what was found in it, as tables of rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.manifest import WORKERS, Manifest
from farstep.checkpoint.tools.contents import Writers, box_of, writers_of
from farstep.checkpoint.tools.inspecting import Branch, Leaf
from farstep.checkpoint.tools.units import count, printable, shape_text, short, size
from farstep.checkpoint.tools.verifying import Damage, Examined

__all__ = ["damages_screen", "overview", "plain_table", "ranks_table", "tree_table"]

_NARROWEST = 20
_VALUE_LETTERS = 40
_RANKS = 8
_BAR = 24
_DAMAGES = 20
_INFOS = 8
_WORKERS = 4


@dataclass
class _Row:
    first: str
    """What is drawn before the label."""
    more: str
    """The same for its further lines."""
    label: Text
    cells: tuple[str, ...]


def overview(manifest: Manifest, where: str) -> RenderableType:
    """The lines above the tree."""
    dtypes: dict[str, int] = {}
    for info in manifest.tensors.values():
        dtypes[name_of(info.dtype)] = dtypes.get(name_of(info.dtype), 0) + info.nbytes
    kinds = ", ".join(f"{name} {size(n)}" for name, n in sorted(dtypes.items(), key=lambda each: -each[1]))
    boxes, writers = len(manifest.boxes), writers_of(manifest)
    saved, wrote = len(writers.names), set(writers.of_files.tolist())
    by = (
        f" ({writers.text(range(saved)).replace(',', ', ')})"
        if writers.noun == "worker" and saved < _WORKERS
        else ""
    )
    text = Text(printable(where), style="bold")
    text.append(
        f"\n{size(manifest.nbytes)} in {count(len(manifest.tensors), 'tensor')}, {count(boxes, 'box', 'boxes')}, "
        f"{count(len(manifest.files), 'file')}; saved by {count(saved, writers.noun)}{by}"
        + (f", of which {_writers(writers, wrote)} wrote" if len(wrote) != saved else ""),
        style="not bold",
    )
    infos = [
        (key, value)
        for key, value in manifest.info.items()
        if key != WORKERS and not (key == "metric" and value is None)
    ]
    if infos:
        told = ", ".join(f"{short(key, _VALUE_LETTERS)} {_value(value)}" for key, value in infos[:_INFOS])
        text.append(f"\n{told}", style="not bold")
    text.append(f"\n{kinds}{'; ' if kinds else ''}save {manifest.save}", style="not bold dim")
    return text


def _writers(writers: Writers, wrote: set[int]) -> str:
    """Which workers wrote, by name unless they are many; of ranks how many."""
    if writers.noun == "worker" and 0 < len(wrote) < _WORKERS:
        return writers.text(wrote).replace(",", ", ")
    return str(len(wrote))


def tree_table(
    root: Branch, manifest: Manifest, width: int, depth: int | None = None, boxes: bool = False
) -> Table:
    """A line for each part of a name. `boxes`: and for each box of a tensor."""
    writers = writers_of(manifest)
    is_spread = len(set(writers.of_files.tolist())) > 1
    titles = ["shape", "dtype", "size", *([f"{writers.noun}s", "cut"] if is_spread else [])]
    rows = list(_rows(root, manifest, writers, "", 0, depth, boxes))
    taken = sum(
        2 + max(len(title), *(len(row.cells[i]) for row in rows), 0) for i, title in enumerate(titles)
    )
    room = max(_NARROWEST, width - taken)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("name", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right" if title in ("shape", "size") else "left", no_wrap=True)
    for row in rows:
        table.add_row(_wrapped(row, room), *(Text(cell) for cell in row.cells[: len(titles)]))
    return table


def _rows(
    branch: Branch,
    manifest: Manifest,
    writers: Writers,
    guide: str,
    level: int,
    depth: int | None,
    boxes: bool,
) -> Iterator[_Row]:
    children = list(branch.below.values())
    for number, each in enumerate(children):
        is_last = number == len(children) - 1
        is_shut = bool(each.below) and depth is not None and level + 1 >= depth
        inner = guide + ("  " if is_last else "│ ")
        below = "│ " if each.below and not is_shut else "  "
        drawn = guide + ("└ " if is_last else "├ ")
        yield _Row(drawn, inner + below, _label(each, is_shut), _cells(each, writers))
        if boxes and each.leaf is not None:
            yield from _box_rows(each.leaf, manifest, writers, inner + below)
        if not is_shut:
            yield from _rows(each, manifest, writers, inner, level + 1, depth, boxes)


def _label(branch: Branch, is_shut: bool) -> Text:
    text = Text(printable(branch.label), style="" if branch.leaf is not None else "bold")
    leaf = branch.leaf
    if leaf is not None and leaf.kind == "tied":
        text.append(f" is {_names(leaf.values)}", style="magenta")
    if leaf is not None and leaf.kind == "pieces":
        text.append(f": {', '.join(map(printable, leaf.pieces))}", style="not bold dim")
    if leaf is not None and leaf.kind == "value":
        text.append(f" = {_values(leaf.values)}", style="cyan")
    if is_shut:
        inside = [count(branch.tensors, "tensor")] if branch.tensors else []
        inside += [count(branch.values, "value")] if branch.values else []
        text.append(f" ({', '.join(inside) or 'other names of tensors'})", style="not bold dim")
    return text


def _names(names: Sequence[Any]) -> str:
    first = printable(str(names[0]))
    return first if len(set(names)) == 1 else f"{first} and so on"


def _values(values: Sequence[Any]) -> str:
    texts = list(dict.fromkeys(map(_value, values)))
    if len(texts) == 1:
        return texts[0]
    if all(type(each) in (int, float) for each in values):
        return f"{min(values)} to {max(values)}"
    return f"{texts[0]} and {len(texts) - 1} others"


def _value(value: Any) -> str:
    text = short(repr(value), _VALUE_LETTERS)
    return f"{text} ({len(value)} items)" if isinstance(value, list | tuple) and len(value) > 4 else text


def _cells(branch: Branch, writers: Writers) -> tuple[str, ...]:
    each = size(branch.nbytes / branch.layers)
    nbytes = f"{branch.layers:,} x {each}" if branch.layers > 1 else each
    leaf = branch.leaf
    if leaf is None or leaf.kind in ("tied", "value"):
        return "", "", nbytes if branch.tensors else "", "", ""
    cut = next(iter(leaf.grids)) if len(leaf.grids) == 1 else "various"
    shape = "" if leaf.kind == "pieces" and not leaf.shape else shape_text(leaf.shape)
    return shape, leaf.dtype, nbytes, writers.text(leaf.ranks), cut


def _box_rows(leaf: Leaf, manifest: Manifest, writers: Writers, guide: str) -> Iterator[_Row]:
    is_one = len(set(manifest.boxes.tensor[leaf.rows].tolist())) == 1
    for row in leaf.rows:
        file, box = manifest.files[int(manifest.boxes.file[row])].name, box_of(manifest, row)
        name = "" if is_one else manifest.names[int(manifest.boxes.tensor[row])]
        text = Text(f"{printable(name)}{box} at {int(manifest.boxes.at[row]):,} of {file}", style="dim")
        cells = (
            shape_text(box.sizes),
            "",
            size(int(manifest.box_bytes[row])),
            writers.text([writers.of_boxes[row]]),
            "",
        )
        yield _Row(guide, guide, text, cells)


def _wrapped(row: _Row, width: int) -> Text:
    """The label, on as many lines as it needs, with the guide before each."""
    room = max(8, width - max(len(row.first), len(row.more)))
    text, rest = Text().append(row.first, style="dim"), row.label
    while len(rest) > room:
        at = max(rest.plain.rfind(mark, 0, room) for mark in " .") + 1
        at = at if at > room // 2 else room
        text.append_text(rest[:at]).append(f"\n{row.more}", style="dim")
        rest = rest[at:]
    return text.append_text(rest)


def ranks_table(manifest: Manifest) -> RenderableType:
    """What each rank or worker has written; of many, how much they differ."""
    writers = writers_of(manifest)
    top = len(writers.names)
    nbytes = np.zeros(top, dtype=np.int64)
    np.add.at(nbytes, writers.of_boxes, manifest.box_bytes)
    boxes = np.bincount(writers.of_boxes, minlength=top)
    files = np.bincount(writers.of_files, minlength=top)
    has = np.flatnonzero(files)
    if len(has) > _RANKS:
        least, most = int(nbytes[has].min()), int(nbytes[has].max())
        return Text(
            f"{len(has):,} {writers.noun}s wrote {size(least)} to {size(most)} each; --json lists them",
            style="dim",
        )
    table = plain_table(writers.noun, "files", "boxes", "size", "")
    for rank in has.tolist():
        bar = "█" * round(_BAR * int(nbytes[rank]) / max(1, int(nbytes.max())))
        table.add_row(
            short(writers.names[rank], _VALUE_LETTERS),
            f"{files[rank]:,}",
            f"{boxes[rank]:,}",
            size(int(nbytes[rank])),
            Text(bar, style="blue"),
        )
    return table


def plain_table(*titles: str, left: Iterable[int] = (-1,)) -> Table:
    """Columns of numbers, and of text where `left` says so."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    lefts = {each % len(titles) for each in left}
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number in lefts else "right")
    return table


def damages_screen(found: Examined, where: str, seconds: float, strict: bool) -> RenderableType:
    """What `verify` has found: by file, and in each by what is wrong."""
    lines: list[RenderableType] = []
    by_file: dict[str, dict[tuple[str, str], list[Damage]]] = {}
    for damage in found.damages:
        by_file.setdefault(damage.file, {}).setdefault((damage.kind, damage.what), []).append(damage)
    for file, kinds in by_file.items():
        lines.append(Text(file, style="bold"))
        for (_, what), damages in kinds.items():
            lines += _damages(what, damages)
    if found.strays:
        left = f"{count(len(found.strays), 'file')} beside it of a save that did not finish, or is not finished yet: {', '.join(found.strays[:3])}"
        left += f" and {len(found.strays) - 3} more" if len(found.strays) > 3 else ""
        lines.append(Text(f"{left}. The next save removes them.", style="red" if strict else "yellow"))
    manifest = found.manifest
    if found.damages:
        tensors = {damage.tensor for damage in found.damages if damage.tensor is not None}
        said = f"{printable(where)} is damaged: {count(len(by_file), 'file')}"
        said += f", {count(len(tensors), 'tensor')} of {len(manifest.tensors):,}" if manifest and tensors else ""  # fmt: skip
        lines.append(Text(said, style="bold red"))
    elif manifest is not None:
        rate = f", {size(manifest.nbytes / seconds)}/s" if manifest.nbytes > 100 << 20 and seconds else ""
        lines.append(
            Text(
                f"{printable(where)} is whole: {count(len(manifest.checksums), 'block')} of {count(len(manifest.tensors), 'tensor')} "
                f"in {count(len(manifest.files), 'file')}, {size(manifest.nbytes)}{rate}",
                style="yellow" if strict and found.strays else "green",
            )
        )
        if strict and found.strays:
            lines.append(Text("--strict: what lies beside it counts as wrong", style="red"))
    return Group(*lines)


def _damages(what: str, damages: Sequence[Damage]) -> Iterator[RenderableType]:
    named = [damage for damage in damages if damage.tensor is not None]
    if not named:
        yield Text(f"  {what}", style="red")
        return
    yield Text(
        f"  {what}: {count(len(named), 'box', 'boxes')}" if len(named) > 1 else f"  {what}", style="red"
    )
    for damage in named[:_DAMAGES]:
        spans = ", ".join(f"{a:,} to {b:,}" for a, b in damage.spans[:3])
        more = f" and {len(damage.spans) - 3} more" if len(damage.spans) > 3 else ""
        text = Text(f"    {printable(str(damage.tensor))}{damage.box or ''}")
        yield text.append(f"  bytes {spans}{more}" if spans else "", style="dim")
    if len(named) > _DAMAGES:
        yield Text(f"    and {len(named) - _DAMAGES:,} more; --json lists all", style="dim")
