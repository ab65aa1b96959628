"""One named tensor, as one rank holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from farstep.errors import LayoutError
from farstep.state.box import Box
from farstep.state.layout import Spread
from farstep.state.memory import repeats

__all__ = ["Shards", "check_tensors"]

_AT_ONCE = 4096
"""So many sizes are made Python's at a time, which need more memory then."""


class Shards:
    """How a tensor is spread over all ranks, and the tensors that this rank has of it.

    `tensors[i]` is the i-th of `spread.boxes(rank)`. They are usually views of somebody's memory, so that what is written into them
    is written there.
    """

    __slots__ = ("spread", "tensors")

    def __init__(self, spread: Spread, tensors: Sequence[Tensor]) -> None:
        self.spread = spread
        self.tensors = list(tensors)

    @classmethod
    def empty(cls, spread: Spread, rank: int, device: torch.device | str | None = None) -> Self:
        """Fresh memory, not filled, for what a rank holds; none where it holds nothing."""
        return cls(
            spread, [torch.empty(box.sizes, dtype=spread.dtype, device=device) for box in spread.boxes(rank)]
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.spread.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.spread.dtype

    def check(self, name: str, rank: int) -> None:
        """Raise LayoutError unless the tensors are those that the spread gives this rank."""
        check_tensors(name, self.spread, rank, self.tensors)

    def __getstate__(self) -> dict[str, Any]:
        # A view is pickled with all the memory it looks at; what is to be kept is the part alone.
        own = [t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for t in self.tensors]
        return {"spread": self.spread, "tensors": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.spread = state["spread"]
        self.tensors = list(state["tensors"])

    def __repr__(self) -> str:
        sizes = ", ".join(str(tuple(t.shape)) for t in self.tensors)
        return f"Shards({self.spread!r}, here: {sizes or 'nothing'})"


def check_tensors(
    name: str, spread: Spread, rank: int, tensors: Sequence[Tensor], written: bool = False
) -> None:
    """Raise LayoutError unless these tensors are those of the rank's boxes, and can be read; or, if they are to be, written."""
    rows = spread.rows(rank)
    if len(tensors) != len(rows):
        raise LayoutError(
            f"rank {rank} holds {len(rows)} boxes of {name!r}, and {len(tensors)} tensors were given for them"
        )
    for first in range(0, len(rows), _AT_ONCE):
        some = rows[first : first + _AT_ONCE]
        every = [spread.sizes[some[0]].tolist()] if len(some) == 1 else spread.sizes[some].tolist()
        for row, sizes, tensor in zip(some, every, tensors[first : first + _AT_ONCE], strict=True):
            wrong = _wrong(tensor, tuple(sizes), spread.dtype, written)
            if wrong is not None:
                box = Box(tuple(spread.offsets[row].tolist()), tuple(sizes))
                raise LayoutError(f"the tensor for {name!r} {box} on rank {rank} {wrong}")


def _wrong(tensor: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, written: bool) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, and no tensor"
    if tensor.shape != sizes:
        return f"has the shape {tuple(tensor.shape)}, not {sizes}"
    if tensor.dtype != dtype:
        return f"has the dtype {tensor.dtype}, not {dtype}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return f"is {kind}, so no part of it can be taken: make it dense (to_dense, dequantize) first"
    if tensor.is_meta:
        return "is on the meta device, so it has no elements: give a tensor that has memory"
    if written and repeats(tensor):
        return f"has elements that share memory (strides {tensor.stride()}), so it cannot be filled: give a tensor that was not expanded, or a clone"
    return None
