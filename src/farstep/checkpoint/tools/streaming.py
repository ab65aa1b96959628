"""Any boxes of a checkpoint's tensors, in any order, a bounded part of them in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.reading import Wanted, read_into, reads_for
from farstep.checkpoint.storage import Storage
from farstep.state import Box
from farstep.state.messages import pieces

__all__ = ["BATCH_BYTES", "Piece", "batches", "fetched", "one_ahead"]

BATCH_BYTES = 32 << 20
_MOST_PIECES = 10_000
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Piece(NamedTuple):
    """A box of a tensor. `is_last`: no more of what was asked for as one box comes after it."""

    name: str
    box: Box
    is_last: bool


def batches(wanted: Iterable[tuple[str, Box, int]]) -> Iterator[list[Piece]]:
    """Boxes, each with the name of its tensor and the bytes of an element, in that order, so many at a time as are in memory together.

    A box that is too large for that comes in pieces: its rows in their order, or parts of a row.
    """
    batch: list[Piece] = []
    nbytes = 0
    for name, box, itemsize in wanted:
        before: Box | None = None
        for each in pieces(box, itemsize, BATCH_BYTES):
            if before is not None:
                batch.append(Piece(name, before, False))
            if len(batch) >= _MOST_PIECES or (batch and nbytes + each.numel * itemsize > BATCH_BYTES):
                yield batch
                batch, nbytes = [], 0
            before = each
            nbytes += each.numel * itemsize
        assert before is not None
        batch.append(Piece(name, before, True))
    if batch:
        yield batch


def fetched(storage: Storage, manifest: Manifest, batch: Sequence[tuple[str, Box]]) -> list[Tensor]:
    """The boxes, verified. Raises DamagedCheckpoint."""
    tensors = [torch.empty(box.sizes, dtype=manifest.tensors[name].dtype) for name, box in batch]
    by_name: dict[str, tuple[list[Box], list[Tensor]]] = {}
    for (name, box), tensor in zip(batch, tensors, strict=True):
        boxes, into = by_name.setdefault(name, ([], []))
        boxes.append(box)
        into.append(tensor)
    wanted: Wanted = {name: (name, boxes, into) for name, (boxes, into) in by_name.items()}
    read_into(storage, manifest, reads_for(manifest, wanted), threads=storage.threads)
    return tensors


def one_ahead(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[tuple[_Item, _Result]]:  # fmt: skip
    """Each item with what the function makes of it, which is done in another thread while the one before is used."""
    with ThreadPoolExecutor(1, "farstep-ahead") as pool:
        waiting = None
        for item in items:
            task = item, pool.submit(function, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = task
        if waiting is not None:
            yield waiting[0], waiting[1].result()
