"""Which rank holds which boxes of which named tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from farstep.errors import LayoutError
from farstep.state.arrays import Ints, grouped, total
from farstep.state.box import Box
from farstep.state.columns import Columns
from farstep.state.replicas import Replicas, check_overlaps

__all__ = ["Layout", "Spread"]

_MOST = (1 << 63) - 1
_RANKS = 1 << 31
_FEW = 16  # below this numpy takes longer than Python


class Spread:
    """How one tensor is spread over ranks.

    The boxes are kept as columns, so that a million of them are a few arrays: `ranks[i]` holds the box `offsets[i]`, `sizes[i]`. A rank's
    boxes are in the order in which it gives its local tensors. The same box on several ranks is a replica. Not to be changed once made.
    """

    __slots__ = ("dtype", "offsets", "ranks", "shape", "sizes")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, ranks: Ints, offsets: Ints, sizes: Ints
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.ranks = _int64(ranks)
        self.offsets = _int64(offsets)
        self.sizes = _int64(sizes)
        self._check()

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, boxes: Mapping[int, Sequence[Box]]) -> Self:
        """From rank -> boxes."""
        rows = [(rank, box) for rank, each in boxes.items() for box in each]
        for rank, box in rows:
            if len(box.sizes) != len(shape):
                raise LayoutError(
                    f"the box {box} of rank {rank} has {len(box.sizes)} dimensions, and the tensor {len(shape)}"
                )
        columns = (len(rows), len(shape))
        return cls(
            shape,
            dtype,
            _int64([rank for rank, _ in rows]),
            _int64([box.offsets for _, box in rows]).reshape(columns),
            _int64([box.sizes for _, box in rows]).reshape(columns),
        )

    @staticmethod
    def whole(shape: Sequence[int], dtype: torch.dtype, ranks: Iterable[int]) -> Spread:
        """All of it on each of these ranks."""
        return _whole(tuple(shape), dtype, tuple(ranks))

    def boxes(self, rank: int) -> list[Box]:
        """What a rank holds of it."""
        at = self.rows(rank)
        return [
            Box(tuple(o), tuple(n))
            for o, n in zip(self.offsets[at].tolist(), self.sizes[at].tolist(), strict=True)
        ]

    def rows(self, rank: int) -> Ints | list[int]:
        """Which of the boxes are a rank's, in their order."""
        if len(self.ranks) > _FEW:
            return np.flatnonzero(self.ranks == rank)
        return [row for row, holder in enumerate(self.ranks.tolist()) if holder == rank]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, once."""
        return self.numel * self.dtype.itemsize

    def bytes_on(self, rank: int) -> int:
        return total(self.sizes[self.ranks == rank].prod(axis=1)) * self.dtype.itemsize

    def _check(self) -> None:
        dims, rows = len(self.shape), len(self.ranks)
        if self.shape and min(self.shape) < 0:
            raise LayoutError(f"no tensor has the shape {self.shape}")
        if self.nbytes > _MOST or (self.shape and max(self.shape) > _MOST):
            raise LayoutError(
                f"a tensor of shape {self.shape} and {self.dtype} has more than 2**63 - 1 bytes"
            )
        if self.offsets.shape != (rows, dims) or self.sizes.shape != (rows, dims):
            raise LayoutError(
                f"{rows} boxes of a tensor of shape {self.shape} have offsets and sizes of shape {(rows, dims)}, "
                f"not {self.offsets.shape} and {self.sizes.shape}"
            )
        if not rows:
            return
        bad = (self.offsets < 0) | (self.sizes < 0) | (self.offsets > self.shape - self.sizes)
        if bad.any():
            row = int(np.flatnonzero(bad.any(axis=1))[0])
            offsets, sizes = self.offsets[row].tolist(), self.sizes[row].tolist()
            box = ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True))
            raise LayoutError(
                f"the box [{box}] of rank {self.ranks[row]} is not within a tensor of shape {self.shape}"
            )
        for rank in (int(self.ranks.min()), int(self.ranks.max())):
            if not 0 <= rank < _RANKS:
                raise LayoutError(f"no rank is {rank}: ranks are from 0 to {_RANKS - 1}")

    def __eq__(self, other: object) -> bool:
        """The same boxes on the same ranks, in the same order on each."""
        if not isinstance(other, Spread):
            return NotImplemented
        if self.shape != other.shape or self.dtype != other.dtype or len(self.ranks) != len(other.ranks):
            return False
        ours, theirs = (np.argsort(s.ranks, kind="stable") for s in (self, other))
        return (
            np.array_equal(self.ranks[ours], other.ranks[theirs])
            and np.array_equal(self.offsets[ours], other.offsets[theirs])
            and np.array_equal(self.sizes[ours], other.sizes[theirs])
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, len(self.ranks)))

    def __getstate__(self) -> dict[str, Any]:
        # Tensors and not arrays, so that torch.load(weights_only=True) reads it once the class is allowed.
        columns = {
            name: torch.from_numpy(getattr(self, name).copy()) for name in ("ranks", "offsets", "sizes")
        }
        return {"shape": self.shape, "dtype": self.dtype, **columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["shape"], state["dtype"], *(state[name].numpy() for name in ("ranks", "offsets", "sizes"))
        )

    def __repr__(self) -> str:
        what = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        holders = np.unique(self.ranks)
        if len(self.ranks) > 4:
            return f"<{what}: {len(self.ranks)} boxes on {len(holders)} ranks>"
        each = "; ".join(f"rank {r} {' '.join(map(str, self.boxes(r)))}" for r in holders.tolist())
        return f"<{what}: {each or 'on no rank'}>"


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...], dtype: torch.dtype, ranks: tuple[int, ...]) -> Spread:
    """Models have many tensors of a few shapes."""
    box = Box.whole(shape)
    return Spread.of(shape, dtype, {rank: [box] for rank in ranks})


class Layout(Mapping[str, Spread]):
    """Tensor name -> how it is spread. Not to be changed once made."""

    def __init__(self, spreads: Mapping[str, Spread]) -> None:
        self._spreads = dict(spreads)

    def __getitem__(self, name: str) -> Spread:
        return self._spreads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spreads)

    def __len__(self) -> int:
        return len(self._spreads)

    def only(self, names: Iterable[str]) -> Layout:
        """These tensors, in this order."""
        return Layout({name: self[name] for name in names})

    def renamed(self, new_name: Callable[[str], str]) -> Layout:
        """The same tensors under other names, which are to differ."""
        spreads: dict[str, Spread] = {}
        for name, spread in self.items():
            new = new_name(name)
            if new in spreads:
                raise LayoutError(f"two tensors would be called {new!r}, one of them {name!r}")
            spreads[new] = spread
        return Layout(spreads)

    def merged(self, other: Mapping[str, Spread]) -> Layout:
        """The tensors of both, which have no name in common."""
        both = self.keys() & other.keys()
        if both:
            raise LayoutError(f"both layouts have a tensor {min(both)!r}")
        return Layout({**self, **other})

    def boxes(self, rank: int) -> dict[str, list[Box]]:
        """What a rank holds, by name; an empty list where it holds nothing."""
        return {name: spread.boxes(rank) for name, spread in self.items()}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self._spreads)

    @property
    def nbytes(self) -> int:
        """Of all tensors, each once."""
        return sum(spread.nbytes for spread in self.values())

    def bytes_per_rank(self) -> dict[int, int]:
        """Of each rank that holds any boxes."""
        if not len(self.columns):
            return {}
        itemsize = np.array([spread.dtype.itemsize for spread in self.values()], dtype=np.int64)
        columns = self.columns
        return grouped(columns.rank, columns.numel() * itemsize[columns.tensor])

    def check(self) -> None:
        """Raise LayoutError if two boxes of one tensor overlap and are not the same."""
        self._checked  # noqa: B018  # once

    @cached_property
    def _checked(self) -> bool:
        check_overlaps(self.names, self.columns, self.replicas)
        return True

    @cached_property
    def replicas(self) -> Replicas:
        """All boxes, each once, made on first use."""
        return Replicas(self.names, self.columns)

    @cached_property
    def columns(self) -> Columns:
        """All boxes at once, made on first use."""
        return Columns(list(self._spreads.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._spreads == other._spreads

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Spread]:
        return self._spreads

    def __setstate__(self, state: dict[str, Spread]) -> None:
        self._spreads = state

    def __repr__(self) -> str:
        return f"<Layout: {len(self)} tensors, {self.nbytes:,} bytes>"

    def __str__(self) -> str:
        lines = [f"{name}: {spread!r}" for name, spread in list(self.items())[:20]]
        more = [f"and {len(self) - 20} more"] if len(self) > 20 else []
        return "\n".join([repr(self), *lines, *more])


def _int64(column: npt.ArrayLike) -> Ints:
    """As a column. Raises LayoutError for what is no whole number, or too large to be one."""
    if isinstance(column, np.ndarray) and column.dtype == np.int64:
        return column
    found = np.asarray(column)
    if not found.size:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu" or int(found.max()) > _MOST:
        raise LayoutError(
            f"ranks, offsets and sizes of boxes are whole numbers below 2**63, not {found.dtype} such as {found.flat[0]} and {found.max()}"
        )
    return found.astype(np.int64)
