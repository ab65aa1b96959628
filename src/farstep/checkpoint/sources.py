"""A checkpoint of any format that is read: which it is, and its tensors one by one, without all of them in memory."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.dcp import METADATA, open_dcp
from farstep.checkpoint.huggingface import INDEX, open_safetensors
from farstep.checkpoint.local_disk import LocalDisk
from farstep.checkpoint.manifest import MANIFEST, Manifest, is_ours
from farstep.checkpoint.no_links import file_to_read
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import Files, Read, Reader, Wanted, planned, read_into, reads_for
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.writing import Progress, Tally
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, NoCheckpoint, StorageFailed
from farstep.state import Box

__all__ = [
    "Source",
    "StoredTensor",
    "fill",
    "format_of",
    "manifest_of",
    "opened_by_all",
    "reading",
    "source_of",
]

_ZIP = b"PK\x03\x04"
_SHOWN = 3
_LOOKED_AT = 20
"""Of directories that may have checkpoints."""


def format_of(storage: Storage) -> str:
    """ "farstep", "dcp", "safetensors" or "torch". Raises NoCheckpoint."""
    if isinstance(storage, LocalDisk) and storage.path.is_file():
        with open(storage.path, "rb") as file:
            head = file.read(9)
        if head[:4] == _ZIP or head[:1] == b"\x80":
            return "torch"
        if head[8:] == b"{":
            return "safetensors"
        raise NoCheckpoint(f"{storage} is a file neither of torch.save nor of safetensors")
    names = storage.names()
    for mark, kind in ((MANIFEST, "farstep"), (METADATA, "dcp"), (INDEX, "safetensors")):
        if mark in names:
            return kind
    if any(name.endswith(".safetensors") and not is_ours(name) for name in names):
        return "safetensors"
    hint = ""
    if f"__0{METADATA}" in names:
        hint = ". Its ranks have saved with DCP each for itself (no collectives), which is not read"
    elif isinstance(storage, LocalDisk) and not storage.path.exists():
        raise NoCheckpoint(f"there is no checkpoint at {storage}: there is nothing of that name")
    elif below := _below(storage):
        more = f" and {len(below) - _SHOWN} more" if len(below) > _SHOWN else ""
        raise NoCheckpoint(
            f"there is no checkpoint in {storage} itself, but in {', '.join(below[-_SHOWN:])}{more}, as a CheckpointManager has its steps, below it: give the path of "
            f"one, or CheckpointManager(...).resume(state) finds the newest"
        )
    elif names or storage.directories():
        hint = f", but {len(names)} other files"
    raise NoCheckpoint(
        f"there is no checkpoint in {storage}: it has no {MANIFEST}, which a save puts there when all is written, and is none of DCP or safetensors{hint}"
    )


def _below(storage: Storage) -> list[str]:
    """The checkpoints in directories below, by number."""
    try:
        names = sorted(storage.directories(), key=_by_number)[-_LOOKED_AT:]
        return [name for name in names if MANIFEST in storage.at(name).names()]
    except Exception:
        return []  # a hint is not worth an error


def _by_number(name: str) -> list[Any]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def manifest_of(storage: Storage) -> Manifest:
    """Of a checkpoint of ours. Raises NoCheckpoint or DamagedCheckpoint."""
    try:
        with reading(storage):
            return Manifest.of(storage)
    except FileNotFoundError:
        raise NoCheckpoint(
            f"there is no checkpoint in {storage}: it has no {MANIFEST}, which a save puts there when all is written"
        ) from None


@contextmanager
def reading(storage: Storage) -> Iterator[None]:
    """What a disk cannot read any more is damage; else it may be there another time."""
    try:
        yield
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        raise
    except OSError as exc:
        if exc.errno == errno.EIO:
            raise DamagedCheckpoint(
                f"{storage} cannot be read any more: {exc}. Load another checkpoint"
            ) from exc
        failed = StorageFailed(f"reading {storage} failed: {exc}")
        failed.errno = exc.errno
        raise failed from exc


def fill(
    storage: Storage,
    manifest: Manifest,
    wanted: Wanted,
    *,
    ranks: int = 1,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Read all that is wanted, with this rank's share of the threads that the storage bears."""
    for label, (_, _, tensors) in wanted.items():
        if any(each.is_meta for each in tensors):
            raise CheckpointMismatch(
                f"{label!r} is on the meta device, so nothing can be read into it: give it memory first "
                f"(module.to_empty). Nothing has been changed"
            )
    with reading(storage):
        threads = max(1, storage.threads // ranks)
        read_into(storage, manifest, reads_for(manifest, wanted), verify=verify, progress=progress, threads=threads)  # fmt: skip


def source_of(storage: Storage, verify: bool = True) -> tuple[Storage, Manifest]:
    """A storage and a manifest to read a checkpoint by, of whatever format. Raises NoCheckpoint, DamagedCheckpoint."""
    try:  # most are ours: one read tells
        with reading(storage):
            return storage, Manifest.of(storage)
    except (FileNotFoundError, NotADirectoryError):
        pass
    kind = format_of(storage)
    if kind == "torch":
        raise CheckpointError(
            f"{storage} is a file of torch.save, which is not loaded from: farstep.checkpoint.convert makes a checkpoint of it"
        )
    if kind == "safetensors":
        if isinstance(storage, LocalDisk) and storage.path.is_file():
            return open_safetensors(_OneFile(storage.path), storage.path.name)
        return open_safetensors(storage)
    items, manifest = open_dcp(storage)
    items.verify = verify
    return items, manifest


class _OneFile(LocalDisk):
    """The directory of a file that is a checkpoint by itself; called as that. The file may be a link: the user gave its path."""

    def __init__(self, file: Path) -> None:
        super().__init__(file.parent)
        self._file = file

    def _opened(self, name: str) -> int:
        return file_to_read(self._file, is_users=True) if name == self._file.name else super()._opened(name)

    def __str__(self) -> str:
        return str(self._file)


def opened_by_all(storage: Storage, ranks: Ranks, verify: bool) -> tuple[Storage, Manifest]:
    """The same checkpoint on all ranks, or an error on all."""
    found: tuple[Storage, Manifest] | None = None
    error: Exception | None = None
    try:
        found = source_of(storage, verify)
    except Exception as exc:
        error = exc
    doing = f"loading from {storage}"
    if not ranks.agree(error, doing, found[1].save.encode() if found is not None else b""):
        raise CheckpointError(
            f"{doing}: a new checkpoint was saved there meanwhile, and the ranks have read different ones. Load again"
        )
    assert found is not None
    return found


class Source:
    """An open checkpoint. Used by several threads."""

    def __init__(self, storage: Storage, manifest: Manifest, verify: bool, stack: ExitStack) -> None:
        self.manifest = manifest
        self._verify = verify and len(manifest.checksums) > 0
        self._files = Files(storage, manifest, stack)
        self._numbers = {name: number for number, name in enumerate(manifest.names)}
        self._own = threading.local()

    def tensors(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(self, name) for name in self.manifest.names}

    def read(self, name: str, box: Box) -> Tensor:
        info = self.manifest.tensors[name]
        made = torch.empty(box.sizes, dtype=info.dtype)
        if not made.numel():
            return made
        rows = self.manifest.rows_of(self._numbers[name])
        if len(rows) == 1:
            reads: list[Read] = [Read(int(rows[0]), info.dtype, info.shape, box, made)]
        else:
            reads = list(planned(self.manifest, self._numbers, {name: (name, [box], [made])}))
        self._reader().run(reads)
        return made

    def _reader(self) -> Reader:
        reader: Reader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = Reader(self._files, self.manifest, self._verify, Tally(0, None), Event())
            self._own.reader = reader
        return reader


class StoredTensor:
    """A tensor that is still in a checkpoint: what is taken of it by slices is read. A save takes it for one that is in another memory."""

    device = torch.device("meta")

    def __init__(self, source: Source, name: str) -> None:
        info = source.manifest.tensors[name]
        self._source, self._name = source, name
        self.dtype, self.shape, self.nbytes = info.dtype, info.shape, info.nbytes
        self.itemsize = info.dtype.itemsize

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        offsets = tuple(each.start for each in slices)
        sizes = tuple(each.stop - each.start for each in slices)
        return self._source.read(self._name, Box(offsets, sizes))
