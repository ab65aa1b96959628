"""Where two checkpoints differ, however each is cut: by tensor, with norms, and by value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.manifest import Manifest, TensorInfo
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tools.contents import Contents, contents_of, opened, value_of
from farstep.checkpoint.tools.elements import Sums, sums_of
from farstep.checkpoint.tools.streaming import Piece, batches, fetched, one_ahead
from farstep.checkpoint.writing import Progress, Tally
from farstep.errors import DamagedCheckpoint
from farstep.state import Box

__all__ = ["Diff", "TensorDiff", "ValueDiff", "diff"]


@dataclass(frozen=True)
class TensorDiff:
    name: str
    status: str
    """`equal`, `close` (within the tolerance), `different`, `dtype`, `shape`, `only_a` or `only_b`."""
    a: TensorInfo | None
    b: TensorInfo | None
    sums: Sums | None = None
    """Of elements; None where they are all equal, or there are none to compare."""

    @property
    def is_same(self) -> bool:
        return self.status in ("equal", "close")


@dataclass(frozen=True)
class ValueDiff:
    """A value that is not a tensor."""

    name: str
    status: str
    """`different`, `only_a` or `only_b`."""
    a: Any
    b: Any


@dataclass
class Diff:
    """What `diff` has found. True if there is any difference."""

    tensors: list[TensorDiff] = field(default_factory=list)
    """All of them, those that are equal too."""
    values: list[ValueDiff] = field(default_factory=list)
    """Those that differ."""
    equal_values: int = 0

    def __bool__(self) -> bool:
        return bool(self.values) or any(not each.is_same for each in self.tensors)

    def as_json(self) -> dict[str, Any]:
        return {
            "same": not self,
            "tensors": [_tensor_json(each) for each in self.tensors],
            "values": [
                {"name": each.name, "status": each.status, "a": _value_json(each.a), "b": _value_json(each.b)}
                for each in self.values
            ],
            "equal_values": self.equal_values,
        }


def diff(
    a: str | os.PathLike[str] | Storage,
    b: str | os.PathLike[str] | Storage,
    *,
    tolerance: float = 0.0,
    names: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Diff:
    """Compare two checkpoints, or of them what has names that are wanted. Both are verified on the way.

    Elements, and numbers among the values, whose absolute difference is at most `tolerance` are taken as equal. NaN equals NaN. A tensor that
    both have with different dtypes is compared by its numbers all the same.
    """
    one, other = _Side(a, storage_options), _Side(b, storage_options)
    wanted = names or (lambda name: True)
    found = Diff()
    _values(one.contents, other.contents, tolerance, wanted, found)
    found.tensors = list(_tensors(one, other, tolerance, wanted, progress))
    return found


class _Side:
    def __init__(self, path: str | os.PathLike[str] | Storage, options: dict[str, Any] | None) -> None:
        self.storage, self.manifest = opened(path, options)
        self.contents: Contents = contents_of(self.manifest)
        manifest: Manifest = self.manifest
        self.tensors = {name: name for name in manifest.tensors} | self.contents.tied
        """Every name of a tensor -> the one that it has in the manifest."""
        lost = next((name for name in self.tensors.values() if name not in manifest.tensors), None)
        if lost is not None:
            raise DamagedCheckpoint(f"{self.storage}: there is no tensor {lost!r}, which is in its state")

    def info(self, name: str) -> TensorInfo:
        return self.manifest.tensors[self.tensors[name]]

    def fetched(self, batch: Sequence[Piece]) -> list[Tensor]:
        return fetched(self.storage, self.manifest, [(self.tensors[name], box) for name, box, _ in batch])


def _tensors(
    one: _Side, other: _Side, tolerance: float, wanted: Callable[[str], bool], progress: Progress | None
) -> Iterator[TensorDiff]:
    pairs: dict[tuple[str, str], Any] = {}
    """A tensor that has two names on both sides is compared once."""
    found: dict[str, TensorDiff | None] = {}
    for name in filter(wanted, dict.fromkeys([*one.tensors, *other.tensors])):
        if name not in other.tensors:
            found[name] = TensorDiff(name, "only_a", one.info(name), None)
        elif name not in one.tensors:
            found[name] = TensorDiff(name, "only_b", None, other.info(name))
        elif one.info(name).shape != other.info(name).shape:
            found[name] = TensorDiff(name, "shape", one.info(name), other.info(name))
        elif (pair := (one.tensors[name], other.tensors[name])) not in pairs:
            pairs[pair] = found[name] = None
    compared = [name for name, each in found.items() if each is None]
    for name, sums in _compared(one, other, compared, tolerance, progress):
        a, b = one.info(name), other.info(name)
        if a.dtype != b.dtype:
            status = "dtype"
        else:
            status = "equal" if sums is None else "different" if sums.different else "close"
        found[name] = TensorDiff(name, status, a, b, sums)
    yield from (each for each in found.values() if each is not None)


def _compared(
    one: _Side, other: _Side, names: Sequence[str], tolerance: float, progress: Progress | None
) -> Iterator[tuple[str, Sums | None]]:
    """None for those that are equal."""
    itemsizes = {name: (one.info(name).dtype.itemsize, other.info(name).dtype.itemsize) for name in names}
    total = sum(one.info(name).nbytes + other.info(name).nbytes for name in names)
    tally = Tally(total, progress)
    wanted = ((name, Box.whole(one.info(name).shape), max(itemsizes[name])) for name in names)
    sums = Sums()
    for batch, (left, right) in one_ahead(lambda each: (one.fetched(each), other.fetched(each)), batches(wanted)):  # fmt: skip
        nbytes = 0
        for piece, a, b in zip(batch, left, right, strict=True):
            is_whole = piece.is_last and piece.box.sizes == one.info(piece.name).shape
            sums += sums_of(a, b, tolerance, norms_of_equal=not is_whole)
            nbytes += a.nbytes + b.nbytes
            if piece.is_last:
                yield piece.name, sums if sums.unequal else None
                sums = Sums()
        tally.add(nbytes)


# -- values -----------------------------------------------------------------------------------------------


def _values(a: Contents, b: Contents, tolerance: float, wanted: Callable[[str], bool], found: Diff) -> None:
    for name in filter(wanted, dict.fromkeys([*a.values, *b.values])):
        if name not in b.values:
            if name not in b.containers:
                found.values.append(ValueDiff(name, "only_a", value_of(a.values[name]), None))
        elif name not in a.values:
            if name not in a.containers:
                found.values.append(ValueDiff(name, "only_b", None, value_of(b.values[name])))
        elif _is_same(a.values[name], b.values[name], tolerance):
            found.equal_values += 1
        else:
            found.values.append(
                ValueDiff(name, "different", value_of(a.values[name]), value_of(b.values[name]))
            )
    for name in filter(wanted, a.containers):
        ours, theirs = a.containers[name], b.containers.get(name)
        if theirs is not None and theirs != ours:
            found.values.append(ValueDiff(name, "different", _Container(ours), _Container(theirs)))


class _Container(str):
    """What holds values, in words."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _is_same(a: Any, b: Any, tolerance: float) -> bool:
    """Nodes of trees: in JSON 1 and 1.0 and true are three things, and NaN is the same as NaN."""
    if json.dumps(a) == json.dumps(b):
        return True
    return type(a) is type(b) and type(a) in (int, float) and abs(a - b) <= tolerance


# -- for programs -----------------------------------------------------------------------------------------


def _tensor_json(each: TensorDiff) -> dict[str, Any]:
    found: dict[str, Any] = {"name": each.name, "status": each.status}
    for side, info in (("a", each.a), ("b", each.b)):
        found[side] = None if info is None else {"dtype": name_of(info.dtype), "shape": list(info.shape)}
    if each.sums is not None:
        sums = each.sums
        found |= {
            "max_abs": _number(sums.largest),
            "different": sums.different,
            "elements": sums.elements,
            "nan": sums.nan,
            "norm_a": _number(sums.norm_a),
            "norm_b": _number(sums.norm_b),
            "norm_difference": _number(sums.norm_difference),
        }
    return found


def _number(value: float) -> Any:
    """JSON has no inf and nan."""
    return value if math.isfinite(value) else str(value)


def _value_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    return _number(value) if isinstance(value, float) else repr(value)
