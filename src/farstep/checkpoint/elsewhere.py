"""What a state has on other workers of RPC: whose it is, and how they are told where a checkpoint is.

Nothing here imports RPC: where nobody has, there is no reference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farstep import errors
from farstep.checkpoint.local_disk import LocalDisk
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.remote import RemoteStorage
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import MOST_DEPTH, joined, plain_key
from farstep.errors import CheckpointError

if TYPE_CHECKING:
    from farstep.checkpoint.rpc_stopping import Stopped
    from farstep.optim.distributed import DistributedOptimizer
    from farstep.optim.owners import Outcome
    from farstep.rpc.agent import Agent
    from farstep.rpc.membership import WorkerInfo
    from farstep.rpc.rref import RRef

__all__ = ["Elsewhere", "Target", "agent_of", "by_owner", "failure", "hidden", "is_below", "placed", "reference_in", "sharded_state", "spread_optimizer", "steps_stopped", "target_of", "within"]  # fmt: skip

Target = tuple[str, dict[str, Any]]
"""A directory's path or URL, and options for fsspec: what `storage_of` makes a storage of."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands in a tree for the node that an owner will give."""

    name: str


def reference_in(value: Any) -> RRef[Any] | None:
    """Of an RRef or a RemoteModule; None for anything else."""
    rpc = sys.modules.get("farstep.rpc.rref")
    if rpc is not None and isinstance(value, rpc.RRef):
        found: RRef[Any] = value
        return found
    modules = sys.modules.get("farstep.rpc.remote_module")
    if modules is not None and isinstance(value, modules.RemoteModule):
        found = value.module_rref
        return found
    return None


def spread_optimizer(value: Any) -> DistributedOptimizer | None:
    optim = sys.modules.get("farstep.optim.distributed")
    return value if optim is not None and isinstance(value, optim.DistributedOptimizer) else None


def within(
    value: Any, name: str = "", *, for_another: bool = False, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """References and DistributedOptimizers in dicts and lists, with their names. `for_another`:
    references of what this worker owns are followed."""
    if depth > MOST_DEPTH:
        raise CheckpointError(f"{name[:200]!r} is nested too deep, or has itself inside")
    rref = reference_in(value)
    if rref is not None and for_another and rref.is_owner():
        yield from within(rref.local_value(), name, for_another=True, depth=depth + 1)
    elif rref is not None or spread_optimizer(value) is not None:
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from within(each, joined(name, plain_key(key)), for_another=for_another, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from within(each, joined(name, number), for_another=for_another, depth=depth + 1)


@contextmanager
def steps_stopped(state: Any, ranks: Ranks, doing: str) -> Iterator[Stopped | None]:
    """For a save: no DistributedOptimizer in the state takes a step, whichever worker has it.
    None if the state has nothing of RPC."""
    if not ranks.alone or "farstep.rpc.rref" not in sys.modules:
        yield None  # what cannot be saved so is refused later, with its place
        return
    references, optimizers = {}, {}
    for name, value in within(state):
        if (rref := reference_in(value)) is not None:
            references[name] = rref
        else:
            optimizers[name] = value
    if "" in {**references, **optimizers} or not (references or optimizers):
        yield None
        return
    from farstep.checkpoint.rpc_stopping import Stopped

    stopped = Stopped(references, optimizers, doing, ranks.rpc_timeout, saves=True)
    try:
        yield stopped
    finally:
        stopped.drop()


def sharded_state(optimizer: DistributedOptimizer, name: str, timeout: float) -> dict[str, Any]:
    """By the names of parameters, with references of copies that their owners have made. Raises CheckpointError."""
    try:
        return optimizer.state_dict(sharded=True, timeout=timeout)
    except (errors.RpcError, errors.OptimError) as exc:
        notes = "; ".join(getattr(exc, "__notes__", ()))
        raise CheckpointError(
            f"{name!r} cannot be saved{f' ({notes})' if notes else ''}: {type(exc).__name__}: {exc}. Nothing has been saved"
        ) from exc


def target_of(storage: Storage) -> Target:
    """Raises CheckpointError for a storage that only this process knows."""
    if type(storage) is LocalDisk:
        return os.path.abspath(storage.path), {}
    if type(storage) is RemoteStorage:
        return storage.url, dict(storage.options)
    raise CheckpointError(
        f"{storage} is a {type(storage).__name__}, which other workers cannot be told of: a state with RRefs or a DistributedOptimizer in it needs a path or a "
        f"URL that all workers reach"
    )


def hidden(name: str) -> CheckpointError:
    """For what another worker could not find before it asked for the state."""
    return CheckpointError(
        f"{name!r} is a reference or a DistributedOptimizer in what an object's state_dict gives, "
        f"on another worker: put it into a dict or list beside the object, and save a "
        f"reference of that"
    )


def agent_of(entries: Mapping[str, RRef[Any]]) -> Agent:
    agents = {id(each._agent): each._agent for each in entries.values()}
    if len(agents) != 1:
        raise CheckpointError(
            f"the state has references of {len(agents)} agents: save what each has by itself"
        )
    return next(iter(agents.values()))


def by_owner(entries: Mapping[str, RRef[Any]]) -> dict[WorkerInfo, list[tuple[str, RRef[Any]]]]:
    found: dict[WorkerInfo, list[tuple[str, RRef[Any]]]] = {}
    for name, rref in entries.items():
        found.setdefault(rref.owner(), []).append((name, rref))
    return found


def is_below(name: str, heads: Container[str]) -> bool:
    """Whether it is one of these, or within one."""
    while name and name not in heads:
        name = name.rpartition(".")[0]
    return bool(name)


def placed(tree: Any, nodes: Mapping[str, Any]) -> Any:
    """The tree, with the owners' nodes in place."""
    if isinstance(tree, Elsewhere):
        return placed(nodes[tree.name], nodes)
    if isinstance(tree, dict):
        return {key: placed(each, nodes) for key, each in tree.items()}
    if isinstance(tree, list):
        return [placed(each, nodes) for each in tree]
    return tree


def failure(outcome: Outcome, what: str, after: str) -> CheckpointError:
    """One error for all owners that failed, of the class that they all have."""
    kinds = {type(each) for each in outcome.errors.values()}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    if not issubclass(kind, CheckpointError) or getattr(errors, kind.__name__, None) is not kind:
        kind = CheckpointError
    told = "; ".join(
        f"worker {owner.name!r} {what}: {'' if issubclass(type(each), CheckpointError) else f'{type(each).__name__}: '}{each}"
        for owner, each in outcome.errors.items()
    )
    error: CheckpointError = kind(f"{told}. {after}")
    error.__cause__ = outcome.first_error()
    return error
