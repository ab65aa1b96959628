"""What there is in a checkpoint, by name: tensors, names that share a tensor, and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from farstep.checkpoint.manifest import MANIFEST, WORKERS, Manifest
from farstep.checkpoint.sources import source_of
from farstep.checkpoint.storage import Storage, storage_of
from farstep.checkpoint.tools.units import ranges, short
from farstep.checkpoint.tree import MOST_DEPTH, children, decode, is_container, joined
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state import Box
from farstep.state.sweep import Ints

__all__ = [
    "Contents",
    "Writers",
    "box_of",
    "contents_of",
    "matcher",
    "opened",
    "opened_own",
    "storage_at",
    "value_of",
    "writers_of",
]

_NAME_LETTERS, _MOST_NAMES = 16, 4
_CONTAINERS = {
    "dict": "a dict",
    "pairs": "a dict with keys that are not all strings",
    "list": "a list",
    "tuple": "a tuple",
    "ranks": "a value for each rank",
}


@dataclass
class Contents:
    """Everything goes by its name; what each rank has for itself is below `rank0`, `rank1` and so on."""

    tensors: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    """Another name -> the tensor that it is a name of."""
    values: dict[str, Any] = field(default_factory=dict)
    """As they are encoded in the manifest, see tree.py; `decode` gives them back."""
    containers: dict[str, str] = field(default_factory=dict)
    """What holds others -> what it is, in words."""
    owners: dict[str, int] = field(default_factory=dict)
    """Tensors that one rank has for itself -> the rank."""


def storage_at(path: str | os.PathLike[str] | Storage, options: dict[str, Any] | None = None) -> Storage:
    """Raises CheckpointError for a URL that this machine cannot reach for want of a package, or that nobody knows."""
    try:
        return storage_of(path, options)
    except (ImportError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{path} cannot be reached: {exc}") from exc


def opened(
    path: str | os.PathLike[str] | Storage, options: dict[str, Any] | None = None
) -> tuple[Storage, Manifest]:
    """A checkpoint of any format that is read, as `load` has it."""
    return source_of(storage_at(path, options))


def opened_own(
    path: str | os.PathLike[str] | Storage, options: dict[str, Any] | None = None
) -> tuple[Storage, Manifest]:
    """One that `save` wrote: with checksums."""
    storage = storage_at(path, options)
    try:
        return storage, Manifest.of(storage)
    except (FileNotFoundError, NotADirectoryError):
        opened(storage)  # raises if it is nothing at all
        raise CheckpointError(
            f"{storage} is a checkpoint of another format, which has no checksums: farstep checkpoint convert makes one of it that has"
        ) from None


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of them, or there are none. `*` and `?` match the whole name; a pattern without them, any part of it."""
    if not patterns:
        return lambda name: True
    globs = [each if set(each) & set("*?[") else f"*{each}*" for each in patterns]
    return lambda name: any(fnmatchcase(name, each) for each in globs)


def box_of(manifest: Manifest, row: int) -> Box:
    boxes = manifest.boxes
    at = slice(int(boxes.first[row]), int(boxes.first[row] + boxes.dims[row]))
    return Box(tuple(boxes.offsets[at].tolist()), tuple(boxes.sizes[at].tolist()))


def value_of(node: Any) -> Any:
    """What is shown of a value."""
    if isinstance(node, dict) and "unreadable" in node:  # of another format, and not to be built here
        return Unreadable(node["unreadable"])
    return decode(node)


class Unreadable(str):
    """Why."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<unreadable: {self}>"


@dataclass(frozen=True)
class Writers:
    """Who wrote a checkpoint: ranks, or workers of RPC, of which one may have written as two."""

    noun: str
    """`rank` or `worker`."""
    names: list[str]
    """Of each, in their order."""
    of_files: Ints
    """Which of them wrote each file."""
    of_boxes: Ints
    """Which of them wrote each box."""

    def text(self, numbers: Iterable[int]) -> str:
        """Some of them."""
        if self.noun == "rank":
            return ranges(numbers)
        found = [short(self.names[number], _NAME_LETTERS) for number in sorted(set(numbers))]
        return ",".join(found) if len(found) < _MOST_NAMES else f"{len(found)} workers"


def writers_of(manifest: Manifest) -> Writers:
    ranks = np.array([file.rank for file in manifest.files], dtype=np.int64)
    count = max(manifest.ranks, int(ranks.max(initial=-1)) + 1)
    told = manifest.info.get(WORKERS)
    if type(told) is list and len(told) == count and all(type(each) is str for each in told):
        names = list(dict.fromkeys(told))
        ranks = np.array([names.index(each) for each in told], dtype=np.int64)[ranks]
        noun = "worker"
    else:
        names, noun = [str(rank) for rank in range(count)], "rank"
    of_boxes = ranks[manifest.boxes.file] if len(manifest.boxes) else np.zeros(0, dtype=np.int64)
    return Writers(noun, names, ranks, of_boxes)


def contents_of(manifest: Manifest, *, whole_lists: bool = False) -> Contents:
    """Raises DamagedCheckpoint for a tree that no save writes. `whole_lists`: a list of plain values is one value."""
    found = Contents()
    try:
        _walk(manifest.tree, "", 0, None, whole_lists, found)
    except (AttributeError, TypeError, ValueError, KeyError):
        raise DamagedCheckpoint(f"{MANIFEST} has a state that no save writes") from None
    return found


def _walk(node: Any, name: str, depth: int, owner: int | None, whole_lists: bool, found: Contents) -> None:
    if depth > MOST_DEPTH or (isinstance(node, dict) and len(node) != 1):
        raise DamagedCheckpoint(f"{MANIFEST} has something at {name[:200]!r} that no save writes")
    if isinstance(node, dict) and "tensor" in node:
        if node["tensor"] is None:
            found.tensors.append(name)
            if owner is not None:
                found.owners[name] = owner
        else:
            found.tied[name] = str(node["tensor"])
        return
    inside = list(_inside(node, name)) if is_container(node) else []
    if not inside or (whole_lists and ("list" in node or "tuple" in node) and _is_plain(inside)):
        found.values[name] = node
        return
    ((kind, _),) = node.items()
    found.containers[name] = _CONTAINERS[kind]
    for number, (below, each) in enumerate(inside):
        _walk(each, below, depth + 1, number if kind == "ranks" else owner, whole_lists, found)


def _inside(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if "ranks" in node:
        for rank, each in enumerate(node["ranks"]):
            yield joined(name, f"rank{rank}"), each
    for key, each in children(node):
        yield joined(name, key), each


def _is_plain(inside: Sequence[tuple[str, Any]]) -> bool:
    return not any(isinstance(each, dict) and ("tensor" in each or is_container(each)) for _, each in inside)
