"""Anything that fsspec reaches: S3, GCS, HTTP, memory.

An object store has no rename; but an object is there when all of it has been sent, or not at all, which is what a checkpoint needs of it. Where there
are directories (SFTP, HDFS) a file is there from its first byte on, so the manifest is written aside and renamed.
Requests that fail are tried again by fsspec's file system, and listings are never taken from its cache.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
from farstep.errors import CheckpointError, StorageFailed

__all__ = ["RemoteStorage", "is_plain_url"]

_CALL_TIMEOUT_S = 300.0
"""One request, with all tries of it."""
_PART_BYTES = 16 << 20
"""What is sent at once of a file; each file that is being written has about two of these in memory."""
_MOST_PARTS = 9_000
"""S3 takes 10,000."""
_AHEAD_BYTES = 8 << 20
_NEAR_BYTES = 64 << 10
"""A read that begins so near to the end of the one before goes on with it."""
_WITHOUT_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "http", "https", "memory"}  # fmt: skip
_WITH_DIRECTORIES = {"sftp", "ssh", "hdfs", "webhdfs", "smb", "ftp", "dbfs", "lakefs"}
_S3 = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"max_attempts": 2},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""For botocore, beneath fsspec's own tries: with its defaults a host that does not answer would be waited for half an hour. Its checksums are not those of a
range on all servers, and a checkpoint has its own."""


class RemoteStorage(Storage):
    """A directory at a URL. `options` are those of fsspec's file system: credentials, an endpoint, and so on."""

    request_bytes = _AHEAD_BYTES
    threads = 8

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url.rstrip("/"), dict(options or {})
        given = {"use_listings_cache": False, **self.options}
        protocol = self.url.partition("://")[0]
        if protocol in ("s3", "s3a"):
            given["config_kwargs"] = {**_S3, **given.get("config_kwargs", {})}
        try:
            self._files, self._path = _fsspec().core.url_to_fs(self.url, **given)
        except (ImportError, ValueError, TypeError) as exc:
            raise CheckpointError(
                f"{url} cannot be reached: {exc}. A URL is for one of fsspec's file systems, whose package is installed (s3fs for s3://, gcsfs for gs://), and "
                f"storage_options are what it takes"
            ) from exc
        self._path = self._path.rstrip("/")
        self._has_directories = protocol not in _WITHOUT_DIRECTORIES
        self._renames = self._has_directories and _has_rename(self._files)

    def prepare(self) -> None:
        # Elsewhere it would at most make a bucket, which is not ours to make.
        if self._has_directories:
            self._call("makedirs", self._path, exist_ok=True)

    def names(self) -> list[str]:
        return self._listed("file")

    def directories(self) -> list[str]:
        return self._listed("directory")

    def _listed(self, kind: str) -> list[str]:
        try:
            found = self._call("ls", self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == kind]
        return [name for name in names if name]

    def modified(self, name: str) -> float:
        """When, in seconds since 1970. Raises what the file system raises if it cannot tell."""
        found: float = self._call("modified", self._at(name)).timestamp()
        return found

    def create(self, name: str, nbytes: int) -> NewFile:
        return _NewFile(self, name, nbytes)

    def open(self, name: str) -> StoredFile:
        return _StoredFile(self, self._at(name), self._call("info", self._at(name)).get("size"))

    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        check_size(f"{self.url}/{name}", self._call("info", self._at(name)).get("size") or 0, most)
        data: bytes = self._call("cat_file", self._at(name))
        return data

    def replace(self, name: str, data: bytes) -> None:
        if not self._renames:
            self._written(lambda: self._call("pipe_file", self._at(name), data))
            return
        new = name_aside(name)
        try:
            self._written(lambda: self._call("pipe_file", self._at(new), data))
            self._written(lambda: self._call("mv", self._at(new), self._at(name)))
            if self._is_there(
                new
            ):  # HDFS renames nothing in the place of a file that is there, and does not say so
                raise StorageFailed(
                    f"{self.url} cannot put a file in the place of another: save into a new directory"
                )
        except BaseException:
            with suppress(Exception):  # else the next save cleans up
                self.delete([new])
            raise

    def _is_there(self, name: str) -> bool:
        try:
            self._call("info", self._at(name))
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._call("rm_file", self._at(name))
            except FileNotFoundError:
                pass

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        yield  # nothing that all stores have would tell

    def at(self, name: str) -> Storage:
        return type(self)(f"{self.url}/{name}", self.options)

    def remove(self) -> None:
        try:
            self._call("rm", self._path, recursive=True)
        except FileNotFoundError:
            pass

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Of the file system, in bounded time. Raises FileNotFoundError and its like, and StorageFailed for all else."""
        with self.told():
            if getattr(self._files, "async_impl", False):
                coroutine = getattr(self._files, f"_{method}")
                return _fsspec().asyn.sync(
                    self._files.loop, coroutine, *args, timeout=_CALL_TIMEOUT_S, **kwargs
                )
            return getattr(self._files, method)(*args, **kwargs)

    def _written(self, write: Callable[[], Any]) -> Any:
        """Nothing is missing where something is written, but a bucket may be."""
        try:
            with self.told():
                return write()
        except FileNotFoundError as exc:
            raise StorageFailed(
                f"{self.url} cannot be written: {exc}. Is there such a bucket? It is not made here"
            ) from exc

    @contextmanager
    def told(self) -> Iterator[None]:
        """Every file system has exceptions of its own."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, CheckpointError):
            raise
        except PermissionError as exc:
            raise _failed(f"{self.url} denies access: {exc}. Give credentials that may do this, in storage_options (key=, secret= for s3://) or in the environment", exc) from exc  # fmt: skip
        except NotImplementedError as exc:
            raise _failed(f"{self.url} cannot be written by fsspec: it is for reading alone", exc) from exc
        except (TimeoutError, _fsspec().FSTimeoutError) as exc:
            raise _failed(f"{self.url} did not answer in time. Try again, or see whether it is there", exc) from exc  # fmt: skip
        except Exception as exc:
            what = str(exc).rstrip(".") or type(exc).__name__
            raise _failed(f"{self.url} failed: {what}. See whether it can be reached from here, and whether storage_options (endpoint_url= for s3://) are right", exc) from exc  # fmt: skip

    def __str__(self) -> str:
        return self.url


def _fsspec() -> Any:
    """The package, imported when the first URL is used: it takes long."""
    import fsspec.asyn  # type: ignore[import-untyped]

    return fsspec


def is_plain_url(url: str) -> bool:
    """Whether it is of a storage that is reached over a network, and of nothing else: fsspec also has URLs that are made of others, and of templates that are run."""
    return "::" not in url and url.partition("://")[0] in _WITHOUT_DIRECTORIES | _WITH_DIRECTORIES


def _has_rename(files: Any) -> bool:
    """Whether its `mv` is its own: fsspec's is a copy, during which the target is neither the one nor the other."""
    return not files.async_impl and type(files).mv is not _fsspec().AbstractFileSystem.mv


def _failed(text: str, exc: Exception) -> StorageFailed:
    found = StorageFailed(text)
    found.errno = getattr(exc, "errno", None)
    return found


class _NewFile(NewFile):
    """Sent in parts, so that only some of it is in memory; it is there when `finish` has put them together."""

    def __init__(self, storage: RemoteStorage, name: str, nbytes: int) -> None:
        self._storage, self._name = storage, name
        part = max(_PART_BYTES, -(-nbytes // _MOST_PARTS))
        self._file: io.IOBase | None = storage._written(
            lambda: storage._files.open(storage._at(name), "wb", block_size=part)
        )

    def write(self, buffers: Sequence[Buffer]) -> None:
        file = self._file
        assert file is not None
        for buffer in buffers:
            # A copy, since some file systems keep what they are given.
            self._storage._written(partial(file.write, bytes(buffer)))

    def finish(self) -> None:
        assert self._file is not None
        self._storage._written(self._file.close)
        self._file = None

    def abandon(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                getattr(file, "discard", file.close)()
        except Exception:
            pass  # what was sent of it is no object
        try:
            if file is not None and hasattr(file, "forced"):
                file.closed = True  # type: ignore[misc]  # or it would be sent after all when it is collected
            else:  # what is sent when it is closed has left what was there before as it was
                self._storage.delete([self._name])
        except Exception:
            pass  # the next save cleans up


class _StoredFile(StoredFile):
    """Reads ahead where reads follow one another, more and more, so that small tensors do not cost a request each."""

    def __init__(self, storage: RemoteStorage, path: str, nbytes: int | None) -> None:
        self._storage, self._path, self._nbytes = storage, path, nbytes
        self._own = threading.local()

    def read_into(self, offset: int, buffer: Buffer) -> int:
        wanted = buffer.nbytes
        if self._nbytes is not None:
            wanted = max(0, min(wanted, self._nbytes - offset))
        begin, data, ahead = getattr(self._own, "last", (0, b"", 0))
        at = offset - begin
        if not 0 <= at <= at + wanted <= len(data):
            follows = data and 0 <= at <= len(data) + _NEAR_BYTES
            ahead = min(_AHEAD_BYTES, max(4 * ahead, _NEAR_BYTES)) if follows else 0
            begin, data, at = offset, self._fetched(offset, max(wanted, ahead)), 0
            # What has filled the buffer is not kept beside it, but for its end, by which the next read is known to follow.
            kept = 0 if len(data) > wanted else max(0, len(data) - 1)
            self._own.last = begin + kept, data[kept:], ahead
        found = data[at : at + wanted]
        buffer[: len(found)] = found
        return len(found)

    def _fetched(self, offset: int, nbytes: int) -> bytes:
        end = offset + nbytes if self._nbytes is None else min(offset + nbytes, self._nbytes)
        if end <= offset:
            return b""
        data: bytes = self._storage._call("cat_file", self._path, start=offset, end=end)
        if len(data) > end - offset:
            raise StorageFailed(
                f"{self._storage}: the server sends all of {self._path} where {end - offset} bytes of it are asked for. It has no byte ranges: copy the "
                f"checkpoint to a disk, or serve it by something that has them"
            )
        return data

    def close(self) -> None:
        self._own = threading.local()
