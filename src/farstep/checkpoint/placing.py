"""Where a converted checkpoint is put: what may be replaced, and how it is replaced whole or not at all.

On a local disk all is written aside and renamed. Where there is no rename, new files have names that are not there yet, the one that makes them a
checkpoint is put in place last, and only then are the old ones removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farstep.checkpoint.dcp_metadata import METADATA
from farstep.checkpoint.huggingface import INDEX
from farstep.checkpoint.local_disk import LocalDisk, sync_directory
from farstep.checkpoint.manifest import MANIFEST, is_ours
from farstep.checkpoint.no_links import refuse_link
from farstep.checkpoint.sources import format_of
from farstep.checkpoint.storage import Storage, local_path, storage_of
from farstep.errors import CheckpointError, NoCheckpoint

__all__ = ["PathLike", "aside", "exists", "refuse_overlap"]

PathLike = str | os.PathLike[str]
_MARKS = (MANIFEST, METADATA, INDEX)
"""What makes files a checkpoint; of several in one directory the first counts."""
_DATA = {"farstep": (), "dcp": (METADATA, ".distcp"), "safetensors": (INDEX, ".safetensors"), "torch": ()}
"""How the names of each format's files end."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def refuse_overlap(source: PathLike | Storage, target: PathLike | Storage, is_file: bool) -> None:
    """Raise CheckpointError if writing the target would remove the source or a part of it."""
    one, other = _place(source), _place(target)
    if one == other:
        raise CheckpointError(f"{target} is the checkpoint that is to be converted: give another place")
    if one.startswith(f"{other.rstrip('/')}/"):
        raise CheckpointError(
            f"{source}, which is to be converted, is within {target}: give a place that does not have it inside"
        )
    local = _local_path(target)
    if is_file and other.rpartition("/")[0] == one and local is not None and local.exists():
        raise CheckpointError(
            f"{target} is a file of the checkpoint that is to be converted: give another place"
        )


@contextmanager
def aside(
    target: PathLike | Storage, is_file: bool, overwrite: bool, options: dict[str, Any] | None
) -> Iterator[tuple[Storage, str | None, set[str]]]:
    """A storage to write into, the name of the file, if it is to be one, and names that are taken there. What is there in the end is put in place, or gone if
    there was an error."""
    local = _local_path(target)
    if local is None:
        if is_file:
            with _remote_file(target, overwrite, options) as (storage, name):
                yield storage, name, set()
        else:
            with _remote(storage_of(target, options), overwrite) as (storage, taken):
                yield storage, None, taken
        return
    local = Path(os.path.abspath(local))
    local = Path(os.path.realpath(local.parent)) / local.name
    _check_there(target, local, is_file, overwrite)
    parent = LocalDisk(local.parent)
    parent.prepare()
    made = local.with_name(f".{local.name}.{secrets.token_hex(8)}.tmp")
    try:
        if is_file:
            yield parent, made.name, set()
        else:
            made.mkdir()  # it is new
            yield LocalDisk(made), None, set()
            sync_directory(made)
        _check_there(target, local, is_file, overwrite)  # it may be there since
        _move(made, local)
    except BaseException:
        if is_file:
            made.unlink(missing_ok=True)
        else:
            shutil.rmtree(made, ignore_errors=True)
        raise


def exists(where: Any) -> CheckpointError:
    return CheckpointError(
        f"there is something at {where} already: overwrite=True replaces it; nothing has been written"
    )


# -- a local disk -----------------------------------------------------------------------------------------


def _check_there(target: Any, local: Path, is_file: bool, overwrite: bool) -> None:
    refuse_link(local)
    if not local.exists():
        return
    if not overwrite and not (local.is_dir() and not any(local.iterdir())):
        raise exists(target)
    if local.is_dir() == is_file:
        raise CheckpointError(f"{target} is a {'directory' if local.is_dir() else 'file'}, and a {'file' if is_file else 'directory'} is to be written there")  # fmt: skip
    if not is_file:
        _refuse_others(LocalDisk(local))


def _move(made: Path, local: Path) -> None:
    if not local.is_dir():
        os.replace(made, local)
    elif _exchanged(made, local):
        shutil.rmtree(made, ignore_errors=True)
    else:
        old = made.with_suffix(".old")
        os.rename(local, old)
        try:
            os.rename(made, local)
        except BaseException:
            os.rename(old, local)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync_directory(local.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Put each in the other's place at once. False where the system, or this file system, cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


# -- where there is no rename -----------------------------------------------------------------------------


@contextmanager
def _remote_file(
    target: Any, overwrite: bool, options: dict[str, Any] | None
) -> Iterator[tuple[Storage, str]]:
    """An object is there when all of it has been sent."""
    if isinstance(target, Storage):
        raise CheckpointError("a file is written to a path or URL, not into a storage: give that")
    folder, _, name = os.fspath(target).rpartition("/")
    storage = storage_of(folder, options)
    if not overwrite and name in storage.names():
        raise exists(target)
    storage.prepare()
    yield storage, name


@contextmanager
def _remote(storage: Storage, overwrite: bool) -> Iterator[tuple[Storage, set[str]]]:
    there = set(storage.names())
    if there and not overwrite:
        raise exists(storage)
    _refuse_others(storage)
    marks = _marks(storage, there)
    storage.prepare()
    try:
        yield storage, there
        written = {name for name in _MARKS if _marks(storage, {name}) != {name: marks.get(name)}}
    except BaseException:
        _forget_new(storage, there, marks)
        raise
    old = there - written
    storage.delete([name for name in _MARKS if name in old])  # from here on the new one counts
    storage.delete(old.difference(_MARKS))


def _marks(storage: Storage, names: set[str]) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name in names.intersection(_MARKS):
        try:
            found[name] = storage.read(name)
        except FileNotFoundError:
            found[name] = None
    return found


def _forget_new(storage: Storage, there: set[str], marks: dict[str, bytes | None]) -> None:
    """What has been written, unless it may have become the checkpoint for all that an error says."""
    try:
        now = set(storage.names())
        if _marks(storage, now) == marks:
            storage.delete(now - there)
    except Exception:
        pass  # nothing names them


# -- what is there ----------------------------------------------------------------------------------------


def _refuse_others(storage: Storage) -> None:
    """Raise CheckpointError if a directory has more in it than one checkpoint: that would be gone with it."""
    names, directories = storage.names(), storage.directories()
    try:
        ends = _DATA[format_of(storage)] if names else ()
    except NoCheckpoint:
        ends = ()
    others = [name for name in names if not (is_ours(name) or name == MANIFEST or name.endswith(ends))]
    if others or directories:
        raise CheckpointError(
            f"{storage} has something else in it, {(others or directories)[0]!r}: give a directory that is new or has a checkpoint alone. Nothing has been written"
        )


def _local_path(target: PathLike | Storage) -> Path | None:
    if isinstance(target, Storage):
        return target.path if isinstance(target, LocalDisk) else None
    found = local_path(os.fspath(target))
    return None if found is None else Path(found)


def _place(where: PathLike | Storage) -> str:
    """The same for paths and storages that are the same."""
    local = _local_path(where)
    if local is not None:
        return os.path.realpath(local)
    protocol, _, rest = str(where).partition("://")
    return f"{protocol}://{re.sub('/+', '/', rest).strip('/')}"
