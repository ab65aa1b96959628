"""The memory of other ranks on the same host, read without a message: one copy instead of two, and nothing for the other rank to do.

Linux lets a process read another's memory where it would let it be debugged: the same user, and no stricter rule such as Yama's. Whether that is so is tried
out once, on all ranks; where it is not, pieces travel by messages.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from farstep.dist import waiting
from farstep.errors import ExchangeError

__all__ = ["Neighbours", "Span"]

Span = tuple[int, int]
"""Address and length in bytes."""
MOST_SPANS = 512
"""Of one call; the kernel takes 1,024."""


_known: WeakKeyDictionary[Any, Neighbours | None] = WeakKeyDictionary()


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Neighbours:
    """The processes of a group, by rank. Each may read the memory of all others."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._readv = _readv()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Neighbours | None:
        """None unless all ranks are on one host and may. All ranks call it, and come to the same."""
        token = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        cards = _gathered(group, (_host(), os.getpid(), ctypes.addressof(token), token.raw))
        found = cls([pid for _, pid, _, _ in cards]) if _readv() is not None else None
        may = found is not None and len({host for host, _, _, _ in cards}) == 1 and found._can_read(cards)
        return found if all(_gathered(group, may)) else None

    @classmethod
    def known(cls, group: dist.ProcessGroup | None) -> Neighbours | None:
        """The same, tried out only once for each group."""
        key = group if group is not None else dist.group.WORLD
        if key not in _known:
            _known[key] = cls.of(group)
        return _known[key]

    def _can_read(self, cards: Sequence[Any]) -> bool:
        for rank, (_, _, address, token) in enumerate(cards):
            copy = ctypes.create_string_buffer(16)
            try:
                self.read(rank, [(address, 16)], [(ctypes.addressof(copy), 16)])
            except ExchangeError:
                return False
            if copy.raw != token:
                return False  # a process of that number in another namespace
        return True

    def read(self, rank: int, there: Sequence[Span], here: Sequence[Span]) -> None:
        """Copy from a rank's memory. `there` and `here` have the same lengths, pair by pair."""
        for first in range(0, len(there), MOST_SPANS):
            self._read(rank, there[first : first + MOST_SPANS], here[first : first + MOST_SPANS])

    def _read(self, rank: int, there: Sequence[Span], here: Sequence[Span]) -> None:
        count = len(there)
        wanted = sum(nbytes for _, nbytes in there)
        remote, local = (
            (_Span * count)(*itertools.starmap(_Span, there)),
            (_Span * count)(*itertools.starmap(_Span, here)),
        )
        got = self._readv(self._pids[rank], local, count, remote, count, 0)
        if got == wanted:
            return
        if got < 0:
            error = ctypes.get_errno()
            raise ExchangeError(
                f"the memory of rank {rank} (process {self._pids[rank]}) cannot be read: {os.strerror(error)}. That rank has died, or its rights have changed"
            )
        # A call moves at most 2 GiB, and may stop between two spans.
        self._read(rank, *_rest(there, here, got))


def _rest(there: Sequence[Span], here: Sequence[Span], done: int) -> tuple[list[Span], list[Span]]:
    left: tuple[list[Span], list[Span]] = [], []
    for (a, nbytes), (b, _) in zip(there, here, strict=True):
        skip = min(done, nbytes)
        done -= skip
        if skip < nbytes:
            left[0].append((a + skip, nbytes - skip))
            left[1].append((b + skip, nbytes - skip))
    return left


def _gathered(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    with waiting(group, "finding out whether the ranks can read each other's memory"):
        dist.all_gather_object(found, value, group)
    return found


def _readv() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        function.restype = ctypes.c_ssize_t
        unsigned = ctypes.c_ulong
        function.argtypes = (ctypes.c_int, ctypes.c_void_p, unsigned, ctypes.c_void_p, unsigned, unsigned)
    return function


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return os.uname().nodename
