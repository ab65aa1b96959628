"""The header that a data file has of its own, for readers of safetensors, against what the manifest says of the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from farstep.checkpoint.dtypes import stored_as
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.storage import StoredFile
from farstep.checkpoint.tools.contents import box_of
from farstep.checkpoint.writing import name_apart
from farstep.state.sweep import Ints

__all__ = ["header_damages"]

_SHOWN_BYTES = 100


def header_damages(
    manifest: Manifest, rows: Ints, file: StoredFile, nbytes: int
) -> Iterator[tuple[int | None, str]]:
    """What is wrong with it, each with the box that it is about. `nbytes` is what there is of the file."""
    if nbytes < 8:
        return  # it is told already that the file ends there
    length = memoryview(bytearray(8))
    file.read_into(0, length)
    (size,) = struct.unpack("<Q", length)
    first = min(manifest.boxes.at[rows].tolist(), default=None)
    if size > nbytes - 8 or (first is not None and size != first - 8):
        wanted = f"{first - 8:,}" if first is not None else f"at most {nbytes - 8:,}"
        yield None, f"its header is to have {wanted} bytes, and says that it has {size:,}"
        return
    data = bytearray(size)
    file.read_into(8, memoryview(data))
    try:
        found = json.loads(data.decode(), object_pairs_hook=_distinct)
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as exc:
        yield None, f"its header is not valid: {exc}"
        return
    yield from _compared(manifest, rows, found, 8 + size)


def _compared(
    manifest: Manifest, rows: Ints, found: dict[str, Any], begin: int
) -> Iterator[tuple[int | None, str]]:
    metadata, wanted = found.pop("__metadata__", None), {"format": "pt", "farstep": manifest.save}
    if metadata != wanted:
        yield None, f"its header says of itself {_text(metadata)}, and is to say {_text(wanted)}"
    taken = {"__metadata__"}
    for row in sorted(rows.tolist(), key=lambda row: int(manifest.boxes.at[row])):  # as they were named
        name, entry = _entry(manifest, row, begin)
        name = name_apart(name, taken)
        taken.add(name)
        if name not in found:
            yield row, "is not in the file's header"
            continue
        there = found.pop(name)
        if there != entry:
            yield row, f"is {_text(there)} in the file's header, and is to be {_text(entry)}"
    for name in found:
        yield None, f"its header names {_text(name)}, which the manifest does not have in it"


def _entry(manifest: Manifest, row: int, begin: int) -> tuple[str, Any]:
    name = manifest.names[int(manifest.boxes.tensor[row])]
    info, box = manifest.tensors[name], box_of(manifest, row)
    at, nbytes = int(manifest.boxes.at[row]) - begin, int(manifest.box_bytes[row])
    kind, sizes = stored_as(info.dtype), list(box.sizes)
    if kind is None:
        kind, sizes = "U8", [nbytes]
    entry = {"dtype": kind, "shape": sizes, "data_offsets": [at, at + nbytes]}
    return name if box.sizes == info.shape else f"{name}{box}", entry


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def _text(found: Any) -> str:
    text = json.dumps(found)
    return text if len(text) <= _SHOWN_BYTES else f"{text[: _SHOWN_BYTES - 3]}..."
