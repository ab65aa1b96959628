"""Pickles: programs of any instructions, and real ones that have been changed. They give a plain value, or are refused, and nothing else happens."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from farstep.checkpoint import archives, dcp_metadata
from farstep.checkpoint.dcp import check_extent
from farstep.checkpoint.pickles import Refused, unpickled
from fuzz.support import Bound, Choices, cases, edited

NAME = "dcp_pickle"
SECONDS_PER_INPUT_LIMIT = 5.0
strategy = st.one_of(cases, st.binary(min_size=96, max_size=96))
_bound = Bound()

_TABLES = [
    (dcp_metadata._named, None),
    (archives._tensor_names, archives._storage_of),
    (archives._value_names, None),
    (archives._checked_names, lambda _: archives._OPAQUE),
]
_NAMES = [
    "torch Size",
    "torch float32",
    "torch FloatStorage",
    "torch.storage UntypedStorage",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
    "torch._tensor _rebuild_from_type_v2",
    "torch.serialization _get_layout",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata TensorProperties",
    "collections OrderedDict",
    "pathlib PosixPath",
    "builtins bytearray",
    "builtins complex",
    "_codecs encode",
    "os system",
    "builtins eval",
    "torch Tensor",
    "torch storage",
    "torch",
    " ",
]
_PLAIN = [b"(", b".", b"N", b"\x88", b"\x89", b"}", b"]", b")", b"t", b"a", b"e", b"s", b"u", b"\x85", b"\x86", b"\x87", b"\x94", b"\x93", b"\x81", b"R", b"b", b"Q", b"0", b"2", b"1", b"d", b"l", b"o", b"\x82\x01", b"\x92", b"\x8f", b"\x90", b"\x91", b"\x96"]  # fmt: skip


def _instruction(choices: Choices) -> bytes:
    how = choices.number(12)
    if how < 6:
        return choices.one_of(_PLAIN)
    if how == 6:
        module, _, name = choices.one_of(_NAMES).partition(" ")
        if choices.number(2):
            return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        return b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, name)) + b"\x93"
    if how == 7:
        return choices.one_of([b"h", b"q", b"K"]) + bytes([choices.number(4)])
    if how == 8:
        return choices.one_of([b"j", b"r", b"J", b"X"]) + struct.pack("<I", choices.one_of([0, 1, 5, 255, 1 << 31, (1 << 32) - 1]))  # fmt: skip
    if how == 9:
        text = choices.one_of(["a", "storage", "0", "cpu", "dtype", "x" * 70, "é"]).encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if how == 10:
        return choices.one_of([b"\x8a\x01\x05", b"\x8a\xff" + b"\xff" * 255, b"\x8b\xff\xff\xff\x7f", b"G" + b"\x7f" * 8, b"M\xff\xff", b"\x8d" + b"\xff" * 8, b"\x95" + b"\xff" * 8])  # fmt: skip
    return bytes([choices.number(256)])


@cache
def _real() -> list[bytes]:
    """What torch writes: values, tensors, a checkpoint's metadata."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    size = torch.Size([2, 3])
    found = dcp.Metadata(
        {
            "w": dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=torch.float32),
                size,
                [dcp.ChunkStorageMetadata(torch.Size([0, 0]), size)],
            ),
            "n": dcp.BytesStorageMetadata(),
        },
        {"w": ("w",), "n": ("n",)},
        {dcp.MetadataIndex("w", torch.Size([0, 0])): _StorageInfo("__0_0.distcp", 0, 500)},
    )
    values = [
        {"a": [1, 2.5, None, True, "text", (1, (2, (3,)))], "b": {"c": 1 << 70}},
        OrderedDict(a=1),
        torch.arange(6.0).reshape(2, 3),
        {"w": torch.nn.Parameter(torch.ones(2)), "t": torch.ones(3, dtype=torch.bfloat16)},
    ]
    pickles = [pickle.dumps(found, protocol=n) for n in (2, 4)]
    for value in values:
        file = io.BytesIO()
        torch.save(value, file)
        with zipfile.ZipFile(file) as archive:
            pickles.append(archive.read("archive/data.pkl"))
    return pickles


def check(case: bytes) -> None:
    choices = Choices(case)
    if len(case) > 32:
        data = b"\x80\x02" + b"".join(_instruction(choices) for _ in range(1 + choices.number(60))) + b"."
    else:
        data = edited(choices.one_of(_real()), choices)
    names, persistent = choices.one_of(_TABLES)
    try:
        value = unpickled(data, names, persistent)
        _look(value)
        check_extent(value, len(data))
    except Refused:
        pass
    _bound.check()


_MADE = (type(None), bool, int, float, str, list, dict, tuple, torch.dtype)


def _look(value: Any) -> None:
    """Nothing but plain values and what the tables make has come of it. A bounded part is looked at: a value may be in itself."""
    waiting, left = [value], 2000
    while waiting and left:
        each = waiting.pop()
        left -= 1
        kind = type(each)
        assert kind in _MADE or kind.__module__.startswith("farstep.checkpoint."), kind
        if kind in (list, tuple):
            waiting += each
        elif kind is dict:
            waiting += [*each.keys(), *each.values()]
