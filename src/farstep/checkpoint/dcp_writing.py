"""Checkpoints that torch.distributed.checkpoint.load reads, written one tensor after the other."""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections.abc import Collection, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch

from farstep.checkpoint.archives import Handle, write_archive
from farstep.checkpoint.content import Content
from farstep.checkpoint.dcp_metadata import METADATA
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import TensorAt, children, decode, is_container
from farstep.checkpoint.writing import Tally
from farstep.errors import CheckpointError

__all__ = ["value_with", "write_dcp"]

_Path = tuple[str | int, ...]


def write_dcp(storage: Storage, content: Content, tally: Tally, taken: Collection[str] = ()) -> None:
    """A tensor of several names is stored once. What DCP has no place for, a dict without anything in it, is told of in `content.left_out`. Data files have
    no names that are taken."""
    name_of_file = next(name for n in count() if (name := f"__0_{n}.distcp") not in taken)
    leaves = _leaves(content)
    stored: dict[str, tuple[int, int]] = {}
    by_tensor: dict[str, tuple[int, int]] = {}
    file = storage.create(name_of_file, 0)
    at = 0
    try:
        for name, (_, node) in leaves.items():
            tensor = _tensor_at(node, name)
            if tensor is not None and tensor in by_tensor:
                stored[name] = by_tensor[tensor]
                continue
            length = write_archive(file.write, value_with(node, name, content, tally))
            stored[name] = at, length
            if tensor is not None:
                by_tensor[tensor] = at, length
            at += length
        file.finish()
    except BaseException:
        file.abandon()
        raise
    storage.replace(METADATA, pickle.dumps(_metadata(content, leaves, stored, name_of_file)))


def value_with(node: Any, name: str, content: Content, tally: Tally) -> Any:
    """A node's value, with handles for its tensors: a tensor that is there twice has one handle."""
    handles: dict[str, Handle] = {}

    def built(value: Any) -> Any:
        if isinstance(value, TensorAt):
            if value.name not in handles:
                info = content.info(value.name)
                blocks = partial(content.blocks, value.name, tally)
                handles[value.name] = Handle(info.shape, info.dtype, blocks)
            return handles[value.name]
        if isinstance(value, dict):
            return {key: built(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return value if isinstance(value, torch.Size) else type(value)(built(each) for each in value)
        return value

    return built(decode(node, name))


def _leaves(content: Content) -> dict[str, tuple[_Path, Any]]:
    """What DCP stores as an item each, by name, with the keys and numbers that lead there."""
    found: dict[str, tuple[_Path, Any]] = {}

    def walk(node: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
        if not _is_opened(node):
            yield path, node
            return
        inside = list(children(node))
        if not inside:
            content.left_out.append(".".join(map(str, path)))
        for key, each in inside:
            yield from walk(each, (*path, key if "list" in node else str(key)))

    for path, node in walk(content.tree, ()):
        name = ".".join(map(str, path))
        if name in found:
            raise CheckpointError(f"two values would be called {name!r} in DCP; nothing has been written")
        found[name] = path, node
    return found


def _is_opened(node: Any) -> bool:
    """A dict, and a list with tensors or dicts in it. DCP keeps other lists, and all tuples, as one value."""
    if not is_container(node):
        return False
    if "dict" in node or "pairs" in node:
        return True
    return "list" in node and any(
        _is_opened(each) or _tensor_at(each, "") is not None for each in node["list"]
    )


def _tensor_at(node: Any, name: str) -> str | None:
    if isinstance(node, dict) and "tensor" in node:
        return name if node["tensor"] is None else node["tensor"]
    return None


def _metadata(
    content: Content, leaves: dict[str, tuple[_Path, Any]], stored: dict[str, tuple[int, int]], file: str
) -> Any:
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, (_, node) in leaves.items():
        tensor = _tensor_at(node, name)
        index = dcp.MetadataIndex(name)
        if tensor is None:
            entries[name] = dcp.BytesStorageMetadata()
        else:
            info = content.info(tensor)
            size, zero = torch.Size(info.shape), torch.Size([0] * len(info.shape))
            entries[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(dtype=info.dtype), size, [dcp.ChunkStorageMetadata(zero, size)]
            )
            index = dcp.MetadataIndex(name, zero)
        places[index] = _StorageInfo(file, *stored[name])
    more: dict[str, Any] = {"storage_meta": dcp.StorageMeta(save_id=str(uuid.uuid4())), "version": "1.0.0"}
    known = {each.name for each in dataclasses.fields(dcp.Metadata)}
    return dcp.Metadata(
        entries,
        {name: path for name, (path, _) in leaves.items()},
        places,
        **{key: value for key, value in more.items() if key in known},
    )
