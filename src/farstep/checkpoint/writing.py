"""What a rank writes of a checkpoint: which boxes, into which files, and what is known of them afterwards.

A data file is in the format of safetensors: the length of a header, the header, and the bytes of all boxes without gaps. A box that is a whole tensor
has the tensor's name there, any other has its place added: `weight[0:512, 0:256]`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from farstep.checkpoint.dtypes import stored_as
from farstep.checkpoint.manifest import BLOCK_BYTES, data_file
from farstep.checkpoint.memory import bytes_of, is_plain
from farstep.checkpoint.storage import Buffer, NewFile, Storage
from farstep.state import Box, Layout, Shards
from farstep.state.messages import pieces
from farstep.state.sweep import Ints

__all__ = [
    "Part",
    "Progress",
    "Tally",
    "Write",
    "blocks_of",
    "header",
    "name_apart",
    "shared_out",
    "write_part",
]

Progress = Callable[[int, int], None]
_REPLICA_BYTES = 64 << 20
"""Larger boxes that several ranks have are written by several."""
_FILE_BYTES = 32 << 20
"""Of less than this a second file is not worth its sync."""
_AT_ONCE_BYTES = 1 << 20
_STAGED_BYTES = 32 << 20
"""Of a tensor that is not in main memory, or not in one piece, so much at a time."""


class Write(NamedTuple):
    """A box that this rank writes. `tensor` has it alone."""

    name: str
    box: Box
    tensor: Tensor
    is_whole: bool


@dataclass
class Part:
    """What one rank has written, as columns; the numbers of files are the rank's own."""

    rank: int
    files: list[tuple[str, int]]
    """Name and bytes of each."""
    names: list[str]
    """Of each box's tensor."""
    file: Ints
    at: Ints
    offsets: Ints
    sizes: Ints
    checksums: npt.NDArray[np.uint64]


class Tally:
    """Bytes done of all. The callback is called by one thread at a time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done = total, 0
        self._progress, self._lock = progress, Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self.total)


# -- who writes what --------------------------------------------------------------------------------------


def shared_out(layout: Layout, shards: Mapping[str, Shards], rank: int) -> list[Write]:
    """The boxes that this rank writes. Every rank comes to the same: each box is written once, and replicas by those who have least to write."""
    columns, names = layout.columns, layout.names
    if not len(columns):
        return []
    key = columns.key(slice(None))
    order = np.lexsort((columns.rank, key))
    new = np.diff(key[order], prepend=-1) != 0
    first = np.flatnonzero(new)
    count = np.diff(first, append=len(order))
    itemsize = np.array([spread.dtype.itemsize for spread in layout.values()], dtype=np.int64)
    nbytes = columns.numel() * itemsize[columns.tensor]
    alone = order[first[count == 1]]
    load = np.zeros(int(columns.rank.max()) + 1, dtype=np.int64)
    np.add.at(load, columns.rank[alone], nbytes[alone])
    own = alone[columns.rank[alone] == rank]
    found = [(row, box, False) for row, box in zip(own.tolist(), columns.boxes_at(own), strict=True)]
    several = [order[f : f + c] for f, c in zip(first[count > 1], count[count > 1], strict=True)]
    several.sort(key=lambda rows: (-int(nbytes[rows[0]]), int(key[rows[0]])))
    for rows in several:
        box = columns.box(int(rows[0]))
        size = int(itemsize[columns.tensor[rows[0]]])
        holders = columns.rank[rows]
        for piece in pieces(box, size, max(_REPLICA_BYTES, size)):
            which = int(np.argmin(load[holders]))
            load[holders[which]] += piece.numel * size
            if holders[which] == rank:
                found.append((int(rows[which]), piece, piece != box))
    numbers = columns.number(np.array([row for row, _, _ in found], dtype=np.int64)).tolist()
    writes = []
    for (row, box, is_piece), number in zip(found, numbers, strict=True):
        name = names[int(columns.tensor[row])]
        tensor = shards[name].tensors[number]
        view = tensor[box.within(columns.box(row)).slices] if is_piece else tensor
        writes.append(Write(name, box, view, box.sizes == layout[name].shape))
    # Elements of 8 bytes before those of 4, and so on: then all lie at multiples of their size.
    writes.sort(key=lambda each: (-each.tensor.itemsize, -each.tensor.nbytes))
    return writes


# -- writing ----------------------------------------------------------------------------------------------


def write_part(
    storage: Storage,
    save: str,
    rank: int,
    ranks: int,
    writes: Sequence[Write],
    progress: Progress | None,
) -> Part:
    """Write them, each file by a thread of its own. If that fails, the files are gone."""
    batches = _batches(writes, max(1, storage.threads // ranks))
    tally = Tally(sum(each.tensor.nbytes for each in writes), progress)
    # Numbers of files do not clash: those of a rank are its own plus multiples of the number of ranks.
    names = [data_file(save, rank + number * ranks) for number in range(len(batches))]
    stop = Event()
    if len(batches) < 2:
        done = [
            _write_file(storage, name, save, batch, tally, stop)
            for name, batch in zip(names, batches, strict=True)
        ]
    else:
        try:
            with ThreadPoolExecutor(len(batches), "farstep-save") as pool:
                tasks = [
                    pool.submit(_write_file, storage, name, save, batch, tally, stop)
                    for name, batch in zip(names, batches, strict=True)
                ]
                try:
                    wait(tasks, return_when=FIRST_EXCEPTION)
                finally:
                    stop.set()  # Ctrl-C too
            done = [task.result() for task in tasks]
        except BaseException:
            storage.delete(names)
            raise
    boxes = [write.box for batch in batches for write in batch]
    return Part(
        rank,
        [(name, nbytes) for name, (nbytes, _, _) in zip(names, done, strict=True)],
        [write.name for batch in batches for write in batch],
        np.repeat(np.arange(len(batches), dtype=np.int64), [len(batch) for batch in batches]),
        np.concatenate([at for _, at, _ in done]) if done else np.zeros(0, dtype=np.int64),
        np.array([o for box in boxes for o in box.offsets], dtype=np.int64),
        np.array([n for box in boxes for n in box.sizes], dtype=np.int64),
        np.array([each for _, _, checksums in done for each in checksums], dtype=np.uint64),
    )


def _batches(writes: Sequence[Write], most: int) -> list[list[Write]]:
    """The files: several of about the same size where there is enough to write; none if there is nothing."""
    if not writes:
        return []
    total = sum(each.tensor.nbytes for each in writes)
    count = max(1, min(most, total // _FILE_BYTES, len(writes)))
    batches: list[list[Write]] = [[] for _ in range(count)]
    load = [0] * count
    for write in writes:
        least = load.index(min(load))
        batches[least].append(write)
        load[least] += write.tensor.nbytes
    return [batch for batch in batches if batch]


def _write_file(
    storage: Storage, name: str, save: str, writes: Sequence[Write], tally: Tally, stop: Event
) -> tuple[int, Ints, list[int]]:
    """Returns its size, where each box is, and all checksums."""
    sizes = np.array([each.tensor.nbytes for each in writes], dtype=np.int64)
    ends = np.cumsum(sizes)
    begin = header(save, writes, ends)
    checksums: list[int] = []
    file = storage.create(name, len(begin) + int(ends[-1]))
    try:
        file.write([memoryview(begin)])
        _write_boxes(file, writes, checksums, tally, stop)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    return len(begin) + int(ends[-1]), len(begin) + ends - sizes, checksums


def _write_boxes(file: NewFile, writes: Sequence[Write], checksums: list[int], tally: Tally, stop: Event) -> None:  # fmt: skip
    """Every block is hashed and then written, while it is in the cache; small boxes are written together."""
    digest = xxhash.xxh3_64_intdigest
    waiting: list[Buffer] = []
    nbytes = 0
    for write in writes:
        if stop.is_set():
            return  # another file has failed
        for data in blocks_of(write.tensor):
            checksums.append(digest(data))
            waiting.append(data)
            nbytes += data.nbytes
            if nbytes >= _AT_ONCE_BYTES:
                file.write(waiting)
                tally.add(nbytes)
                waiting, nbytes = [], 0
    file.write(waiting)
    tally.add(nbytes)


def blocks_of(tensor: Tensor) -> Iterator[Buffer]:
    """The bytes of a tensor, row by row, in blocks."""
    rest: bytes | Buffer = b""
    for data in _in_main_memory(tensor):
        if len(rest):
            data = memoryview(bytes(rest) + bytes(data))
        whole = data.nbytes // BLOCK_BYTES * BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            yield data[at : at + BLOCK_BYTES]
        rest = data[whole:]
    if len(rest):
        yield memoryview(rest)


def _in_main_memory(tensor: Tensor) -> Iterator[Buffer]:
    if is_plain(tensor):
        yield bytes_of(tensor)
        return
    for piece in pieces(Box.whole(tensor.shape), tensor.itemsize, _STAGED_BYTES):
        yield bytes_of(tensor[piece.slices].cpu().resolve_conj().resolve_neg().contiguous())


def name_apart(name: str, taken: Container[str]) -> str:
    """A name that none of the others has: a tensor may be called as a box of another is, or "__metadata__"."""
    while name in taken:
        name += "'"
    return name


def header(save: str, writes: Sequence[Write], ends: Ints) -> bytes:
    """What a data file begins with. `ends` is where each box ends, after the header."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "farstep": save}}
    at = 0
    for write, end in zip(writes, ends.tolist(), strict=True):
        kind, sizes = stored_as(write.tensor.dtype), list(write.box.sizes)
        if kind is None:
            kind, sizes = "U8", [end - at]
        name = name_apart(write.name if write.is_whole else f"{write.name}{write.box}", entries)
        entries[name] = {"dtype": kind, "shape": sizes, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
