"""Ranks that must do the same or nothing: one small collective tells whether all can go on, and whether they have the same."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from farstep.errors import FarstepError, StateError, StateMismatch
from farstep.state.adapters.ranks import Group, own_rank, size_of

__all__ = ["agree", "everyones", "mark_of"]

_MARK_BYTES = 16


def agree(
    error: Exception | None,
    group: Group,
    doing: str,
    mark: bytes = bytes(_MARK_BYTES),
    *,
    kind: type[FarstepError] = StateError,
    help: str = "",
) -> bool:
    """All go on, or all raise: each its own error, or a `kind` that tells that of the first rank that has one, and the `help`.

    Returns whether all have the same mark.
    """
    if size_of(group) == 1:
        if error is not None:
            raise error
        return True
    device = torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
    mine = torch.tensor([error is not None, *mark], dtype=torch.uint8, device=device)
    every = torch.empty(size_of(group), len(mine), dtype=torch.uint8, device=device)
    with _waiting(group, doing, kind):
        dist.all_gather(list(every.unbind()), mine, group=group)
    rows = every.cpu()
    if rows[:, 0].any():
        mismatch = isinstance(error, StateMismatch)
        told = None if error is None else (mismatch, type(error).__name__, str(error))
        texts = _gathered(told, group, doing, kind)
        if error is not None:
            raise error
        first = next(rank for rank, text in enumerate(texts) if text is not None)
        mismatch, name, text = texts[first]
        said = f"{doing} did not come about, because of rank {first}: {name}: {text}"
        failure = (StateMismatch if mismatch else kind)(said + (f". {help}" if help else ""))
        if isinstance(failure, StateError):
            failure.kind = name
        raise failure
    return bool((rows == rows[0]).all())


def everyones(
    value: Any, error: Exception | None, group: Group, doing: str, *, kind: type[FarstepError] = StateError
) -> list[Any] | None:
    """Every rank's, by rank; None if all have the same, which is then not sent. Raises if one cannot go on."""
    text = pickle.dumps(value) if error is None and size_of(group) > 1 else b""
    if agree(error, group, doing, mark_of(text), kind=kind):
        return None
    return [pickle.loads(each) for each in _gathered(text, group, doing, kind)]


def mark_of(*parts: bytes) -> bytes:
    """The same for the same bytes."""
    whole = hashlib.blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        whole.update(part)
    return whole.digest()


def _gathered(value: Any, group: Group, doing: str, kind: type[FarstepError]) -> list[Any]:
    found: list[Any] = [None] * size_of(group)
    with _waiting(group, doing, kind):
        dist.all_gather_object(found, value, group)
    return found


@contextmanager
def _waiting(group: Group, doing: str, kind: type[FarstepError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        raise kind(
            f"rank {own_rank(group)} has waited for the other ranks in vain, for {doing}: {exc}. All ranks of the group take part in it at once, and "
            f"one has died or does not"
        ) from exc
