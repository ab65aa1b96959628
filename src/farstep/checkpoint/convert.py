"""Checkpoints from one format to another: ours, torch's DCP, files of torch.save, and safetensors as Hugging Face keeps models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from farstep.checkpoint.archives import write_archive
from farstep.checkpoint.content import Content, content_of, content_of_state
from farstep.checkpoint.dcp_writing import value_with, write_dcp
from farstep.checkpoint.huggingface import write_safetensors
from farstep.checkpoint.manifest import MANIFEST, is_ours
from farstep.checkpoint.placing import PathLike, aside, exists, refuse_overlap
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.saving import Draft, written
from farstep.checkpoint.storage import Storage, refuse_swapped, storage_of
from farstep.checkpoint.tree import children, is_container, joined
from farstep.checkpoint.writing import Progress, Tally, Write
from farstep.errors import CheckpointError
from farstep.state import Box

__all__ = ["FORMATS", "Converted", "convert", "save_dcp"]

FORMATS = ("farstep", "dcp", "torch", "safetensors")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass
class Converted:
    """What has been done."""

    source_format: str
    format: str
    tensors: int
    nbytes: int
    """Of the tensors."""
    left_out: list[str] = field(default_factory=list)
    """What the source has and the target's format has no place for; of what each rank had for itself, other ranks' than the first's."""


def convert(
    source: PathLike | Storage,
    target: PathLike | Storage,
    *,
    to: str | None = None,
    select: str | None = None,
    strict: bool = True,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    verify: bool = True,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Converted:
    """Make a checkpoint of another format. What the source is is found out; this process does it all, a few tensors in memory at a time.

    `to` is one of `FORMATS`; if it is not given, a target that is called .safetensors, or .pt, .pth, .bin or .ckpt, says it, and else it is "farstep".
    "torch" makes a file, "safetensors" a file if the target is called .safetensors and else a directory, with an index if it has more than
    `max_shard_bytes`. `select` is the name of a part of the state that is taken alone, such as "model".

    The target is there when all of it is written, or not at all. One that is there already is replaced only with `overwrite`, and a directory only if it has
    nothing but a checkpoint in it.
    With `strict`, what the source has must have a place in the target's format; else it is left out and told of. Tensors that are one
    under several names stay so. `progress(bytes_done, bytes_total)` is called as it goes.
    """
    to = to or _format_named(target)
    if to not in FORMATS:
        raise CheckpointError(f"there is no format {to!r}: to is one of {', '.join(FORMATS)}")
    origin = storage_of(source, storage_options)
    refuse_overlap(source, target, _is_file(target, to))
    with ExitStack() as stack:
        content = content_of(origin, verify, stack).selected(select, keep_ranks=to == "farstep")
        return _put(content, target, to, strict, overwrite, max_shard_bytes, progress, storage_options)


def save_dcp(
    state: Any,
    path: PathLike | Storage,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Save a state of this process alone as a checkpoint that torch.distributed.checkpoint.load reads."""
    refuse_swapped("save_dcp(state, path)", state, path)
    content = content_of_state(state).selected(None, keep_ranks=False)
    _put(content, path, "dcp", True, overwrite, 0, progress, storage_options)


def _put(
    content: Content,
    target: PathLike | Storage,
    to: str,
    strict: bool,
    overwrite: bool,
    max_shard_bytes: int,
    progress: Progress | None,
    options: dict[str, Any] | None,
) -> Converted:
    values = _values(content) if to == "safetensors" else []
    if strict and (content.left_out or values):
        lost = [*content.left_out, *values]
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise CheckpointError(
            f"a checkpoint of the format {to!r} has no place for {', '.join(map(repr, lost[:5]))}{more}. Nothing has been written. select= takes a part of the "
            f"state alone, strict=False leaves out what has no place"
        )
    content.left_out += values
    if to == "farstep":
        _put_ours(content, storage_of(target, options), overwrite, progress)
    else:
        tally = Tally(content.nbytes, progress)
        with aside(target, _is_file(target, to), overwrite, options) as (storage, name, taken):
            if to == "dcp":
                write_dcp(storage, content, tally, taken)
            elif to == "torch":
                assert name is not None
                _write_torch(storage, name, content, tally)
            else:
                infos = {each: content.info(each) for each in content.tensors}
                write_safetensors(storage, name, infos, _ties(content), lambda n: content.blocks(n, tally), max_shard_bytes, taken)  # fmt: skip
    return Converted(content.kind, to, len(content.tensors), content.nbytes, content.left_out)


# -- what is written --------------------------------------------------------------------------------------


def _put_ours(content: Content, storage: Storage, overwrite: bool, progress: Progress | None) -> None:
    there = [name for name in storage.names() if not is_ours(name)]
    others = [name for name in there if name != MANIFEST]
    if MANIFEST in there and not overwrite:
        raise exists(storage)
    if others or storage.directories():
        what = others[0] if others else storage.directories()[0]
        raise CheckpointError(
            f"{storage} has something else in it, {what!r}: give a directory that is new or has a checkpoint alone"
        )
    infos = {name: content.info(name) for name in content.tensors}
    writes = [
        Write(name, Box.whole(infos[name].shape), tensor, True)  # type: ignore[arg-type]
        for name, tensor in content.tensors.items()
        if infos[name].nbytes
    ]
    writes.sort(key=lambda each: (-each.tensor.itemsize, -each.tensor.nbytes))
    written(Draft(storage, Ranks(alone=True), content.tree, infos, writes, content.info_of_save), progress)


def _write_torch(storage: Storage, name: str, content: Content, tally: Tally) -> None:
    file = storage.create(name, 0)
    try:
        write_archive(file.write, value_with(content.tree, "", content, tally))
        file.finish()
    except BaseException:
        file.abandon()
        raise


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors and values, by name."""
    if is_container(node):
        for key, each in children(node):
            yield from _leaves(each, joined(name, key))
    else:
        yield name, node


def _values(content: Content) -> list[str]:
    """What is no tensor."""
    return [name for name, node in _leaves(content.tree, "") if not (isinstance(node, dict) and "tensor" in node)]  # fmt: skip


def _ties(content: Content) -> dict[str, str]:
    found = {}
    for name, node in _leaves(content.tree, ""):
        if isinstance(node, dict) and node.get("tensor") is not None:
            found[name] = node["tensor"]
    return found


def _format_named(target: PathLike | Storage) -> str:
    name = str(target).lower()
    if name.endswith(".safetensors"):
        return "safetensors"
    return "torch" if name.endswith(_TORCH_SUFFIXES) else "farstep"


def _is_file(target: PathLike | Storage, to: str) -> bool:
    """Or a directory."""
    return to == "torch" or (to == "safetensors" and str(target).endswith(".safetensors"))
