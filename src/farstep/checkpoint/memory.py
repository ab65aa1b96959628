"""Tensors as bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.storage import Buffer

__all__ = ["bytes_of", "is_plain"]


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes lie in main memory, row by row."""
    in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
    return in_place and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: Tensor) -> Buffer:
    """The memory of such a tensor. One element lies row by row whatever its stride says, and only `as_strided` makes that 1."""
    data: Any = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(data)
