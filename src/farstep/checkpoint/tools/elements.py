"""Two pieces of a tensor, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.checkpoint.memory import bytes_of

__all__ = ["Sums", "sums_of"]

_AT_A_TIME = 1 << 15
"""Elements: what is calculated with them stays in the cache."""


@dataclass
class Sums:
    """What is known of the elements of two tensors. Those of pieces are added up."""

    elements: int = 0
    unequal: int = 0
    different: int = 0
    """Of them, by more than the tolerance."""
    nan: int = 0
    """Of those, where one alone is NaN, or the two cannot be subtracted."""
    largest: float = 0.0
    """The largest absolute difference, but for those."""
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_difference: float = 0.0

    def __iadd__(self, other: Sums) -> Sums:
        self.elements += other.elements
        self.unequal += other.unequal
        self.different += other.different
        self.nan += other.nan
        self.largest = max(self.largest, other.largest)
        self.norm_a = _norm_of_both(self.norm_a, other.norm_a)
        self.norm_b = _norm_of_both(self.norm_b, other.norm_b)
        self.norm_difference = _norm_of_both(self.norm_difference, other.norm_difference)
        return self

    @property
    def relative(self) -> float:
        """The norm of the difference against the larger of the two."""
        larger = max(self.norm_a, self.norm_b)
        return self.norm_difference / larger if larger else 0.0


def sums_of(a: Tensor, b: Tensor, tolerance: float, *, norms_of_equal: bool = True) -> Sums:
    """Of tensors with the same shape, in main memory. `norms_of_equal`: the norms are wanted even if nothing differs."""
    sums = Sums()
    if not a.numel():
        return sums
    is_same = a.dtype == b.dtype and np.array_equal(np.asarray(bytes_of(a)), np.asarray(bytes_of(b)))
    if is_same and not norms_of_equal:
        sums.elements = a.numel()
        return sums
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for first in range(0, a.numel(), _AT_A_TIME):
        part = slice(first, first + _AT_A_TIME)
        if is_same:
            norm = _norm(_wide(flat_a[part]))
            sums += Sums(len(flat_a[part]), norm_a=norm, norm_b=norm)
        elif _are_whole(a.dtype, b.dtype):
            sums += _of_integers(flat_a[part], flat_b[part], tolerance)
        else:
            sums += _of_floats(_wide(flat_a[part]), _wide(flat_b[part]), tolerance)
    return sums


def _of_floats(a: Tensor, b: Tensor, tolerance: float) -> Sums:
    if a.dtype != b.dtype:  # one is complex
        a, b = a.to(torch.complex128), b.to(torch.complex128)
    difference = a - b
    distance = difference.abs()
    largest = float(distance.max())
    if math.isfinite(largest):  # as nearly always
        unequal = int(torch.count_nonzero(distance))
        different = int(torch.count_nonzero(distance > tolerance)) if tolerance else unequal
        return Sums(a.numel(), unequal, different, 0, largest, _norm(a), _norm(b), _norm(difference))
    same = (a == b) | (a.isnan() & b.isnan())
    difference.masked_fill_(same, 0)
    distance = difference.abs()
    no_number = distance.isnan()
    beyond = (distance > tolerance) | no_number
    return Sums(
        a.numel(),
        int((~same).sum()),
        int(beyond.sum()),
        int(no_number.sum()),
        float(distance.masked_fill(no_number, 0).max()),
        _norm(a),
        _norm(b),
        _norm(difference),
    )


def _of_integers(a: Tensor, b: Tensor, tolerance: float) -> Sums:
    """Exact, whatever their size."""
    one, other = _numpy(a, b), _numpy(b, a)
    above = one > other
    # The difference of two numbers of 64 bits is one without a sign: what overflows comes out right.
    distance: Any = np.where(above, one - other, other - one).view(np.uint64)
    largest = int(distance.max())
    return Sums(
        len(one),
        int(np.count_nonzero(distance)),
        int(np.count_nonzero(distance > np.uint64(min(int(tolerance), 2**64 - 1)))),
        0,
        largest,
        _norm(_wide(a)),
        _norm(_wide(b)),
        float(np.linalg.norm(distance.astype(np.float64))),
    )


def _numpy(tensor: Tensor, other: Tensor) -> Any:
    """As numbers of 64 bits that have a sign, unless that is one too few."""
    found = tensor.numpy()
    if torch.uint64 not in (tensor.dtype, other.dtype):
        return found.astype(np.int64)
    return found.astype(np.uint64)


def _are_whole(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether both are of whole numbers, and of such as can be told from each other in 64 bits."""
    whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in (a, b))
    return whole and (a == b or torch.uint64 not in (a, b))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _norm(wide: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(wide))
    if math.isinf(norm):  # squares that are too large, though the numbers may not be
        largest = float(wide.abs().max())
        if math.isfinite(largest):
            return largest * float(torch.linalg.vector_norm(wide / largest))
    return norm


def _norm_of_both(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else math.hypot(a, b)
