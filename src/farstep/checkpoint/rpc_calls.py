"""What an owner does for a checkpoint of another worker: the functions that its messages name.

[Note: what a caller may do] An owner writes into the directory that it is told, which must be there, and in it new files only, which are called as a save's data files are;
it reads what a manifest in that directory names, which is beside it. It follows no links in
either. What it saves and fills are values that the caller has references of, and what others own
within these, as far as it can itself. For so long a DistributedOptimizer among them takes no step.
A worker
with `trusted` set allows none of it, unless `farstep.checkpoint.rpc_calls` is in there. Even then it takes paths, and URLs of storages, but none of fsspec's URLs that
are made of others or of templates, which run more than they reach.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from farstep.checkpoint.collecting import Collected, collected
from farstep.checkpoint.elsewhere import Target, is_below, placed, reference_in, sharded_state, within
from farstep.checkpoint.filling import Filling
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.meta_tensors import MetaTensors
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import read_into, reads_for
from farstep.checkpoint.remote import is_plain_url
from farstep.checkpoint.renaming import Rename
from farstep.checkpoint.sources import reading, source_of
from farstep.checkpoint.staging import give_back, spare_staging
from farstep.checkpoint.storage import Storage, local_path, storage_of
from farstep.checkpoint.stored_values import read_values
from farstep.checkpoint.tree import decode
from farstep.checkpoint.writing import Part, Progress, Write, shared_out, write_part
from farstep.errors import CheckpointError, CheckpointMismatch, StorageFailed
from farstep.rpc.current import current_agent
from farstep.rpc.rref import RRef, local_value_of
from farstep.state import Layout

if TYPE_CHECKING:
    from farstep.checkpoint.rpc_loading import OwnersLoad

__all__ = ["Look", "Staged", "Written", "abandon", "commit", "fill", "look", "prepare", "read_states", "resume", "stage", "stop_steps", "write", "write_staged"]  # fmt: skip

T = TypeVar("T")
Entries = list[tuple[str, RRef[Any]]]
Columns = tuple[list[tuple[str, int]], list[str], Tensor, Tensor, Tensor, Tensor, Tensor]
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Written = tuple[dict[str, Any], Kinds, Columns]
"""The entries' nodes, their tensors, and the part as plain values and tensors."""
_MOST_WRITERS = 100_000


# -- before either ----------------------------------------------------------------------------------------


class Look:
    """The DistributedOptimizers in what this worker has of a state. They go on when the caller
    says so, or does not refer to this any more."""

    def __init__(self) -> None:
        self.optimizers: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        """For a save: by name, as `state_dict(sharded=True)` gives it."""
        self._stops: list[Any] = []

    def _stop(self, who: str, timeout_s: float) -> None:
        gates = {each._gate for each in self.optimizers.values()}
        for gate in sorted(gates, key=lambda each: each.number):
            self._stops.append(gate.stop(who, timeout_s * 0.8, timeout_s * 3))

    def _resume(self) -> bool:
        stops, self._stops = self._stops, []
        were_stopped = [each.release() for each in stops]
        return all(were_stopped)

    def __del__(self) -> None:
        self._resume()


def look(known: RRef[Look] | None, entries: Entries) -> tuple[RRef[Look], list[tuple[str, RRef[Any]]], bool]:
    """What these are made of: references of what others own, and whether there are optimizers.
    The first is for `stop_steps`."""
    seen = RRef(Look()) if known is None else known
    this = _local(seen, Look)
    references: list[tuple[str, RRef[Any]]] = []
    for name, rref in entries:
        for inner, value in within(_value(name, rref), name, for_another=True):
            if (nested := reference_in(value)) is not None:
                references.append((inner, nested))
            else:
                this.optimizers[inner] = value
    return seen, references, bool(this.optimizers)


def stop_steps(
    seen: RRef[Look], who: str, timeout_s: float, saves: bool
) -> dict[str, list[tuple[str, RRef[Any]]]]:
    """No optimizer that was seen takes a step from now on. If it is to be saved, returns where
    the copies of its state are, by the names that these have."""
    this = _local(seen, Look)
    found: dict[str, list[tuple[str, RRef[Any]]]] = {}
    try:
        this._stop(str(who)[:1000], timeout_s)
        for name, optimizer in this.optimizers.items() if saves else ():
            state = this.states[name] = sharded_state(optimizer, name, timeout_s * 0.9)
            found[name] = list(within(state, name, for_another=True))
    except BaseException:
        this._resume()
        raise
    return found


def resume(seen: RRef[Look]) -> bool:
    """The steps go on. Returns whether there were none until now."""
    return _local(seen, Look)._resume()


# -- saving -----------------------------------------------------------------------------------------------


def write(
    target: Target,
    save: str,
    number: int,
    count: int,
    entries: Entries,
    seen: RRef[Look] | None,
    timeout_s: float,
) -> Written:
    """Write these into files of this owner's own, which is writer `number` of `count`."""
    storage = _storage_for(target, save, number, count)
    values = {name: _value(name, rref) for name, rref in entries}
    with _while_nobody_steps(values, timeout_s), _told_of("saving into", storage):
        nodes, kinds, writes = _drafted(values, seen)
        part = write_part(storage, save, number, count, writes, _within(timeout_s))
    return nodes, kinds, _columns(part)


class Staged:
    """A copy of values, until it is written. The caller's reference keeps it, and drops it."""

    def __init__(self, values: Mapping[str, Any], copies: Container[str], seen: RRef[Look] | None) -> None:
        self.nodes, self.kinds, writes = _drafted(values, seen)
        self._spare = spare_staging()
        own = [number for number, each in enumerate(writes) if not is_below(each.name, copies)]
        for number, moved in zip(own, self._spare.copy([writes[n] for n in own], 1).writes(), strict=True):
            writes[number] = moved
        self.writes: list[Write] | None = writes

    # Private, so that a caller whom only some names are trusted cannot call them: memory that is given back twice would be another's, too.

    def _taken(self) -> list[Write]:
        """What is to be written, once."""
        writes, self.writes = self.writes, None
        if writes is None:
            raise CheckpointError("this copy has been written already")
        return writes

    def _end(self) -> None:
        give_back(self._spare)


def stage(entries: Entries, copies: set[str], seen: RRef[Look] | None, timeout_s: float) -> RRef[Staged]:
    """Copy these as they are now, but for those that are copies already."""
    values = {name: _value(name, rref) for name, rref in entries}
    with _while_nobody_steps(values, timeout_s):
        return RRef(Staged(values, copies, seen))


def write_staged(
    target: Target, save: str, number: int, count: int, staged: RRef[Staged], timeout_s: float
) -> Written:
    """As `write`, of what has been copied."""
    storage = _storage_for(target, save, number, count)
    this = _local(staged, Staged)
    writes = this._taken()
    with _told_of("saving into", storage):
        part = write_part(storage, save, number, count, writes, _within(timeout_s))
    del writes
    this._end()
    return this.nodes, this.kinds, _columns(part)


def _storage_for(target: Target, save: str, number: int, count: int) -> Storage:
    if not isinstance(save, str) or not re.fullmatch(r"[0-9a-f]{16}", save):
        raise CheckpointError(f"a save is called by 16 hexadecimal digits, not {str(save)[:40]!r}")
    if not all(type(each) is int for each in (number, count)) or not 0 <= number < count <= _MOST_WRITERS:
        raise CheckpointError(f"there is no writer {str(number)[:20]} of {str(count)[:20]}")
    return storage_of(*_checked(target))


def _drafted(values: Mapping[str, Any], seen: RRef[Look] | None) -> tuple[dict[str, Any], Kinds, list[Write]]:
    """The entries' nodes, their tensors, and what is to be written. What others own is in the
    nodes as ("elsewhere", name), which no tree has otherwise."""
    states = {} if seen is None else _local(seen, Look).states
    found = collected(values, Ranks(alone=True), states, for_another=True)
    _refuse_spread(found)
    layout = Layout({name: each.spread for name, each in found.tensors.items()})
    kinds = {name: (each.dtype, tuple(each.shape)) for name, each in found.tensors.items()}
    marks = {name: ("elsewhere", name) for name in found.references}
    return placed(found.tree["dict"], marks), kinds, shared_out(layout, found.tensors, 0)


def _columns(part: Part) -> Columns:
    numbers = (part.file, part.at, part.offsets, part.sizes, part.checksums.view("int64"))
    return part.files, part.names, *(torch.from_numpy(each.copy()) for each in numbers)  # type: ignore[return-value]


def _refuse_spread(found: Collected) -> None:
    for name, each in found.tensors.items():
        spread = each.spread
        held = spread.sizes[spread.ranks == 0].prod(axis=1).sum()
        if held != torch.Size(spread.shape).numel():
            raise CheckpointError(
                f"{name!r} is spread over the ranks of a process group, of which worker {current_agent().info.name!r} has a part: all its ranks save it "
                f"together, each the model itself and not a reference of it"
            )


@contextmanager
def _while_nobody_steps(values: Mapping[str, Any], timeout_s: float) -> Iterator[None]:
    """Steps of a DistributedOptimizer on these parameters wait until they have been written."""
    local = sys.modules.get("farstep.optim.local")
    if local is None:
        yield
        return
    from farstep.autograd.locks import held

    parameters: list[Tensor] = []
    for value in values.values():
        parameters += value.parameters() if isinstance(value, nn.Module) else []
        parameters += [value] if isinstance(value, Tensor) else []
    who = f"saving on worker {current_agent().info.name!r}"
    with held(local.step_locks.of(parameters), who, timeout_s * 0.9, CheckpointError):
        yield


# -- loading ----------------------------------------------------------------------------------------------


class _Load:
    """One load's share here. The caller's reference keeps it, and drops it."""

    def __init__(self, storage: Storage, manifest: Manifest, filling: Filling, verify: bool) -> None:
        self.storage, self.manifest, self.filling, self.verify = storage, manifest, filling, verify
        self.owners: OwnersLoad | None = None
        """Of what others own within that."""


def prepare(
    target: Target,
    save: str,
    entries: Entries,
    strict: bool,
    convert_dtype: bool,
    rename: Rename | None,
    verify: bool,
    timeout_s: float,
) -> tuple[RRef[_Load], tuple[list[str], list[str], list[str], list[str], dict[str, str]], bool]:
    """Look whether these fit. Nothing is read yet, but for the manifest and the state of
    optimizers. Returns what `fill` and `commit` take, the report, and whether `abandon` has
    anything to do."""
    if rename is not None and not isinstance(rename, Mapping):
        raise CheckpointError("names to rename come as a mapping")
    storage, manifest = _opened(target, save, verify)
    values = {name: _value(name, rref) for name, rref in entries}
    filling = Filling(storage, manifest, Ranks(alone=True), strict, convert_dtype, rename, verify, MetaTensors(None, is_elsewhere=True))  # fmt: skip
    filling.prepare(values)
    load = _Load(storage, manifest, filling, verify)
    if filling.references or filling.spread_optimizers:
        from farstep.checkpoint.rpc_loading import OwnersLoad

        load.owners = OwnersLoad(filling, target, storage, manifest, strict, convert_dtype, rename, verify, timeout_s * 0.9, current_agent())  # fmt: skip
        load.owners.prepare()
    report = filling.report
    if report.meta:
        raise CheckpointMismatch(
            f"{report.meta[0]!r} would stay on the meta device of worker {current_agent().info.name!r}: give it memory there first"
        )
    return RRef(load), (report.missing, report.unexpected, report.reshaped, report.unsaved, report.differences), load.owners is not None  # fmt: skip


def fill(load: RRef[_Load], timeout_s: float) -> None:
    """Read into the memory of the tensors."""
    this = _local(load, _Load)
    with reading(this.storage), nullcontext() if this.owners is None else this.owners.reading():
        reads = reads_for(this.manifest, this.filling.wanted)
        threads = this.storage.threads
        read_into(this.storage, this.manifest, reads, verify=this.verify, progress=_within(timeout_s), threads=threads)  # fmt: skip
    this.filling.finish()


def commit(load: RRef[_Load]) -> None:
    """Put in place what is not tensors' memory."""
    this = _local(load, _Load)
    if this.owners is not None:
        this.owners.commit()
    this.filling.commit()


def abandon(load: RRef[_Load]) -> None:
    """Another owner could not prepare or read."""
    this = _local(load, _Load)
    if this.owners is not None:
        this.owners.drop()


def read_states(
    target: Target, save: str, states: Mapping[str, tuple[str, Any]], verify: bool, timeout_s: float
) -> dict[str, RRef[Any]]:
    """New memory with the states of these parameters, each of which comes with its name in the checkpoint and its node. It becomes the optimizer's."""
    storage, manifest = _opened(target, save, verify)
    saved = {name: decode(node, place) for name, (place, node) in states.items()}
    with reading(storage):
        found = read_values(storage, manifest, saved, verify=verify, progress=_within(timeout_s))
    seen: set[int] = set()
    return {name: RRef(_fresh(each, seen)) for name, each in found.items()}


def _fresh(state: Any, seen: set[int]) -> Any:
    """A parameter's state that the optimizer may keep, if it has but tensors and numbers, and none of the tensors is `seen` elsewhere: what was saved once is one tensor in several places."""
    from farstep.optim.states import Fresh

    if not isinstance(state, dict):
        return state
    ids = [id(each) for each in state.values() if isinstance(each, Tensor)]
    numbers = [each for each in state.values() if each is None or isinstance(each, int | float)]
    is_own = len(set(ids)) + len(numbers) == len(state) and seen.isdisjoint(ids)
    seen.update(ids)
    return Fresh(state) if is_own else state


def _local(rref: RRef[T], kind: type[T]) -> T:
    """What a caller has a reference of, if it is what it is to be."""
    this = local_value_of(rref)
    if type(this) is not kind:
        raise CheckpointError(f"a {type(this).__name__} is no {kind.__name__.strip('_').lower()}")
    return this


def _opened(target: Target, save: str, verify: bool) -> tuple[Storage, Manifest]:
    storage, manifest = source_of(storage_of(*_checked(target)), verify)
    if manifest.save != save:
        raise CheckpointError(
            f"{storage} has another checkpoint on worker {current_agent().info.name!r} than where it is loaded: a new one was saved there meanwhile, or "
            f"the workers do not share that directory"
        )
    return storage, manifest


# -- both -------------------------------------------------------------------------------------------------


def _checked(target: Target) -> Target:
    path, options = target
    if type(path) is not str or not path or type(options) is not dict:
        raise CheckpointError("a checkpoint is at a path or URL")
    agent = current_agent()
    if not agent.trust.is_open and local_path(path) is None and not is_plain_url(path):
        raise CheckpointError(
            f"worker {agent.info.name!r} trusts some names alone, and does not open {path[:200]!r}: for others it takes paths, and URLs such as s3://"
        )
    return path, options


def _value(name: str, rref: RRef[Any]) -> Any:
    """What a reference leads to, if it can be filled in place again."""
    value = local_value_of(rref)
    has_state = callable(getattr(value, "state_dict", None)) and not isinstance(value, type)
    if has_state or isinstance(value, Tensor | nn.Module | dict | list):
        return value
    raise CheckpointMismatch(
        f"{name!r} is a reference of a {type(value).__name__} on worker {current_agent().info.name!r}, which a load could not change there: a reference in a state is of a module, a "
        f"tensor, a dict or list, or an object with state_dict and load_state_dict"
    )


def _within(timeout_s: float) -> Progress | None:
    """Ends what takes longer than the caller waits for."""
    if not timeout_s:
        return None
    deadline = time.monotonic() + timeout_s

    def check(done: int, total: int) -> None:
        if time.monotonic() > deadline and done < total:
            raise CheckpointError(
                f"after {timeout_s:g} s {done:,} of {total:,} bytes are done: rpc_timeout= gives more time"
            )

    return check


@contextmanager
def _told_of(doing: str, storage: Storage) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as exc:
        raise StorageFailed(f"{doing} {storage} failed: {exc}") from exc
