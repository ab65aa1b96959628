"""What a checkpoint has: its values, its tensors, and where the boxes of each lie in its files. `manifest.json`, read and written.

    {"xxh3_128": "<32 hex digits, of the bytes of the next value>", "manifest": {
        "format": "farstep.checkpoint", "version": 1, "save": "<16 hex digits>", "ranks": 4, "block_bytes": 1048576,
        "files": {"names": [...], "nbytes": [...], "ranks": [...]},
        "tree": ...,                                              the state, see tree.py
        "tensors": {"names": [...], "dtypes": [...], "shapes": [...]},
        "boxes": {"tensor": [...], "file": [...], "at": [...], "offsets": [...], "sizes": [...]},
        "checksums": "<base64 of numbers of 8 bytes, little-endian>",
        "info": {"step": 100, ...}}}                              of whoever saved it, such as a CheckpointManager

Boxes are columns, so that a million of them are read at once: box i is of tensor `tensor[i]`, and its elements, row by row, are at byte `at[i]`
of file `file[i]`. `offsets` and `sizes` have as many numbers for a box as its tensor has dimensions. A box has a checksum for each
block of its bytes, the last of which may be shorter; `checksums` has those of all boxes one after the other.

A manifest may come from anybody: nothing in it is believed before it has been checked, and all that it can do is name files beside it.
"""

from __future__ import annotations

import base64
import binascii
import gc
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from farstep.checkpoint import tree
from farstep.checkpoint.dtypes import dtype_named, name_of
from farstep.checkpoint.storage import Storage
from farstep.errors import CheckpointError, DamagedCheckpoint, LayoutError
from farstep.state import Layout, Spread
from farstep.state.sweep import Ints

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST",
    "MOST_DIMENSIONS",
    "MOST_RANKS",
    "WORKERS",
    "Boxes",
    "File",
    "Manifest",
    "TensorInfo",
    "check_places",
    "data_file",
    "is_ours",
    "no_collector",
]

MANIFEST = "manifest.json"
FORMAT, VERSION = "farstep.checkpoint", 1
BLOCK_BYTES = 1 << 20
MOST_RANKS = 10_000_000
"""As many as names of files have numbers."""
_HEAD = b'{"xxh3_128": "%s", "manifest": '
_TAIL = b"}\n"
_HEAD_BYTES = len(_HEAD % (b"0" * 32))
_DATA_FILE = re.compile(r"[0-9a-f]{16}\.\d{1,7}\.safetensors")
_ASIDE = re.compile(r"manifest\.json(\.[0-9a-f]{16})?\.tmp")
WORKERS = "workers"
"""In `info`: the names of the workers of RPC that wrote, where the numbers of ranks are no
ranks."""
MOST_DIMENSIONS = 64


def data_file(save: str, number: int) -> str:
    return f"{save}.{number}.safetensors"


def is_ours(name: str) -> bool:
    """Whether a save may have written a file of this name, so that it may be cleaned up."""
    return _ASIDE.fullmatch(name) is not None or _DATA_FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class File:
    name: str
    nbytes: int
    rank: int
    """Who wrote it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Boxes:
    """Where all boxes lie, as columns. `offsets` and `sizes` have the boxes' dimensions one after the other, from `first` on."""

    tensor: Ints
    file: Ints
    at: Ints
    offsets: Ints
    sizes: Ints
    dims: Ints
    """How many dimensions each box has."""

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def first(self) -> Ints:
        found: Ints = np.cumsum(self.dims) - self.dims
        return found

    @cached_property
    def numel(self) -> Ints:
        numel = np.ones(len(self), dtype=np.int64)
        for d in range(int(self.dims.max(initial=0))):
            has = self.dims > d
            numel[has] *= self.sizes[self.first[has] + d]
        return numel


@dataclass
class Manifest:
    save: str
    ranks: int
    files: list[File]
    tree: Any
    tensors: dict[str, TensorInfo]
    boxes: Boxes
    checksums: npt.NDArray[np.uint64] = field(repr=False)
    block_bytes: int = BLOCK_BYTES
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def names(self) -> list[str]:
        return list(self.tensors)

    @cached_property
    def box_bytes(self) -> Ints:
        itemsize = np.array([info.dtype.itemsize for info in self.tensors.values()], dtype=np.int64)
        found: Ints = self.boxes.numel * itemsize[self.boxes.tensor]
        return found

    @cached_property
    def first_checksum(self) -> Ints:
        """Of each box; one more for where the last ends."""
        counts = -(-self.box_bytes // self.block_bytes)
        found: Ints = np.concatenate(([0], np.cumsum(counts)))
        return found

    @cached_property
    def rows(self) -> tuple[Ints, Ints]:
        """The boxes by tensor: those of tensor t are `order[first[t]:first[t + 1]]`."""
        order = np.argsort(self.boxes.tensor, kind="stable")
        first: Ints = np.searchsorted(self.boxes.tensor[order], np.arange(len(self.tensors) + 1))
        return order, first

    def rows_of(self, number: int) -> Ints:
        order, first = self.rows
        return order[first[number] : first[number + 1]]

    def spread(self, number: int) -> Spread:
        """A tensor's boxes as if all were on rank 0; the i-th is row i of `rows_of`."""
        info = self.tensors[self.names[number]]
        rows, dims = self.rows_of(number), len(info.shape)
        at = self.boxes.first[rows][:, None] + np.arange(dims, dtype=np.int64)
        offsets, sizes = self.boxes.offsets[at], self.boxes.sizes[at]
        key = info, offsets.tobytes(), sizes.tobytes()
        found = self._spreads.get(key)
        if found is None:
            held = np.zeros(len(rows), dtype=np.int64)
            found = self._spreads[key] = Spread(info.shape, info.dtype, held, offsets, sizes)
        return found

    @cached_property
    def _spreads(self) -> dict[tuple[TensorInfo, bytes, bytes], Spread]:
        """Models have many tensors that are cut alike: those have one."""
        return {}

    def layout(self, names: Sequence[str] | None = None) -> Layout:
        """Of these tensors, or all."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return Layout({name: self.spread(numbers[name]) for name in (self.names if names is None else names)})

    # -- as bytes -----------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "save": self.save,
                "ranks": self.ranks,
                "block_bytes": self.block_bytes,
                "files": {
                    "names": [each.name for each in self.files],
                    "nbytes": [each.nbytes for each in self.files],
                    "ranks": [each.rank for each in self.files],
                },
                "tree": self.tree,
                "tensors": {
                    "names": self.names,
                    "dtypes": [name_of(info.dtype) for info in self.tensors.values()],
                    "shapes": [info.shape for info in self.tensors.values()],
                },
                "boxes": {
                    column: getattr(self.boxes, column).tolist()
                    for column in ("tensor", "file", "at", "offsets", "sizes")
                },
                "checksums": base64.b64encode(self.checksums.astype("<u8").tobytes()).decode(),
                "info": self.info,
            },
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=False,
        ).encode()
        return _HEAD % xxhash.xxh3_128_hexdigest(body).encode() + body + _TAIL

    @classmethod
    def of(cls, storage: Storage) -> Manifest:
        """The one that is there now. Raises FileNotFoundError, and what `decode` raises."""
        return cls.decode(storage.read(MANIFEST), str(storage))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Raises DamagedCheckpoint, which says what is wrong with it, if it is not what `encode` gave."""
        body = memoryview(data)[_HEAD_BYTES : len(data) - len(_TAIL)]
        if data[:_HEAD_BYTES] + data[len(data) - len(_TAIL) :] != _HEAD % xxhash.xxh3_128_hexdigest(
            body
        ).encode() + _TAIL or not len(body):
            raise DamagedCheckpoint(
                f"{where}: {MANIFEST} has been changed or cut off since it was written: its checksum is not that of its content. It tells nothing "
                f"that could be relied on; load another checkpoint"
            )
        try:
            with no_collector():
                return _checked(json.loads(bytes(body), parse_float=_finite, parse_constant=_finite))
        except (_Bad, LayoutError, CheckpointError) as exc:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} is not valid: {exc}") from None
        except (ValueError, RecursionError) as exc:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} is no JSON that can be read: {exc}") from None


@contextmanager
def no_collector() -> Iterator[None]:
    """A million new objects, of which none is garbage, are looked at again and again by the collector."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- what may be believed ---------------------------------------------------------------------------------


class _Bad(Exception):
    pass


def _checked(found: Any) -> Manifest:
    _dict(found, "the manifest", "format", "version", "save", "ranks", "block_bytes", "files", "tree", "tensors", "boxes", "checksums", "info")  # fmt: skip
    if found["format"] != FORMAT:
        raise _Bad(f'its format is {found["format"]!r}, not "{FORMAT}"')
    if found["version"] != VERSION:
        raise _Bad(
            f"its version is {found['version']!r}, and this farstep reads version {VERSION}: a newer farstep wrote it"
        )
    save, ranks, block_bytes = found["save"], found["ranks"], found["block_bytes"]
    if not isinstance(save, str) or not re.fullmatch(r"[0-9a-f]{16}", save):
        raise _Bad(f"its save is called {save!r}")
    if not _is_count(ranks) or not 1 <= ranks <= MOST_RANKS:
        raise _Bad(f"ranks is {ranks!r}")
    if (
        type(block_bytes) is not int or block_bytes != BLOCK_BYTES
    ):  # so much is in memory to verify a part of it
        raise _Bad(f"block_bytes is {block_bytes!r}, and not {BLOCK_BYTES}")
    files = _files(found["files"], save, ranks)
    tensors = _tensors(found["tensors"])
    boxes = _boxes(found["boxes"], tensors, files)
    manifest = Manifest(save, ranks, files, found["tree"], tensors, boxes, _checksums(found["checksums"]), block_bytes, found["info"])  # fmt: skip
    if type(manifest.info) is not dict:
        raise _Bad("info is not an object")
    _check_places(manifest)
    tree.check(found["tree"], tensors)
    wanted = int(manifest.first_checksum[-1])
    if len(manifest.checksums) != wanted:
        raise _Bad(f"it has {len(manifest.checksums)} checksums for {wanted} blocks")
    return manifest


def _files(found: Any, save: str, most_ranks: int) -> list[File]:
    _dict(found, "files", "names", "nbytes", "ranks")
    names, nbytes, ranks = (_list(found[key], f"files.{key}") for key in ("names", "nbytes", "ranks"))
    if not len(names) == len(nbytes) == len(ranks):
        raise _Bad("files has columns of different lengths")
    files = []
    for name, size, rank in zip(names, nbytes, ranks, strict=True):
        if not isinstance(name, str) or not _DATA_FILE.fullmatch(name) or not name.startswith(save):
            raise _Bad(
                f"it names the file {name!r}, which no save writes: files are beside the manifest, and called after the save"
            )
        if not _is_count(size) or not _is_count(rank) or rank >= most_ranks:
            raise _Bad(f"the file {name!r} has {size!r} bytes, of rank {rank!r} of {most_ranks}")
        files.append(File(name, size, rank))
    if len({each.name for each in files}) != len(files):
        raise _Bad("two files have one name")
    if sum(each.nbytes for each in files) >= 1 << 62:
        raise _Bad("its files have more bytes than there can be")
    return files


def _tensors(found: Any) -> dict[str, TensorInfo]:
    _dict(found, "tensors", "names", "dtypes", "shapes")
    names, dtypes, shapes = (_list(found[key], f"tensors.{key}") for key in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise _Bad("tensors has columns of different lengths")
    known: dict[Any, torch.dtype] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str):
            raise _Bad(f"a tensor is called {name!r}")
        if name in tensors:
            raise _Bad(f"two tensors are called {name!r}")
        if not isinstance(dtype, str):
            raise _Bad(f"{name!r} has the dtype {dtype!r}")
        if dtype not in known:
            try:
                known[dtype] = dtype_named(dtype)
            except ValueError as exc:
                raise _Bad(f"{name!r}: {exc}") from None
        if (
            type(shape) is not list
            or len(shape) > MOST_DIMENSIONS
            or not all(_is_count(side) for side in shape)
        ):
            raise _Bad(f"{name!r} has the shape {str(shape)[:80]}")
        if math.prod(side for side in shape if side) * known[dtype].itemsize >= 1 << 62:
            raise _Bad(f"{name!r} has the shape {shape}, of more bytes than there can be")
        tensors[name] = TensorInfo(known[dtype], tuple(shape))
    return tensors


def _boxes(found: Any, tensors: dict[str, TensorInfo], files: list[File]) -> Boxes:
    keys = ("tensor", "file", "at", "offsets", "sizes")
    _dict(found, "boxes", *keys)
    tensor, file, at, offsets, sizes = (_numbers(found[key], f"boxes.{key}") for key in keys)
    if not len(tensor) == len(file) == len(at):
        raise _Bad("boxes has columns of different lengths")
    for what, column, most in (("tensor", tensor, len(tensors)), ("file", file, len(files))):
        if len(column) and int(column.max()) >= most:
            raise _Bad(f"a box is of {what} {int(column.max())}, and there are {most}")
    per_tensor = np.array([len(info.shape) for info in tensors.values()], dtype=np.int64)
    dims: Ints = per_tensor[tensor] if len(tensor) else np.zeros(0, dtype=np.int64)
    if not len(offsets) == len(sizes) == int(dims.sum()):
        raise _Bad(
            f"boxes of {int(dims.sum())} dimensions have {len(offsets)} offsets and {len(sizes)} sizes"
        )
    return Boxes(tensor, file, at, offsets, sizes, dims)


def check_places(manifest: Manifest, where: str) -> None:
    """The same for a manifest that was made of another format's. Raises DamagedCheckpoint."""
    try:
        _check_places(manifest)
    except (_Bad, LayoutError) as exc:
        raise DamagedCheckpoint(f"{where}: what it says of its tensors is not valid: {exc}") from None


def _check_places(manifest: Manifest) -> None:
    """Every box is within its tensor and its file; no two share bytes of a file; those of a tensor are all of it, each element once."""
    boxes, names = manifest.boxes, manifest.names
    if not len(boxes):
        short = next((name for name, info in manifest.tensors.items() if math.prod(info.shape)), None)
        if short is not None:
            raise _Bad(f"it has no box of {short!r}")
        return
    shape = np.array([side for info in manifest.tensors.values() for side in info.shape], dtype=np.int64)
    per_tensor = np.array([len(info.shape) for info in manifest.tensors.values()], dtype=np.int64)
    place = (np.cumsum(per_tensor) - per_tensor)[boxes.tensor] - boxes.first
    limit = shape[np.repeat(place, boxes.dims) + np.arange(len(boxes.offsets))]
    # Without a sum, which might be too large for a number: all three are counts.
    bad = (boxes.offsets > limit) | (boxes.sizes > limit - boxes.offsets)
    if bad.any():
        row = int(np.searchsorted(boxes.first, np.flatnonzero(bad)[0], side="right")) - 1
        raise _Bad(f"a box of {names[boxes.tensor[row]]!r} is not within the tensor")
    nbytes = manifest.box_bytes
    ends = np.array([each.nbytes for each in manifest.files], dtype=np.int64)[boxes.file]
    if ((boxes.at > ends) | (nbytes > ends - boxes.at)).any():
        row = int(np.flatnonzero((boxes.at > ends) | (nbytes > ends - boxes.at))[0])
        raise _Bad(
            f"a box of {names[boxes.tensor[row]]!r} is not within its file {manifest.files[boxes.file[row]].name}"
        )
    full = np.flatnonzero(nbytes)
    order = full[np.lexsort((boxes.at[full], boxes.file[full]))]
    before, after = order[:-1], order[1:]
    clash = (boxes.file[before] == boxes.file[after]) & (boxes.at[after] < boxes.at[before] + nbytes[before])
    if clash.any():
        which = int(np.flatnonzero(clash)[0])
        one, other = (names[boxes.tensor[row]] for row in (before[which], after[which]))
        raise _Bad(f"a box of {one!r} and one of {other!r} share bytes of a file")
    stored = np.zeros(len(names), dtype=np.int64)
    np.add.at(stored, boxes.tensor, nbytes)
    wanted = np.array([info.nbytes for info in manifest.tensors.values()], dtype=np.int64)
    if (stored != wanted).any():
        number = int(np.flatnonzero(stored != wanted)[0])
        raise _Bad(f"the boxes of {names[number]!r} have {stored[number]} bytes, and it has {wanted[number]}")
    several = np.bincount(boxes.tensor, minlength=len(names)) > 1
    if several.any():
        # As many elements as the tensor has, and none twice: so none is missing.
        different = {id(spread := manifest.spread(n)): (names[n], spread) for n in np.flatnonzero(several).tolist()}  # fmt: skip
        layout = Layout(dict(different.values()))
        layout.check()
        distinct = layout.replicas.distinct
        if not isinstance(distinct, slice) and len(distinct) != len(layout.columns):
            raise _Bad("it has a box twice")


def _checksums(found: Any) -> npt.NDArray[np.uint64]:
    try:
        data = base64.b64decode(found, validate=True) if isinstance(found, str) else b""
    except binascii.Error:
        raise _Bad("its checksums are no base64") from None
    if len(data) % 8 or not isinstance(found, str):
        raise _Bad("its checksums are no numbers of 8 bytes")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def _dict(found: Any, what: str, *keys: str) -> None:
    if type(found) is not dict or found.keys() != set(keys):
        raise _Bad(f"{what} is not an object with {', '.join(keys)}")


def _list(found: Any, what: str) -> list[Any]:
    if type(found) is not list:
        raise _Bad(f"{what} is no list")
    return found


def _numbers(found: Any, what: str) -> Ints:
    values = _list(found, what)
    if not all(type(each) is int for each in values):  # True is one, too, for numpy
        raise _Bad(f"{what} has something that is no whole number")
    try:
        column = np.array(values, dtype=np.int64)
    except OverflowError:
        raise _Bad(f"{what} has a number that is too large") from None
    if len(column) and (int(column.min()) < 0 or int(column.max()) >= 1 << 62):
        raise _Bad(f"{what} has a number that is negative or too large")
    return column


def _finite(text: str) -> float:
    """What is not is written as text, see tree.py. JSON has no word for it, and Python's reader takes three, and numbers that are too large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text[:20]}")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
