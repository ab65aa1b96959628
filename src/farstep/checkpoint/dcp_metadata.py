"""What `.metadata` of a torch DCP checkpoint says, read without torch's classes and checked before anything is believed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from farstep.checkpoint.dtypes import dtype_named
from farstep.checkpoint.manifest import TensorInfo
from farstep.checkpoint.pickles import Call, Kind, Record, Refused, unpickled
from farstep.checkpoint.tree import MOST_DEPTH
from farstep.errors import DamagedCheckpoint
from farstep.state import Box

__all__ = ["METADATA", "Metadata", "Stored", "metadata_of"]

METADATA = ".metadata"
MOST_BYTES = 2 << 30
"""Of the pickle: that of a million tensors has less."""
_MOST_DIMENSIONS = 64
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an item is: bytes `begin` to `begin + length` of a file."""

    file: str
    begin: int
    length: int


@dataclass
class Metadata:
    tensors: dict[str, TensorInfo]
    chunks: dict[str, list[tuple[Box, Stored]]]
    """Of each tensor."""
    values: dict[str, Stored]
    """What is no tensor."""
    paths: dict[str, tuple[str | int, ...]]
    """Keys and numbers that lead to each in the state."""


def metadata_of(data: bytes, where: str) -> Metadata:
    """Raises DamagedCheckpoint, which says what is refused."""
    try:
        if len(data) > MOST_BYTES:
            raise Refused(f"it has {len(data)} bytes")
        return _understood(unpickled(data, _named))
    except Refused as exc:
        raise DamagedCheckpoint(
            f"{where}: {METADATA} is refused: {exc}. It is read as what DCP writes there and nothing else, and nothing in it has been run"
        ) from None


# -- the names that the pickle may use --------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    (_DCP, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    )
} | {(_OLD, "TensorProperties"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


def _size(*args: Any) -> tuple[int, ...]:
    found = args[0] if args else ()
    if type(found) not in (tuple, list) or len(found) > _MOST_DIMENSIONS or not all(map(_is_count, found)):
        raise Refused("a size in it is no tuple of counts")
    return tuple(found)


def _nothing(*_: Any) -> None:
    """For what is of no use here: the layout, the memory format, the path that it was saved at."""


_CALLS = {
    ("torch", "Size"): Call(_size),
    ("torch.serialization", "_get_layout"): Call(_nothing),
    (_DCP, "_MEM_FORMAT_ENCODING"): Call(_nothing),
    (_OLD, "MEM_FORMAT_ENCODING"): Call(_nothing),
    ("collections", "OrderedDict"): Call(lambda: {}),
    ("pathlib", "Path"): Call(_nothing),
    ("pathlib", "PosixPath"): Call(_nothing),
    ("pathlib", "WindowsPath"): Call(_nothing),
    ("pathlib._local", "PosixPath"): Call(_nothing),
    ("pathlib._local", "WindowsPath"): Call(_nothing),
}


def _named(module: str, name: str) -> Any:
    if (module, name) in _RECORDS:
        return Kind(name)
    if (module, name) in _CALLS:
        return _CALLS[module, name]
    if module == "torch":
        try:
            return dtype_named(name)
        except ValueError:
            pass
    raise Refused(f"it names {module[:100]}.{name[:100]}, which is none of DCP's metadata")


# -- what the pickle says ---------------------------------------------------------------------------------


def _understood(found: Any) -> Metadata:
    fields = _state(found, "Metadata")
    entries = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    stored = _stored(_mapping(fields.get("storage_data"), "storage_data"))
    metadata = Metadata({}, {}, {}, {})
    left = len(stored)
    for name, entry in entries.items():
        if type(name) is not str:
            raise Refused(f"it has a {type(name).__name__} as the name of an item")
        if type(entry) is Record and entry.kind == "BytesStorageMetadata":
            metadata.values[name] = _found(stored, name, None)
            continue
        info, boxes = _tensor(name, _state(entry, "TensorStorageMetadata"), left)
        left -= len(boxes)
        metadata.tensors[name] = info
        metadata.chunks[name] = [
            (box, _checked(name, info, box, _found(stored, name, box.offsets))) for box in boxes if box.numel
        ]
    metadata.paths = _paths(fields.get("planner_data"), entries)
    return metadata


def _tensor(name: str, fields: Mapping[str, Any], most: int) -> tuple[TensorInfo, list[Box]]:
    properties, shape, chunks = (fields.get(key) for key in ("properties", "size", "chunks"))
    if type(properties) is not Record or properties.kind != "TensorProperties" or not properties.state:
        raise Refused(f"{name[:200]!r} has no properties")
    state = properties.state
    dtype = state[0] if type(state) is tuple else state.get("dtype")
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"{name[:200]!r} has no dtype")
    shape = _size(shape)
    if math.prod(side for side in shape if side) * dtype.itemsize >= 1 << 62:
        raise Refused(f"{name[:200]!r} has the shape {shape}, of more bytes than there can be")
    if type(chunks) is not list or len(chunks) > most:
        raise Refused(f"{name[:200]!r} has no list of chunks, or more than are stored")
    boxes = []
    for chunk in chunks:
        state = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(state.get("offsets")), _size(state.get("sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise Refused(f"a chunk of {name[:200]!r} has not as many dimensions as the tensor")
        boxes.append(Box(offsets, sizes))
    return TensorInfo(dtype, shape), boxes


def _stored(found: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Stored]:
    stored: dict[tuple[str, tuple[int, ...] | None], Stored] = {}
    for index, info in found.items():
        place, fields = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        name, offset = place.get("fqn"), place.get("offset")
        file, begin, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str:
            raise Refused("an item in it has no name, or no file")
        if not _FILE.fullmatch(file) or ".." in file:
            raise Refused(
                f"{name[:200]!r} is said to be in {file[:200]!r}, which is no file beside {METADATA}"
            )
        if not _is_count(begin) or not _is_count(length) or begin + length >= 1 << 62:
            raise Refused(f"{name[:200]!r} is said to be at no place that a file has")
        transforms = fields.get("transform_descriptors")
        if transforms:
            first = transforms[0] if type(transforms) in (list, tuple) else None
            said = first[:100] if type(first) is str else "?"
            raise Refused(
                f"{name[:200]!r} was stored through DCP's extension {said!r}, which only that can undo"
            )
        key = name, None if offset is None else _size(offset)
        if key in stored:
            raise Refused(f"{name[:200]!r} is stored twice at {key[1]}")
        stored[key] = Stored(file, begin, length)
    return stored


def _found(stored: Mapping[Any, Stored], name: str, offsets: tuple[int, ...] | None) -> Stored:
    found = stored.get((name, offsets))
    if found is None:
        at = "" if offsets is None else f" at {offsets}"
        raise Refused(f"it does not say where {name[:200]!r}{at} is stored")
    return found


def _checked(name: str, info: TensorInfo, box: Box, stored: Stored) -> Stored:
    nbytes = box.numel * info.dtype.itemsize
    if nbytes > stored.length:
        raise Refused(
            f"{name[:200]!r} {box} has {nbytes} bytes, and is said to be stored in {stored.length} of {stored.file}"
        )
    return stored


def _paths(found: Any, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Without planner data a state was saved that was not nested."""
    given = {} if found is None else _mapping(found, "planner_data")
    paths: dict[str, tuple[str | int, ...]] = {}
    for name in entries:
        path = given.get(name, (name,))
        if (
            type(path) is not tuple
            or not 0 < len(path) <= MOST_DEPTH
            or not all(type(each) is str or _is_count(each) for each in path)
            or type(path[0]) is not str
        ):
            raise Refused(f"{name[:200]!r} has a bad path in planner_data")
        length = sum(len(each) if type(each) is str else len(str(each)) for each in path) + len(path) - 1
        if length != len(name) or ".".join(map(str, path)) != name:
            raise Refused(f"{name[:200]!r} has a path in planner_data that leads elsewhere")
        paths[name] = path
    return paths


def _state(found: Any, kind: str) -> Mapping[str, Any]:
    if type(found) is not Record or found.kind != kind:
        what = found.kind if type(found) is Record else type(found).__name__
        raise Refused(f"it has a {what} where a {kind} belongs")
    if type(found.state) is not dict:
        raise Refused(f"a {kind} in it is empty")
    return found.state


def _mapping(found: Any, what: str) -> Mapping[Any, Any]:
    if type(found) is not dict:
        raise Refused(f"its {what} is no dict, but a {type(found).__name__}")
    return found


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62
