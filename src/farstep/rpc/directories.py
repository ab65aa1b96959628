"""Directories of this process's own for sockets and rendezvous files, and the removal of those that killed processes left.

[Note: locks, not process ids] A directory is in use while a process has a shared lock on the file `lock` in it. The
kernel lets go of it however the process ends, and it means the same in every process namespace. Whoever sweeps takes it
exclusively first. Whoever makes a directory checks, once it has the lock, that nobody has swept the directory in between,
and makes another if so; thus no directory need be spared for being new.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import weakref
from typing import Final

from farstep.errors import RpcError

__all__ = ["Hold", "PrivateDirectory", "sweep"]

PREFIXES: Final = ("farstep-rpc-", "farstep-run-")
LOCK: Final = "lock"
MAX_LOOKED_AT: Final = 100_000
MAX_TRIES: Final = 100


class PrivateDirectory:
    """A new directory that only this user can enter, made in `base`. What killed processes left is removed before."""

    def __init__(self, prefix: str, base: str) -> None:
        for place in {base, tempfile.gettempdir()}:
            sweep(place)
        for _ in range(MAX_TRIES):
            self.path = tempfile.mkdtemp(prefix=prefix, dir=base)
            hold = Hold.of(self.path)
            if hold is not None:
                self._hold = hold
                return
        raise RpcError(
            f"every directory made in {base} was removed at once: something there deletes {prefix}* directories; "
            "set TMPDIR to a directory of your own"
        )

    def close(self) -> None:
        """Remove it, unless it is the parent's of a process that was forked. May be called twice."""
        if self._hold.is_held:
            shutil.rmtree(self.path, ignore_errors=True)
            self._hold.release()


class Hold:
    """A process's word that it uses a directory: as long as there is one, nobody sweeps it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_held = True
        _holds.add(self)

    @staticmethod
    def of(directory: str) -> Hold | None:
        """None if the directory is gone, or is being swept."""
        path = os.path.join(directory, LOCK)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None
        try:
            _lock(fd, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return Hold(fd)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def release(self) -> None:
        """Give the lock back; in a forked child, close its copy and leave the parent's as it is."""
        if self.is_held:
            self.is_held = False
            os.close(self._fd)


def sweep(base: str) -> None:
    """Remove the directories of this user's in `base` that no process holds."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in itertools.islice(entries, MAX_LOOKED_AT):
            if entry.name.startswith(PREFIXES):
                with contextlib.suppress(OSError):
                    _remove_if_free(entry)


def _remove_if_free(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    try:
        fd = os.open(os.path.join(entry.path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        os.rmdir(entry.path)  # whoever has just made it makes another; one that is not empty stays
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> None:
    """Some file systems have no locks: nothing is ever swept there, and that is no reason to fail."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


_holds: weakref.WeakSet[Hold] = weakref.WeakSet()


def _release_in_child() -> None:
    for hold in list(_holds):
        hold.release()


os.register_at_fork(after_in_child=_release_in_child)
