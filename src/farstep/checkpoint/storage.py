"""Where checkpoints are kept: a directory of a local disk, or of anything that fsspec reaches.

A storage holds files by name. A file is written once, from its beginning to its end, and counts when it has been finished. What a
checkpoint needs beyond that is one thing: `replace`, which puts a small file in the place of another at once or not at all.

A subclass that overrides a method sees everything that is written and read: that is how a slow or failing disk is tried out.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from farstep.errors import DamagedCheckpoint, NoCheckpoint

__all__ = [
    "MOST_READ_BYTES",
    "NewFile",
    "Storage",
    "StoredFile",
    "check_size",
    "local_path",
    "name_aside",
    "storage_of",
]

Buffer = memoryview
MOST_READ_BYTES = 1 << 30
"""What is read whole, such as a manifest, is in memory at once. Of a million boxes one has some 100 MB."""


class NewFile(ABC):
    """A file that is being written."""

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all of them."""

    @abstractmethod
    def finish(self) -> None:
        """After this the file is there, whole, whatever happens to the machine."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop what has been written. May be called after any failure, and must not raise."""


class StoredFile(ABC):
    """A file that is being read, by several threads at once if need be."""

    @abstractmethod
    def read_into(self, offset: int, buffer: Buffer) -> int:
        """Fill the buffer from `offset` on. Returns how much there was: less only where the file ends."""

    @abstractmethod
    def close(self) -> None: ...


class Storage(ABC):
    """A directory."""

    request_bytes: int
    """What one read should ask for at least."""
    threads: int
    """How many files are written or read at once, in one process."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the directory, if it is not there."""

    @abstractmethod
    def names(self) -> list[str]:
        """The files in it; none if there is no directory."""

    @abstractmethod
    def create(self, name: str, nbytes: int) -> NewFile:
        """A new file of so many bytes. Names are new with each save: a local disk raises FileExistsError if there is one, others put it in its place."""

    @abstractmethod
    def open(self, name: str) -> StoredFile:
        """Raises FileNotFoundError."""

    @abstractmethod
    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        """A whole file. Raises FileNotFoundError, and DamagedCheckpoint, before it is read, for one of more than `most` bytes."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """The file has this content from now on, or, if this fails or the machine does, what it had before. Everything that was finished
        before it is as safe as it is."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Those that are there."""

    @abstractmethod
    def sole_writer(self) -> AbstractContextManager[None]:
        """Held while a checkpoint is written. Raises CheckpointBusy if another holds it; where a storage cannot tell, it lets both."""

    @abstractmethod
    def at(self, name: str) -> Storage:
        """A directory within this one."""

    @abstractmethod
    def directories(self) -> list[str]:
        """The names of those in this one."""

    @abstractmethod
    def remove(self) -> None:
        """The directory and what is in it."""

    def remove_if_empty(self) -> None:
        if not self.names() and not self.directories():
            self.remove()

    def __str__(self) -> str:
        return type(self).__name__


def name_aside(name: str) -> str:
    """Under which the new content of a file is written before it comes in its place: a name that nobody else has."""
    return f"{name}.{secrets.token_hex(8)}.tmp"


def check_size(where: str, nbytes: int, most: int) -> None:
    """Raises DamagedCheckpoint for a file that is too large to be read whole."""
    if nbytes > most:
        raise DamagedCheckpoint(
            f"{where} has {nbytes:,} bytes, and no more than {most:,} are read of such a file: no checkpoint has one so large"
        )


def storage_of(path: str | os.PathLike[str] | Storage, options: dict[str, Any] | None = None) -> Storage:
    """A local directory, or a URL such as `s3://bucket/run/step_000000010` for fsspec, which is given the options; a storage is taken as it is."""
    from farstep.checkpoint.local_disk import LocalDisk
    from farstep.checkpoint.remote import RemoteStorage

    if isinstance(path, Storage):
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise NoCheckpoint(f"a checkpoint is at a path or URL, not {path!r}")
    local = local_path(text)
    return RemoteStorage(text, options or {}) if local is None else LocalDisk(local)


def refuse_swapped(call: str, state: Any, path: Any) -> None:
    """Raises TypeError if the state is a path and the path is none. `call` says how to call it."""
    places = (str, os.PathLike, Storage)
    if isinstance(state, places) and not isinstance(path, places):
        raise TypeError(
            f"state first, then the path: {call}. The first argument is {str(state)[:200]!r}, the "
            f"second a {type(path).__name__}"
        )


def local_path(text: str) -> str | None:
    """Of a path or URL the path on this machine; None if it is elsewhere."""
    if "://" not in text:
        return os.path.expanduser(text)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return text.removeprefix(scheme)
    return None
