"""Anything that fsspec reaches: S3, GCS, HTTP, memory.

An object store has no rename; but an object is there when all of it has been sent, or not at all, which is what a checkpoint needs of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]

from farstep.checkpoint.storage import Buffer, NewFile, Storage, StoredFile

__all__ = ["RemoteStorage"]


class RemoteStorage(Storage):
    request_bytes = 8 << 20
    threads = 4

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url, self.options = url.rstrip("/"), options
        self._files, self._path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        self._path = self._path.rstrip("/")

    def prepare(self) -> None:
        try:
            self._files.makedirs(self._path, exist_ok=True)
        except (NotImplementedError, PermissionError):
            pass  # where directories are but parts of names, there is nothing to make

    def names(self) -> list[str]:
        return self._listed("file")

    def directories(self) -> list[str]:
        return self._listed("directory")

    def _listed(self, kind: str) -> list[str]:
        try:
            found = self._files.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == kind]
        return [name for name in names if name]

    def create(self, name: str, nbytes: int) -> NewFile:
        return _NewFile(self, name)

    def open(self, name: str) -> StoredFile:
        return _StoredFile(self._files, self._at(name), self._files.info(self._at(name))["size"])

    def read(self, name: str) -> bytes:
        data: bytes = self._files.cat_file(self._at(name))
        return data

    def replace(self, name: str, data: bytes) -> None:
        self._files.pipe_file(self._at(name), data)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._files.rm_file(self._at(name))
            except FileNotFoundError:
                pass

    @contextmanager
    def sole_writer(self) -> Iterator[None]:
        yield  # nothing that all stores have would tell

    def at(self, name: str) -> Storage:
        return type(self)(f"{self.url}/{name}", self.options)

    def remove(self) -> None:
        try:
            self._files.rm(self._path, recursive=True)
        except FileNotFoundError:
            pass

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def __str__(self) -> str:
        return self.url


class _NewFile(NewFile):
    def __init__(self, storage: RemoteStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._file: io.IOBase | None = storage._files.open(storage._at(name), "wb")

    def write(self, buffers: Sequence[Buffer]) -> None:
        assert self._file is not None
        for buffer in buffers:
            self._file.write(bytes(buffer))  # some file systems keep what they are given

    def finish(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    def abandon(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                getattr(file, "discard", file.close)()
            self._storage.delete([self._name])
        except Exception:
            pass  # the next save cleans up


class _StoredFile(StoredFile):
    def __init__(self, files: Any, path: str, nbytes: int) -> None:
        self._files, self._path, self._nbytes = files, path, nbytes

    def read_into(self, offset: int, buffer: Buffer) -> int:
        end = min(offset + buffer.nbytes, self._nbytes)
        if end <= offset:
            return 0
        data = self._files.cat_file(self._path, start=offset, end=end)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
