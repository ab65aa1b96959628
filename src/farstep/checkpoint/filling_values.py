"""Numbers, tensors and numpy arrays in each other's place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farstep.checkpoint.tree import PerRank

__all__ = ["Later", "array_of", "as_tensor", "settled", "tensor_of", "tensors_in"]


class Later:
    """A number that is not read yet."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def settled(value: Any) -> Any:
    """With the numbers that have been read meanwhile."""
    if isinstance(value, Later):
        return value.tensor.item()
    if isinstance(value, PerRank):
        return PerRank(settled(value.value)) if isinstance(value.value, Later | tuple) else value
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        found = [settled(each) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
    return value


def as_tensor(number: float, dtype: torch.dtype, convert: bool) -> Tensor | None:
    """A number as a dtype has it, but for rounding; None if it would be another one, unless that is asked for, or if there is none like it."""
    try:
        made = torch.tensor(number, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError):
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return made if convert or made.item() == number else None
    is_finite = bool(made.isfinite())
    return made if is_finite or not math.isfinite(number) else None


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor | None:
    """In the memory of an array, if it is of a kind that torch knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not to be written, which is looked at
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError):
            return None


def array_of(tensor: Tensor) -> Any:
    """In the memory of a tensor, if numpy has its dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors within dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
