"""State that is kept in another dtype than it was saved in arrives in rounds: what has come is cast into place before more comes.

So a rank never has more than a round of it in the dtype that it does not want.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from farstep.state.layout import Spread
from farstep.state.shards import Shards

__all__ = ["transfers"]

Tensors = dict[str, Shards]


def transfers(
    sources: Mapping[str, Shards],
    targets: Mapping[str, Shards],
    cast: Collection[str],
    round_bytes: int,
) -> Iterator[tuple[Tensors, Tensors]]:
    """Sources and targets to be exchanged, one after another; the same on all ranks.

    The targets that are to be `cast` have local tensors of another dtype than their spread says. They come after all others, each in pieces of at most `round_bytes`
    on any rank (or of one row).
    """
    direct = [name for name in targets if name not in cast]
    if direct or not cast:
        yield {name: sources[name] for name in direct}, {name: targets[name] for name in direct}
    for pieces in _rounds(targets, sorted(cast), round_bytes):
        here: Tensors = {}
        there: Tensors = {}
        arriving: list[tuple[Tensor, Tensor]] = []
        for piece in pieces:
            views = _within(piece, targets[piece.name])
            staged = [torch.empty(view.shape, dtype=piece.spread.dtype, device=view.device) for view in views]
            key = f"{piece.name}, piece {piece.number}"
            here[key], there[key] = sources[piece.name], Shards(piece.spread, staged)
            arriving += zip(views, staged, strict=True)
        yield here, there
        for view, tensor in arriving:
            view.copy_(tensor)


class _Piece(NamedTuple):
    """Some rows of each box of a tensor."""

    name: str
    number: int
    rows: int
    """Of each of its pieces."""
    spread: Spread


def _rounds(targets: Mapping[str, Shards], names: list[str], round_bytes: int) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    sizes: dict[int, int] = {}
    for name in names:
        for piece in _pieces(name, targets[name].spread, round_bytes):
            own = {int(r): piece.spread.bytes_on(int(r)) for r in np.unique(piece.spread.ranks)}
            if pieces and any(sizes.get(r, 0) + n > round_bytes for r, n in own.items()):
                yield pieces
                pieces, sizes = [], {}
            pieces.append(piece)
            for r, n in own.items():
                sizes[r] = sizes.get(r, 0) + n
    if pieces:
        yield pieces


def _pieces(name: str, spread: Spread, round_bytes: int) -> Iterator[_Piece]:
    per_row = int(spread.sizes[:, 1:].prod(axis=1).max(initial=1)) * spread.dtype.itemsize
    # A rank may have several boxes.
    boxes = int(np.bincount(spread.ranks).max(initial=1)) if len(spread.ranks) else 1
    rows = max(1, round_bytes // (per_row * boxes))
    for number in range(-(-int(spread.sizes[:, 0].max(initial=0)) // rows)):
        held = spread.sizes[:, 0] > number * rows
        offsets, sizes = spread.offsets[held].copy(), spread.sizes[held].copy()
        offsets[:, 0] += number * rows
        sizes[:, 0] = np.minimum(rows, sizes[:, 0] - number * rows)
        yield _Piece(
            name, number, rows, Spread(spread.shape, spread.dtype, spread.ranks[held], offsets, sizes)
        )


def _within(piece: _Piece, target: Shards) -> list[Tensor]:
    """Where a piece lies in the tensors that this rank has."""
    begin = piece.number * piece.rows
    return [tensor[begin : begin + piece.rows] for tensor in target.tensors if tensor.shape[0] > begin]
