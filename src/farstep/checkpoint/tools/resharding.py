"""A checkpoint written anew as if another number of ranks had saved it, a bounded part of it in memory at a time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from farstep.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    MOST_RANKS,
    WORKERS,
    Boxes,
    File,
    Manifest,
    data_file,
    is_ours,
)
from farstep.checkpoint.memory import bytes_of
from farstep.checkpoint.saving import is_in_place
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tools.contents import contents_of, opened_own, storage_at
from farstep.checkpoint.tools.streaming import Piece, batches, fetched, one_ahead
from farstep.checkpoint.writing import Progress, Tally, Write, header
from farstep.errors import CheckpointError
from farstep.state import Box
from farstep.state.sweep import Ints

__all__ = ["reshard"]


def reshard(
    path: str | os.PathLike[str] | Storage,
    target: str | os.PathLike[str] | Storage,
    ranks: int,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write the checkpoint at `path` to `target` as if so many ranks had saved it, each into one file. This process does it by itself.

    A tensor is cut along its first dimension into as many parts, all but the last of the same size, as torch.chunk, DTensor and FSDP do it. What
    has no dimension goes where there is least, and what one rank had for itself, to the rank of that number, counted round.

    Everything that is read is verified. The target is there when all is written, or not at all. A checkpoint that is there already is replaced, if
    that is allowed, when the new one is whole; it may be the one that is read.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise CheckpointError(
            f"a checkpoint is saved by at least one rank and at most {MOST_RANKS:,}, not {ranks:,}"
        )
    source, manifest = opened_own(path, storage_options)
    into = storage_at(target, storage_options)
    if not overwrite and MANIFEST in into.names():
        raise CheckpointError(
            f"there is a checkpoint in {into} already: give another directory, or let it be replaced with overwrite=True"
        )
    parts = _shared_out(manifest, ranks)
    into.prepare()
    with into.sole_writer():
        writer = _Writer(source, manifest, into, Tally(manifest.nbytes, progress))
        made = writer.write(parts, ranks)
        _forget_all_but(made, into)


def _forget_all_but(made: Manifest, into: Storage) -> None:
    """Files of saves before, and of such as did not finish."""
    kept = {file.name for file in made.files}
    try:
        into.delete([name for name in into.names() if is_ours(name) and name not in kept])
    except Exception:
        pass  # nothing names them, and the next save tries again


def _shared_out(manifest: Manifest, ranks: int) -> list[list[Write]]:
    """The boxes of each rank, in the order of its file."""
    owners = contents_of(manifest).owners
    found: list[list[Write]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, dtype=np.int64)
    scalars = []
    for name, info in manifest.tensors.items():
        if name in owners:
            boxes = [(owners[name] % ranks, Box.whole(info.shape))]
        elif not info.shape or not info.nbytes:
            scalars.append(name)
            continue
        else:
            boxes = list(_cut(info.shape, ranks))
        for rank, box in boxes:
            found[rank].append(_write(name, box, manifest))
            load[rank] += box.numel * info.dtype.itemsize
    for name in scalars:
        rank = int(np.argmin(load))
        found[rank].append(_write(name, Box.whole(manifest.tensors[name].shape), manifest))
        load[rank] += manifest.tensors[name].nbytes
    for each in found:  # so that all elements lie at multiples of their size
        each.sort(key=lambda write: (-write.tensor.itemsize, -write.tensor.nbytes))
    return found


def _cut(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, Box]]:
    step = -(-shape[0] // ranks)
    rest = (0,) * (len(shape) - 1)
    for rank, first in enumerate(range(0, shape[0], step)):
        yield rank, Box((first, *rest), (min(step, shape[0] - first), *shape[1:]))


def _write(name: str, box: Box, manifest: Manifest) -> Write:
    """Of memory that is not there yet."""
    info = manifest.tensors[name]
    tensor = torch.empty(box.sizes, dtype=info.dtype, device="meta")
    return Write(name, box, tensor, box.sizes == info.shape)


class _Writer:
    def __init__(self, source: Storage, manifest: Manifest, into: Storage, tally: Tally) -> None:
        self._source, self._manifest, self._into, self._tally = source, manifest, into, tally
        self._save = secrets.token_hex(8)

    def write(self, parts: Sequence[Sequence[Write]], ranks: int) -> Manifest:
        """All files, and the manifest, which makes them a checkpoint. If anything fails, none of them is left."""
        files: list[File] = []
        ats, checksums = [], []
        try:
            for rank, writes in enumerate(parts):
                if writes:
                    name = data_file(self._save, rank)
                    nbytes, at, sums = self._file(name, writes)
                    files.append(File(name, nbytes, rank))
                    ats.append(at)
                    checksums.append(sums)
            made = self._described([each for each in parts if each], files, ats, checksums, ranks)
            self._into.replace(MANIFEST, made.encode())
        except BaseException:
            if not is_in_place(self._into, self._save):
                self._into.delete(file.name for file in files)
            raise
        return made

    def _file(self, name: str, writes: Sequence[Write]) -> tuple[int, Ints, list[int]]:
        """Returns its size, where each box is, and all checksums."""
        sizes = np.array([each.tensor.nbytes for each in writes], dtype=np.int64)
        ends = np.cumsum(sizes)
        begin = header(self._save, writes, ends)
        nbytes = len(begin) + int(ends[-1])
        file, blocks = self._into.create(name, nbytes), _Blocks()
        try:
            file.write([memoryview(begin)])
            wanted = ((each.name, each.box, each.tensor.itemsize) for each in writes)
            for batch, tensors in one_ahead(self._fetched, batches(wanted)):
                data = [bytes_of(tensor) for tensor in tensors]
                for piece, each in zip(batch, data, strict=True):
                    blocks.add(each, piece.is_last)
                file.write(data)
                self._tally.add(sum(each.nbytes for each in data))
            file.finish()
        except BaseException:
            file.abandon()
            raise
        return nbytes, len(begin) + ends - sizes, blocks.checksums

    def _fetched(self, batch: Sequence[Piece]) -> list[torch.Tensor]:
        return fetched(self._source, self._manifest, [(name, box) for name, box, _ in batch])

    def _described(
        self,
        parts: Sequence[Sequence[Write]],
        files: list[File],
        ats: Sequence[Ints],
        checksums: Sequence[list[int]],
        ranks: int,
    ) -> Manifest:
        old = self._manifest
        writes = [each for part in parts for each in part]
        numbers = {name: number for number, name in enumerate(old.names)}
        boxes = Boxes(
            np.array([numbers[each.name] for each in writes], dtype=np.int64),
            np.repeat(np.arange(len(parts), dtype=np.int64), [len(part) for part in parts]),
            np.concatenate([np.zeros(0, dtype=np.int64), *ats]),
            np.array([o for each in writes for o in each.box.offsets], dtype=np.int64),
            np.array([n for each in writes for n in each.box.sizes], dtype=np.int64),
            np.array([len(each.box.sizes) for each in writes], dtype=np.int64),
        )
        sums = np.array([each for part in checksums for each in part], dtype=np.uint64)
        info = {key: value for key, value in old.info.items() if key != WORKERS}
        return Manifest(self._save, ranks, files, old.tree, old.tensors, boxes, sums, info=info)


class _Blocks:
    """The checksums of boxes that come in pieces."""

    def __init__(self) -> None:
        self.checksums: list[int] = []
        self._digest, self._filled = xxhash.xxh3_64(), 0

    def add(self, data: memoryview, is_last: bool) -> None:
        """The next bytes of a box."""
        at = 0
        while at < data.nbytes:
            part = data[at : at + BLOCK_BYTES - self._filled]
            self._digest.update(part)
            self._filled += part.nbytes
            at += part.nbytes
            if self._filled == BLOCK_BYTES:
                self._finish()
        if is_last and self._filled:
            self._finish()

    def _finish(self) -> None:
        self.checksums.append(self._digest.intdigest())
        self._digest.reset()
        self._filled = 0
