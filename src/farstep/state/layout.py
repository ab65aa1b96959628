"""Which rank holds which boxes of which named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from farstep.state.box import Box

__all__ = ["Layout", "Spread"]

Ints = npt.NDArray[np.int64]


class Spread:
    """How one tensor is spread over ranks.

    The boxes are kept as columns, so that a million of them are a few arrays: `ranks[i]` holds the box `offsets[i]`, `sizes[i]`. A rank's
    boxes are in the order in which it gives its local tensors. The same box on several ranks is a replica.
    """

    __slots__ = ("dtype", "offsets", "ranks", "shape", "sizes")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, ranks: Ints, offsets: Ints, sizes: Ints
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.ranks = ranks
        self.offsets = offsets
        self.sizes = sizes

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[int, Sequence[Box]]) -> Self:
        """From rank -> boxes."""
        rows = [(rank, box) for rank, each in boxes.items() for box in each]
        columns = (len(rows), len(shape))
        return cls(
            shape,
            dtype,
            np.array([rank for rank, _ in rows], dtype=np.int64),
            np.array([box.offsets for _, box in rows], dtype=np.int64).reshape(columns),
            np.array([box.sizes for _, box in rows], dtype=np.int64).reshape(columns),
        )

    def boxes(self, rank: int) -> list[Box]:
        """What a rank holds of it."""
        (at,) = np.nonzero(self.ranks == rank)
        return [
            Box(tuple(o), tuple(n))
            for o, n in zip(self.offsets[at].tolist(), self.sizes[at].tolist(), strict=True)
        ]


class Layout(Mapping[str, Spread]):
    """Tensor name -> how it is spread."""

    def __init__(self, spreads: Mapping[str, Spread]) -> None:
        self._spreads = dict(spreads)

    def __getitem__(self, name: str) -> Spread:
        return self._spreads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spreads)

    def __len__(self) -> int:
        return len(self._spreads)
