"""What ranks tell each other of a state before any of it moves: for each parameter and piece of state, what it is, without its elements."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farstep.state.layout import Spread
from farstep.state.same import same

__all__ = [
    "Entry",
    "Nested",
    "Number",
    "Odd",
    "RankOwned",
    "Shaped",
    "copied",
    "digest",
    "label",
    "put_together",
    "ranks_named",
    "taken_apart",
    "union",
]


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor that is shaped like its parameter. `elements`, a digest, if it may be that it only happens to be as long."""

    dtype: torch.dtype
    elements: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} of the parameter's shape"


@dataclass(frozen=True, slots=True)
class Odd:
    """A tensor of another shape, and a digest of its elements. `is_part`: what this rank has of a DTensor that others have the rest of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: str
    is_part: bool = False

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
        return isinstance(other, Number) and self.dtype == other.dtype and same(self.value, other.value)

    def __hash__(self) -> int:
        # What is the same has the same hash; a NaN has another each time.
        value = self.value
        return hash((self.dtype, value)) if isinstance(value, int | float | str) and value == value else 0

    def __str__(self) -> str:
        return repr(self.value) if self.dtype is None else f"{self.value} ({self.dtype})"


@dataclass(frozen=True, slots=True)
class Nested:
    """Lists or dicts with tensors in them: what they are without these, see `taken_apart`, and the tensors."""

    frame: Any
    tensors: tuple[Odd, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nested) and self.tensors == other.tensors and same(self.frame, other.frame)

    def __hash__(self) -> int:
        return hash(self.tensors)

    def __str__(self) -> str:
        marks = hashlib.blake2b("".join(each.elements for each in self.tensors).encode(), digest_size=4)
        return f"a {type(self.frame).__name__} of {len(self.tensors)} tensors with the elements {marks.hexdigest()}"


Entry = Shaped | Odd | Number | Nested


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensor of this number goes."""

    number: int


def taken_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """The tensors within lists, tuples and dicts, and the same with places instead of them."""
    tensors: list[Tensor] = []

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    return _each(value, take), tensors


def put_together(frame: Any, tensors: Sequence[Any]) -> Any:
    """The inverse of `taken_apart`."""
    return _each(frame, lambda each: tensors[each.number] if isinstance(each, _Place) else each)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _each(each, change) for key, each in value.items()})
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_each(each, change) for each in value)
    return change(value)


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
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def ranks_named(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def union(several: Iterable[Iterable[Any]]) -> list[Any]:
    """Each once, in the order in which they come first."""
    return list(dict.fromkeys(each for some in several for each in some))
