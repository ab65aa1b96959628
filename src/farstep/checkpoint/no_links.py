"""Opening files and directories of a checkpoint without following symbolic links out of it.

[Note: links] The path that a user gives may lead through links, and where a checkpoint is read it may be one itself, such as `latest`. What lies in a checkpoint may
not be a link: whoever gave it to us would choose by that what else of ours is read. Hugging Face's cache is the exception, which has nothing but links: see
`_in_cache`. Where a checkpoint is written, the last part of the path may not be a link either: it might be `latest`, and what it leads to is another checkpoint.

Nothing here looks first and opens then: what was opened is what is looked at.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from farstep.errors import CheckpointError, DamagedCheckpoint

__all__ = ["directory_to_write", "file_to_read", "refuse_link"]

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BLOB = re.compile(r"((?:\.\./){2,8})blobs/([0-9a-f]{40}|[0-9a-f]{64})")


def file_to_read(path: Path, *, is_users: bool = False) -> int:
    """A descriptor of a file in a checkpoint. `is_users`: the user gave this very path, which may be a link.

    Raises DamagedCheckpoint for a link, and for what is no file: opening a pipe would wait for ever, and reading a device would not end.
    """
    try:
        file = os.open(path, _READ if is_users else _READ | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno == errno.ENXIO:  # a socket
            raise _no_file(path) from None
        if exc.errno != errno.ELOOP or is_users or not path.is_symlink():
            raise
        file = _in_cache(path)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise _no_file(path)


def directory_to_write(path: Path) -> int:
    """A descriptor of a directory in which files are made, replaced and removed. Raises CheckpointError for a link."""
    try:
        return os.open(path, _DIRECTORY | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            refuse_link(path)
        raise


def refuse_link(path: Path) -> None:
    """Raise CheckpointError if something is to be written where a link is."""
    try:
        target = os.readlink(path)
    except OSError:
        return  # it is none
    raise CheckpointError(
        f"{path} is a symbolic link to {target[:200]!r}, and a checkpoint is not written through a link: give the path that it leads to, {os.path.realpath(path)}, or "
        f"remove the link. Nothing has been written"
    )


def _no_file(path: Path) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} is a directory, a pipe, a socket or a device, and not a file that was saved. Load another checkpoint"
    )


def _in_cache(path: Path) -> int:
    """The file that a link of Hugging Face's cache leads to, which is `models--NAME/snapshots/REVISION/FILE -> ../../blobs/CHECKSUM`.

    From the directory of the link upwards, and down again without a link on the way. Raises DamagedCheckpoint for any other link.
    """
    refused = DamagedCheckpoint(
        f"{path} is a symbolic link, which may lead out of the checkpoint, and is not followed. If you trust it, make a copy without links (cp -rL), and load that"
    )
    match = _BLOB.fullmatch(os.readlink(path))
    if match is None:
        raise refused
    up = match[1]
    opened: list[int] = []

    def enter(name: str, within: int) -> int:
        opened.append(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=within))
        return opened[-1]

    try:
        opened.append(os.open(path.parent, _DIRECTORY))
        top = enter(up, opened[0])
        below = enter(up.removesuffix("../"), opened[0])
        if not os.path.samestat(os.fstat(enter("snapshots", top)), os.fstat(below)):
            raise refused
        return os.open(match[2], _READ | os.O_NOFOLLOW, dir_fd=enter("blobs", top))
    except FileNotFoundError:
        if os.path.lexists(path) and not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "a link into a cache leads to nothing", str(path)) from None
        raise refused from None
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise refused from None
        raise
    finally:
        for directory in opened:
            os.close(directory)
