"""Programs of a pickle's instructions, and bodies that were whole, where `trusted` is narrow.

A value comes out that can be hashed, printed and sent on, or one of the errors that are promised does.
"""

from __future__ import annotations

import random
import struct
import warnings
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from hypothesis import strategies as st

from farstep.errors import PayloadError, RpcError
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.message import Message
from farstep.rpc.payload import pack
from farstep.rpc.trust import Trust
from farstep.rpc.wire import Kind
from fuzz.mutate import check_brief, mutated, odd_values

NAME = "narrow_pickle"
INPUTS_PER_CASE = 30


class Plain:
    """A trusted class."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


@dataclass(frozen=True)
class Frozen:
    """Another, which is hashed by what is in it."""

    value: Any = None


class Color(Enum):
    RED = 1


class Text(str):
    """Another."""


def identity(value: Any = None) -> Any:
    return value


warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
_TRUST = Trust((__name__,))
_BODIES = [
    pack(values).body
    for values in (
        ([1, 2.5, "x", None, b"y"], {"a": (1,)}, {1, 2}, frozenset({(3,)})),
        (
            OrderedDict(a=1),
            defaultdict(list, {1: [2]}),
            deque([1], maxlen=3),
            timedelta(1),
            range(5),
            1j,
            slice(3),
        ),
        (Plain([1]), Frozen((1, 2)), Color.RED, Text("x"), Plain(3).method, identity, torch.float32),
        (torch.Size([1]), torch.device("cpu"), ValueError("x"), KeyError(1, 2), WorkerInfo("a", 1)),
        ([torch.ones(2), torch.ones(2).to_sparse(), torch.ones(2, 2).to_sparse_csr()],),
        ({(1, "x"): 1, Frozen(5): 2, 2.5: 3}, [[[[1]]]], bytearray(b"abc"), 2**200),
    )
]
_GLOBALS = [
    *((__name__, name) for name in ("Plain", "Frozen", "Color", "Text", "identity", "Plain.method")),
    *(
        ("builtins", name)
        for name in ("list", "range", "bytearray", "ValueError", "object", "complex", "eval")
    ),
    *(("collections", name) for name in ("OrderedDict", "defaultdict", "deque")),
    *(
        ("farstep.rpc.payload", name)
        for name in ("_tensor", "_method", "_named", "_with_grad", "_sparse_coo")
    ),
    *(("torch", name) for name in ("Size", "device", "float32", "load")),
    *(("farstep.errors", "WorkerLost"), ("farstep.rpc.payload", "ref_slot"), ("os", "system"), ("", "")),
]


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


_STEPS = [
    *(bytes([code]) for code in b"(()N]}tuse0\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94\x81\x92Rba1"),
    *(b"K" + bytes([number]) for number in (0, 1, 5, 255)),
    *(b"h" + bytes([number]) for number in (0, 1, 2, 3, 7)),
    *(_text(text) for text in ("", "x", "value", "__class__", "cpu")),
    *(_text(module) + _text(name) + b"\x93" for module, name in _GLOBALS),
    *(b"J" + struct.pack("<i", number) for number in (-1, 2_000_000_000)),
    *(b"G" + struct.pack(">d", number) for number in (0.5, float("nan"))),
    *(
        b"\x8a\x05" + b"\xff" * 5,
        b"C\x02ab",
        b"\x96" + struct.pack("<Q", 3) + b"abc",
        b"r" + struct.pack("<I", 2**31),
    ),
    *(b"\x96" + struct.pack("<Q", 2**40), b"\x8b" + struct.pack("<I", 2**31), b"j" + struct.pack("<I", 1)),
    *(
        b"\x94h\x00\x86" * 40,
        b"\x85" * 2000,
        b"\x94](h\x00h\x00e" * 3,
        b"I99\n",
        b"cos\nsystem\n",
        b"P1\n",
        b"\x82\x01",
    ),
]
"""Instructions, with what follows them. More than once: `(`, as most need it."""

strategy = st.tuples(
    st.lists(st.integers(0, len(_STEPS) - 1), max_size=40), odd_values, st.integers(0, 2**32)
)


def check(case: tuple[list[int], Any, int]) -> None:
    program, value, seed = case
    rng = random.Random(seed)
    _check_one(pack(([value],)).body)
    for number in range(INPUTS_PER_CASE):
        if number % 3 == 0:
            steps = [_STEPS[i] for i in program]
            for _ in range(rng.randrange(20)):
                steps.insert(rng.randrange(len(steps) + 1), rng.choice(_STEPS))
            body = b"\x80\x05(N(" + b"".join(steps) + b"t}t."
        else:
            body = mutated(rng.choice(_BODIES), rng)
        _check_one(body)


def _check_one(body: bytes) -> None:
    data = [bytearray(torch.ones(2).numpy().tobytes()), bytearray(16)]
    descriptions = [("float32", 0, (2,), None, None, 8, None), ("int64", 0, (1, 2), None, None, 16, None)]
    message = Message(Kind.CALL, 1, 1, None, None, body, (), descriptions, buffers=data)  # type: ignore[arg-type]
    try:
        _, args, kwargs = message.open(_TRUST)
    except (RpcError, AttributeError, ImportError) as exc:
        check_brief(exc)
        return
    for value in (*args, *kwargs.values()):
        try:
            hash(value)
        except TypeError:
            pass
        try:
            repr(value)
            pack((value,))
        except (RecursionError, PayloadError):
            pass
