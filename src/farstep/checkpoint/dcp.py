"""Checkpoints of torch.distributed.checkpoint, read as ours are: any part, on any number of ranks, without running anything that their pickles say.

A DCP checkpoint is a directory: `.metadata`, and files in which each chunk of a tensor is a file of `torch.save` by itself (or, if DCP was told so, a tensor of
a safetensors file at the end). Values that are no tensors are stored the same way.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import xxhash
from torch import Tensor

from farstep.checkpoint.archives import Range, check_archive, loaded, place_of, plain_value
from farstep.checkpoint.collecting import Collected, collected
from farstep.checkpoint.dcp_metadata import METADATA, Metadata, Stored, metadata_of
from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.items import Item, Items, Located, made_manifest
from farstep.checkpoint.manifest import File, Manifest, TensorInfo
from farstep.checkpoint.memory import bytes_of
from farstep.checkpoint.pickles import Refused
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.safetensors_files import Header, read_header
from farstep.checkpoint.storage import Storage, StoredFile
from farstep.checkpoint.tree import MOST_DEPTH, encode_mapping
from farstep.errors import CheckpointError, DamagedCheckpoint, FarstepError, NoCheckpoint
from farstep.state import Box

__all__ = ["METADATA", "check_extent", "collected_values", "open_dcp"]

_RANK = re.compile(r"__(\d{1,7})_\d+\.distcp")
_ZIP = b"PK\x03\x04"
_SHORT = 64
"""Names and such, which pickles have once however often they are used."""


def open_dcp(storage: Storage) -> tuple[Items, Manifest]:
    """A storage and a manifest to read it by. Raises NoCheckpoint or DamagedCheckpoint."""
    try:
        data = storage.read(METADATA)
    except FileNotFoundError:
        raise NoCheckpoint(f"there is no DCP checkpoint in {storage}: it has no {METADATA}") from None
    metadata = metadata_of(data, str(storage))
    with ExitStack() as stack:
        return _Opening(storage, metadata, stack).opened(xxhash.xxh3_64_hexdigest(data))


class _Opening:
    def __init__(self, storage: Storage, metadata: Metadata, stack: ExitStack) -> None:
        self._storage, self._metadata, self._stack = storage, metadata, stack
        self._files: dict[str, StoredFile] = {}
        self._items: dict[str, list[Item]] = {}
        self._tensors = dict(metadata.tensors)
        self._rows: list[tuple[str, str, int, Box]] = []
        """Tensor, file, place in what the file stores, box."""

    def opened(self, mark: str) -> tuple[Items, Manifest]:
        ties = self._checked_ties()
        headers: dict[tuple[str, int], Header] = {}
        for name, chunks in self._metadata.chunks.items():
            if name in ties:
                del self._tensors[name]
                continue
            for box, stored in chunks:
                item = _Saved(self._storage, name, box, self._tensors[name].dtype, stored, headers)
                self._add(name, box, stored.file, item)
        nodes = {name: self._value(name, stored) for name, stored in self._metadata.values.items()}
        nodes |= {name: {"tensor": ties.get(name)} for name in self._metadata.tensors}
        tree = _tree(nodes, self._metadata.paths, str(self._storage))
        sizes = {file: sum(item.nbytes for item in items) for file, items in self._items.items()}
        files = [
            File(file, size, int(found[1]) if (found := _RANK.fullmatch(file)) else 0)
            for file, size in sizes.items()
        ]
        manifest = made_manifest(mark, files, tree, self._tensors, self._rows, str(self._storage))
        return Items(self._storage, self._items), manifest

    def _add(self, name: str, box: Box, file: str, item: Item) -> None:
        items = self._items.setdefault(file, [])
        item.at = items[-1].at + items[-1].nbytes if items else 0
        items.append(item)
        self._rows.append((name, file, item.at, box))

    def _file(self, name: str, what: str) -> StoredFile:
        file = self._files.get(name)
        if file is None:
            try:
                file = self._files[name] = self._storage.open(name)
            except FileNotFoundError:
                raise DamagedCheckpoint(
                    f"{self._storage}: the file {name}, which has {what!r}, is missing"
                ) from None
            self._stack.callback(file.close)
        return file

    def _checked_ties(self) -> dict[str, str]:
        """Items that share bytes are one tensor under several names, or tensors of one safetensors file. Anything else is refused.

        No file is shorter than it is said to be: so no tensor is larger than what is there.
        """
        by_file: dict[str, dict[int, list[tuple[str, Box | None, Stored]]]] = {}
        for name, chunks in self._metadata.chunks.items():
            for box, stored in chunks:
                by_file.setdefault(stored.file, {}).setdefault(stored.begin, []).append((name, box, stored))
        for name, stored in self._metadata.values.items():
            if stored.length:
                by_file.setdefault(stored.file, {}).setdefault(stored.begin, []).append((name, None, stored))
        ties: dict[str, str] = {}
        for file, by_begin in by_file.items():
            reached, before = 0, ""
            for begin, sharing in sorted(by_begin.items()):
                name, _, stored = sharing[0]
                end = begin + stored.length
                if len(sharing) > 1:
                    is_tied = self._is_archive(file, begin, name)
                    if not is_tied:  # tensors of one safetensors file, which has them all
                        end = begin + sum(each.length for _, _, each in sharing)
                    for other, place, each in sharing[1:] if is_tied else ():
                        if each != stored or place is None or not self._is_one(name, other, place):
                            raise self._shared(name, other, file)
                        ties[other] = name
                if begin < reached:
                    raise self._shared(before, name, file)
                reached, before = end, name
            if self._file(file, before).read_into(reached - 1, memoryview(bytearray(1))) != 1:
                raise DamagedCheckpoint(
                    f"{self._storage}: the file {file}, which has {before!r}, ends before byte {reached}: it has been cut off"
                )
        return ties

    def _is_archive(self, file: str, begin: int, name: str) -> bool:
        head = bytearray(4)
        self._file(file, name).read_into(begin, memoryview(head))
        return head == _ZIP

    def _is_one(self, name: str, other: str, box: Box) -> bool:
        info = self._tensors.get(name)
        return info is not None and info == self._tensors.get(other) and box == Box.whole(info.shape)

    def _shared(self, one: str, other: str, file: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self._storage}: by {METADATA} {one!r} and {other!r} share bytes of the file {file}, which DCP does not write"
        )

    # -- values that are no tensors -----------------------------------------------------------------------

    def _value(self, name: str, stored: Stored) -> Any:
        """As a node of the tree. What may not be loaded is one that says so when it is wanted."""
        file = self._file(stored.file, name)
        try:
            value = plain_value(Range(file, stored.begin, stored.length))
        except Refused:
            try:
                value = _loaded(file, stored)
            except Refused as exc:
                return {"unreadable": f"{self._storage}: in the file {stored.file}, {exc}"}
        try:
            check_extent(value, stored.length)
            found = collected_values({name: value})
        except (Refused, CheckpointError) as exc:
            return {"unreadable": f"{self._storage}: in the file {stored.file}, {exc}"}
        for inner, shards in found.tensors.items():
            (tensor,) = shards.tensors
            if inner in self._tensors:
                raise DamagedCheckpoint(f"{self._storage}: two tensors are called {inner!r}")
            self._tensors[inner] = TensorInfo(tensor.dtype, tuple(tensor.shape))
            if tensor.numel():
                self._add(inner, Box.whole(tensor.shape), stored.file, _InMemory(inner, tensor))
        return found.tree["dict"][name]


def _loaded(file: StoredFile, stored: Stored) -> Any:
    """By torch. Raises Refused."""
    source = Range(file, stored.begin, stored.length)
    check_archive(source)
    source.seek(0)
    return loaded(io.BytesIO(source.read()))


def check_extent(value: Any, nbytes: int) -> None:
    """A small pickle may stand for a structure that never ends when it is walked, or for one tensor or text many times over."""
    left = 1000 + 10 * nbytes
    waiting = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        left -= 1
        if isinstance(each, Tensor):
            left -= 0 if each.layout is not torch.strided else each.nbytes
        elif isinstance(each, str | bytes | bytearray) and len(each) > _SHORT:
            left -= len(each)
        if left < 0 or depth > MOST_DEPTH:
            raise Refused("a value is larger or deeper than what is stored")
        if isinstance(each, Mapping):
            waiting += [(inner, depth + 1) for pair in each.items() for inner in pair]
        elif isinstance(each, list | tuple):
            waiting += [(inner, depth + 1) for inner in each]


def collected_values(state: Any) -> Collected:
    """Of what another format has. Raises CheckpointError for what a checkpoint of ours does not keep, tensors of another layout or dtype included."""
    try:
        found = collected(state, Ranks(alone=True))
        for name, shards in found.tensors.items():
            for tensor in shards.tensors:
                _check_kept(name, tensor)
    except CheckpointError:
        raise
    except (FarstepError, TypeError, ValueError) as exc:
        raise CheckpointError(f"it has what a checkpoint does not keep: {exc}") from exc
    return found


def _check_kept(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name!r} is a tensor of the layout {tensor.layout}, which a checkpoint does not keep: make it dense"
        )
    try:
        name_of(tensor.dtype)
    except ValueError as exc:
        raise CheckpointError(f"{name!r}: {exc}") from None


# -- tensors ----------------------------------------------------------------------------------------------


class _Saved(Item):
    """A chunk of a tensor."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        box: Box,
        dtype: torch.dtype,
        stored: Stored,
        headers: dict[tuple[str, int], Header],
    ) -> None:
        self._storage, self._box, self._dtype, self._stored = storage, box, dtype, stored
        self._headers = headers
        self.name, self.label = name, repr(name)
        self.nbytes = box.numel * dtype.itemsize

    def locate(self, file: StoredFile) -> Located:
        stored = self._stored
        head = bytearray(4)
        file.read_into(stored.begin, memoryview(head))
        try:
            if head != _ZIP:
                return self._in_safetensors(file)
            source = Range(file, stored.begin, stored.length)
            place = place_of(source, stored.begin, self._box.sizes, self._dtype)
            if place is not None:
                return Located(place.begin, place.crc)
            return Located(memory=bytes_of(self._tensor(file)))
        except Refused as exc:
            raise DamagedCheckpoint(
                f"{self._storage}: the file {stored.file} does not have {self.name!r} {self._box} at byte {stored.begin}: {exc}"
            ) from None

    def _tensor(self, file: StoredFile) -> Tensor:
        value = _loaded(file, self._stored)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise Refused(f"it is a {type(value).__name__}, and no tensor whose elements lie in memory")
        if tuple(value.shape) != self._box.sizes or value.dtype != self._dtype:
            raise Refused(f"it is {value.dtype} of shape {tuple(value.shape)}, and not {self._dtype} of {self._box.sizes}")  # fmt: skip
        return value.detach().resolve_conj().resolve_neg().contiguous()

    def _in_safetensors(self, file: StoredFile) -> Located:
        key = self._stored.file, self._stored.begin
        if key not in self._headers:
            self._headers[key] = read_header(file, self._stored.begin)
        header = self._headers[key]
        found = header.tensors.get(self.name)
        if found is None:
            raise Refused("there is neither a file of torch.save nor of safetensors that has it")
        offsets = header.offsets.get(self.name)
        if (found.shape, found.dtype) != (self._box.sizes, self._dtype) or (
            offsets is not None and offsets != self._box.offsets
        ):
            raise Refused("the safetensors file there has another chunk of it")
        return Located(self._stored.begin + found.begin)


class _InMemory(Item):
    """A tensor inside a value."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._tensor, self.label, self.nbytes = tensor, repr(name), tensor.nbytes

    def locate(self, file: StoredFile) -> Located:
        return Located(memory=bytes_of(self._tensor.detach().resolve_conj().resolve_neg().contiguous()))


# -- how it is nested -------------------------------------------------------------------------------------


def _tree(nodes: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], where: str) -> Any:
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        inside = root
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
            if type(inside) is not dict:
                raise DamagedCheckpoint(
                    f"{where}: {METADATA} has something within {name!r}, which is a value"
                )
        if path[-1] in inside:
            raise DamagedCheckpoint(f"{where}: {METADATA} has {name!r} as a value and as a place of values")
        inside[path[-1]] = _Leaf(nodes[name])
    return _node(root)


class _Leaf:
    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def _node(found: Any) -> Any:
    if isinstance(found, _Leaf):
        return found.node
    nodes = {key: _node(each) for key, each in found.items()}
    if nodes and all(type(key) is int for key in nodes):
        if sorted(nodes) == list(range(len(nodes))):
            return {"list": [nodes[i] for i in range(len(nodes))]}
        return encode_mapping(nodes)
    nodes = {str(key): each for key, each in nodes.items()}
    groups = nodes.get("param_groups")
    if isinstance(groups, dict) and "list" in groups:
        nodes["state"] = _optimizer_state(nodes.get("state", {"dict": {}}), groups["list"])
    return {"dict": nodes}


def _optimizer_state(state: Any, groups: list[Any]) -> Any:
    """DCP leaves out a dict that is empty, and makes strings of keys: where parameters go by numbers, they are numbers again."""
    numbered = [
        number
        for group in groups
        if isinstance(group, dict) and isinstance(params := group.get("dict", {}).get("params"), dict)
        for number in params.get("list", ())
    ]
    keys = state.get("dict", {})
    if not keys or not numbered or not all(type(number) is int for number in numbered):
        return state
    if not keys.keys() <= {str(number) for number in numbered}:
        return state
    return encode_mapping({int(key): each for key, each in keys.items()})
