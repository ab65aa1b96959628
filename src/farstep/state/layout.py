"""Which rank holds which boxes of which named tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import torch

from farstep.errors import LayoutError
from farstep.state.box import Box
from farstep.state.columns import Columns
from farstep.state.replicas import Replicas, check_overlaps
from farstep.state.sweep import Ints

__all__ = ["Layout", "Spread"]


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
        self.ranks = ranks
        self.offsets = offsets
        self.sizes = sizes
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
            np.array([rank for rank, _ in rows], dtype=np.int64),
            np.array([box.offsets for _, box in rows], dtype=np.int64).reshape(columns),
            np.array([box.sizes for _, box in rows], dtype=np.int64).reshape(columns),
        )

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: torch.dtype, ranks: Iterable[int]) -> Self:
        """All of it on each of these ranks. Tensors of one shape have one, as it is not to be changed."""
        found: Self = _whole(cls, tuple(shape), dtype, tuple(ranks))  # type: ignore[arg-type]
        return found

    def boxes(self, rank: int) -> list[Box]:
        """What a rank holds of it."""
        (at,) = np.nonzero(self.ranks == rank)
        return [
            Box(tuple(o), tuple(n))
            for o, n in zip(self.offsets[at].tolist(), self.sizes[at].tolist(), strict=True)
        ]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of the whole tensor, once."""
        return self.numel * self.dtype.itemsize

    def bytes_on(self, rank: int) -> int:
        return int(self.sizes[self.ranks == rank].prod(axis=1).sum()) * self.dtype.itemsize

    def _check(self) -> None:
        dims, rows = len(self.shape), len(self.ranks)
        if self.offsets.shape != (rows, dims) or self.sizes.shape != (rows, dims):
            raise LayoutError(
                f"{rows} boxes of a tensor of shape {self.shape} have offsets and sizes of shape {(rows, dims)}, "
                f"not {self.offsets.shape} and {self.sizes.shape}"
            )
        bad = (
            (self.offsets < 0)
            | (self.sizes < 0)
            | (self.offsets + self.sizes > np.array(self.shape, dtype=np.int64))
        )
        if bad.any():
            row = int(np.flatnonzero(bad.any(axis=1))[0])
            offsets, sizes = self.offsets[row].tolist(), self.sizes[row].tolist()
            box = ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True))
            raise LayoutError(
                f"the box [{box}] of rank {self.ranks[row]} is not within a tensor of shape {self.shape}"
            )
        if rows and int(self.ranks.min()) < 0:
            raise LayoutError(f"no rank is {int(self.ranks.min())}")

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


@lru_cache(maxsize=4096)
def _whole(kind: type[Any], shape: tuple[int, ...], dtype: torch.dtype, ranks: tuple[int, ...]) -> Any:
    return kind.of(shape, dtype, {rank: [Box.whole(shape)] for rank in ranks})


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
        sizes = np.zeros(int(columns.rank.max()) + 1, dtype=np.int64)
        np.add.at(sizes, columns.rank, columns.numel() * itemsize[columns.tensor])
        return {int(rank): int(sizes[rank]) for rank in np.unique(columns.rank)}

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
