"""Saving what other workers own: each writes its own files, all at once, while this one writes its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from farstep.checkpoint import rpc_calls
from farstep.checkpoint.elsewhere import Elsewhere, agent_of, by_owner, failure, hidden, is_below, target_of
from farstep.checkpoint.manifest import TensorInfo, data_file
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.writing import Part
from farstep.errors import CheckpointError
from farstep.optim.owners import ask_owners

if TYPE_CHECKING:
    from farstep.checkpoint.rpc_stopping import Stopped
    from farstep.checkpoint.saving import Draft
    from farstep.rpc.membership import WorkerInfo
    from farstep.rpc.rref import RRef

__all__ = ["OwnersPart", "staged_by_owners", "written_by_owners"]


class OwnersPart:
    """What owners have written: their nodes by entry, their tensors, and a part of each."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.parts: list[Part] = []
        self.workers: list[str] = []
        """The names of all who have written, this worker's first."""


def written_by_owners(
    entries: Mapping[str, RRef[Any]],
    storage: Storage,
    save: str,
    taken: Iterable[str],
    rpc_timeout: float,
    write_own: Callable[[int], Part],
    staged: Mapping[WorkerInfo, RRef[rpc_calls.Staged]] | None = None,
    stopped: Stopped | None = None,
) -> tuple[Part, OwnersPart]:
    """`write_own(count)` writes this worker's own part, as the first of so many writers. `taken` are the names that it has.

    Owners write what they have `staged`, or else what they have now.
    """
    target, agent = target_of(storage), agent_of(entries)
    timeout_s = agent.effective_timeout(rpc_timeout)
    owners = by_owner(entries)
    count = len(owners) + 1
    function = rpc_calls.write if staged is None else rpc_calls.write_staged
    looks = {} if stopped is None else stopped.looks
    args: dict[WorkerInfo, tuple[Any, ...]] = {}
    for number, (owner, theirs) in enumerate(owners.items(), 1):
        what = (theirs, looks.get(owner)) if staged is None else (staged[owner],)
        args[owner] = (target, save, number, count, *what, timeout_s)
    with ThreadPoolExecutor(1, "farstep-save") as pool:
        asking = pool.submit(copy_context().run, ask_owners, agent, function, args, timeout_s)
        own = write_own(count)
        outcome = asking.result()
    if outcome.errors:
        raise failure(outcome, f"did not save its part into {storage}", "Nothing has been saved; what was there before still is")  # fmt: skip
    found = OwnersPart()
    found.workers = [agent.info.name, *(owner.name for owner in owners)]
    names = set(taken)
    nested = {} if stopped is None else dict(stopped.references)
    for number, (owner, theirs) in enumerate(owners.items(), 1):
        nodes, tensors, columns = outcome.results[owner]
        wanted = [name for name, _ in theirs]
        part = _part(columns, number, count, save)
        if part is None or nodes.keys() != set(wanted) or not _are_its_own(tensors, part, wanted, names):
            raise CheckpointError(
                f"worker {owner.name!r} says that it has saved other things than it was asked for, or under names that others have. Nothing has been saved"
            )
        names |= tensors.keys()
        found.nodes |= {name: _opened(node, name, nested, owner) for name, node in nodes.items()}
        found.tensors |= {name: TensorInfo(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        found.parts.append(part)
    return own, found


def _opened(node: Any, head: str, nested: dict[str, Any], owner: WorkerInfo) -> Any:
    """An owner's node, with an `Elsewhere` for each thing within it that others own. Those are
    taken out of `nested`: each comes once."""
    if isinstance(node, tuple):
        name = node[1] if len(node) == 2 and node[0] == "elsewhere" else None
        if type(name) is not str or name == head or not is_below(name, {head}):
            raise CheckpointError(
                f"worker {owner.name!r} has sent something as {head!r} that is no part of a "
                f"state. Nothing has been saved"
            )
        if nested.pop(name, None) is None:
            raise hidden(name)
        return Elsewhere(name)
    if isinstance(node, dict):
        return {key: _opened(each, head, nested, owner) for key, each in node.items()}
    if isinstance(node, list):
        return [_opened(each, head, nested, owner) for each in node]
    return node


def staged_by_owners(draft: Draft, rpc_timeout: float) -> dict[WorkerInfo, RRef[rpc_calls.Staged]]:
    """Every owner has copied aside what it is to write, but for copies. Raises CheckpointError
    if one has not, or could not be told where to write."""
    storage = draft.storage
    target_of(storage)
    agent = agent_of(draft.references)
    timeout_s = agent.effective_timeout(rpc_timeout)
    looks = {} if draft.stopped is None else draft.stopped.looks
    args = {
        owner: (theirs, {name for name, _ in theirs if name in draft.copies}, looks.get(owner), timeout_s)
        for owner, theirs in by_owner(draft.references).items()
    }
    outcome = ask_owners(agent, rpc_calls.stage, args, timeout_s)
    if outcome.errors:
        raise failure(outcome, f"did not copy its part, which was to be saved into {storage}", "Nothing has been saved; what was there before still is")  # fmt: skip
    return outcome.results


def _part(columns: Any, number: int, count: int, save: str) -> Part | None:
    """As the owner says; None if it cannot have written that."""
    files, names, *numbers = columns
    if [name for name, _ in files] != [data_file(save, number + i * count) for i in range(len(files))]:
        return None
    if len(numbers) != 5 or not all(isinstance(each, Tensor) for each in numbers):
        return None
    file, at, offsets, sizes, checksums = (each.numpy() for each in numbers)
    if not len(file) == len(at) == len(names) or (
        len(file) and not 0 <= file.min() <= file.max() < len(files)
    ):
        return None
    return Part(number, [(name, int(nbytes)) for name, nbytes in files], list(names), file, at, offsets, sizes, checksums.view(np.uint64))  # fmt: skip


def _are_its_own(tensors: Mapping[str, Any], part: Part, entries: list[str], taken: set[str]) -> bool:
    heads = set(entries)
    if not tensors.keys().isdisjoint(taken) or not set(part.names) <= tensors.keys():
        return False
    return all(is_below(name, heads) for name in tensors)
