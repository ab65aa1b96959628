"""A directory of a local disk, or of one that all hosts have mounted, through plain reads and writes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farstep.checkpoint.storage import (
    MOST_READ_BYTES,
    Buffer,
    NewFile,
    Storage,
    StoredFile,
    check_size,
    name_aside,
)
from farstep.errors import CheckpointBusy, DamagedCheckpoint

__all__ = ["LocalDisk", "sync_directory"]

_WRITEBACK_BYTES = 32 << 20
"""After so much has been written the kernel is told to begin putting it on the disk, so that the sync at the end has little left."""
_MOST_BUFFERS = 512
_SYNC_FILE_RANGE_WRITE = 2


class LocalDisk(Storage):
    request_bytes = 1 << 20  # what was read is still in the cache when it is hashed

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # wherever the process goes while it saves
        self._given = os.fspath(Path(path))
        self.threads = max(1, min(4, os.cpu_count() or 1))

    def prepare(self) -> None:
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_directory(each.parent)

    def names(self) -> list[str]:
        if not self.path.is_dir():
            return []
        return [entry.name for entry in os.scandir(self.path) if entry.is_file()]

    def create(self, name: str, nbytes: int) -> NewFile:
        return _NewFile(self.path / name, nbytes)

    def open(self, name: str) -> StoredFile:
        return _StoredFile(self.path / name)

    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        with open(_opened(self.path / name), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            check_size(str(self.path / name), nbytes, most)
            return file.read(nbytes)

    def replace(self, name: str, data: bytes) -> None:
        new = self.path / name_aside(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(new, flags, 0o644), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self.path)  # so that the files it names are there if it is
            os.replace(new, self.path / name)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        sync_directory(self.path)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _locks.add(lock)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointBusy(
                    f"another process is saving into {self.path}: wait until it is done, or save elsewhere"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            _let_go(lock)

    def at(self, name: str) -> Storage:
        found = type(self)(self.path / name)
        found._given = os.path.join(self._given, name)
        return found

    def directories(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.path) if entry.is_dir()] if self.path.is_dir() else []

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_if_empty(self) -> None:
        try:
            self.path.rmdir()
        except OSError:
            pass  # there is something in it

    def __str__(self) -> str:
        return self._given

    def __fspath__(self) -> str:
        return os.fspath(self.path)


class _NewFile(NewFile):
    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        self._written = self._begun = 0
        # Not posix_fallocate: in a tmpfs it fills all pages with zeros first, which takes as long as writing them.
        disk = os.fstatvfs(self._file)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and nbytes > free:
            self.abandon()
            raise OSError(
                errno.ENOSPC, f"{nbytes:,} bytes are to be written and {free:,} are free", str(path)
            )

    def write(self, buffers: Sequence[Buffer]) -> None:
        for first in range(0, len(buffers), _MOST_BUFFERS):
            self._write(list(buffers[first : first + _MOST_BUFFERS]))
        if self._written - self._begun >= _WRITEBACK_BYTES:
            _begin_writeback(self._file, self._begun, self._written - self._begun)
            self._begun = self._written

    def _write(self, buffers: list[Buffer]) -> None:
        left = sum(buffer.nbytes for buffer in buffers)
        while left:
            done = os.writev(self._file, buffers)
            self._written += done
            left -= done
            while left and done >= buffers[0].nbytes:
                done -= buffers.pop(0).nbytes
            if left:
                buffers[0] = buffers[0].cast("B")[done:]

    def finish(self) -> None:
        try:
            os.fsync(self._file)
        finally:
            file, self._file = self._file, -1
            os.close(file)

    def abandon(self) -> None:
        try:
            if self._file >= 0:
                os.close(self._file)
            self._path.unlink(missing_ok=True)
        except OSError:
            pass  # the next save cleans up
        self._file = -1


class _StoredFile(StoredFile):
    def __init__(self, path: Path) -> None:
        self._file = _opened(path)
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: Buffer) -> int:
        done = os.preadv(self._file, [buffer], offset)
        while 0 < done < buffer.nbytes:
            more = os.preadv(self._file, [buffer[done:]], offset + done)
            if not more:
                break
            done += more
        return done

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _opened(path: Path) -> int:
    """For reading. What is no file is refused: opening a pipe would wait for ever, and reading a device would not end."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise DamagedCheckpoint(
        f"{path} is a directory, a pipe or a device, and not a file that was saved. Load another checkpoint"
    )


_locks: set[int] = set()
"""Of this process. One that it forks has them too, such as a data loader's, and would keep them for as long as it lives."""


def _let_go(lock: int) -> None:
    if lock not in _locks:
        return  # this is a child, and it was closed
    _locks.discard(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing it is not enough while anybody else has it
    except OSError:
        pass  # a file system without locks
    os.close(lock)


def _close_in_child() -> None:
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_in_child)


def sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_start = _sync_file_range()


def _begin_writeback(file: int, offset: int, nbytes: int) -> None:
    """A hint: what comes of it shows at the sync."""
    if _start is not None:
        _start(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
