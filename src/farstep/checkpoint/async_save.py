"""Saving in the background: the caller waits for a copy of what this rank writes, and not for the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from farstep.checkpoint.elsewhere import steps_stopped
from farstep.checkpoint.handle import SaveHandle, begin, settle
from farstep.checkpoint.manifest import no_collector
from farstep.checkpoint.ranks import Ranks, group_beside
from farstep.checkpoint.saving import Draft, drafted, written
from farstep.checkpoint.staging import Copy, staging
from farstep.checkpoint.storage import Storage, refuse_swapped, storage_of
from farstep.checkpoint.writing import Progress
from farstep.dist import operation
from farstep.state.adapters.ranks import Group

__all__ = ["async_save", "saved_behind"]

_one_call = threading.Lock()


@operation("checkpoint.async_save")
def async_save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    group: Group = None,
    no_dist: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    rpc_timeout: float | None = None,
) -> SaveHandle:
    """Save a state as `save` does, but return as soon as it has been copied; a thread writes the copy. All ranks of the group call it.

    What happens to the state after the call does not change what is saved. The copy is of what this rank writes, in main memory, which is kept for the
    next one (`release_staging` gives it back). There is one copy at most: if a save is under way in this process, this one waits for it first,
    and so does `save`.

    What fails later is raised by the handle's `wait`, and, if nobody waits, by the next `save` or `async_save` of this process, which then does
    nothing else; at the end of the process, which waits for the save, it is a warning. Until the new checkpoint is whole the old one stays.

    `progress(bytes_done, bytes_total)` is called on the thread that writes. With several ranks the thread has a process group of its own (gloo), made at the first call for a group. Wait before
    `destroy_process_group`.

    What workers of RPC own is copied aside by each owner, before this returns, and written by it in the background. `rpc_timeout` is as in `save`, for the copies and for the writing. Wait before `shutdown`.
    """
    refuse_swapped("async_save(state, path)", state, path)
    ranks = Ranks(group, no_dist, rpc_timeout)
    return saved_behind(state, storage_of(path, storage_options), ranks, progress)


def saved_behind(
    state: Any,
    storage: Storage,
    ranks: Ranks,
    progress: Progress | None,
    write: Callable[[Draft, Progress], None] = written,
) -> SaveHandle:
    """The same; `write` is what the thread does."""
    with _one_call, no_collector():
        settle(ranks, f"saving into {storage}")
        with steps_stopped(state, ranks, f"saving into {storage}") as stopped:
            draft = drafted(state, storage, ranks, stopped)
            staged = None
            if draft.references:
                from farstep.checkpoint.rpc_saving import staged_by_owners

                staged = staged_by_owners(draft, ranks.rpc_timeout)
            # No rank waits here for the copies of the others: that one could not be made is told in the background.
            copy: Copy | None = None
            error: Exception | None = None
            try:
                copy = staging.copy(draft.writes, ranks.count)
            except Exception as exc:
                error = exc
            if stopped is not None:
                stopped.resume()
        total = sum(each.tensor.nbytes for each in draft.writes)
        draft = replace(draft, ranks=_behind(ranks), writes=(), staged=staged)

        @operation("async_save", home=draft.ranks.group)
        def work(told: Progress) -> None:
            with draft.ranks.all_or_none(draft.doing):
                if error is not None:
                    raise error
            assert copy is not None
            draft.writes = copy.writes()
            write(draft, told)

        return begin(str(storage), total, work, progress)


def _behind(ranks: Ranks) -> Ranks:
    """The same ranks, for another thread."""
    if ranks.alone:
        return ranks
    members = dist.get_process_group_ranks(ranks.group or dist.group.WORLD)
    return Ranks(group_beside(ranks.group, members))
