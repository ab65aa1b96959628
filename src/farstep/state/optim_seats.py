"""A parameter as an optimizer has it on this rank: under which keys its state is kept, and where in the whole that lies.

An optimizer steps tensors, and keeps its state by them. Mostly a parameter is one such tensor. But several parameters lie in one flat
parameter of FSDP1, and one ShardedTensor is several local shards. A seat hides that: from it, and from what is kept under its keys, one gets
the parameter's state as parts of a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.state.layout import Spread
from farstep.state.shards import Shards

__all__ = ["Seat", "retyped"]

Views = Callable[[Sequence[Tensor]], list[Tensor]]


def retyped(spread: Spread, dtype: torch.dtype) -> Spread:
    """The same boxes of a tensor of another dtype."""
    if spread.dtype == dtype:
        return spread
    return Spread(spread.shape, dtype, spread.ranks, spread.offsets, spread.sizes)


class Seat:
    """`name` is the parameter's own, `keys` are the tensors by which the optimizer keeps its state here, none where it steps nothing of it.

    `spread` is that of the parameter, and of every state that is shaped like it. Of such a state the optimizer has one tensor for each
    key, of the shape `local_shapes[i]`; `views` are the boxes of `spread` in them. `form` makes the tensor that a user gets.
    """

    def __init__(
        self,
        name: str,
        keys: Sequence[Tensor],
        spread: Spread,
        local_shapes: Sequence[Sequence[int]],
        views: Views,
        *,
        requires_grad: bool,
        is_flat: bool = False,
        is_dtensor: bool = False,
        is_line: bool = False,
        gets_gradients: bool = True,
        form: Callable[[Sequence[Tensor], torch.dtype], Any] | None = None,
        fresh: Callable[[int, torch.dtype, torch.device], Tensor] | None = None,
    ) -> None:
        self.name = name
        self.keys = list(keys)
        self.spread = spread
        self.local_shapes = [tuple(shape) for shape in local_shapes]
        self.views = views
        self.requires_grad = requires_grad
        self.is_flat = is_flat
        """Whether others lie in the same tensor."""
        self.is_line = is_line
        """Whether the optimizer has some of its elements end to end, and not in the parameter's shape."""
        self.gets_gradients = gets_gradients
        """False where a rank holds none of the parameter and its wrapper gives the empty tensor
        no gradient: the optimizer never makes state there.
        """
        self._is_dtensor = is_dtensor
        """Whether the optimizer's state is DTensors."""
        self._kind = type(keys[0].data) if is_dtensor and keys else Tensor
        self._form, self._fresh = form, fresh

    def left_out(self) -> Seat:
        """The same where the optimizer steps nothing of it."""
        self.keys, self.local_shapes, self._form = [], [], None
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spread.shape

    @property
    def device(self) -> torch.device | None:
        return self.keys[0].device if self.keys else None

    def is_held_by(self, rank: int) -> bool:
        """Whether this rank's state of the parameter counts. All that lie in a flat parameter
        share one state, which every rank steps.
        """
        return self.is_flat or rank in self.spread.ranks

    def is_like(self, number: int, value: Tensor) -> bool:
        """Whether a state under the key of this number is shaped like the parameter."""
        if self._is_dtensor:
            return type(value) is self._kind and tuple(value.shape) == self.shape
        return value.dim() > 0 and tuple(value.shape) == self.local_shapes[number]

    def is_cut(self, number: int) -> bool:
        """Whether what is under this key has another shape than the parameter, so that what is shaped like it may be so by chance."""
        return not self._is_dtensor and self.local_shapes[number] != self.shape

    def shards(self, values: Sequence[Tensor], dtype: torch.dtype) -> Shards:
        """A state that is shaped like the parameter, from one tensor for each key."""
        return Shards(retyped(self.spread, dtype), self.views(values))

    def form(self, values: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """The same as users get it: a DTensor for a DTensor, else Shards."""
        return self.shards(values, dtype) if self._form is None else self._form(values, dtype)

    def fresh(self, number: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Memory for a state under the key of this number. What no parameter lies in is zero; the rest is not filled."""
        device = device or self.keys[number].device
        if self._fresh is not None:
            return self._fresh(number, dtype, device)
        make = torch.zeros if self.is_flat else torch.empty
        return make(self.local_shapes[number], dtype=dtype, device=device)

    def __repr__(self) -> str:
        return f"Seat({self.name!r}, {self.spread!r}, {len(self.keys)} here)"
