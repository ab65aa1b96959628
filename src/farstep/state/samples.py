"""A few elements of each tensor, as bytes that can be compared: cheap enough to be taken of a whole state before it is loaded.

Two saves of a training differ almost everywhere, so a few elements tell them apart. They do not tell whether two tensors are the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["samples_of"]

COUNT = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (7919, 104729, 1299709, 15485863)
"""Primes, so that the places go through all of a dimension in no order that its values could have."""


@torch.no_grad()
def samples_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor a checksum of at most 64 elements, at places that depend on its shape alone; all of a tensor that has no more."""
    found = [0] * len(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    taken: list[Tensor] = []
    for number, tensor in enumerate(tensors):
        taken.append(_taken(tensor))
        kinds.setdefault((taken[-1].dtype, taken[-1].device), []).append(number)
    for numbers in kinds.values():
        packed = torch.cat([taken[number] for number in numbers]).cpu()
        view = packed.view(torch.uint8).numpy().data
        at = 0
        for number in numbers:
            end = at + taken[number].nbytes
            found[number] = zlib.crc32(view[at:end])
            at = end
    return found


def _taken(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    bits = tensor.view(_INTEGERS[tensor.itemsize])
    return bits.reshape(-1) if bits.numel() <= COUNT else bits[_places(tuple(bits.shape), bits.device)]


@lru_cache(maxsize=1024)
def _places(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    steps = torch.arange(COUNT, dtype=torch.int64)
    return tuple(
        (steps * _FACTORS[d % len(_FACTORS)] + steps * steps * d).remainder(size).to(device)
        for d, size in enumerate(shape)
    )
