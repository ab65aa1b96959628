"""Safetensors files as Hugging Face keeps models in them: one file, or several with `model.safetensors.index.json`; read as ours are, and written."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from farstep.checkpoint.dtypes import stored_as
from farstep.checkpoint.items import made_manifest
from farstep.checkpoint.manifest import File, Manifest, TensorInfo
from farstep.checkpoint.pickles import Refused
from farstep.checkpoint.safetensors_files import Header, header_bytes, read_header
from farstep.checkpoint.storage import Buffer, Storage
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from farstep.state import Box

__all__ = ["INDEX", "open_safetensors", "write_safetensors"]

INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
_MOST_INDEX_BYTES = 1 << 30
_FORMAT = "format"
"""In the metadata: what wrote it, and no tensor."""


def open_safetensors(storage: Storage, only: str | None = None) -> tuple[Storage, Manifest]:
    """Of a directory's files, or one of them. Its state is a dict of tensors by their names there.

    Raises NoCheckpoint or DamagedCheckpoint.
    """
    names = [only] if only is not None else None
    weight_map: Mapping[str, str] | None = None
    if names is None and INDEX in (there := storage.names()):
        weight_map = _weight_map(storage)
        names = sorted(set(weight_map.values()))
    elif names is None:
        names = sorted(name for name in there if name.endswith(".safetensors"))
    if not names:
        raise NoCheckpoint(f"there is no safetensors file in {storage}")
    headers = {name: _header(storage, name) for name in names}
    tensors, rows = _tensors(headers, weight_map, storage)
    nodes: dict[str, Any] = {name: {"tensor": None} for name in tensors}
    for header in headers.values():
        for name, kept in header.metadata.items():  # as safetensors' save_model tells of tied tensors
            if kept in tensors and name not in nodes and name != _FORMAT:
                nodes[name] = {"tensor": kept}
    mark = xxhash.xxh3_64_hexdigest(
        repr([(n, h.nbytes, sorted(h.tensors)) for n, h in headers.items()]).encode()
    )
    files = [File(name, header.nbytes, 0) for name, header in headers.items()]
    return storage, made_manifest(mark, files, {"dict": nodes}, tensors, rows, str(storage))


def _weight_map(storage: Storage) -> Mapping[str, str]:
    data = storage.read(INDEX)
    try:
        found = json.loads(data) if len(data) <= _MOST_INDEX_BYTES else None
        weight_map = found["weight_map"] if type(found) is dict else None
    except (ValueError, KeyError, RecursionError):
        weight_map = None
    if type(weight_map) is not dict or not weight_map:
        raise DamagedCheckpoint(f"{storage}: {INDEX} is no JSON object with a weight_map")
    for name, file in weight_map.items():
        if type(file) is not str or not _FILE.fullmatch(file):
            raise DamagedCheckpoint(
                f"{storage}: {INDEX} says that {name[:200]!r} is in {str(file)[:200]!r}, which is no file beside it"
            )
    return weight_map


def _header(storage: Storage, name: str) -> Header:
    try:
        file = storage.open(name)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{storage}: the file {name}, which {INDEX} names, is missing") from None
    try:
        return read_header(file)
    except Refused as exc:
        raise DamagedCheckpoint(f"{storage}: the file {name} is refused: {exc}") from None
    finally:
        file.close()


def _tensors(
    headers: Mapping[str, Header], weight_map: Mapping[str, str] | None, storage: Storage
) -> tuple[dict[str, TensorInfo], list[tuple[str, str, int, Box]]]:
    boxes: dict[str, list[tuple[str, int, Box]]] = {}
    dtypes: dict[str, Any] = {}
    for file, header in headers.items():
        for name, placed in header.tensors.items():
            if weight_map is not None and weight_map.get(name) != file:
                continue
            offsets = header.offsets.get(name, (0,) * len(placed.shape))
            others = boxes.setdefault(name, [])
            if others and (len(others[0][2].sizes) != len(offsets) or dtypes[name] != placed.dtype):
                raise DamagedCheckpoint(f"{storage}: {name!r} has another dtype or shape in {file} than in {others[0][0]}")  # fmt: skip
            if others and name not in header.offsets:
                raise DamagedCheckpoint(f"{storage}: both {others[0][0]} and {file} have {name!r}, and there is no {INDEX} that says which counts: give the path of one of them")  # fmt: skip
            dtypes[name] = placed.dtype
            others.append((file, placed.begin, Box(offsets, placed.shape)))
    for name in weight_map or ():
        if name not in boxes:
            raise DamagedCheckpoint(f"{storage}: the file {(weight_map or {})[name]} does not have {name!r}, which {INDEX} says it has")  # fmt: skip
    tensors, rows = {}, []
    for name, each in boxes.items():
        shape = tuple(map(max, zip(*(box.ends for _, _, box in each), strict=True)))
        if math.prod(side for side in shape if side) * dtypes[name].itemsize >= 1 << 62:
            raise DamagedCheckpoint(f"{storage}: the parts of {name[:200]!r} are at places of more bytes than there can be")  # fmt: skip
        tensors[name] = TensorInfo(dtypes[name], shape)
        rows += [(name, file, at, box) for file, at, box in each if box.numel]
    return tensors, rows


# -- writing ----------------------------------------------------------------------------------------------


def write_safetensors(
    storage: Storage,
    only: str | None,
    tensors: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    blocks: Callable[[str], Iterable[Buffer]],
    max_shard_bytes: int,
    taken: Collection[str] = (),
) -> None:
    """Files of at most so many bytes each, if a tensor is not larger, with an index if there are several; or, with `only`, one file of that name.

    If there are other files already, whose names are taken, there is always an index: it makes the new ones count at once, under names of their own.

    `ties` are other names of tensors: they are kept in the file's metadata, where safetensors' load_model looks for them.
    """
    for name, info in tensors.items():
        if stored_as(info.dtype) is None:
            raise CheckpointError(f"{name!r} is {info.dtype}, which safetensors does not keep; nothing has been written")  # fmt: skip
        if name == "__metadata__":
            raise CheckpointError("a tensor is called '__metadata__', which safetensors keeps for itself; nothing has been written")  # fmt: skip
    if _FORMAT in ties:
        raise CheckpointError(f"'{_FORMAT}' is another name of {ties[_FORMAT]!r}, and safetensors keeps that word for itself; nothing has been written")  # fmt: skip
    shards = [list(tensors)] if only is not None else _shards(tensors, max_shard_bytes)
    with_index = only is None and (len(shards) > 1 or bool(taken))
    mark = f"-{secrets.token_hex(4)}" if taken else ""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = only or "model.safetensors"
        if with_index:
            file = f"model{mark}-{number:05}-of-{len(shards):05}.safetensors"
        # Elements of 8 bytes before those of 4, and so on: then all lie at multiples of their size.
        names.sort(key=lambda name: -tensors[name].dtype.itemsize)
        own = {tied: kept for tied, kept in ties.items() if kept in names}
        _write(storage, file, names, tensors, own, blocks)
        weight_map |= dict.fromkeys(names, file)
    if with_index:
        total = sum(info.nbytes for info in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        storage.replace(INDEX, json.dumps(index, indent=2).encode())


def _shards(tensors: Mapping[str, TensorInfo], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    return shards


def _write(
    storage: Storage,
    file_name: str,
    names: Sequence[str],
    tensors: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    blocks: Callable[[str], Iterable[Buffer]],
) -> None:
    header = header_bytes([(name, tensors[name]) for name in names], ties)
    file = storage.create(file_name, len(header) + sum(tensors[name].nbytes for name in names))
    try:
        file.write([memoryview(header)])
        for name in names:
            for block in blocks(name):
                file.write([block])
        file.finish()
    except BaseException:
        file.abandon()
        raise
