"""Whether two values are the same: options, numbers, tensors, and whatever holds them. The one place where that is decided."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["differing", "same"]


def same(a: Any, b: Any) -> bool:
    """To the last bit, not as they print. Numbers are compared by value, lists and tuples alike; a NaN is the same as a NaN.

    Tensors are the same in shape, dtype and elements, wherever they are; DTensors and shards also in how they are spread. An object
    without an `==` of its own is what it holds.
    """
    return _same(a, b, frozenset())


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The keys of two dicts under which they do not have the same, in the order in which they come first."""
    return [key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])]


def _same(a: Any, b: Any, within: frozenset[tuple[int, int]]) -> bool:
    if a is b or (id(a), id(b)) in within:  # in a ring, the rest decides
        return True
    if isinstance(a, bool | int | float | complex) and isinstance(b, bool | int | float | complex):
        return a == b or (a != a and b != b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensors(a, b)
    if isinstance(a, np.ndarray | np.generic) or isinstance(b, np.ndarray | np.generic):
        return _same_arrays(a, b)
    within |= {(id(a), id(b))}
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], within) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y, within) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if any("__eq__" in vars(kind) for kind in type(a).__mro__[:-1]):
        return bool(a == b)
    return _same_insides(a, b, within)


def _same_tensors(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if hasattr(a, "to_local") or hasattr(b, "to_local"):
        if not (hasattr(a, "to_local") and hasattr(b, "to_local")):
            return False
        alike = a.device_mesh == b.device_mesh and a.placements == b.placements  # type: ignore[attr-defined]
        return bool(alike) and _same_tensors(a.to_local(), b.to_local())
    a, b = a.detach(), b.detach()
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if a.layout != torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(a, b) or _same_bits(a, b)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaNs are equal in their bits alone."""
    if not (a.is_floating_point() or a.is_complex()):
        return False
    x, y = (each.contiguous().as_strided((each.numel(),), (1,)).view(torch.uint8) for each in (a, b))
    return torch.equal(x, y)


def _same_arrays(a: Any, b: Any) -> bool:
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        a, b = (each.item() if isinstance(each, np.generic) else each for each in (a, b))
        return same(a, b)
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return False
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return same(a.tolist(), b.tolist()) if a.dtype.hasobject else a.tobytes() == b.tobytes()


def _same_insides(a: Any, b: Any, within: frozenset[tuple[int, int]]) -> bool:
    slots = [slot for kind in type(a).__mro__ for slot in _slots_of(kind)]
    if slots or hasattr(a, "__dict__"):
        ours, theirs = (
            {**getattr(each, "__dict__", {}), **{slot: getattr(each, slot, None) for slot in slots}}
            for each in (a, b)
        )
        if ours or theirs:
            return _same(ours, theirs, within)
    try:
        return pickle.dumps(a) == pickle.dumps(b)
    except Exception:  # nothing is known of it but that it is another object
        return False


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [s for s in ([slots] if isinstance(slots, str) else slots) if not s.startswith("__")]
