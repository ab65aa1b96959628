"""Ranks that must do the same or nothing: one small collective tells whether all can go on, and whether they have the same."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
import torch.distributed as dist

from farstep.errors import StateError, StateMismatch
from farstep.state.adapters.ranks import Group, size_of

__all__ = ["agree", "everyones", "mark_of"]

_MARK_BYTES = 16


def agree(error: Exception | None, group: Group, doing: str, mark: bytes = bytes(_MARK_BYTES)) -> bool:
    """All go on, or all raise: each its own error, or that of the first rank that has one. Returns whether all have the same mark."""
    if size_of(group) == 1:
        if error is not None:
            raise error
        return True
    device = torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
    mine = torch.tensor([error is not None, *mark], dtype=torch.uint8, device=device)
    every = torch.empty(size_of(group), len(mine), dtype=torch.uint8, device=device)
    dist.all_gather(list(every.unbind()), mine, group=group)
    rows = every.cpu()
    if rows[:, 0].any():
        texts: list[Any] = [None] * size_of(group)
        mismatch = isinstance(error, StateMismatch)
        told = None if error is None else (mismatch, type(error).__name__, str(error))
        dist.all_gather_object(texts, told, group)
        if error is not None:
            raise error
        first = next(rank for rank, text in enumerate(texts) if text is not None)
        mismatch, name, text = texts[first]
        said = f"{doing} did not come about, because of rank {first}: {name}: {text}"
        if mismatch:
            raise StateMismatch(said)
        told_of = StateError(said)
        told_of.kind = name
        raise told_of
    return bool((rows == rows[0]).all())


def everyones(value: Any, error: Exception | None, group: Group, doing: str) -> list[Any] | None:
    """Every rank's, by rank; None if all have the same, which is then not sent. Raises if one cannot go on."""
    text = pickle.dumps(value) if error is None and size_of(group) > 1 else b""
    if agree(error, group, doing, mark_of(text)):
        return None
    found: list[Any] = [None] * size_of(group)
    dist.all_gather_object(found, text, group)
    return [pickle.loads(each) for each in found]


def mark_of(*parts: bytes) -> bytes:
    """The same for the same bytes."""
    whole = hashlib.blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        whole.update(part)
    return whole.digest()
