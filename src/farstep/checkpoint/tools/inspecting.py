"""A checkpoint as a tree of the parts of its names, in which layers that are alike are one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.tools.contents import box_of, contents_of, value_of, writers_of
from farstep.checkpoint.tools.units import ranges

__all__ = ["Branch", "Leaf", "as_json", "folded", "tree_of"]

_FEWEST_ALIKE = 3
_NUMBER = re.compile(r"\d+")


@dataclass
class Leaf:
    """What a name stands for: a tensor, another tensor's memory, or a value. Of several layers that are one, all of them."""

    kind: str
    """`tensor`, `tied`, `value`, or `pieces`: the state that an optimizer has for a parameter."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    ranks: frozenset[int] = frozenset()
    """Who wrote it, as `Writers` counts them."""
    grids: frozenset[str] = frozenset()
    """How it is cut: `4x1` is into four along the first dimension."""
    values: list[Any] = field(default_factory=list)
    """Of a value, those of all layers; of a tied tensor, the other names."""
    rows: list[int] = field(default_factory=list)
    """The boxes of a tensor, or of all pieces."""
    pieces: tuple[str, ...] = ()
    """What they are called, such as exp_avg."""

    @property
    def sort(self) -> tuple[Any, ...]:
        """The same for those that may be told as one."""
        if self.kind in ("tied", "value"):
            return (self.kind,)
        return self.kind, self.dtype, self.shape, self.pieces


@dataclass
class Branch:
    """A part of a name, and all names that begin with it."""

    label: str
    leaf: Leaf | None = None
    below: dict[str, Branch] = field(default_factory=dict)
    layers: int = 1
    """How many it stands for."""
    nbytes: int = 0
    """Of all of them."""
    tensors: int = 0
    values: int = 0


def tree_of(manifest: Manifest, wanted: Callable[[str], bool] = lambda name: True) -> Branch:
    """Everything whose name is wanted."""
    contents = contents_of(manifest, whole_lists=True)
    root = Branch("")
    numbers = {name: number for number, name in enumerate(manifest.names)}
    writers = writers_of(manifest).of_boxes
    for name in filter(wanted, dict.fromkeys([*contents.tensors, *manifest.names])):
        if name in numbers:
            _add(root, name, _tensor(manifest, numbers[name], writers), manifest.tensors[name].nbytes)
    for name, other in contents.tied.items():
        if wanted(name):
            _add(root, name, Leaf("tied", values=[other]))
    for name, node in contents.values.items():
        if wanted(name):
            _add(root, name, Leaf("value", values=[value_of(node)]))
    return root


def _tensor(manifest: Manifest, number: int, writers: Any) -> Leaf:
    info, rows = manifest.tensors[manifest.names[number]], manifest.rows_of(number)
    ranks = frozenset(writers[rows].tolist())
    grid = _grid(manifest, number) if len(rows) > 1 else ""
    return Leaf("tensor", name_of(info.dtype), info.shape, ranks, frozenset([grid]), rows=rows.tolist())


def _grid(manifest: Manifest, number: int) -> str:
    spread = manifest.spread(number)
    sides = [len(np.unique(spread.offsets[:, d])) for d in range(len(spread.shape))]
    return "x".join(map(str, sides)) if math.prod(sides) == len(spread.ranks) else f"{len(spread.ranks)} boxes"  # fmt: skip


def _add(root: Branch, name: str, leaf: Leaf, nbytes: int = 0) -> None:
    branch = root
    for part in [None, *name.split(".")]:
        if part is not None:
            branch = branch.below.setdefault(part, Branch(part))
        branch.nbytes += nbytes
        branch.tensors += leaf.kind == "tensor"
        branch.values += leaf.kind == "value"
    branch.leaf = leaf


# -- layers that are alike --------------------------------------------------------------------------------


def folded(branch: Branch) -> Branch:
    """The same, where what an optimizer has for a parameter is one line, numbered neighbours
    with the same inside are one, and a part that has but one below it is one with that."""
    branch = _with_pieces(branch, in_state=False)
    kinds: dict[Any, int] = {}
    sorts: dict[int, int] = {}
    _number_sorts(branch, kinds, sorts)
    return _folded(branch, sorts)


def _with_pieces(branch: Branch, in_state: bool) -> Branch:
    """In the state of an optimizer, which is beside its param_groups, a parameter's pieces as
    one leaf."""
    inside = list(branch.below.values())
    leaves = [each.leaf for each in inside if each.leaf is not None and not each.below]
    tensors = [each for each in leaves if each.kind == "tensor"]
    made = Branch(branch.label, branch.leaf, {}, branch.layers, branch.nbytes, branch.tensors, branch.values)
    if in_state and branch.leaf is None and len(leaves) == len(inside) > 1 and tensors:
        made.leaf = _piece_leaf([each.label for each in inside], tensors)
        return made
    for key, each in branch.below.items():
        is_state = key == "state" and "param_groups" in branch.below
        made.below[key] = _with_pieces(each, in_state or is_state)
    return made


def _piece_leaf(names: Iterable[str], tensors: Sequence[Leaf]) -> Leaf:
    shaped = [each for each in tensors if each.shape] or tensors
    shapes, dtypes = {each.shape for each in shaped}, {each.dtype for each in shaped}
    return Leaf(
        "pieces",
        dtypes.pop() if len(dtypes) == 1 else "various",
        shapes.pop() if len(shapes) == 1 else (),
        frozenset().union(*(each.ranks for each in tensors)),
        frozenset().union(*(each.grids for each in shaped)),
        rows=[row for each in tensors for row in each.rows],
        pieces=tuple(names),
    )


def _number_sorts(branch: Branch, kinds: dict[Any, int], sorts: dict[int, int]) -> int:
    """Branches that are alike but for their label have the same number."""
    inside = tuple((key, _number_sorts(each, kinds, sorts)) for key, each in branch.below.items())
    sort = (branch.leaf.sort if branch.leaf is not None else None, inside)
    sorts[id(branch)] = number = kinds.setdefault(sort, len(kinds))
    return number


def _folded(branch: Branch, sorts: dict[int, int]) -> Branch:
    alike: dict[Any, list[Branch]] = {}
    for key, each in branch.below.items():
        numbers = _NUMBER.findall(key)
        pattern = _NUMBER.sub("#", key) if len(numbers) == 1 else None
        alike.setdefault((pattern, sorts[id(each)]) if pattern is not None else key, []).append(each)
    below: dict[str, Branch] = {}
    for found in alike.values():
        groups = [found] if len(found) >= _FEWEST_ALIKE else [[each] for each in found]
        for group in groups:
            one = group[0]
            if len(group) > 1:
                one = _as_one(group, sorts)
                one.label = _label([each.label for each in group])
            one = _folded(one, sorts)
            below[one.label] = one
    made = Branch(branch.label, branch.leaf, below, branch.layers, branch.nbytes, branch.tensors, branch.values)  # fmt: skip
    if len(below) == 1 and made.leaf is None and made.label:
        (only,) = below.values()
        if only.layers == made.layers:
            only.label = f"{made.label}.{only.label}"
            return only
    return made


def _as_one(group: Sequence[Branch], sorts: dict[int, int]) -> Branch:
    first = group[0]
    leaf = _merged([each.leaf for each in group if each.leaf is not None]) if first.leaf is not None else None
    below = {key: _as_one([each.below[key] for each in group], sorts) for key in first.below}
    made = Branch(
        first.label,
        leaf,
        below,
        sum(each.layers for each in group),
        sum(each.nbytes for each in group),
        sum(each.tensors for each in group),
        sum(each.values for each in group),
    )
    sorts[id(made)] = sorts[id(first)]
    return made


def _merged(leaves: Sequence[Leaf]) -> Leaf:
    first = leaves[0]
    return Leaf(
        first.kind,
        first.dtype,
        first.shape,
        frozenset().union(*(each.ranks for each in leaves)),
        frozenset().union(*(each.grids for each in leaves)),
        [value for each in leaves for value in each.values],
        [row for each in leaves for row in each.rows],
        first.pieces,
    )


def _label(labels: Iterable[str]) -> str:
    """`layers0`, `layers1`, ... as `layers[0-11]`."""
    numbers, pattern = [], ""
    for label in labels:
        numbers.append(int(_NUMBER.findall(label)[0]))
        pattern = _NUMBER.sub("{}", label.replace("{", "{{").replace("}", "}}"))
    return pattern.format(f"[{ranges(numbers)}]")


# -- for programs -----------------------------------------------------------------------------------------


def as_json(manifest: Manifest, where: str, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:  # fmt: skip
    """All that is told of a checkpoint, in full. Values are as in the manifest."""
    contents = contents_of(manifest, whole_lists=True)
    boxes = np.bincount(manifest.boxes.file, minlength=len(manifest.files)).tolist()
    return {
        "path": where,
        "save": manifest.save,
        "ranks": manifest.ranks,
        "info": manifest.info,
        "nbytes": manifest.nbytes,
        "files": [
            {"name": file.name, "rank": file.rank, "nbytes": file.nbytes, "boxes": count}
            for file, count in zip(manifest.files, boxes, strict=True)
        ],
        "tensors": [
            {
                "name": name,
                "dtype": name_of(info.dtype),
                "shape": list(info.shape),
                "nbytes": info.nbytes,
                "boxes": list(_boxes(manifest, number)),
            }
            for number, (name, info) in enumerate(manifest.tensors.items())
            if wanted(name)
        ],
        "tied": {name: other for name, other in contents.tied.items() if wanted(name)},
        "values": {name: node for name, node in contents.values.items() if wanted(name)},
    }


def _boxes(manifest: Manifest, number: int) -> Iterator[dict[str, Any]]:
    for row in manifest.rows_of(number).tolist():
        box, file = box_of(manifest, row), manifest.files[int(manifest.boxes.file[row])]
        yield {
            "offsets": list(box.offsets),
            "sizes": list(box.sizes),
            "rank": file.rank,
            "file": file.name,
            "at": int(manifest.boxes.at[row]),
            "nbytes": int(manifest.box_bytes[row]),
        }
