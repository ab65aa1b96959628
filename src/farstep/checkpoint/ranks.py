"""The processes that save or load together: those of a process group, or this one alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from farstep import errors
from farstep.dist import waiting
from farstep.dist.adapters import timeout_of
from farstep.errors import CheckpointError, RankLost, StateError
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.council import agree, everyones, first_mark, mark_of

__all__ = ["Ranks", "group_beside", "has_told", "kind_named", "reached"]


class Ranks:
    """`group` is that of a process group's ranks; `alone` leaves all others out of it, whatever groups there are."""

    def __init__(self, group: Group = None, alone: bool = False, rpc_timeout: float | None = None) -> None:
        if alone and group is not None:
            raise ValueError("no_dist=True leaves other ranks out, so there is no group to give")
        self.group = _group_of_one() if alone else group
        self.alone = alone or size_of(group) == 1
        self.hint = (
            ". With no_dist=True a process saves and loads what it has all of by itself" if alone else ""
        )
        """What may be at the bottom of it if something is not laid out as it should be."""
        self.rpc_timeout = -1.0 if rpc_timeout is None else rpc_timeout
        """For what workers beyond the group own; -1: as RPC has it."""
        self.rank = 0 if alone else own_rank(group)
        self.count = 1 if alone else size_of(group)

    @contextmanager
    def all_or_none(self, doing: str) -> Iterator[None]:
        """Every rank does what is inside; if one fails there, all raise: it its own error, the others one that tells of it."""
        error: Exception | None = None
        try:
            yield
        except Exception as exc:
            error = exc
        self.agree(error, doing)

    def agree(self, error: Exception | None, doing: str, mark: bytes = b"") -> bool:
        """All go on, or all raise. Returns whether all gave the same mark."""
        error = self._own(error)
        with reached(error):
            return self.alone or agree(error, self.group, doing, mark_of(mark))

    def everyones(self, value: Any, doing: str, error: Exception | None = None) -> list[Any] | None:
        """Every rank's; None if all have the same. All raise if one has an error."""
        error = self._own(error)
        with reached(error):
            return None if self.alone else everyones(value, error, self.group, doing)

    def token_of_first(self, doing: str, act: Callable[[], str]) -> str:
        """The first rank does it, and gives 32 hex digits, which all get; if it fails, all raise."""
        token, error = "0" * 32, None
        try:
            token = act() if self.rank == 0 else token
        except Exception as exc:
            error = exc
        error = self._own(error)
        with reached(error):
            found = token if self.alone else first_mark(bytes.fromhex(token), error, self.group, doing).hex()
        if not found.strip("0"):  # nobody gives that
            raise CheckpointError(
                f"{doing} has come to nothing: the process group has ended meanwhile. Wait for a save before destroy_process_group"
            )
        return found

    def _own(self, error: Exception | None) -> Exception | None:
        """This rank's error as the others are to hear of it. One that is alone raises it."""
        if isinstance(error, StateError):
            error = _as_ours(error, self.hint)
        if self.alone and error is not None:
            raise error
        return error

    def to_first(self, value: Any) -> list[Any]:
        """On the first rank every rank's; nothing elsewhere."""
        if self.alone:
            return [value]
        found: list[Any] | None = [None] * self.count if self.rank == 0 else None
        with waiting(self.group, "telling the first rank what was written"):
            dist.gather_object(value, found, group=self.group, group_dst=0)
        return found or []

    def from_first(self, value: Any) -> Any:
        if self.alone:
            return value
        box = [value]
        with waiting(self.group, "hearing from the first rank"):
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


_beside: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
_making = Lock()


def group_beside(group: Group, members: Sequence[int]) -> dist.ProcessGroup:
    """Another group (gloo) that has these ranks of the job, made once, for as long as the one that is given is there. Its members call this, and no others."""
    known = group or dist.group.WORLD
    assert known is not None
    with _making:
        made = _beside.setdefault(known, {})
        found = made.get(tuple(members))
        if found is None:
            with reached():
                found = dist.new_group(members, timeout_of(group), "gloo", use_local_synchronization=True)
            made[tuple(members)] = found
        return found


def _group_of_one() -> Group:
    """A group that has this process alone; None where there are no others anyway."""
    return None if size_of(None) == 1 else group_beside(None, [dist.get_rank()])


_WORDS = ("gloo", "timed out", "timeout", "connection")
"""Of torch's plain RuntimeErrors, those that have one of these are about other ranks."""


def kind_named(name: str) -> type[CheckpointError]:
    """The class of that name, so that all who hear of an error can catch the same; CheckpointError if it is none of ours."""
    found = getattr(errors, name, CheckpointError)
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else CheckpointError


def _as_ours(exc: StateError, hint: str = "") -> CheckpointError:
    error = kind_named(exc.kind)(f"{exc}{hint}")
    error.__cause__ = exc
    return error


def has_told(error: BaseException) -> bool:
    """Whether another rank has said that it failed; else it is this rank's own error, or another is lost and may do anything."""
    return isinstance(error.__cause__, StateError) and bool(error.__cause__.kind)


@contextmanager
def reached(own: Exception | None = None) -> Iterator[None]:
    """Errors of other ranks, and of not reaching them, in words of checkpoints. This rank's `own` is raised as it is."""
    try:
        yield
    except RankLost:
        raise
    except StateError as exc:  # another rank's
        raise _as_ours(exc) from exc
    except CheckpointError:
        raise
    except RuntimeError as exc:
        if exc is own:
            raise
        text = str(exc).lower()
        if not isinstance(exc, dist.DistError) and not any(word in text for word in _WORDS):
            raise
        raise CheckpointError(
            f"another rank has died, or has not called this too: {exc}. save, load and async_save are called by all ranks of the group; where one saves for "
            f"itself, it says no_dist=True"
        ) from exc
