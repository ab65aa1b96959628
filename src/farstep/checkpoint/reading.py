"""Takes the boxes of a checkpoint's tensors out of its files, straight into memory that waits for them, and compares their checksums.

What is read is whole blocks, since that is what checksums are of. Blocks that are wanted whole, where they lie in one piece on both sides, go to their place
directly; others are read aside and copied from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Event
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.memory import bytes_of, is_plain
from farstep.checkpoint.storage import Buffer, Storage, StoredFile
from farstep.checkpoint.writing import Progress, Tally
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state import Box, Layout, Spread, plan

__all__ = ["Files", "Read", "Reader", "planned", "read_into", "reads_for"]

_ASIDE_BYTES = 8 << 20
"""What a thread reads aside at a time."""
_THREAD_BYTES = 8 << 20
"""Of less than this a second thread is not worth its start."""

Wanted = dict[str, tuple[str, Sequence[Box], Sequence[Tensor]]]
"""Any label -> a tensor of the checkpoint, the boxes of it that are wanted, and memory for each."""


class Read(NamedTuple):
    """`region` of a stored box, as seen from the box's beginning, into a tensor of that shape. Another dtype is converted to."""

    row: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Of the stored box."""
    region: Box
    into: Tensor


def reads_for(manifest: Manifest, wanted: Mapping[str, tuple[str, Sequence[Box], Sequence[Tensor]]]) -> list[Read]:  # fmt: skip
    """What fills these tensors: any label -> the tensor's name in the checkpoint, the boxes of it that are wanted, and a tensor for each."""
    numbers = {name: number for number, name in enumerate(manifest.names)}
    reads: list[Read] = []
    spread_out: dict[str, tuple[str, Sequence[Box], Sequence[Tensor]]] = {}
    for label, (name, boxes, tensors) in wanted.items():
        rows = manifest.rows_of(numbers[name])
        if len(rows) == 1 and len(boxes) == 1:  # whole: there is nothing to plan
            dtype, shape = manifest.tensors[name].dtype, manifest.tensors[name].shape
            reads.append(Read(int(rows[0]), dtype, shape, boxes[0], tensors[0]))
        elif len(rows):
            spread_out[label] = name, boxes, tensors
    if spread_out:
        reads += planned(manifest, numbers, spread_out)
    return [each for each in reads if each.into.numel()]


def planned(
    manifest: Manifest,
    numbers: Mapping[str, int],
    wanted: Mapping[str, tuple[str, Sequence[Box], Sequence[Tensor]]],
) -> Iterator[Read]:
    """What is wanted alike of tensors that are stored alike is planned once."""
    spreads = {name: manifest.spread(numbers[name]) for name in {name for name, _, _ in wanted.values()}}
    alike: dict[tuple[int, tuple[Box, ...]], list[str]] = {}
    for label, (name, boxes, _) in wanted.items():
        alike.setdefault((id(spreads[name]), tuple(boxes)), []).append(label)
    source = Layout({labels[0]: spreads[wanted[labels[0]][0]] for labels in alike.values()})
    target = Layout(
        {
            labels[0]: Spread.of(source[labels[0]].shape, source[labels[0]].dtype, {0: boxes})
            for (_, boxes), labels in alike.items()
        }
    )
    found = plan(source, target, 0)
    order = np.argsort(found.tensor, kind="stable")
    ends = np.searchsorted(found.tensor[order], np.arange(len(found.names)), side="right").tolist()
    others = {labels[0]: labels for labels in alike.values()}
    for first, begin, end in zip(found.names, [0, *ends], ends, strict=False):
        rows = order[begin:end]
        spread, into = source[first], target[first]
        stored, there = found.source_box[rows], found.target_box[rows]
        offsets, sizes = found.offsets[rows, : len(spread.shape)], found.sizes[rows, : len(spread.shape)]
        columns = (
            spread.sizes[stored],
            offsets - spread.offsets[stored],
            sizes,
            there,
            offsets - into.offsets[there],
            (sizes == into.sizes[there]).all(axis=1),
        )
        pieces = [
            (
                tuple(held),
                Box(tuple(inside), tuple(shape)),
                number,
                None if is_all else tuple(slice(o, o + n) for o, n in zip(at, shape, strict=True)),
            )
            for held, inside, shape, number, at, is_all in zip(*(c.tolist() for c in columns), strict=True)
        ]
        for label in others[first]:
            name, _, tensors = wanted[label]
            own = manifest.rows_of(numbers[name])[stored].tolist()
            for row, (held, region, number, slices) in zip(own, pieces, strict=True):
                tensor = tensors[number] if slices is None else tensors[number][slices]
                yield Read(row, spread.dtype, held, region, tensor)


def read_into(
    storage: Storage,
    manifest: Manifest,
    reads: Sequence[Read],
    *,
    verify: bool = True,
    progress: Progress | None = None,
    threads: int = 1,
) -> None:
    """Do all the reads. Raises DamagedCheckpoint; then tensors may be partly written."""
    total = sum(each.into.nbytes for each in reads)
    tally = Tally(total, progress)
    verify = verify and len(manifest.checksums) > 0  # another format has none, see items.py
    count = max(1, min(threads, total // _THREAD_BYTES, len(reads)))
    with ExitStack() as stack:
        files = Files(storage, manifest, stack)
        # In the order of the files, so that a disk is read from its beginning to its end.
        at = manifest.boxes.at
        ordered = sorted(reads, key=lambda each: (int(manifest.boxes.file[each.row]), int(at[each.row])))
        stop = Event()
        if count == 1:
            Reader(files, manifest, verify, tally, stop).run(ordered)
            return
        with ThreadPoolExecutor(count, "farstep-load") as pool:
            tasks = [
                pool.submit(Reader(files, manifest, verify, tally, stop).run, batch)
                for batch in _batches(ordered, count)
            ]
            wait(tasks, return_when=FIRST_EXCEPTION)
            stop.set()
        for task in tasks:
            task.result()


def _batches(reads: Sequence[Read], count: int) -> list[list[Read]]:
    """Parts of about as many bytes, each in one go through the files."""
    ends = np.cumsum([each.into.nbytes for each in reads])
    cuts = np.searchsorted(ends, [int(ends[-1]) * k // count for k in range(1, count)])
    found, at = [], 0
    for cut in [*cuts.tolist(), len(reads)]:
        found.append(list(reads[at:cut]))
        at = cut
    return [batch for batch in found if batch]


class Files:
    """The files of a checkpoint, each opened when it is first needed."""

    def __init__(self, storage: Storage, manifest: Manifest, stack: ExitStack) -> None:
        self._storage, self._manifest = storage, manifest
        needed: dict[int, StoredFile] = {}
        self._open, self._stack = needed, stack

    def __getitem__(self, number: int) -> StoredFile:
        file = self._open.get(number)
        if file is None:
            name = self._manifest.files[number].name
            try:
                file = self._storage.open(name)
            except FileNotFoundError:
                if is_replaced(self._storage, self._manifest):
                    raise CheckpointError(
                        f"{self._storage}: a new checkpoint was saved there meanwhile, in the place of the one that was being read. Load again"
                    ) from None
                raise DamagedCheckpoint(
                    f"{self._storage}: the file {name}, which {_tensors_in(self._manifest, number)}, is missing"
                ) from None
            self._stack.callback(file.close)
            self._open[number] = file
        return file


def is_replaced(storage: Storage, manifest: Manifest) -> bool:
    """Whether another checkpoint of ours is there by now."""
    try:
        return Manifest.of(storage).save != manifest.save
    except Exception:
        return False  # what is there cannot be read either


class Reader:
    """One thread's."""

    def __init__(self, files: Files, manifest: Manifest, verify: bool, tally: Tally, stop: Event) -> None:
        self._files, self._manifest, self._verify = files, manifest, verify
        self._tally, self._stop = tally, stop
        self._request_blocks = max(1, files._storage.request_bytes // manifest.block_bytes)
        self._aside = memoryview(bytearray(0))
        self._last: tuple[int, int, bytes | bytearray] = (-1, -1, b"")
        """The block that was read last: others may begin in it."""

    def run(self, reads: Sequence[Read]) -> None:
        for each in reads:
            if self._stop.is_set():
                return
            self._read(each)
            self._tally.add(each.into.nbytes)

    def _read(self, read: Read) -> None:
        target = read.into
        span = _contiguous_span(read.sizes, read.region, read.dtype.itemsize)
        if span is not None and target.dtype == read.dtype and is_plain(target):
            self._straight(read.row, span, bytes_of(target))
        else:
            self._strided(read, read.sizes, read.region, 0, target)

    def _straight(self, row: int, begin: int, into: Buffer) -> None:
        """Bytes from `begin` on of a stored box."""
        block, end = self._manifest.block_bytes, begin + into.nbytes
        box_bytes = int(self._manifest.box_bytes[row])
        at = begin
        while at < end:
            number = at // block
            whole_end = end if end == box_bytes else end // block * block
            if at == number * block and at < whole_end:
                stop = min(whole_end, at + self._request_blocks * block)
                self._blocks(row, number, into[at - begin : stop - begin])
            else:
                stop = min(end, (number + 1) * block)
                data = self._one(row, number)
                into[at - begin : stop - begin] = data[at - number * block : stop - number * block]
            at = stop

    def _strided(self, read: Read, sizes: Sequence[int], region: Box, base: int, into: Tensor) -> None:
        """A region of the stored box whose first byte is `base`, some rows of it at a time."""
        itemsize = read.dtype.itemsize
        if not sizes:
            self._copy(read, base, itemsize, (), (), into)
            return
        pitch = itemsize
        for side in sizes[1:]:
            pitch *= side
        wanted = itemsize
        for side in region.sizes[1:]:
            wanted *= side
        rows = region.sizes[0]
        if len(sizes) > 1 and (pitch > _ASIDE_BYTES or wanted + 2 * self._manifest.block_bytes < pitch // 2):
            inner = Box(region.offsets[1:], region.sizes[1:])
            for row in range(rows):
                self._strided(read, sizes[1:], inner, base + (region.offsets[0] + row) * pitch, into[row])
            return
        step = max(1, _ASIDE_BYTES // pitch)
        inside = tuple(slice(o, o + n) for o, n in zip(region.offsets[1:], region.sizes[1:], strict=True))
        for row in range(0, rows, step):
            count = min(step, rows - row)
            begin = base + (region.offsets[0] + row) * pitch
            shape = (count, *sizes[1:])
            self._copy(read, begin, count * pitch, shape, (slice(None), *inside), into[row : row + count])

    def _copy(
        self,
        read: Read,
        begin: int,
        nbytes: int,
        shape: tuple[int, ...],
        region: tuple[slice, ...],
        into: Tensor,
    ) -> None:
        if len(self._aside) < nbytes:
            room = min(_ASIDE_BYTES, int(self._manifest.box_bytes[read.row]))
            self._aside = memoryview(bytearray(max(nbytes, room)))
        data = self._aside[:nbytes]
        self._straight(read.row, begin, data)
        whole = torch.frombuffer(data, dtype=torch.uint8).view(read.dtype).reshape(shape)
        into.copy_(whole[region])

    def _one(self, row: int, number: int) -> bytes | bytearray:
        """A block by itself."""
        if self._last[:2] != (row, number):
            block = self._manifest.block_bytes
            size = min(block, int(self._manifest.box_bytes[row]) - number * block)
            data = bytearray(size)
            self._blocks(row, number, memoryview(data))
            self._last = row, number, data
        return self._last[2]

    def _blocks(self, row: int, first: int, into: Buffer) -> None:
        """Whole blocks from the first on."""
        manifest, block = self._manifest, self._manifest.block_bytes
        number = int(manifest.boxes.file[row])
        at = int(manifest.boxes.at[row]) + first * block
        got = self._files[number].read_into(at, into)
        if got != into.nbytes:
            length = at + got if got else _length(self._files[number], at)
            raise self._damaged(
                row, f"is {length:,} bytes long, of {manifest.files[number].nbytes:,} that were written"
            )
        if not self._verify:
            return
        checksum = int(manifest.first_checksum[row]) + first
        for start in range(0, into.nbytes, block):
            part = into[start : start + block]
            if xxhash.xxh3_64_intdigest(part) != int(manifest.checksums[checksum]):
                begin, end = at + start, at + start + part.nbytes
                raise self._damaged(row, f"has been changed within its bytes {begin:,} to {end:,}")
            checksum += 1

    def _damaged(self, row: int, what: str) -> DamagedCheckpoint:
        manifest = self._manifest
        name = manifest.names[int(manifest.boxes.tensor[row])]
        file = manifest.files[int(manifest.boxes.file[row])].name
        return DamagedCheckpoint(
            f"{self._files._storage}: the file {file}, which has {name!r}, {what}. What has been read of it is not what was saved: load another checkpoint"
        )


def _length(file: StoredFile, most: int) -> int:
    """Of a file that is at most so long."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if file.read_into(middle, memoryview(bytearray(1))):
            low = middle + 1
        else:
            high = middle
    return low


def _contiguous_span(sizes: Sequence[int], region: Box, itemsize: int) -> int | None:
    """Where the region begins in the box, in bytes, if it lies there in one piece: whole in its last dimensions, one in its first."""
    begin, stride, is_cut = 0, itemsize, False
    for d in reversed(range(len(sizes))):
        if is_cut and region.sizes[d] != 1:
            return None
        is_cut = is_cut or region.sizes[d] != sizes[d]
        begin += region.offsets[d] * stride
        stride *= sizes[d]
    return begin


def _tensors_in(manifest: Manifest, number: int) -> str:
    rows = np.flatnonzero(manifest.boxes.file == number)
    names = dict.fromkeys(manifest.names[int(t)] for t in manifest.boxes.tensor[rows[:1000]])
    return f"has {next(iter(names), 'nothing')!r}" + (
        f" and {len(names) - 1} others" if len(names) > 1 else ""
    )
