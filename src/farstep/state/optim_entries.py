"""What ranks tell each other of a state before any of it moves: for each parameter and piece of state, what it is, without its elements."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farstep.state.layout import Spread

__all__ = [
    "Entry",
    "Number",
    "Odd",
    "RankOwned",
    "Shaped",
    "copied",
    "digest",
    "label",
    "ranks_named",
    "union",
    "unlike",
]


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor that is shaped like its parameter."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of the parameter's shape"


@dataclass(frozen=True, slots=True)
class Odd:
    """A tensor of another shape, and a digest of its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: str

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape} with the elements {self.elements[:8]}"


@dataclass(frozen=True, slots=True)
class Number:
    """A number, an object, or a tensor of one number, whose dtype is then given."""

    value: Any
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, value: Any) -> Number:
        if not isinstance(value, Tensor):
            return cls(value)
        local = value if type(value) is Tensor else value.to_local() if hasattr(value, "to_local") else value
        return cls(local.item(), value.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Number) or self.dtype != other.dtype:
            return False
        return self.value is other.value or _text(self.value) == _text(other.value)

    def __hash__(self) -> int:
        return hash(_text(self.value))

    def __str__(self) -> str:
        return _text(self.value) if self.dtype is None else f"{self.value} ({self.dtype})"


Entry = Shaped | Odd | Number


class RankOwned:
    """A state of another shape than its parameter's, which is not the same on all ranks: it belongs to the part that each has.

    `tensors` are those of some ranks, `spread` is how the parameter was spread. It loads where the parameter is spread just so.
    """

    __slots__ = ("spread", "tensors")

    def __init__(self, spread: Spread, tensors: Mapping[int, Tensor]) -> None:
        self.spread = spread
        self.tensors = dict(tensors)

    def __getstate__(self) -> dict[str, Any]:
        return {"spread": self.spread, "tensors": self.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.spread, self.tensors = state["spread"], dict(state["tensors"])

    def __repr__(self) -> str:
        return f"RankOwned({', '.join(f'rank {rank}: {tuple(t.shape)}' for rank, t in self.tensors.items())})"


def label(name: str, key: str, rank: int | None = None) -> str:
    """A piece of state, as errors call it."""
    return f"state[{name!r}][{key!r}]" + ("" if rank is None else f" of rank {rank}")


def copied(value: Any) -> Any:
    """A copy that does not change with the original."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def digest(tensor: Tensor) -> str:
    """The same for the same shape and bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def unlike(a: Any, b: Any) -> bool:
    """Whether two options differ."""
    return Number.of(a) != Number.of(b) if _is_single(a) and _is_single(b) else _text(a) != _text(b)


def _is_single(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _text(value: Any) -> str:
    return repr(value)


def ranks_named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def union(several: Iterable[Iterable[Any]]) -> list[Any]:
    """Each once, in the order in which they come first."""
    return list(dict.fromkeys(each for some in several for each in some))
