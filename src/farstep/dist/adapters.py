"""What only torch's inside tells about a process group, and how to end what its ranks wait for."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Store", "break_group", "closed_peers", "connected_anew", "is_about_ranks", "store_of", "timeout_of"]

_PROBE_TAG, _BREAK_TAG = 0x57A7F, 0x57A80
_WORDS = ("gloo", "timed out", "timeout", "connection", "pair closure")
"""A plain RuntimeError of torch that has one of these is about other ranks."""


def is_about_ranks(error: BaseException) -> bool:
    """Return True if a collective failed because of other ranks, and not because of its arguments."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _WORDS)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long the group's ranks wait for one another; None if it does not say."""
    try:
        backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        found = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def store_of(group: dist.ProcessGroup) -> Store | None:
    """Return the store in which the group's ranks met, or None if the group has none."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):
        return None


def connected_anew(store: Store) -> Store:
    """Return the same store over a connection of its own."""
    own: Store = store.clone()  # type: ignore[attr-defined]
    return own


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks within the group to which the connection is closed: they ended, or gave the group up.

    The messages sent to find out are never received: call this only for a group that is given up.
    """
    if not _has_gloo(group):
        return []
    found = []
    for peer in _peers(group):
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=peer, tag=_PROBE_TAG)
        except RuntimeError:
            found.append(peer)
    return found


def break_group(group: dist.ProcessGroup) -> None:
    """Make everything fail that waits in the group, here at once and elsewhere when it meets this rank.

    gloo closes all connections of a group when a receive times out, and that is its only way to end a
    collective. Other backends have `abort`.
    """
    backend = dist.get_backend(group)  # what waited may destroy the group as soon as it is broken
    if "gloo" in backend:
        for peer in _peers(group):
            try:
                work = dist.irecv(torch.zeros(1), group=group, group_src=peer, tag=_BREAK_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as exc:
                if "timed out" in str(exc).lower():
                    break  # all connections are closed now; else only this one was
    if backend != "gloo":
        with suppress(AttributeError, RuntimeError):
            group.abort()


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "gloo" in dist.get_backend(group)


def _peers(group: dist.ProcessGroup) -> list[int]:
    own = dist.get_rank(group)
    return [rank for rank in range(dist.get_world_size(group)) if rank != own]
