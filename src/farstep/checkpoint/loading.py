"""Loading: what a state wants is looked up in a checkpoint by name, checked, read into the state's own memory, and put in place."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from farstep.checkpoint.elsewhere import target_of
from farstep.checkpoint.filling import Filling
from farstep.checkpoint.filling_optimizers import OptimizerFilling
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.meta_tensors import MetaTensors
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.renaming import Rename
from farstep.checkpoint.report import Report
from farstep.checkpoint.sources import fill, manifest_of, opened_by_all, source_of
from farstep.checkpoint.storage import Storage, refuse_swapped, storage_of
from farstep.checkpoint.stored_values import read_values
from farstep.checkpoint.tree import decode
from farstep.checkpoint.writing import Progress
from farstep.dist import operation
from farstep.errors import CheckpointError, DamagedCheckpoint
from farstep.state.adapters.ranks import Group

if TYPE_CHECKING:
    from farstep.checkpoint.rpc_loading import OwnersLoad

__all__ = ["carry_out", "check_alike", "load", "manifest_of", "read"]


@operation("checkpoint.load")
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
    device: torch.device | str | None = None,
) -> Report:
    """Load a checkpoint into a state of the same form, on any number of ranks. All ranks of the group call it.

    The checkpoint is one that `save` wrote, one of torch's DCP, or safetensors files of Hugging Face's.

    Tensors are filled in place, each rank reading what it holds of them. Values in dicts and lists are replaced, and objects are given theirs by
    `load_state_dict`. A state may name less than the checkpoint has: then that is all that is read, but with `strict` it must say so by naming
    no part of what it leaves out.

    `strict`: every name in the state is in the checkpoint with the same shape, and the other way round. Else names that only one has, and
    tensors of other shapes, are left as they are and told of in the report. Dtypes must be the same unless `convert_dtype`.
    `rename` gives the names that things have in the checkpoint their names in the state: a mapping, of which an entry also goes for all names below
    it, or a function. Every block that is read is compared with its checksum; `verify=False` leaves that out.

    A tensor on the meta device is given memory in place, and stays the same object: a DTensor on the device type of its mesh, a plain tensor on
    the device of the tensors beside it (of its model, or in its dict), else in main memory. `device` overrides that. What stays on the meta
    device, because the checkpoint has nothing for it, is refused if `strict`, else it is in the report. If the load fails, all are as they were.

    One process may load what workers of RPC own, see `save`: each owner reads its part, which takes each time at most `rpc_timeout` seconds.

    CheckpointMismatch, and anything else that is found before reading, changes nothing. After DamagedCheckpoint tensors may be partly
    written, on all ranks.
    """
    refuse_swapped("load(state, path)", state, path)
    ranks = Ranks(group, no_dist, rpc_timeout)
    given = storage_of(path, storage_options)
    memory_device = None if device is None else torch.device(device)
    if memory_device is not None and memory_device.type == "meta":
        raise ValueError("device= is where tensors get memory, which the meta device has not")
    storage, manifest = opened_by_all(given, ranks, verify)
    doing = f"loading from {storage}"
    error: Exception | None = None
    mark = f"{strict} {convert_dtype} {verify} "
    filling = Filling(
        storage, manifest, ranks, strict, convert_dtype, rename, verify, MetaTensors(memory_device)
    )
    try:
        filling.prepare(state)
        if rename is not None:  # functions are compared by what they give
            mark += repr([(name, place.name) for name, place in filling.index.places.items()])
    except Exception as exc:
        error = exc
    try:
        check_alike(ranks, error, doing, mark)
        owners = None
        if filling.references or filling.spread_optimizers:
            from farstep.checkpoint.rpc_loading import OwnersLoad

            owners = OwnersLoad(filling, target_of(given), storage, manifest, strict, convert_dtype, rename, verify, ranks.rpc_timeout)  # fmt: skip
            owners.prepare()
        carry_out(filling, storage, manifest, ranks, doing, verify, progress, owners)
    except BaseException:
        filling.undo()
        raise
    return filling.report


def carry_out(
    filling: Filling | OptimizerFilling,
    storage: Storage,
    manifest: Manifest,
    ranks: Ranks,
    doing: str,
    verify: bool,
    progress: Progress | None,
    owners: OwnersLoad | None = None,
) -> None:
    """Read what has been prepared, on all ranks and owners, and when all have it, put it in place."""
    try:
        with ranks.all_or_none(doing), nullcontext() if owners is None else owners.reading():
            fill(storage, manifest, filling.wanted, ranks=ranks.count, verify=verify, progress=progress)
            filling.finish()
        with ranks.all_or_none(doing):
            if owners is not None:
                owners.commit()
            filling.commit()
    except DamagedCheckpoint as exc:  # in the middle of it
        exc.is_partly_loaded = True
        raise


def check_alike(ranks: Ranks, error: Exception | None, doing: str, settings: str) -> None:
    """All go on, or all raise; they do too if what was given to load with is not the same on all."""
    if not ranks.agree(error, doing, settings.encode()):
        raise CheckpointError(
            f"{doing}: the ranks have given different arguments (strict, convert_dtype, verify, rename or key), or a function that renames otherwise. Give the same on all; nothing has been changed"
        )


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
    storage, manifest = source_of(storage_of(path, storage_options), verify)
    return read_values(
        storage, manifest, decode(manifest.tree), names=names, verify=verify, progress=progress
    )
