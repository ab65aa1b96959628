"""A checkpoint of another format, as the rest of the package reads checkpoints: a manifest, and a storage in which each box lies row by row.

The manifest's files are not the files that are there, but what is stored in each, box after box, without what lies between. Where a box really is is
found out when it is first read.
"""

from __future__ import annotations

import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from farstep.checkpoint.manifest import Boxes, File, Manifest, TensorInfo, check_places
from farstep.checkpoint.storage import MOST_READ_BYTES, Buffer, NewFile, Storage, StoredFile
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state import Box

__all__ = ["Item", "Items", "Located", "made_manifest"]


class Located:
    """Where an item's bytes are: at a place of its file, with a CRC-32 if there is one, or in memory."""

    __slots__ = ("begin", "crc", "memory")

    def __init__(self, begin: int = 0, crc: int | None = None, memory: Buffer | None = None) -> None:
        self.begin, self.crc, self.memory = begin, crc, memory


class Item(ABC):
    """A box that is stored."""

    nbytes: int
    at: int
    """Where it begins in what its file stores."""
    label: str
    """As errors call it."""

    @abstractmethod
    def locate(self, file: StoredFile) -> Located:
        """Raises DamagedCheckpoint."""


class Items(Storage):
    """`files`: the items of each file, in the order in which the manifest has them. Nothing can be written there."""

    def __init__(self, storage: Storage, files: Mapping[str, Sequence[Item]]) -> None:
        self._storage, self._items = storage, files
        self.request_bytes, self.threads = storage.request_bytes, storage.threads
        self.verify = True
        """Whether what is read whole is compared with its CRC, if it has one."""

    def open(self, name: str) -> StoredFile:
        return _ItemFile(self, name, self._storage.open(name), self._items[name])

    def names(self) -> list[str]:
        return self._storage.names()

    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        return self._storage.read(name, most)

    def at(self, name: str) -> Storage:
        return self._storage.at(name)

    def directories(self) -> list[str]:
        return self._storage.directories()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(f"{self} is a checkpoint of another format, which is only read; save elsewhere")

    def prepare(self) -> None:
        self._refuse()

    def create(self, name: str, nbytes: int) -> NewFile:
        self._refuse()

    def replace(self, name: str, data: bytes) -> None:
        self._refuse()

    def delete(self, names: Iterable[str]) -> None:
        self._refuse()

    def sole_writer(self) -> AbstractContextManager[None]:
        self._refuse()

    def remove(self) -> None:
        self._refuse()

    def __str__(self) -> str:
        return str(self._storage)


class _ItemFile(StoredFile):
    def __init__(self, storage: Items, name: str, file: StoredFile, items: Sequence[Item]) -> None:
        self._storage, self._name, self._file, self._items = storage, name, file, items
        self._starts = list(accumulate((each.nbytes for each in items), initial=0))
        self._located: dict[int, Located] = {}
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        """Of a thread that reads an item from its beginning: how far it is, and the CRC so far."""

    def read_into(self, offset: int, buffer: Buffer) -> int:
        done = 0
        while done < buffer.nbytes:
            number = bisect_right(self._starts, offset + done) - 1
            if number >= len(self._items):
                break
            item = self._items[number]
            within = offset + done - self._starts[number]
            count = min(buffer.nbytes - done, item.nbytes - within)
            self._read(number, item, within, buffer[done : done + count])
            done += count
        return done

    def _read(self, number: int, item: Item, within: int, buffer: Buffer) -> None:
        place = self._place(number, item)
        if place.memory is not None:
            buffer[:] = place.memory[within : within + buffer.nbytes]
        else:
            got = self._file.read_into(place.begin + within, buffer)
            if got != buffer.nbytes:
                raise self._damaged(
                    item, f"ends before byte {place.begin + within + buffer.nbytes}, to which it goes"
                )
            if place.crc is not None and self._storage.verify:
                self._check(number, item, within, buffer, place.crc)
        if within + buffer.nbytes == item.nbytes and place.memory is not None:
            with self._lock:
                self._located.pop(number, None)  # it has been read to its end; its memory is not kept

    def _place(self, number: int, item: Item) -> Located:
        place = self._located.get(number)
        if place is None:
            with self._lock:
                place = self._located.get(number)
                if place is None:
                    place = self._located[number] = item.locate(self._file)
        return place

    def _check(self, number: int, item: Item, within: int, buffer: Buffer, crc: int) -> None:
        key = threading.get_ident(), number
        reached, so_far = (0, 0) if within == 0 else self._sums.pop(key, (-1, 0))
        if reached != within:
            return  # only a part of it is wanted, which no CRC is of
        so_far = zlib.crc32(buffer, so_far)
        reached += buffer.nbytes
        if reached < item.nbytes:
            self._sums[key] = reached, so_far
        elif so_far != crc:
            raise self._damaged(item, "has been changed there")

    def _damaged(self, item: Item, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self._storage}: the file {self._name}, which has {item.label}, {what}. What has been read of it is not what was saved: load another checkpoint"
        )

    def close(self) -> None:
        self._file.close()


def made_manifest(
    mark: str,
    files: Sequence[File],
    tree: Any,
    tensors: dict[str, TensorInfo],
    rows: Sequence[tuple[str, str, int, Box]],
    where: str,
) -> Manifest:
    """Of boxes, each as its tensor, its file, where it begins there, and its place. Raises DamagedCheckpoint if they are not all of each tensor."""
    numbers = {file.name: number for number, file in enumerate(files)}
    known = {name: number for number, name in enumerate(tensors)}
    boxes = Boxes(
        np.array([known[name] for name, _, _, _ in rows], dtype=np.int64),
        np.array([numbers[file] for _, file, _, _ in rows], dtype=np.int64),
        np.array([at for _, _, at, _ in rows], dtype=np.int64),
        np.array([o for _, _, _, box in rows for o in box.offsets], dtype=np.int64),
        np.array([n for _, _, _, box in rows for n in box.sizes], dtype=np.int64),
        np.array([len(box.sizes) for _, _, _, box in rows], dtype=np.int64),
    )
    ranks = max((file.rank for file in files), default=0) + 1
    manifest = Manifest(mark, ranks, list(files), tree, tensors, boxes, np.zeros(0, dtype=np.uint64))
    check_places(manifest, where)
    return manifest
