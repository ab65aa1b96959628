"""Saving what other workers own: each writes its own files, all at once, while this one writes its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from farstep.checkpoint import rpc_calls
from farstep.checkpoint.elsewhere import agent_of, by_owner, failure, is_below, target_of
from farstep.checkpoint.manifest import TensorInfo, data_file
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.writing import Part
from farstep.errors import CheckpointError
from farstep.optim.owners import ask_owners

if TYPE_CHECKING:
    from farstep.rpc.rref import RRef

__all__ = ["OwnersPart", "written_by_owners"]


class OwnersPart:
    """What owners have written: their nodes by entry, their tensors, and a part of each."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.parts: list[Part] = []


def written_by_owners(
    entries: Mapping[str, RRef[Any]],
    storage: Storage,
    save: str,
    taken: Iterable[str],
    rpc_timeout: float,
    write_own: Callable[[int], Part],
) -> tuple[Part, OwnersPart]:
    """`write_own(count)` writes this worker's own part, as the first of so many writers. `taken` are the names that it has."""
    target, agent = target_of(storage), agent_of(entries)
    timeout_s = agent.effective_timeout(rpc_timeout)
    owners = by_owner(entries)
    count = len(owners) + 1
    args = {
        owner: (target, save, number, count, theirs, timeout_s)
        for number, (owner, theirs) in enumerate(owners.items(), 1)
    }
    with ThreadPoolExecutor(1, "farstep-save") as pool:
        asking = pool.submit(copy_context().run, ask_owners, agent, rpc_calls.write, args, timeout_s)
        own = write_own(count)
        outcome = asking.result()
    if outcome.errors:
        raise failure(outcome, f"did not save its part into {storage}", "Nothing has been saved; what was there before still is")  # fmt: skip
    found = OwnersPart()
    names = set(taken)
    for number, (owner, theirs) in enumerate(owners.items(), 1):
        nodes, tensors, columns = outcome.results[owner]
        wanted = [name for name, _ in theirs]
        part = _part(columns, number, count, save)
        if part is None or nodes.keys() != set(wanted) or not _are_its_own(tensors, part, wanted, names):
            raise CheckpointError(
                f"worker {owner.name!r} says that it has saved other things than it was asked for, or under names that others have. Nothing has been saved"
            )
        names |= tensors.keys()
        found.nodes |= nodes
        found.tensors |= {name: TensorInfo(dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        found.parts.append(part)
    return own, found


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
