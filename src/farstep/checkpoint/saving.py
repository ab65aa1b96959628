"""Saving: every rank writes its part aside, and when all are safe the manifest is put in place, which makes them a checkpoint.

[Note: whole or absent] Data files have names that no other save has. Until a manifest names them they are nothing, and the next save removes
them. The manifest is replaced by one rename, after all that it names is on the disk. So at any moment the directory has the manifest of one save,
with all its files; or none. Only then are the files of the save before removed.

[Note: handed over] The first rank may put the manifest in place as soon as it has heard what all have written. From then on a rank that loses touch with the others cannot
tell what becomes of its files, and leaves them: either a manifest names them, or the next save removes them. It removes them itself only if the first rank
has told that it failed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from farstep.checkpoint.collecting import Collected, collected
from farstep.checkpoint.elsewhere import placed, steps_stopped
from farstep.checkpoint.handle import settle
from farstep.checkpoint.manifest import MANIFEST, WORKERS, Boxes, File, Manifest, TensorInfo, is_ours
from farstep.checkpoint.memory import bytes_of, is_plain
from farstep.checkpoint.ranks import Ranks, has_told
from farstep.checkpoint.storage import MOST_READ_BYTES, Storage, refuse_swapped, storage_of
from farstep.checkpoint.tree import merged
from farstep.checkpoint.writing import Part, Progress, Write, shared_out, write_part
from farstep.dist import operation
from farstep.errors import CheckpointError, DamagedCheckpoint, StorageFailed
from farstep.state import Layout, Shards, Spread
from farstep.state.adapters.ranks import Group

if TYPE_CHECKING:
    from farstep.checkpoint.rpc_stopping import Stopped

__all__ = ["Draft", "drafted", "is_in_place", "save", "written"]

_COMPARED_BYTES = 64 << 10


@operation("checkpoint.save")
def save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    group: Group = None,
    no_dist: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    rpc_timeout: float | None = None,
) -> None:
    """Save a state as a checkpoint. All ranks of the group call it, and it returns when the checkpoint is whole and safe on all.

    The state is any nesting of dicts, lists, tensors, DTensors, ShardedTensors, Shards, numbers, strings, and objects with `state_dict`. Of a
    model and its optimizer in one state, the optimizer's state goes by the names of the model's parameters, and so loads under any
    other parallelism. Each rank writes what it holds; of replicas, one rank. Values that are not tensors are the same on all ranks, or
    `PerRank`; what only some ranks have is saved by them.

    A checkpoint that is there already stays until the new one is whole; then it is gone. Whatever fails, on whichever rank, is raised on all, and leaves
    what was there before. With `no_dist` this process saves by itself. `progress(bytes_done, bytes_total)` tells of this rank's part.

    One process may save what workers of RPC own: RRefs, RemoteModules and DistributedOptimizers in
    the state, and RRefs of DistributedOptimizers that other workers have.
    Each owner writes its part, into the same directory, in at most `rpc_timeout` seconds (0: any
    time), by default RPC's own timeout. Meanwhile these optimizers take no step.
    """
    refuse_swapped("save(state, path)", state, path)
    storage = storage_of(path, storage_options)
    ranks = Ranks(group, no_dist, rpc_timeout)
    settle(ranks, f"saving into {storage}")
    with steps_stopped(state, ranks, f"saving into {storage}") as stopped:
        written(drafted(state, storage, ranks, stopped), progress)


@dataclass
class Draft:
    """All that is to be saved, with what this rank writes of it. Everyone has the same but for `writes`."""

    storage: Storage
    ranks: Ranks
    tree: Any
    tensors: dict[str, TensorInfo]
    writes: Sequence[Write]
    info: dict[str, Any] = field(default_factory=dict)
    """What else the manifest tells."""
    references: dict[str, Any] = field(default_factory=dict)
    """What other workers write, by name."""
    copies: set[str] = field(default_factory=set)
    """Of these, those of copies that were made for this."""
    staged: Mapping[Any, Any] | None = None
    """What these workers have copied aside, by owner; None: they write what they have."""
    workers: Sequence[str] = ()
    """The names of those who write, if they are workers of RPC: this one's first."""
    stopped: Stopped | None = None
    """The optimizers that take no step until it is written or copied."""

    @property
    def doing(self) -> str:
        return f"saving into {self.storage}"


def drafted(state: Any, storage: Storage, ranks: Ranks, stopped: Stopped | None = None) -> Draft:
    """Look at the state, without touching the storage."""
    doing = f"saving into {storage}"
    found, error = Collected(None), None
    try:
        found = collected(state, ranks, None if stopped is None else stopped.states)
    except Exception as exc:
        error = exc
    tree, spreads = _agreed(found, ranks, doing, error)
    writes = shared_out(Layout(spreads), found.tensors, ranks.rank)
    tensors = {name: TensorInfo(spread.dtype, spread.shape) for name, spread in spreads.items()}
    draft = Draft(storage, ranks, tree, tensors, writes, references=found.references, copies=found.copies)
    if stopped is not None:
        draft.stopped = stopped
        draft.references |= stopped.references
        draft.copies |= stopped.copies
    return draft


def written(draft: Draft, progress: Progress | None) -> None:
    """Write it, and make it the checkpoint."""
    ranks, storage = draft.ranks, draft.storage
    with ExitStack() as stack:
        old: list[str] = []

        def prepare() -> str:
            with _told_of(storage):
                storage.prepare()
                stack.enter_context(storage.sole_writer())
                old.extend(_cleaned(storage))
            return secrets.token_hex(16)

        save = ranks.token_of_first(draft.doing, prepare)[:16]
        part: Part | None = None
        is_handed_over = False
        try:
            with ranks.all_or_none(draft.doing), _told_of(storage):
                if draft.references:
                    part, parts = _written_by_owners(draft, save, progress)
                    if draft.stopped is not None:
                        draft.stopped.resume()
                else:
                    part = write_part(storage, save, ranks.rank, ranks.count, draft.writes, progress)
            if not draft.references:
                is_handed_over = ranks.rank != 0
                parts = ranks.to_first(part)
            with ranks.all_or_none(draft.doing), _told_of(storage):
                if ranks.rank == 0:
                    manifest = _manifest(draft, save, parts).encode()
                    _check_readable(manifest, storage)
                    _check_shared(storage, parts)  # just before they are named
                    storage.replace(MANIFEST, manifest)
        except BaseException as exc:
            if is_handed_over and not has_told(exc):
                raise  # see [Note: handed over]
            if (part is not None or draft.references) and not is_in_place(storage, save):
                _forget(storage, [name for name, _ in part.files] if part is not None else [])
                if draft.references:
                    _forget_save(storage, save)
            raise
        if ranks.rank == 0:
            _forget(storage, old)


def _written_by_owners(draft: Draft, save: str, progress: Progress | None) -> tuple[Part, list[Part]]:
    """This process's part, and that with the parts of all owners; the draft has what they own after this."""
    from farstep.checkpoint.rpc_saving import written_by_owners

    own, others = written_by_owners(
        draft.references,
        draft.storage,
        save,
        draft.tensors,
        draft.ranks.rpc_timeout,
        lambda count: write_part(draft.storage, save, 0, count, draft.writes, progress),
        draft.staged,
        draft.stopped,
    )
    draft.tree = placed(draft.tree, others.nodes)
    draft.tensors = {**draft.tensors, **others.tensors}
    draft.workers = others.workers
    return own, [own, *others.parts]


def _agreed(
    found: Collected, ranks: Ranks, doing: str, error: Exception | None
) -> tuple[Any, dict[str, Spread]]:
    """The tree and the tensors of all ranks together, unless one has an error."""
    spreads = {name: each.spread for name, each in found.tensors.items()}
    told = (found.tree, _described(found.tensors, ranks))
    every = ranks.everyones(told, doing, error)
    if every is None:
        return found.tree, spreads
    tree = merged([each for each, _ in every])
    holders: dict[str, list[int]] = {}
    first: dict[str, Any] = {}
    for rank, (_, tensors) in enumerate(every):
        for name, description in tensors.items():
            holders.setdefault(name, []).append(rank)
            known = first.setdefault(name, description)
            if known != description:
                raise _differ(name, known, description, holders[name][0], rank)
            if known[3] is None:
                first[name] = description
    known_spreads: dict[Any, Spread] = {}  # models have many tensors of a few shapes
    agreed = {}
    for name, (shape, dtype, columns, _) in first.items():
        key = (shape, dtype, *(column.tobytes() for column in columns), *holders[name])
        if key not in known_spreads:
            known_spreads[key] = _held_by(Spread(shape, dtype, *columns), holders[name])
        agreed[name] = known_spreads[key]
    return tree, agreed


def _described(tensors: Mapping[str, Shards], ranks: Ranks) -> dict[str, Any]:
    """What all ranks that have a tensor must have alike: how it is spread, and, of a small one that each has whole, what is in it."""
    if ranks.alone:
        return {}
    found = {}
    for name, each in tensors.items():
        spread = each.spread
        mark = None
        is_whole = len(spread.ranks) > 1 and bool((spread.sizes == spread.shape).all())
        if is_whole and 0 < spread.nbytes <= _COMPARED_BYTES and each.tensors and is_plain(each.tensors[0]):
            mark = xxhash.xxh3_64_intdigest(bytes_of(each.tensors[0]))
        found[name] = spread.shape, spread.dtype, (spread.ranks, spread.offsets, spread.sizes), mark
    return {name: _Description(each) for name, each in found.items()}


class _Description(tuple[Any, ...]):
    """Arrays are compared as a whole."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple):
            return NotImplemented
        return (
            self[:2] == other[:2]
            and all(np.array_equal(a, b) for a, b in zip(self[2], other[2], strict=True))
            and (self[3] == other[3] or None in (self[3], other[3]))
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _differ(name: str, one: Any, other: Any, rank: int, other_rank: int) -> CheckpointError:
    if one[:2] != other[:2]:
        what = f"is {one[1]} of shape {one[0]} on rank {rank} and {other[1]} of shape {other[0]} on rank {other_rank}"
    elif one[3] != other[3] and None not in (one[3], other[3]):
        what = f"has other elements on rank {other_rank} than on rank {rank}, and is to be the same on both"
    else:
        what = f"is spread otherwise for rank {other_rank} than for rank {rank}"
    return CheckpointError(
        f"{name!r} {what}. Nothing has been saved. What belongs to each rank alone is saved as farstep.checkpoint.PerRank(value)"
    )


def _held_by(spread: Spread, ranks: Sequence[int]) -> Spread:
    """A plain tensor counts as being on every rank, and some may not have it at all."""
    has = np.isin(spread.ranks, ranks)
    if has.all():
        return spread
    return Spread(spread.shape, spread.dtype, spread.ranks[has], spread.offsets[has], spread.sizes[has])


def _manifest(draft: Draft, save: str, parts: Sequence[Part]) -> Manifest:
    numbers = {name: number for number, name in enumerate(draft.tensors)}
    dims = [len(info.shape) for info in draft.tensors.values()]
    files: list[File] = []
    file, tensor = [], []
    for part in parts:
        file.append(part.file + len(files))
        files += [File(name, nbytes, part.rank) for name, nbytes in part.files]
        tensor.append(np.array([numbers[name] for name in part.names], dtype=np.int64))
    tensors = np.concatenate(tensor)
    boxes = Boxes(
        tensors,
        np.concatenate(file),
        np.concatenate([part.at for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        np.array(dims, dtype=np.int64)[tensors] if dims else np.zeros(0, dtype=np.int64),
    )
    checksums = np.concatenate([part.checksums for part in parts])
    return Manifest(
        save,
        max(part.rank for part in parts) + 1,
        files,
        draft.tree,
        draft.tensors,
        boxes,
        checksums,
        info={**draft.info, WORKERS: draft.workers} if draft.workers else draft.info,
    )


def _cleaned(storage: Storage) -> list[str]:
    """Remove what saves have left that did not finish. Returns the files of the checkpoint that is there."""
    ours = [name for name in storage.names() if is_ours(name)]
    try:
        kept = {each.name for each in Manifest.of(storage).files}
    except FileNotFoundError:
        kept = set()
    except DamagedCheckpoint:
        kept = set(ours)  # what could be saved from it is not ours to remove, until a whole one is there
    storage.delete(name for name in ours if name not in kept)
    return [name for name in ours if name in kept]


def _check_readable(manifest: bytes, storage: Storage) -> None:
    """What could not be read again does not come in the place of what can. Parts of it are what others say."""
    if len(manifest) > MOST_READ_BYTES:
        raise CheckpointError(
            f"{storage}: the manifest has {len(manifest):,} bytes, and one of more than {MOST_READ_BYTES:,} is not read: the state has too many tensors, or too much that is no "
            f"tensor. Nothing has been saved"
        )
    try:
        Manifest.decode(manifest, str(storage))
    except DamagedCheckpoint as exc:
        raise CheckpointError(
            f"what is to be saved into {storage} could not be loaded again: {exc}. Nothing has been saved; please report this, with the state's form"
        ) from exc


def _check_shared(storage: Storage, parts: Sequence[Part]) -> None:
    """Whether all that was written is here: others may have been given another path, or a disk of their own; and where there are no locks, another save may
    have removed it."""
    for number, part in enumerate(parts):
        for name, _ in part.files:
            try:
                storage.open(name).close()
            except FileNotFoundError:
                if number == 0:
                    raise CheckpointError(
                        f"{storage}: {name}, which has just been written, is gone: another process saves there too, and there are no locks by which to tell. Save into "
                        f"different directories. Nothing has been saved"
                    ) from None
                raise CheckpointError(
                    f"{storage}: writer {part.rank} has written {name}, and the first does not find it there. All ranks give the same path, and all workers have it, on a disk or storage that they share. "
                    f"Nothing has been saved"
                ) from None


@contextmanager
def _told_of(storage: Storage) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as exc:
        what = f"{exc.strerror or exc}{f' ({exc.filename})' if exc.filename else ''}"
        failed = StorageFailed(
            f"saving into {storage} failed: {what}. Nothing has been saved; what was there before still is"
        )
        failed.errno = exc.errno
        raise failed from exc


def is_in_place(storage: Storage, save: str) -> bool:
    """Whether a save that failed has become the checkpoint all the same; if that cannot be told, it may have."""
    try:
        return Manifest.of(storage).save == save
    except (FileNotFoundError, DamagedCheckpoint):
        return False
    except Exception:
        return True


def _forget_save(storage: Storage, save: str) -> None:
    """All its files, those too of which nobody can tell any more."""
    try:
        storage.delete([name for name in storage.names() if name.startswith(f"{save}.") and is_ours(name)])
    except Exception:
        pass  # nothing names them, and the next save tries again


def _forget(storage: Storage, names: Sequence[str]) -> None:
    try:
        storage.delete(names)
    except Exception:
        pass  # nothing names them, and the next save tries again
