"""Descriptions of tensors, and bytes: what comes out is exactly those bytes, or an error does."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st

from farstep.errors import PayloadError, ProtocolError
from farstep.rpc.message import Message
from farstep.rpc.schema import check_message
from farstep.rpc.shm import Borrower
from farstep.rpc.tensors import describe
from farstep.rpc.trust import Trust
from farstep.rpc.wire import Kind
from fuzz.mutate import odd_value, odd_values, replaced

NAME = "tensors"
INPUTS_PER_CASE = 30

_DTYPES = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.bfloat16]
_PEER: Any = SimpleNamespace(borrower=Borrower(1 << 30))
_numbers = st.integers(0, 5) | st.sampled_from([7, 64, 2**31, 2**62, 2**63 - 1])
strategy = st.tuples(
    st.sampled_from(_DTYPES),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
    st.lists(_numbers, max_size=5),
    odd_values,
    st.integers(0, 2**32),
)


def check(case: tuple[torch.dtype, list[int], bool, list[int], Any, int]) -> None:
    dtype, shape, turned, numbers, value, seed = case
    rng = random.Random(seed)
    tensor = torch.zeros(shape, dtype=dtype)
    if turned and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    outgoing = describe(tensor, None, "peer")
    right = outgoing.description(None)
    data = rng.randbytes(outgoing.nbytes)
    _check_one(right, [data])
    for _ in range(INPUTS_PER_CASE):
        how = rng.randrange(4)
        buffers = [data]
        wrong: Any = right
        if how == 0:
            wrong = replaced(right, rng, odd_value(rng, value))
        elif how == 1:
            sizes = tuple(numbers)
            strides = tuple(rng.choice((0, 1, 2, 5, 2**61)) for _ in sizes) if rng.random() < 0.5 else None
            nbytes = rng.choice((len(data), 0, 4, 8, math.prod(sizes) % 1000))
            wrong = (right[0], rng.randrange(4), sizes, strides, None, nbytes, None)
            buffers = [rng.randbytes(rng.choice((nbytes, 0, len(data), 5)))]
        elif how == 2:
            buffers = [rng.randbytes(rng.choice((0, 1, len(data) + 1, 4, 8)))] * rng.choice((0, 1, 1, 2))
        else:
            wrong = (rng.choice(("float64", "int8", "float3", "qint8")), *right[1:])
        _check_one(wrong, buffers)


def _check_one(description: Any, buffers: list[bytes]) -> None:
    meta = (("a", "b"), ([None], None), [0], [description], (), None)
    try:
        check_message(int(Kind.CALL), 1, meta, len(buffers), lambda: None)
        message = Message(Kind.CALL, 1, 1, _PEER, *meta, [bytearray(b) for b in buffers])
        _, (tensor,), _ = message.open(Trust(None))
    except (PayloadError, ProtocolError):
        return
    (data,) = buffers
    assert tensor.shape == description[2]
    assert tensor.untyped_storage().nbytes() == len(data)
    if len(data):
        itemsize = tensor.element_size()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        assert tensor.storage_offset() == 0
        assert span * itemsize == len(data)
        assert bytes(tensor.untyped_storage()) == data
    else:
        assert tensor.numel() == 0
