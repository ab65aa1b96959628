"""Bytes of a tensor, without a copy and without numpy."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["Bytes", "bytes_of"]

Bytes = bytes | bytearray | memoryview


def bytes_of(tensor: torch.Tensor, nbytes: int | None = None) -> memoryview:
    """A writable view of the tensor's memory, from its first element on.

    The view does not keep the tensor alive: hold the tensor as long as the view. `nbytes` is the
    length of the view where it is not that of a contiguous tensor.
    """
    length = tensor.nbytes if nbytes is None else nbytes
    if length == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr())).cast("B")
