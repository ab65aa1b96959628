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
        self._by_leaf: dict[torch.Tensor, torch.Tensor] = {}
        self._own: set[torch.Tensor] = set()
        """Leaves whose gradient is memory that nobody else has, so that it can be added to in place."""
        self._borrowed: dict[int, torch.Tensor] = {}
        """Where the memory is that was taken over as it was -> the leaf it was taken for."""

    def accumulate(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take gradients over, without a copy where each has its memory to itself."""
        addresses = [_address(gradient) for _, gradient in found]
        shared = _repeated(addresses)
        with self._lock:
            for (leaf, gradient), address in zip(found, addresses, strict=True):
                old = self._by_leaf.get(leaf)
                if old is None:
                    if address in shared or not _is_dense(gradient) or self._is_borrowed(address):
                        gradient = _copy(gradient)
                        self._own.add(leaf)
                    else:
                        self._borrowed[address] = leaf
                    self._by_leaf[leaf] = gradient
                elif leaf in self._own and old.layout is torch.strided and not gradient.requires_grad:
                    old += gradient
                else:
                    self._by_leaf[leaf] = add(old, gradient)
                    if not gradient.requires_grad:
                        self._own.add(leaf)

    def change(
        self, leaves: Iterable[torch.Tensor], function: Callable[[torch.Tensor, bool], torch.Tensor]
    ) -> None:
        """Put `function(gradient, mine)` in the place of each of these leaves' gradients: a new tensor, or, where it is `mine`
        because nobody else has its memory, the same one changed."""
        with self._lock:
            for leaf in leaves:
                old = self._by_leaf.get(leaf)
                if old is not None:
                    self._by_leaf[leaf] = function(old, leaf in self._own)
                    self._own.add(leaf)

    def _is_borrowed(self, address: int) -> bool:
        """Under the lock. Whether this very memory is another leaf's gradient: one gradient may flow to several leaves."""
        leaf = self._borrowed.get(address)
        return leaf is not None and leaf not in self._own

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            return dict(self._by_leaf)

    def clear(self) -> None:
        with self._lock:
            self._by_leaf.clear()
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
