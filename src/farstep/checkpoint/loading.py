"""Loading: what a state wants is looked up in a checkpoint by name, checked, read into the state's own memory, and put in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from farstep.checkpoint.filling import Filling, Report, fresh_state
from farstep.checkpoint.manifest import MANIFEST, Manifest
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import read_into, reads_for
from farstep.checkpoint.renaming import Rename
from farstep.checkpoint.storage import Storage, storage_of
from farstep.checkpoint.writing import Progress
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, StorageFailed
from farstep.state.adapters.ranks import Group

__all__ = ["load", "manifest_of", "read"]


def load(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    strict: bool = True,
    *,
    rename: Rename | None = None,
    convert_dtype: bool = False,
    verify: bool = True,
    group: Group = None,
    no_dist: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    rpc_timeout: float | None = None,
) -> Report:
    """Load a checkpoint into a state of the same form, on any number of ranks. All ranks of the group call it.

    Tensors are filled in place, each rank reading what it holds of them. Values in dicts and lists are replaced, and objects are given theirs by
    `load_state_dict`. A state may name less than the checkpoint has: then that is all that is read, but with `strict` it must say so by naming
    no part of what it leaves out.

    `strict`: every name in the state is in the checkpoint with the same shape, and the other way round. Else names that only one has, and
    tensors of other shapes, are left as they are and told of in the report. Dtypes must be the same unless `convert_dtype`.
    `rename` gives the names that things have in the checkpoint their names in the state: a mapping, of which an entry also goes for all names below
    it, or a function. Every block that is read is compared with its checksum; `verify=False` leaves that out.

    One process may load what workers of RPC own, see `save`: each owner reads its part, which takes each time at most `rpc_timeout` seconds.

    CheckpointMismatch, and anything else that is found before reading, changes nothing. After DamagedCheckpoint tensors may be partly
    written, on all ranks.
    """
    storage = storage_of(path, storage_options)
    ranks = Ranks(group, no_dist, rpc_timeout)
    doing = f"loading from {storage}"
    manifest, error = None, None
    try:
        manifest = manifest_of(storage)
    except Exception as exc:
        error = exc
    if not ranks.agree(error, doing, manifest.save.encode() if manifest is not None else b""):
        raise CheckpointError(
            f"{doing}: a new checkpoint was saved there meanwhile, and the ranks have read different ones. Load again"
        )
    assert manifest is not None
    filling: Filling | None = None
    with ranks.all_or_none(doing):
        filling = Filling(storage, manifest, ranks, strict, convert_dtype, rename)
        filling.prepare(state)
    assert filling is not None
    owners = None
    if filling.references or filling.spread_optimizers:
        from farstep.checkpoint.rpc_loading import OwnersLoad

        owners = OwnersLoad(filling, storage, manifest, strict, convert_dtype, rename, verify, ranks.rpc_timeout)  # fmt: skip
    with ranks.all_or_none(doing), owners or nullcontext():
        threads = max(1, storage.threads // ranks.count)
        reads = reads_for(manifest, filling.wanted)
        with _told_of(storage):
            read_into(storage, manifest, reads, verify=verify, progress=progress, threads=threads)
        filling.finish()
    if owners is not None:
        owners.commit()
    filling.commit()
    return filling.report


def read(
    path: str | os.PathLike[str] | Storage,
    *,
    names: Callable[[str], bool] | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """A checkpoint's whole state, as nested dicts and lists with plain tensors in main memory; or of its tensors those whose names are wanted.

    This process reads it by itself. Of what each rank had for itself, the first rank's.
    """
    storage = storage_of(path, storage_options)
    manifest = manifest_of(storage)
    state, wanted = fresh_state(manifest, names)
    with _told_of(storage):
        read_into(storage, manifest, reads_for(manifest, wanted), verify=verify, progress=progress, threads=storage.threads)  # fmt: skip
    return state


def manifest_of(storage: Storage) -> Manifest:
    """Raises NoCheckpoint or DamagedCheckpoint."""
    try:
        with _told_of(storage):
            data = storage.read(MANIFEST)
    except FileNotFoundError:
        raise NoCheckpoint(
            f"there is no checkpoint in {storage}: it has no {MANIFEST}, which a save puts there when all is written"
        ) from None
    return Manifest.decode(data, str(storage))


@contextmanager
def _told_of(storage: Storage) -> Iterator[None]:
    """What a disk cannot read any more is damage; else it may be there another time."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except OSError as exc:
        if exc.errno == errno.EIO:
            raise DamagedCheckpoint(
                f"{storage} cannot be read any more: {exc}. Load another checkpoint"
            ) from exc
        failed = StorageFailed(f"reading {storage} failed: {exc}")
        failed.errno = exc.errno
        raise failed from exc
