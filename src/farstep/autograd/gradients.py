"""The gradients of one context: leaf tensor -> gradient, instead of `.grad`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

__all__ = ["Gradients", "add"]


def add(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients of one tensor, dense or sparse."""
    if old is None:
        return new
    return new + old if old.layout is not torch.strided and new.layout is torch.strided else old + new


class Gradients:
    """Adds up. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By the leaf's id: a tensor's hash is a call.
        self._leaves: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._own: set[int] = set()
        """Leaves whose gradient is memory that nobody else has, so that it can be added to in place."""
        self._borrowed: dict[int, int] = {}
        """Where the memory is that was taken over as it was -> the leaf it was taken for."""

    def accumulate(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take gradients over, without a copy where each has its memory to itself."""
        addresses = [_address(gradient) for _, gradient in found]
        shared = _repeated(addresses)
        with self._lock:
            for (leaf, gradient), address in zip(found, addresses, strict=True):
                key = id(leaf)
                old = self._gradients.get(key)
                if old is None:
                    # One gradient may flow to several leaves, of which one may have taken its memory already.
                    lender = self._borrowed.get(address)
                    is_taken = address in shared or (lender is not None and lender not in self._own)
                    if is_taken or not _is_dense(gradient):
                        gradient = _copy(gradient)
                        self._own.add(key)
                    else:
                        self._borrowed[address] = key
                    self._leaves[key] = leaf
                    self._gradients[key] = gradient
                elif key in self._own and old.layout is torch.strided and not gradient.requires_grad:
                    old += gradient
                else:
                    self._gradients[key] = add(old, gradient)
                    if not gradient.requires_grad:
                        self._own.add(key)

    def change(
        self, leaves: Iterable[torch.Tensor], function: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> None:
        """Put `function(gradient, mine)` in the place of each of these leaves' gradients: a new tensor, or, where it is `mine`
        because nobody else has its memory, the same one changed."""
        with self._lock:
            for leaf in leaves:
                key = id(leaf)
                old = self._gradients.get(key)
                if old is not None:
                    self._gradients[key] = function(old, key in self._own)
                    self._own.add(key)

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            return {leaf: self._gradients[key] for key, leaf in self._leaves.items()}

    def clear(self) -> None:
        with self._lock:
            self._leaves.clear()
            self._gradients.clear()
            self._own.clear()
            self._borrowed.clear()


def _repeated(addresses: list[int]) -> set[int]:
    if len(set(addresses)) == len(addresses):
        return set()
    return {address for address in addresses if addresses.count(address) > 1}


def _address(gradient: torch.Tensor) -> int:
    return (gradient._values() if gradient.layout is torch.sparse_coo else gradient).data_ptr()


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.clone()


def _is_dense(gradient: torch.Tensor) -> bool:
    """Whether every element has a place of its own and there are no gaps."""
    if gradient.layout is torch.sparse_coo:
        return gradient._values().is_contiguous() and gradient._indices().is_contiguous()
    if gradient.layout is not torch.strided or gradient.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(gradient.stride(), gradient.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
