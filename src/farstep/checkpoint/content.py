"""What is converted: a state's tree, and its tensors by name, in memory or still in a checkpoint."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from farstep.checkpoint.archives import Range, check_archive, loaded
from farstep.checkpoint.dcp import check_extent, collected_values
from farstep.checkpoint.local_disk import DiskFile, LocalDisk
from farstep.checkpoint.manifest import WORKERS, TensorInfo
from farstep.checkpoint.no_links import file_to_read
from farstep.checkpoint.pickles import Refused
from farstep.checkpoint.sources import Source, StoredTensor, format_of, source_of
from farstep.checkpoint.storage import Buffer, Storage
from farstep.checkpoint.tree import children, is_container, joined
from farstep.checkpoint.writing import Tally, blocks_of
from farstep.errors import CheckpointError, CheckpointMismatch

__all__ = ["Content", "content_of", "content_of_state"]


@dataclass
class Content:
    """`left_out` are names of values that the state had and the tree has not."""

    tree: Any
    tensors: dict[str, Tensor | StoredTensor]
    kind: str = "state"
    left_out: list[str] = field(default_factory=list)
    info_of_save: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint of ours says of itself, such as its step."""

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.tensors[name].dtype, tuple(self.tensors[name].shape))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    def blocks(self, name: str, tally: Tally) -> Iterator[Buffer]:
        """A tensor's bytes, row by row."""
        for block in blocks_of(self.tensors[name]):  # type: ignore[arg-type]
            yield block
            tally.add(block.nbytes)

    def selected(self, select: str | None, *, keep_ranks: bool) -> Content:
        """A part of it, as a state by itself; every tensor goes by its place there. Of what each rank had for itself, the first rank's, unless all are kept."""
        node, name = self.tree, ""
        if select is not None:
            node, name = _found(self.tree, select), select
        made = Content(None, {}, self.kind, list(self.left_out), self.info_of_save)
        made.tree = _Replacing(self, made, keep_ranks).node(node, name, "")
        if not is_container(made.tree) or ("dict" not in made.tree and "pairs" not in made.tree):
            raise CheckpointMismatch(
                f"{select!r} is no part with names of its own"
                if select
                else "the state is no dict: there is nothing to name its values by"
            )
        return made


def _found(tree: Any, select: str) -> Any:
    waiting = [(tree, "")]
    while waiting:
        node, name = waiting.pop()
        if name == select:
            return node
        if is_container(node):
            inside = [(each, joined(name, key)) for key, each in children(node)]
            waiting += [each for each in inside if select == each[1] or select.startswith(f"{each[1]}.")]
    top = [str(key) for key, _ in children(tree)] if is_container(tree) else []
    raise CheckpointMismatch(
        f"there is no {select!r}: at its top the state has {', '.join(map(repr, top[:20]))}"
    )


class _Replacing:
    def __init__(self, old: Content, new: Content, keep_ranks: bool) -> None:
        self._old, self._new, self._keep_ranks = old, new, keep_ranks
        self._names: dict[str, str] = {}

    def node(self, node: Any, old: str, new: str) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, inside),) = node.items()
        if kind == "tensor":
            return self._tensor(old if inside is None else inside, new)
        if kind == "dict":
            return {"dict": dict(self._items(inside.items(), old, new))}
        if kind == "pairs":
            keys = [key for key, _ in children(node)]
            nodes = [each for _, each in inside]
            done = [self.node(n, joined(old, k), joined(new, k)) for k, n in zip(keys, nodes, strict=True)]
            return {"pairs": [[pair[0], each] for pair, each in zip(inside, done, strict=True)]}
        if kind in ("list", "tuple"):
            return {kind: [self.node(n, joined(old, i), joined(new, i)) for i, n in enumerate(inside)]}
        if kind == "ranks":
            return self._ranks(inside, old, new)
        if kind == "unreadable":
            self._new.left_out.append(f"{new}: {inside}")
            return None
        return node

    def _items(self, items: Iterable[tuple[str, Any]], old: str, new: str) -> Iterator[tuple[str, Any]]:
        for key, each in items:
            found = self.node(each, joined(old, key), joined(new, key))
            if not (isinstance(each, dict) and "unreadable" in each):
                yield key, found

    def _ranks(self, inside: list[Any], old: str, new: str) -> Any:
        names = [f"rank{rank}" for rank in range(len(inside))]
        if self._keep_ranks:
            return {"ranks": [self.node(n, joined(old, r), joined(new, r)) for r, n in zip(names, inside, strict=True)]}  # fmt: skip
        self._new.left_out += [joined(new, rank) for rank in names[1:]]
        return self.node(inside[0], joined(old, "rank0"), new) if inside else None

    def _tensor(self, old: str, new: str) -> Any:
        known = self._names.setdefault(old, new)
        if known != new:
            return {"tensor": known}
        if old not in self._old.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {old!r}, which its tree names")
        if new in self._new.tensors:
            raise CheckpointError(f"two tensors would be called {new!r}; nothing has been written")
        self._new.tensors[new] = self._old.tensors[old]
        return {"tensor": None}


def content_of(storage: Storage, verify: bool, stack: ExitStack) -> Content:
    """Of a checkpoint of any format, whose files are open until the stack ends."""
    kind = format_of(storage)
    if kind == "torch":
        assert isinstance(storage, LocalDisk)
        return _of_torch(storage)
    inner, manifest = source_of(storage, verify)
    source = Source(inner, manifest, verify, stack)
    info = {key: value for key, value in manifest.info.items() if key != WORKERS}
    return Content(manifest.tree, dict(source.tensors()), kind, info_of_save=info)


def content_of_state(state: Any) -> Content:
    """Of a state in this process alone."""
    found = collected_values(state)
    return Content(found.tree, {name: shards.tensors[0] for name, shards in found.tensors.items()})


def _of_torch(storage: LocalDisk) -> Content:
    file = DiskFile(file_to_read(storage.path, is_users=True))
    try:
        source = Range(file, 0, os.fstat(file.fileno()).st_size)
        if is_zip := zipfile.is_zipfile(source):
            check_archive(source)
        # By the descriptor: what has been checked is loaded, whatever may be called so by now. Files of torch before 1.6 are no zips, and read whole.
        value = loaded(Path(f"/proc/self/fd/{file.fileno()}"), mmap=is_zip)
        check_extent(value, source.seek(0, os.SEEK_END))
    except Refused as exc:
        raise CheckpointError(f"{storage} is refused: {exc}") from None
    finally:
        file.close()
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{storage} has a {type(value).__name__}, and no dict of what is saved")
    content = content_of_state(value)
    content.kind = "torch"
    return content
