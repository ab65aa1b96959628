"""A directory of a local disk, or of one that all hosts have mounted, through plain reads and writes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farstep.checkpoint.no_links import directory_to_write, file_to_read, refuse_link
from farstep.checkpoint.storage import (
    MOST_READ_BYTES,
    Buffer,
    NewFile,
    Storage,
    StoredFile,
    check_size,
    name_aside,
)
from farstep.errors import CheckpointBusy

__all__ = ["DiskFile", "LocalDisk", "sync_directory"]

_WRITEBACK_BYTES = 32 << 20
"""After so much has been written the kernel is told to begin putting it on the disk, so that the sync at the end has little left."""
_MOST_BUFFERS = 512
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SYNC_FILE_RANGE_WRITE = 2


class LocalDisk(Storage):
    """Does not write through links, nor read through any within the directory. See [Note: links]."""

    request_bytes = 1 << 20  # what was read is still in the cache when it is hashed

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # wherever the process goes while it saves
        self._given = os.fspath(Path(path))
        self.threads = max(1, min(4, os.cpu_count() or 1))

    def prepare(self) -> None:
        refuse_link(self.path)
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_directory(each.parent)

    def names(self) -> list[str]:
        """Pipes and whatever else is no directory count, too."""
        return [entry.name for entry in self._entries() if not _is_directory(entry)]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):  # another process may have just removed it
            return []

    def create(self, name: str, nbytes: int) -> NewFile:
        return _NewFile(self._within(name), nbytes)

    def open(self, name: str) -> StoredFile:
        return DiskFile(self._opened(name))

    def _opened(self, name: str) -> int:
        return file_to_read(self._within(name))

    def _within(self, name: str) -> Path:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in {self.path}")
        return self.path / name

    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        with open(self._opened(name), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            check_size(str(self.path / name), nbytes, most)
            return file.read(nbytes)

    def replace(self, name: str, data: bytes) -> None:
        new, name = name_aside(name), self._within(name).name
        with self._writing() as here:
            try:
                with open(os.open(new, _NEW, 0o644, dir_fd=here), "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.fsync(here)  # so that the files it names are there if it is
                os.replace(new, name, src_dir_fd=here, dst_dir_fd=here)
            except BaseException:
                _unlink(new, here)
                raise
            os.fsync(here)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        try:
            with self._writing() as here:
                for name in names:
                    _unlink(self._within(name).name, here)
        except FileNotFoundError:
            pass  # there is no directory

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """This directory, whatever else may be called so meanwhile."""
        here = directory_to_write(self.path)
        try:
            yield here
        finally:
            os.close(here)

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        lock = directory_to_write(self.path)
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
        return [entry.name for entry in self._entries() if _is_directory(entry)]

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
        self._name = path.name
        self._directory, self._file = directory_to_write(path.parent), -1
        try:
            self._file = os.open(self._name, _NEW, 0o644, dir_fd=self._directory)
        except OSError as exc:
            self._close()
            exc.filename = str(path)
            raise
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
        os.fsync(self._file)
        self._close()

    def abandon(self) -> None:
        try:
            if self._directory >= 0:
                _unlink(self._name, self._directory)
            self._close()
        except OSError:
            pass  # the next save cleans up

    def _close(self) -> None:
        descriptors = self._file, self._directory
        self._file = self._directory = -1
        for each in descriptors:
            if each >= 0:
                os.close(each)


class DiskFile(StoredFile):
    """Of a descriptor, which is its own from now on."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._file

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


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads to itself


def _unlink(name: str, directory: int) -> None:
    """If it is there. A link goes, and not what it leads to."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


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
