"""Headers of safetensors files, and the index of several, with other bytes and other values; then the tensors are read."""

from __future__ import annotations

import json
import struct
from functools import cache
from typing import Any

from farstep import checkpoint
from farstep.checkpoint.huggingface import INDEX
from farstep.checkpoint.pickles import Refused
from farstep.checkpoint.safetensors_files import read_header
from farstep.errors import CheckpointError
from fuzz.support import Bound, Choices, InMemory, cases, deep_text, edited, paths_in, spoiled

NAME = "safetensors_header"
SECONDS_PER_INPUT_LIMIT = 5.0
strategy = cases
_bound = Bound()


@cache
def _whole() -> list[tuple[str, list[Any]]]:
    """Headers, and the places in them."""
    plain = {
        "__metadata__": {"format": "pt", "tied": "w"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        "e": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [32, 32]},
    }
    part = {"w": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": []}, "e": {"saved_offsets": [0, 0]}}
    cut = {**plain, "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(part)}}
    return [(json.dumps(each), paths_in(each)) for each in (plain, cut)]


@cache
def _index() -> tuple[str, list[Any]]:
    found = {
        "metadata": {"total_size": 32},
        "weight_map": {"w": "a.safetensors", "b": "b.safetensors", "e": "a.safetensors"},
    }
    return json.dumps(found), paths_in(found)


def _file(header: bytes, choices: Choices) -> bytes:
    length = len(header)
    if choices.number(6) == 5:
        length = choices.one_of(
            [0, 1, 2, length - 1, length + 1, 99_999_999, 100_000_000, 1 << 40, (1 << 64) - 1]
        )
    return (
        struct.pack("<Q", max(0, length))
        + header
        + bytes(range(32 if choices.number(8) < 7 else choices.number(33)))
    )


def _spoiled_header(choices: Choices) -> bytes:
    text, paths = choices.one_of(_whole())
    how = choices.number(6)
    if how < 3:
        return deep_text(json.dumps(spoiled(json.loads(text), paths, choices)).encode())
    if how == 3:
        found = json.loads(_whole()[1][0])
        inner = json.loads(found["__metadata__"]["DCP_SHARDING_INFO"])
        inner = deep_text(json.dumps(spoiled(inner, paths_in(inner), choices)).encode())
        found["__metadata__"]["DCP_SHARDING_INFO"] = inner.decode()
        return json.dumps(found).encode()
    return edited(text.encode(), choices) if how == 4 else text.encode()


def check(case: bytes) -> None:
    choices = Choices(case)
    one = _file(_spoiled_header(choices), choices)
    files = {"a.safetensors": one}
    if choices.number(3) == 0:
        files["b.safetensors"] = _file(_spoiled_header(choices), choices)
        if choices.number(2):
            text, paths = _index()
            files[INDEX] = deep_text(json.dumps(spoiled(json.loads(text), paths, choices)).encode())
    storage = InMemory(files)
    try:
        read_header(storage.open("a.safetensors"))
    except Refused:
        if len(files) == 1:
            _bound.check()
            return
    try:
        checkpoint.read(storage)
    except CheckpointError:
        pass
    _bound.check()
