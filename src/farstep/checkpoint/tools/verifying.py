"""Looks at every byte of a checkpoint: each block against its checksum, and each file's own header against the manifest.

Unlike a load it does not stop at the first damage, and needs no memory but a few buffers.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any, NamedTuple

import numpy as np
import xxhash

from farstep.checkpoint.manifest import MANIFEST, Manifest, is_ours
from farstep.checkpoint.storage import Storage, StoredFile
from farstep.checkpoint.tools.contents import box_of, contents_of, opened_own, storage_at
from farstep.checkpoint.tools.headers import header_damages
from farstep.checkpoint.writing import Progress, Tally
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state.sweep import Ints

__all__ = ["Damage", "Examined", "examine", "verify"]

_BUFFER_BYTES = 8 << 20
_CHANGED = "has other bytes than were saved"


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was saved. A box of a tensor has one at most, of its bytes; a file has one for each tensor that it has lost."""

    kind: str
    """`manifest`, `missing`, `short`, `long`, `changed`, `unreadable`, `header` or `extra`."""
    file: str
    tensor: str | None
    what: str
    box: str | None = None
    """Of the tensor, if that is cut."""
    spans: tuple[tuple[int, int], ...] = ()
    """From which byte of the file to which. Checksums are of blocks, so it may be less."""

    def __str__(self) -> str:
        of = "" if self.tensor is None else f", {self.tensor!r}{self.box or ''}"
        return f"{self.file}{of}: {self.what}"


@dataclass
class Examined:
    """What was looked at, and what was found."""

    manifest: Manifest | None
    """None if it is damaged itself."""
    damages: list[Damage]
    strays: list[str]
    """Files that a save has left which did not finish, or is writing now. They do no harm, and the next save removes them."""


def verify(
    path: str | os.PathLike[str] | Storage,
    *,
    strict: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[Damage]:
    """All damages of a checkpoint; none if every byte is as it was saved. Raises NoCheckpoint if there is none.

    `strict`: files of saves that did not finish count, too. `progress(bytes_done, bytes_total)` is called as it goes.
    """
    found = examine(path, threads=threads, progress=progress, storage_options=storage_options)
    extra = [Damage("extra", name, None, "belongs to no checkpoint") for name in found.strays if strict]
    return found.damages + extra


def examine(
    path: str | os.PathLike[str] | Storage,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Examined:
    """What `verify` is made of."""
    storage = storage_at(path, storage_options)
    try:
        storage, manifest = opened_own(storage)
    except DamagedCheckpoint as exc:
        return Examined(None, [_of_manifest(str(exc).removeprefix(f"{storage}: "))], [])
    damages = _of_tree(manifest)
    files = [_File(storage, manifest, number) for number in range(len(manifest.files))]
    _run(_units(manifest, files), manifest, progress, threads or storage.threads)
    for file in files:
        damages += file.damages()
    if damages and opened_own(storage)[1].save != manifest.save:
        raise CheckpointError(
            f"a new checkpoint was saved in {storage} meanwhile, so this says nothing of it: verify it again"
        )
    named = {file.name for file in manifest.files}
    return Examined(
        manifest, damages, sorted(name for name in _names(storage) if is_ours(name) and name not in named)
    )


def _names(storage: Storage) -> list[str]:
    try:
        return storage.names()
    except Exception:
        return []  # what can be read by name need not have a list


def _of_manifest(what: str, tensor: str | None = None) -> Damage:
    return Damage("manifest", MANIFEST, tensor, what)


def _of_tree(manifest: Manifest) -> list[Damage]:
    """Its checksum is right, so another program has written it."""
    try:
        contents = contents_of(manifest)
    except DamagedCheckpoint as exc:
        return [_of_manifest(str(exc))]
    named = dict.fromkeys([*contents.tensors, *contents.tied.values()])
    return [
        *(
            _of_manifest("is in the state, and has no boxes", each)
            for each in named
            if each not in manifest.tensors
        ),
        *(
            _of_manifest("has boxes, and is not in the state", each)
            for each in manifest.tensors
            if each not in named
        ),
    ]


# -- the blocks -------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """Blocks that lie one after the other in a file, as numbers of checksums; none if there is nothing but the header to look at."""

    file: _File
    blocks: Sequence[int]


class _Blocks:
    """Where each block lies."""

    def __init__(self, manifest: Manifest) -> None:
        first, block = manifest.first_checksum, manifest.block_bytes
        self.row: Ints = np.repeat(np.arange(len(manifest.boxes), dtype=np.int64), np.diff(first))
        within = (np.arange(len(self.row), dtype=np.int64) - first[self.row]) * block
        self.at: Ints = manifest.boxes.at[self.row] + within
        self.nbytes: Ints = np.minimum(block, manifest.box_bytes[self.row] - within)
        self.file: Ints = manifest.boxes.file[self.row]


def _units(manifest: Manifest, files: Sequence[_File]) -> Iterator[_Unit]:
    blocks = _Blocks(manifest)
    order = np.lexsort((blocks.at, blocks.file))
    first = np.searchsorted(blocks.file[order], np.arange(len(files) + 1))
    for file, begin, end in zip(files, first[:-1].tolist(), first[1:].tolist(), strict=True):
        mine = order[begin:end]
        file.blocks = blocks
        ends = blocks.at[mine] + blocks.nbytes[mine]
        cuts, at = [], 0
        while at < len(mine):
            stop = int(np.searchsorted(ends, blocks.at[mine[at]] + _BUFFER_BYTES, side="right"))
            cuts.append((at, max(stop, at + 1)))
            at = cuts[-1][1]
        file.left = max(1, len(cuts))
        for a, b in cuts or [(0, 0)]:
            yield _Unit(file, mine[a:b].tolist())


def _run(units: Iterator[_Unit], manifest: Manifest, progress: Progress | None, threads: int) -> None:
    total = int(manifest.box_bytes.sum())
    tally, lock, stop = Tally(total, progress), Lock(), Event()

    def work() -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while not stop.is_set():
            with lock:
                unit = next(units, None)
            if unit is None:
                return
            unit.file.check(unit.blocks, buffer)
            tally.add(int(unit.file.blocks.nbytes[unit.blocks].sum()))

    threads = max(1, min(threads, 1 + total // _BUFFER_BYTES))
    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, "farstep-verify") as pool:
        tasks = [pool.submit(work) for _ in range(threads)]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for task in tasks:
        task.result()


@dataclass
class _Found:
    """Of one box."""

    kind: str
    what: str
    spans: list[tuple[int, int]] = field(default_factory=list)


class _File:
    """A data file: opened by the first thread that needs it, and closed by the last."""

    blocks: _Blocks
    left: int

    def __init__(self, storage: Storage, manifest: Manifest, number: int) -> None:
        self._storage, self._manifest, self._number = storage, manifest, number
        self._info = manifest.files[number]
        self._lock = Lock()
        self._file: StoredFile | None = None
        self._is_open = False
        self._nbytes = 0
        """What there is of it, or as much as is to be."""
        self._of_boxes: dict[int, _Found] = {}
        self._of_file: list[tuple[str, int | None, str]] = []

    def check(self, blocks: Sequence[int], buffer: memoryview) -> None:
        with self._lock:
            if not self._is_open:
                self._open()
                self._is_open = True
        if self._file is not None:
            self._check_blocks(blocks, buffer)
        with self._lock:
            self.left -= 1
            if not self.left and self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> None:
        """Raises nothing: what fails is a damage."""
        rows = np.flatnonzero(self._manifest.boxes.file == self._number)
        try:
            self._file = self._storage.open(self._info.name)
            self._nbytes = _length(self._file, self._info.nbytes)
            if self._nbytes < self._info.nbytes:
                self._of_file.append(("short", None, f"ends at byte {self._nbytes:,} of {self._info.nbytes:,}"))  # fmt: skip
            elif self._file.read_into(self._info.nbytes, memoryview(bytearray(1))):
                self._of_file.append(("long", None, f"goes on after its {self._info.nbytes:,} bytes"))
            for row, what in header_damages(self._manifest, rows, self._file, self._nbytes):
                self._of_file.append(("header", row, what))
        except FileNotFoundError:
            self._lost(rows, "missing", "the file is missing")
        except Exception as exc:  # whatever a storage raises
            self._lost(rows, "unreadable", _words(exc))

    def _lost(self, rows: Ints, kind: str, what: str) -> None:
        """All that is in it."""
        for row in rows.tolist():
            self._of_boxes[row] = _Found(kind, what)
        if not len(rows):
            self._of_file.append((kind, None, what))
        self._file = None

    def _check_blocks(self, blocks: Sequence[int], buffer: memoryview) -> None:
        begins: list[int] = self.blocks.at[blocks].tolist()
        ends: list[int] = (self.blocks.at[blocks] + self.blocks.nbytes[blocks]).tolist()
        there = bisect_right(ends, self._nbytes)
        for each in blocks[there:]:
            self._note(each, "short", "the file ends before it")
        if not there:
            return
        first = begins[0]
        try:
            # More than fits is one block, of a size that is not ours.
            if ends[there - 1] - first <= len(buffer) and self._read(
                first, buffer[: ends[there - 1] - first]
            ):
                wanted: list[int] = self._manifest.checksums[blocks].tolist()
                for each, begin, end, checksum in zip(blocks[:there], begins, ends, wanted, strict=False):
                    if xxhash.xxh3_64_intdigest(buffer[begin - first : end - first]) != checksum:
                        self._note(each, "changed", _CHANGED)
                return
        except Exception:
            pass  # one by one, to find out which
        for each in blocks[:there]:
            self._check_one(each, buffer)

    def _check_one(self, block: int, buffer: memoryview) -> None:
        """Piece by piece."""
        digest = xxhash.xxh3_64()
        at, end = int(self.blocks.at[block]), int(self.blocks.at[block] + self.blocks.nbytes[block])
        try:
            while at < end:
                piece = buffer[: min(len(buffer), end - at)]
                if not self._read(at, piece):
                    return self._note(block, "short", "the file ends before it")
                digest.update(piece)
                at += piece.nbytes
        except Exception as exc:
            return self._note(block, "unreadable", _words(exc))
        if digest.intdigest() != int(self._manifest.checksums[block]):
            self._note(block, "changed", _CHANGED)

    def _read(self, at: int, into: memoryview) -> bool:
        assert self._file is not None
        return self._file.read_into(at, into) == into.nbytes

    def _note(self, block: int, kind: str, what: str) -> None:
        begin = int(self.blocks.at[block])
        with self._lock:
            found = self._of_boxes.setdefault(int(self.blocks.row[block]), _Found(kind, what))
            found.spans.append((begin, begin + int(self.blocks.nbytes[block])))

    def damages(self) -> Iterator[Damage]:
        for kind, row, what in self._of_file:
            yield Damage(kind, self._info.name, *self._named(row, what))
        for row in sorted(self._of_boxes):
            found = self._of_boxes[row]
            yield Damage(found.kind, self._info.name, *self._named(row, found.what), _merged(found.spans))

    def _named(self, row: int | None, what: str) -> tuple[str | None, str, str | None]:
        if row is None:
            return None, what, None
        name = self._manifest.names[int(self._manifest.boxes.tensor[row])]
        box = box_of(self._manifest, row)
        return name, what, None if box.sizes == self._manifest.tensors[name].shape else str(box)


def _length(file: StoredFile, nbytes: int) -> int:
    """How much of so many bytes a file has."""
    byte = memoryview(bytearray(1))
    if not nbytes or file.read_into(nbytes - 1, byte):
        return nbytes
    there, gone = 0, nbytes - 1
    while there < gone:
        middle = (there + gone) // 2
        if file.read_into(middle, byte):
            there = middle + 1
        else:
            gone = middle
    return there


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return tuple(found)


def _words(exc: Exception) -> str:
    return f"cannot be read: {type(exc).__name__}: {exc}"
