"""Whether two tensors of a checkpoint have the same elements, found out before anything is filled and without either in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.sources import Source, reading
from farstep.checkpoint.storage import Storage
from farstep.state import Box

__all__ = ["have_same"]

_AT_ONCE = 4 << 20


def have_same(
    storage: Storage,
    manifest: Manifest,
    one: str,
    other: str,
    boxes: Sequence[Box],
    dtype: torch.dtype,
    verify: bool,
) -> bool:
    """In these boxes, and as they are in the dtype."""
    with reading(storage), ExitStack() as stack:
        source = Source(storage, manifest, verify, stack)
        for box in boxes:
            for part in _parts(box):
                if not torch.equal(*(_bytes(source.read(name, part).to(dtype)) for name in (one, other))):
                    return False
    return True


def _parts(box: Box) -> Iterator[Box]:
    """Rows of it, in order."""
    if not box.sizes:
        yield box
        return
    rows = box.sizes[0]
    step = max(1, _AT_ONCE // max(1, box.numel // max(1, rows)))
    for begin in range(0, rows, step):
        yield Box((box.offsets[0] + begin, *box.offsets[1:]), (min(step, rows - begin), *box.sizes[1:]))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
