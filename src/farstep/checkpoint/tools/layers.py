"""A checkpoint as few rows as fit into a picture: layers, or several of them as one, with what each rank has of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.tools.contents import Writers, writers_of
from farstep.checkpoint.tools.units import ranges
from farstep.state.sweep import Ints

__all__ = ["Layers", "Row", "layers_of"]

_MOST_ROWS = 32
_MOST_RANKS = 64
_MOST_KINDS = 6
_MOST_DROPPED = 4
_NUMBERED = re.compile(r"(\D*)(\d+)(\D*)")
OTHERS = "others"


@dataclass
class Row:
    label: str
    nbytes: int
    by_rank: Ints
    """Bytes, as `Layers.ranks` has the ranks."""
    by_kind: dict[str, int]


@dataclass
class Layers:
    rows: list[Row]
    ranks: list[str]
    """A rank, or several that are shown as one; or workers of RPC, by their names."""
    kinds: list[str]
    """What tensors are: the model's, or an optimizer's exp_avg and so on. The largest first."""
    noun: str = "rank"
    """Or `worker`."""


def layers_of(manifest: Manifest, wanted: Callable[[str], bool] = lambda name: True) -> Layers:
    """Of the tensors whose names are wanted."""
    writers = writers_of(manifest)
    columns, ranks = _columns(writers)
    by_rank = np.zeros((len(manifest.tensors), len(ranks)), dtype=np.int64)
    if len(manifest.boxes):
        np.add.at(by_rank, (manifest.boxes.tensor, columns[writers.of_boxes]), manifest.box_bytes)
    root = _Node(())
    places = _Places(manifest.names)
    for number, name in enumerate(manifest.names):
        if wanted(name):
            kind, path = places.kind_and_path(name)
            root.add(path, kind, by_rank[number])
    totals: dict[str, int] = {}
    for kind, nbytes in root.by_kind.items():
        totals[kind] = nbytes
    kinds = sorted(totals, key=lambda kind: -totals[kind])
    if len(kinds) > _MOST_KINDS:
        kinds = [*kinds[: _MOST_KINDS - 1], OTHERS]
    return Layers([node.row(kinds, len(ranks)) for node in _expanded(root)], ranks, kinds, writers.noun)


def _columns(writers: Writers) -> tuple[Ints, list[str]]:
    """The column of each rank or worker, and what stands above each column."""
    names, count = writers.names, len(writers.names)
    step = -(-count // _MOST_RANKS)
    columns: Ints = np.arange(count, dtype=np.int64) // step
    ends = [(first, min(first + step, count) - 1) for first in range(0, count, step)]
    between = "-" if writers.noun == "rank" else " to "
    return columns, [
        names[first] if first == last else f"{names[first]}{between}{names[last]}" for first, last in ends
    ]


# -- what belongs to which layer --------------------------------------------------------------------------


class _Places:
    """A model's tensors, and those that an optimizer has for them, are one row, which is called as the model calls them. All else has its whole name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._tops: dict[str, set[str]] = {}
        """What names go on with -> what they begin with."""
        for name in self._names:
            top, _, rest = name.partition(".")
            if rest:
                self._tops.setdefault(rest, set()).add(top)
        owners = {owner for name in self._names if (owner := self._owner(name)) is not None}
        models = {top for owner in owners - self._names for top in self._tops[owner]}
        self._within = {rest for rest, tops in self._tops.items() if tops & models}
        """Names within a model that has an optimizer."""

    def kind_and_path(self, name: str) -> tuple[str, tuple[str, ...]]:
        """`optimizer.state.h.0.weight.exp_avg` is the exp_avg of `h.0.weight` if there is a `model.h.0.weight`."""
        owner = self._owner(name)
        if owner is not None:
            return name.rpartition(".")[2], tuple(owner.split("."))
        top, _, rest = name.partition(".")
        if rest in self._within:
            return top, tuple(rest.split("."))
        return top if rest else "tensors", tuple(name.split("."))

    def _owner(self, name: str) -> str | None:
        """The parameter that an optimizer has this for, as the optimizer calls it: without what the model is called in the state, or with it."""
        owner = name.rpartition(".")[0]
        for _ in range(_MOST_DROPPED):
            _, _, owner = owner.partition(".")
            if not owner or owner.replace(".", "").isdecimal():  # a number, of whatever it is
                return None
            if owner in self._names or owner in self._tops:
                return owner
        return None


@dataclass
class _Node:
    path: tuple[str, ...]
    below: dict[str, _Node] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    by_rank: Any = 0
    label: str = ""

    def add(self, path: Sequence[str], kind: str, by_rank: Ints) -> None:
        node = self
        for part in [None, *path]:
            if part is not None:
                node = node.below.setdefault(part, _Node((*node.path, part)))
            node.by_rank = node.by_rank + by_rank
            node.by_kind[kind] = node.by_kind.get(kind, 0) + int(by_rank.sum())

    @property
    def nbytes(self) -> int:
        return sum(self.by_kind.values())

    def row(self, kinds: Sequence[str], ranks: int) -> Row:
        by_kind = dict.fromkeys(kinds, 0)
        for kind, nbytes in self.by_kind.items():
            by_kind[kind if kind in by_kind else OTHERS] += nbytes
        by_rank = np.zeros(ranks, dtype=np.int64) + self.by_rank
        return Row(self.label or ".".join(self.path), self.nbytes, by_rank, by_kind)


# -- as many rows as fit ----------------------------------------------------------------------------------


def _expanded(root: _Node) -> list[_Node]:
    """The tree, opened where there is most, as far as the rows go. Layers with numbers are opened all or none."""
    rows = list(root.below.values())
    units = _units(rows)
    if len(rows) > _MOST_ROWS:
        return _packed(rows, _MOST_ROWS)
    while units:
        unit = units.pop(max(range(len(units)), key=lambda i: sum(node.nbytes for node in units[i])))
        children = [child for node in unit for child in node.below.values()]
        if not children or any(not node.below for node in unit):
            continue
        room = _MOST_ROWS - len(rows) + len(unit)
        if len(children) > room and (len(unit) > 1 or room < 2):
            continue
        at = next(i for i, row in enumerate(rows) if row is unit[0])
        ids = {id(node) for node in unit}
        rest = [row for row in rows if id(row) not in ids]
        if len(children) > room:
            rows = [*rest[:at], *_packed(children, room), *rest[at:]]
        else:
            rows = [*rest[:at], *children, *rest[at:]]
            units += _units(children) if len(unit) == 1 else [children]
    return rows


def _units(nodes: Sequence[_Node]) -> list[list[_Node]]:
    """Those with numbers together, the others each by itself."""
    series: dict[Any, list[_Node]] = {}
    for node in nodes:
        match = _NUMBERED.fullmatch(node.path[-1])
        series.setdefault((match[1], match[3]) if match else node.path, []).append(node)
    return list(series.values())


def _packed(nodes: Sequence[_Node], room: int) -> list[_Node]:
    """Neighbours as one, as few as possible; those of a series among themselves, if there is room."""
    units = _units(nodes)
    if len(units) > room // 2:
        return list(_runs(nodes, room))
    found: list[_Node] = []
    left = room - sum(len(unit) == 1 for unit in units)
    total = sum(len(unit) for unit in units if len(unit) > 1)
    for unit in units:
        found += unit if len(unit) == 1 else _runs(unit, max(1, left * len(unit) // total))
    return found


def _runs(nodes: Sequence[_Node], count: int) -> Iterator[_Node]:
    step = -(-len(nodes) // count)
    for first in range(0, len(nodes), step):
        run = nodes[first : first + step]
        made = _Node(run[0].path, label=_label(run))
        for node in run:
            made.by_rank = made.by_rank + node.by_rank
            for kind, nbytes in node.by_kind.items():
                made.by_kind[kind] = made.by_kind.get(kind, 0) + nbytes
        yield made


def _label(run: Sequence[_Node]) -> str:
    first, last = run[0].path, run[-1].path
    if len(run) == 1:
        return ".".join(first)
    one, other = _NUMBERED.fullmatch(first[-1]), _NUMBERED.fullmatch(last[-1])
    if one and other and (one[1], one[3]) == (other[1], other[3]):
        inside = ranges(int(match[2]) for match in (_NUMBERED.fullmatch(node.path[-1]) for node in run) if match)  # fmt: skip
        return ".".join((*first[:-1], f"{one[1]}[{inside}]{one[3]}"))
    return f"{'.'.join(first)} and {len(run) - 1:,} others"
