"""Files of safetensors: what their headers say, checked before it is believed, and headers to be written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from farstep.checkpoint.dtypes import dtype_named, stored_as, stored_names
from farstep.checkpoint.manifest import TensorInfo
from farstep.checkpoint.pickles import Refused
from farstep.checkpoint.storage import StoredFile

__all__ = ["Header", "Placed", "header_bytes", "read_header"]

_MOST_HEADER_BYTES = 100_000_000  # what safetensors itself reads
_SHARDING = "DCP_SHARDING_INFO"


class Placed(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """From where the length of the header is."""


@dataclass
class Header:
    tensors: dict[str, Placed] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Where each tensor is a box of a larger one, as DCP says in such files."""
    nbytes: int = 0
    """Of the whole file."""


def read_header(file: StoredFile, begin: int = 0) -> Header:
    """Of a file that begins at a place of another. Raises Refused."""
    size = bytearray(8)
    if file.read_into(begin, memoryview(size)) != 8:
        raise Refused("it is no file of safetensors: it is too short")
    (length,) = struct.unpack("<Q", size)
    if not 2 <= length <= _MOST_HEADER_BYTES:
        raise Refused("it is no file of safetensors: its header would have more bytes than any has")
    last = bytearray(1)
    if file.read_into(begin + 7 + length, memoryview(last)) != 1:
        raise Refused("its header is cut off")
    data = bytearray(length)
    file.read_into(begin + 8, memoryview(data))
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise Refused("its header is no JSON") from None
    if type(found) is not dict:
        raise Refused("its header is no JSON object")
    header = _understood(found, 8 + length)
    if header.nbytes > 8 + length and file.read_into(begin + header.nbytes - 1, memoryview(last)) != 1:
        raise Refused(f"it ends before byte {header.nbytes}, where its header says: it has been cut off")
    return header


def _understood(found: Mapping[str, Any], first: int) -> Header:
    header = Header(nbytes=first)
    metadata = found.get("__metadata__", {})
    if type(metadata) is not dict or not all(type(each) is str for each in metadata.values()):
        raise Refused("its __metadata__ is no object of strings")
    header.metadata = metadata
    spans = []
    for name, entry in found.items():
        if name == "__metadata__":
            continue
        placed, end = _placed(name, entry)
        spans.append((placed.begin, end, name))
        header.tensors[name] = placed._replace(begin=first + placed.begin)
        header.nbytes = max(header.nbytes, first + end)
    reached = 0
    for begin, end, name in sorted(spans):
        if begin < reached:
            raise Refused(f"{name[:200]!r} shares bytes with another tensor")
        reached = end
    header.offsets = _offsets(metadata, header.tensors)
    return header


def _placed(name: str, entry: Any) -> tuple[Placed, int]:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = dtype_named(stored_names()[kind])
    except (TypeError, KeyError, ValueError):
        raise Refused(f"{name[:200]!r} has no dtype, shape and place that are known") from None
    if type(shape) is not list or not all(_is_count(n) for n in (*shape, begin, end)) or len(shape) > 64:
        raise Refused(f"{name[:200]!r} has no shape or no place")
    if math.prod(side for side in shape if side) * dtype.itemsize >= 1 << 62:
        raise Refused(f"{name[:200]!r} has a shape of more bytes than there can be")
    if end < begin or end - begin != math.prod(shape) * dtype.itemsize:
        raise Refused(f"{name[:200]!r} has not as many bytes as its shape")
    return Placed(dtype, tuple(shape), begin), end


def _offsets(metadata: Mapping[str, str], tensors: Mapping[str, Placed]) -> dict[str, tuple[int, ...]]:
    if _SHARDING not in metadata:
        return {}
    try:
        said = json.loads(metadata[_SHARDING])
        found = {name: tuple(said[name]["saved_offsets"]) for name in tensors if name in said}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Refused(f"its {_SHARDING} is not what DCP writes") from None
    for name, offsets in found.items():
        if len(offsets) != len(tensors[name].shape) or not all(map(_is_count, offsets)):
            raise Refused(f"its {_SHARDING} has a bad place of {name[:200]!r}")
    return found


def header_bytes(tensors: Iterable[tuple[str, TensorInfo]], metadata: Mapping[str, str]) -> bytes:
    """For tensors whose bytes follow in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, info in tensors:
        entries[name] = {
            "dtype": stored_as(info.dtype),
            "shape": list(info.shape),
            "data_offsets": [at, at + info.nbytes],
        }
        at += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
