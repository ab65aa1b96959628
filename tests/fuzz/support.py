"""What the targets that read checkpoints share: a storage in memory, ways to spoil bytes and JSON, and a bound on memory.

A case is some bytes, by which `Choices` chooses what is done. One draw takes Hypothesis a tenth of the time that a draw for every choice would.
"""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import strategies as st

from farstep.checkpoint.storage import MOST_READ_BYTES, NewFile, Storage, StoredFile, check_size

__all__ = ["Bound", "Choices", "InMemory", "cases", "deep_text", "edited", "paths_in", "spoiled"]

cases = st.binary(min_size=32, max_size=32)
"""What `Choices` is made of. Zeros, to which Hypothesis shrinks, choose the first of everything."""

T = TypeVar("T")


class Choices:
    """Takes a case apart; when it is used up, everything is the first."""

    def __init__(self, case: bytes) -> None:
        self._left = int.from_bytes(case, "little")

    def number(self, below: int) -> int:
        self._left, found = divmod(self._left, below)
        return found

    def one_of(self, several: Sequence[T]) -> T:
        return several[self.number(len(several))]

    def some_bytes(self, most: int) -> bytes:
        return bytes(self.number(256) for _ in range(1 + self.number(most)))


_EVERY = 32


class Bound:
    """How much memory a few inputs may take, for a moment too: by so much the highest that this process has had may grow from one look to the next."""

    def __init__(self, most_bytes: int = 96 << 20) -> None:
        self._most, self._peak, self._calls = most_bytes, 0, 0

    def check(self) -> None:
        self._calls += 1
        if self._calls % _EVERY != 1:
            return  # the highest stays, and to ask for it takes a while
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        grown = peak - (self._peak or peak)
        self._peak = peak
        assert grown < self._most, f"{grown:,} bytes were taken for a few small inputs"


# -- a storage --------------------------------------------------------------------------------------------


class _File(StoredFile):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> int:
        assert offset >= 0
        found = self._data[offset : offset + buffer.nbytes]
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        pass


class InMemory(Storage):
    """Files that are there, to be read."""

    request_bytes, threads = 1 << 20, 1

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def names(self) -> list[str]:
        return list(self._files)

    def directories(self) -> list[str]:
        return []

    def open(self, name: str) -> StoredFile:
        return _File(self._found(name))

    def read(self, name: str, most: int = MOST_READ_BYTES) -> bytes:
        data = self._found(name)
        check_size(name, len(data), most)
        return data

    def _found(self, name: str) -> bytes:
        if name not in self._files:
            assert name == name.rpartition("/")[2] != "", f"a file {name!r} was asked for"
            raise FileNotFoundError(name)
        return self._files[name]

    def sole_writer(self) -> Any:
        return nullcontext()

    def at(self, name: str) -> Storage:
        raise AssertionError("a checkpoint has no directories")

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("what is read is not written")

    def prepare(self) -> None:
        self._refuse()

    def create(self, name: str, nbytes: int) -> NewFile:
        return self._refuse()

    def replace(self, name: str, data: bytes) -> None:
        self._refuse()

    def delete(self, names: Iterable[str]) -> None:
        self._refuse()

    def remove(self) -> None:
        self._refuse()


# -- bytes ------------------------------------------------------------------------------------------------

_NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
_PIECES = [struct.pack(form, n) for n in _NUMBERS for form in ("<B", "<H", "<I", "<Q", ">Q") if n < 1 << 8 * struct.calcsize(form)]  # fmt: skip


def edited(data: bytes, choices: Choices) -> bytes:
    """With some bytes set, inserted, left out, repeated elsewhere, or all from a place on cut off."""
    found = bytearray(data)
    for _ in range(1 + choices.number(3)):
        how = choices.number(8)
        at = choices.number(len(found) + 1)
        if how <= 1:
            piece = choices.one_of(_PIECES)
            found[at : at + len(piece)] = piece
        elif how == 2:
            found[at : at + 1] = bytes([choices.number(256)])
        elif how == 3:
            found[at : at + 1] = bytes([(found[at] if at < len(found) else 0) ^ 1 << choices.number(8)])
        elif how == 4:
            found[at:at] = choices.some_bytes(6)
        elif how == 5:
            del found[at : at + 1 + choices.number(12)]
        elif how == 6:
            source = choices.number(len(found) + 1)
            found[at:at] = found[source : source + choices.number(60)]
        else:
            del found[at:]
    return bytes(found)


# -- JSON -------------------------------------------------------------------------------------------------

Path = tuple[Any, ...]
_DEEP = "\x01deep"
_DEPTHS = [(b"[", b"]"), (b'{"list":[', b"]}"), (b'{"dict":{"a":', b"}}"), (b'{"":', b"}")]


def deep_text(data: bytes) -> bytes:
    """With nests where the edits have put the word for one: too deep for `json.dumps` to write."""
    word = json.dumps(_DEEP)[:-1].encode()
    while (at := data.find(word)) >= 0:
        end = data.index(b'"', at + 1)
        kind, _, depth = data[at + len(word) + 1 : end].partition(b":")
        left, right = _DEPTHS[int(kind)]
        data = data[:at] + left * int(depth) + b"1" + right * int(depth) + data[end + 1 :]
    return data


_HUGE = [2**31, 2**32, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400]
_WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 64, 65, 1e308, -0.0, 0.5, float("nan"), float("inf")),
    *_HUGE,
    *(-n for n in _HUGE[:4]),
    *("", "a", "..", "../x", "/etc/passwd", "\x00", "\ud800", "é", "x" * 300, "float32", "F32", "int4", "nan", "=", "AAAA"),
    *([], {}, [[]], [None], [0] * 70, [1] * 70, [-1], [2**62], ["a"], [True], {"a": 1}, {"": {}}),
    *({"tensor": "a"}, {"tensor": None}, {"tensor": 5}, {"list": {}}, {"dict": []}, {"pairs": [[1]]}, {"ranks": 5}),
    *({"ranks": [{"tensor": None}] * 3}, {"bytes": "!"}, {"complex": [1] * 9}, {"complex": [{"list": []}, 1]}),
    *({"device": "cuda:99999"}, {"dtype": "no"}, {"size": [2**70]}, {"size": ["a"]}, {"float": 5}, {"unreadable": "x"}),
    *({"pairs": [[{"list": []}, 1]]}, {"pairs": [[{"bytes": "AA=="}, 1], ["b", {"tensor": None}]]}, {"dict": {"a": 1}, "list": []}),
    *(f"{_DEEP}:{kind}:{depth}" for kind in range(len(_DEPTHS)) for depth in (50, 200, 2000)),
]  # fmt: skip


def paths_in(found: Any, path: Path = ()) -> list[Path]:
    """Where there is something in it, itself included."""
    paths = [path]
    pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, each in pairs:
        paths += paths_in(each, (*path, key))
    return paths


def spoiled(found: Any, paths: Sequence[Path], choices: Choices) -> Any:
    """With some values in other values' places. `found` is changed."""
    for _ in range(1 + choices.number(3)):
        how, path, value = choices.number(8), choices.one_of(paths), deepcopy(choices.one_of(_WRONG))
        if how == 0:
            value = choices.number(1 << choices.number(66)) - choices.number(3)
        if not path:
            if how < 3:
                return value
            continue
        inside = found
        try:
            for key in path[:-1]:
                inside = inside[key]
            if how <= 4:
                inside[path[-1]] = value
            elif how == 5:
                del inside[path[-1]]
            elif how == 6:
                inside.append(inside[path[-1]])
            elif isinstance(inside, list):
                inside.append(value)
            else:
                inside[str(value)[:20]] = value
        except (TypeError, KeyError, IndexError, AttributeError):
            pass  # an edit before has changed the place
    return found
