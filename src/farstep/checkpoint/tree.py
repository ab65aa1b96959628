"""A state as JSON: what its values are and how they are nested, with marks where its tensors are.

    null, true, 5, 0.5, "text"     themselves
    {"dict": {"key": ...}}         a mapping whose keys are strings
    {"pairs": [[key, ...], ...]}   one that has other keys
    {"list": [...]}, {"tuple": [...]}
    {"tensor": null}               the tensor that is named after its place
    {"tensor": "name"}             another's memory: a tied weight
    {"float": "nan"}, {"bytes": "..."}, {"complex": [re, im]}, {"dtype": "float32"}, {"device": "cpu"}, {"size": [2, 3]}
    {"ranks": [...]}               what each rank has for itself, see PerRank
    {"unreadable": "why"}          of another format: a value that is not to be loaded; no save writes it

The name of a value is its keys with dots between them: `model.layers.0.weight`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from farstep.checkpoint.dtypes import dtype_named, name_of
from farstep.errors import CheckpointError, DamagedCheckpoint

__all__ = ["MOST_DEPTH", "PerRank", "TensorAt", "check", "children", "decode", "encode_value", "is_container", "joined", "like", "merged", "plain_key", "tensors_of"]  # fmt: skip

MOST_DEPTH = 100
Key = str | int | float | bool | None
_SCALARS = (str, bool, int, type(None))
_PLAIN = (*_SCALARS, float)
_MOST_BITS = 14_000
"""Of a whole number: Python reads no more than 4300 digits."""


@dataclass
class PerRank:
    """A value that every rank has for itself, such as its random numbers' state. It is loaded on the rank of the same number."""

    value: Any


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor of a checkpoint, by name."""

    name: str


def joined(path: str, key: object) -> str:
    if type(key) not in _PLAIN:
        key = plain_key(key)
    return f"{path}.{key}" if path else str(key)


def plain_key(key: Any) -> Any:
    """A key as it is when it has been saved and read again, by which what lies below it is named: an Enum's or numpy's, whose text is another, as its value.

    One that a checkpoint does not keep stays as it is.
    """
    try:
        return decode(encode_value(key))
    except (TypeError, ValueError):
        return key


def encode_value(value: Any) -> Any:
    """A value that is neither a tensor nor has others in it. Raises TypeError or ValueError for what a checkpoint cannot keep."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a whole number of {value.bit_length():,} bits")
    if type(value) in _SCALARS:
        return value
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [encode_value(value.real), encode_value(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    # An Enum, or another class of a number or string: what it is, and not the text that it shows.
    if isinstance(value, int):
        return encode_value(int.__int__(value))
    if isinstance(value, float):
        return encode_value(float.__float__(value))
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def like(now: Any, found: Any) -> Any:
    """A dict or tuple that was saved, of the class that is in its place now: a MultiStepLR steps by what only a Counter has."""
    kind = type(now)
    if type(found) is dict and kind in (Counter, OrderedDict):
        return kind(found)
    if type(found) is dict and kind is defaultdict:
        return defaultdict(now.default_factory, found)
    if type(found) is tuple and isinstance(now, tuple) and hasattr(now, "_fields") and len(now) == len(found):
        return kind(*found)
    return found


def is_container(node: Any) -> bool:
    return isinstance(node, dict) and not node.keys().isdisjoint(("dict", "pairs", "list", "tuple", "ranks"))


def children(node: Any) -> Iterator[tuple[Any, Any]]:
    """The keys and nodes in a mapping, list or tuple; those of `ranks` are for nobody else."""
    ((kind, inside),) = node.items()
    if kind == "dict":
        yield from inside.items()
    elif kind == "pairs":
        for key, each in inside:
            yield decode(key), each
    elif kind in ("list", "tuple"):
        yield from enumerate(inside)


def tensors_of(node: Any, name: str) -> Iterator[str]:
    """The names of all tensors in it, those of every rank included."""
    if not isinstance(node, dict):
        return
    ((kind, inside),) = node.items()
    if kind == "tensor":
        yield name if inside is None else inside
    elif kind == "ranks":
        for rank, each in enumerate(inside):
            yield from tensors_of(each, joined(name, f"rank{rank}"))
    elif is_container(node):
        for key, each in children(node):
            yield from tensors_of(each, joined(name, key))


def check(node: Any, tensors: Container[str], name: str = "", depth: int = 0) -> None:
    """Raise DamagedCheckpoint unless it is a tree, and names no other tensors than these."""
    if not is_container(node) or len(node) != 1:
        value = decode(node, name)
        if isinstance(value, TensorAt) and value.name not in tensors:
            raise DamagedCheckpoint(
                f"the manifest has no tensor {value.name!r}, which {name!r} is said to be"
            )
        return
    ((kind, inside),) = node.items()
    if depth > MOST_DEPTH or type(inside) is not (dict if kind == "dict" else list):
        raise DamagedCheckpoint(f"the manifest has a bad {kind!r} at {name!r}")
    if kind == "ranks":
        pairs: Any = ((f"rank{rank}", each) for rank, each in enumerate(inside))
    else:
        if kind == "pairs" and not all(
            type(each) is list and len(each) == 2 and _is_key(each[0]) for each in inside
        ):
            raise DamagedCheckpoint(f"the manifest has a bad key at {name!r}")
        pairs = children(node)
    for key, each in pairs:
        check(each, tensors, joined(name, key), depth + 1)


def _is_key(node: Any) -> bool:
    return not is_container(node) and not isinstance(decode(node), TensorAt)


def decode(node: Any, name: str = "", rank: int = 0, depth: int = 0) -> Any:
    """What was encoded, with a `TensorAt` in the place of each tensor. Raises DamagedCheckpoint for anything else."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    if type(node) is not dict or len(node) != 1 or depth > MOST_DEPTH:
        raise DamagedCheckpoint(f"the manifest has something at {name!r} that no save writes")
    ((kind, inside),) = node.items()
    try:
        return _DECODERS[kind](inside, name, rank, depth + 1)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, binascii.Error):
        raise DamagedCheckpoint(f"the manifest has a bad {str(kind)[:40]!r} at {name!r}") from None


def _dict(inside: Any, name: str, rank: int, depth: int) -> Any:
    return {key: decode(each, joined(name, key), rank, depth) for key, each in inside.items()}


def _pairs(inside: Any, name: str, rank: int, depth: int) -> Any:
    found = {}
    for node, each in inside:
        key = decode(node, name, rank, depth)
        found[key] = decode(each, joined(name, key), rank, depth)
    return found


def _list(inside: Any, name: str, rank: int, depth: int) -> Any:
    if type(inside) is not list:
        raise TypeError
    return [decode(each, joined(name, key), rank, depth) for key, each in enumerate(inside)]


def _size(inside: Any, *_: Any) -> torch.Size:
    if not all(0 <= side < 1 << 63 for side in inside):  # torch would notice later
        raise ValueError
    return torch.Size(inside)


def _tensor(inside: Any, name: str, rank: int, depth: int) -> Any:
    if inside is not None and type(inside) is not str:
        raise TypeError
    return TensorAt(name if inside is None else inside)


def _ranks(inside: Any, name: str, rank: int, depth: int) -> Any:
    """This rank's; None for a rank that was not there."""
    if type(inside) is not list:
        raise TypeError
    return PerRank(decode(inside[rank], joined(name, f"rank{rank}"), rank, depth) if rank < len(inside) else None)  # fmt: skip


def _unreadable(inside: Any, name: str, *_: Any) -> Any:
    """In place of what another format has and is not to be loaded."""
    raise CheckpointError(f"{name!r} cannot be read: {str(inside)[:500]}")


def _float(inside: Any, *_: Any) -> float:
    if inside not in ("nan", "inf", "-inf"):
        raise ValueError
    return float(inside)


def _device(inside: Any, *_: Any) -> torch.device:
    if type(inside) is not str or len(inside) > 40:
        raise ValueError
    return torch.device(inside)


_DECODERS: dict[str, Any] = {
    "dict": _dict,
    "pairs": _pairs,
    "list": _list,
    "tuple": lambda *a: tuple(_list(*a)),
    "tensor": _tensor,
    "ranks": _ranks,
    "float": _float,
    "bytes": lambda inside, *_: base64.b64decode(inside, validate=True),
    "complex": lambda inside, *_: complex(*(decode(each) for each in inside)),
    "dtype": lambda inside, *_: dtype_named(inside),
    "device": _device,
    "size": _size,
    "unreadable": _unreadable,
}


def merged(trees: list[Any], name: str = "") -> Any:
    """One tree of what all ranks have. Raises CheckpointError where two have different values in one place."""
    first = next(tree for tree in trees if tree is not _ABSENT)
    if all(tree is _ABSENT or tree == first for tree in trees):
        return first
    kinds = {next(iter(tree)) if isinstance(tree, dict) else "value" for tree in trees if tree is not _ABSENT}
    if kinds == {"dict"}:
        keys = dict.fromkeys(key for tree in trees if tree is not _ABSENT for key in tree["dict"])
        return {
            "dict": {
                key: merged(
                    [_ABSENT if tree is _ABSENT else tree["dict"].get(key, _ABSENT) for tree in trees],
                    joined(name, key),
                )
                for key in keys
            }
        }
    if kinds == {"ranks"}:
        return {"ranks": [_own(tree, rank) for rank, tree in enumerate(trees)]}
    lengths = {len(tree[kind]) for tree in trees if tree is not _ABSENT for kind in ("list", "tuple") if isinstance(tree, dict) and kind in tree}  # fmt: skip
    if len(kinds) == 1 and kinds <= {"list", "tuple"} and len(lengths) == 1:
        (kind,) = kinds
        return {
            kind: [
                merged([_ABSENT if tree is _ABSENT else tree[kind][i] for tree in trees], joined(name, i))
                for i in range(lengths.pop())
            ]
        }
    said: dict[str, list[int]] = {}
    for rank, tree in enumerate(trees):
        if tree is not _ABSENT:
            said.setdefault(str(tree), []).append(rank)
    said = dict(zip(_cut([*said]), said.values(), strict=True))
    words = "; ".join(f"{text} on rank {', '.join(map(str, ranks))}" for text, ranks in said.items())
    raise CheckpointError(
        f"{name!r} is not the same on all ranks: {words}. Nothing has been saved. What belongs to each rank alone is saved as farstep.checkpoint.PerRank(value)"
    )


class _Absent:
    pass


_ABSENT = _Absent()


def _own(tree: Any, rank: int) -> Any:
    return None if tree is _ABSENT else tree["ranks"][rank]


def _cut(texts: list[str]) -> list[str]:
    """Around where they begin to differ."""
    same = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    begin = max(0, same - 20)
    return [
        f"{'...' if begin else ''}{text[begin : begin + 60]}{'...' if len(text) > begin + 60 else ''}"
        for text in texts
    ]


def encode_mapping(pairs: Mapping[Any, Any]) -> Any:
    """A mapping of nodes."""
    if all(type(key) is str for key in pairs):
        return {"dict": dict(pairs)}
    return {"pairs": [[encode_value(key), each] for key, each in pairs.items()]}
