"""Ranks that must do the same or nothing: one small collective tells whether all can go on, and whether they have the same."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import current_operation, waiting
from farstep.errors import FarstepError, RankLost, StateError, StateMismatch
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.kept import keep

__all__ = ["Settings", "agree", "everyones", "first_mark", "firsts", "gathered", "mark_of"]

_MARK_BYTES = 16

Settings = Mapping[str, Any]
"""Arguments that all ranks are to give alike."""


def agree(
    error: Exception | None,
    group: Group,
    doing: str,
    mark: bytes = bytes(_MARK_BYTES),
    *,
    settings: Settings | None = None,
    kind: type[FarstepError] = StateError,
    help: str = "",
) -> bool:
    """All go on, or all raise: each its own error, or a `kind` that tells that of the first rank that has one, and the `help`.

    All raise too where ranks were given other `settings`, or do something else. Returns whether all have the same mark.
    """
    rows = _rows(error, group, doing, mark, settings, kind, help)
    return bool((rows == rows[0]).all())


def first_mark(mark: bytes, error: Exception | None, group: Group, doing: str) -> bytes:
    """That of the first rank. Raises if one cannot go on."""
    return bytes(_rows(error, group, doing, mark, None, StateError, "")[0, -_MARK_BYTES:].tolist())


def everyones(
    value: Any,
    error: Exception | None,
    group: Group,
    doing: str,
    *,
    settings: Settings | None = None,
    kind: type[FarstepError] = StateError,
) -> list[Any] | None:
    """Every rank's, by rank; None if all have the same, which is then not sent. Raises if one cannot go on."""
    if size_of(group) == 1:
        agree(error, group, doing)
        return None
    text, error = _pickled(value, error)
    if agree(error, group, doing, mark_of(text), settings=settings, kind=kind):
        return None
    return _unpickled(gathered(text, group, doing, kind=kind), group, doing, kind)


def firsts(
    value: Any,
    error: Exception | None,
    group: Group,
    doing: str,
    *,
    settings: Settings | None = None,
    kind: type[FarstepError] = StateError,
) -> Any:
    """What the first rank has. Raises if one cannot go on."""
    text = b""
    if own_rank(group) == 0:
        text, error = _pickled(value, error)
    rows = _rows(error, group, doing, len(text).to_bytes(_MARK_BYTES), settings, kind, "")
    if len(rows) == 1:
        return value
    length = int.from_bytes(bytes(rows[0, -_MARK_BYTES:].tolist()))
    sent = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(length, dtype=torch.uint8)
    )
    sent = sent.to(_device(group))
    keep(sent)
    with waiting(group, doing):
        dist.broadcast(sent, group=group, group_src=0)
    return _unpickled([sent.cpu().numpy().tobytes()], group, doing, kind)[0]


def gathered(value: Any, group: Group, doing: str, *, kind: type[FarstepError] = StateError) -> list[Any]:
    """Every rank's, by rank."""
    if size_of(group) == 1:
        return [value]
    found: list[Any] = [None] * size_of(group)
    with waiting(group, doing):
        dist.all_gather_object(found, value, group)
    return found


def mark_of(*parts: bytes) -> bytes:
    """The same for the same bytes."""
    whole = hashlib.blake2b(digest_size=_MARK_BYTES)
    for part in parts:
        whole.update(part)
    return whole.digest()


def _rows(
    error: Exception | None,
    group: Group,
    doing: str,
    mark: bytes,
    settings: Settings | None,
    kind: type[FarstepError],
    help: str,
) -> Tensor:
    """Every rank's mark, behind what all have the same. Raises unless all go on."""
    if isinstance(error, RankLost):
        raise error  # the others cannot be told
    if size_of(group) == 1:
        if error is not None:
            raise error
        return torch.tensor([[*mark]], dtype=torch.uint8)
    act = mark_of(f"{doing} {settings}".encode())
    mine = torch.tensor([error is not None, *act, *mark], dtype=torch.uint8, device=_device(group))
    every = torch.empty(size_of(group), len(mine), dtype=torch.uint8, device=mine.device)
    parts = every.unbind()
    keep(mine, *parts)
    with waiting(group, doing):
        dist.all_gather(list(parts), mine, group=group)
        rows = every.cpu()
    if rows[:, 0].any():
        mismatch = isinstance(error, StateMismatch)
        told = None if error is None else (mismatch, type(error).__name__, str(error))
        every_told = gathered((told, _Act(doing, current_operation())), group, doing, kind=kind)
        texts = [text for text, _ in every_told]
        if other := _other_act([act for _, act in every_told]):
            # An error of something else than this rank called is not one of what it called.
            raise kind(f"{doing} did not come about: {other}. All ranks call the same") from error
        if error is not None:
            raise error
        first = next(rank for rank, text in enumerate(texts) if text is not None)
        mismatch, name, text = texts[first]
        words = f"{doing} did not come about, because of rank {first}: {name}: {text}"
        failure = (StateMismatch if mismatch else kind)(words + (f". {help}" if help else ""))
        if isinstance(failure, StateError):
            failure.kind = name
        raise failure
    acts = rows[:, 1 : 1 + _MARK_BYTES]
    if not (acts == acts[0]).all():
        said = gathered(
            (_Act(doing, current_operation()), {k: repr(v) for k, v in (settings or {}).items()}),
            group,
            doing,
            kind=kind,
        )
        other = _other_act([act for act, _ in said]) or _difference([each for _, each in said])
        raise kind(f"{doing} did not come about: {other}. All ranks give the same")
    return rows


class _Act(NamedTuple):
    """What a rank does, and the public operation that it is a part of."""

    doing: str
    operation: str


def _other_act(acts: list[_Act]) -> str:
    """Which rank does something else than the first; "" if all do the same."""
    first = acts[0]
    for rank, act in enumerate(acts):
        if act.doing != first.doing:
            if act.operation == first.operation or not (act.operation and first.operation):
                return f"rank 0 is {first.doing} and rank {rank} is {act.doing}"
            return (
                f"rank {rank} called {act.operation} ({act.doing}) while rank 0 called "
                f"{first.operation} ({first.doing})"
            )
    return ""


def _difference(said: list[dict[str, str]]) -> str:
    for key in said[0]:
        for rank, each in enumerate(said):
            if each.get(key) != said[0][key]:
                return f"{key} is {said[0][key]} on rank 0 and {each.get(key, 'absent')} on rank {rank}"
    return "the ranks were given other arguments"


def _pickled(value: Any, error: Exception | None) -> tuple[bytes, Exception | None]:
    if error is not None:
        return b"", error
    try:
        return pickle.dumps(value), None
    except Exception as exc:
        failure = StateError(
            f"what this rank has cannot be told to the others, because something in the state or in its options cannot be pickled: {exc}"
        )
        failure.__cause__ = exc
        return b"", failure


def _unpickled(texts: list[bytes], group: Group, doing: str, kind: type[FarstepError]) -> list[Any]:
    found, error = [], None
    try:
        found = [pickle.loads(each) for each in texts]
    except Exception as exc:
        error = StateError(f"what other ranks have told this one cannot be unpickled here: {exc}")
        error.__cause__ = exc
    agree(error, group, doing, kind=kind)
    return found


def _device(group: Group) -> torch.device:
    return torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
