"""What a checkpoint has, by the names that it is to have in the state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farstep.checkpoint.tree import children, is_container, joined
from farstep.errors import CheckpointError, CheckpointMismatch

__all__ = ["Index", "Place", "Rename", "new_name"]

Rename = Mapping[str, str] | Callable[[str], str]


def new_name(rename: Rename | None, name: str) -> str:
    """Of the entries of a mapping that go for a name, the longest counts; one for "" goes for all that have no other."""
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return _called(rename, name)
    head = name
    while head:
        if head in rename:
            return rename[head] + name[len(head) :]
        head = head.rpartition(".")[0]
    return joined(rename[""], name) if "" in rename else name


def _called(rename: Callable[[str], str], name: str) -> str:
    try:
        found = rename(name)
    except Exception as exc:
        raise CheckpointError(
            f"rename= raised {type(exc).__name__} ({exc}) for {name!r}: it is called with every name in the checkpoint, those of dicts too, and gives "
            f"back the name itself where there is nothing to rename. Nothing has been changed"
        ) from exc
    if not isinstance(found, str):
        raise CheckpointError(
            f"rename= gave {found!r} for {name!r}: it gives a name for every name. Nothing has been changed"
        )
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """A node of the checkpoint's tree, and the name that it has there."""

    node: Any
    name: str

    @property
    def tensor(self) -> str | None:
        """The tensor that is here, by its name in the checkpoint."""
        if isinstance(self.node, dict) and "tensor" in self.node:
            inside = self.node["tensor"]
            return self.name if inside is None else inside
        return None

    @property
    def is_per_rank(self) -> bool:
        return isinstance(self.node, dict) and "ranks" in self.node


class Index:
    """`places` are all values and what they are nested in, by new names, the whole tree as "". A value is left over until somebody takes it."""

    def __init__(self, tree: Any, rename: Rename | None, name: str = "", called: str = "") -> None:
        """`tree` may be a part of the checkpoint's, which has this `name` there, and is `called` otherwise here."""
        whole = rename.get("", "") if isinstance(rename, Mapping) else called
        self.places: dict[str, Place] = {whole: Place(tree, name)}
        self.left: dict[str, None] = {} if _has_inside(tree) else {whole: None}
        for place in _inside(tree, name):
            new = joined(called, place.name[len(name) + 1 :]) if name else new_name(rename, place.name)
            other = self.places.get(new)
            if other is not None and not (is_container(other.node) and is_container(place.node)):
                raise CheckpointMismatch(
                    f"{other.name!r} and {place.name!r} of the checkpoint would both be called {new!r}; nothing has been loaded"
                )
            self.places[new] = place
            if not _has_inside(place.node):
                self.left[new] = None

    def get(self, name: str) -> Place | None:
        """Without taking it."""
        return self.places.get(name)

    def take(self, name: str) -> Place | None:
        self.left.pop(name, None)
        return self.places.get(name)

    def take_all(self, name: str) -> Place | None:
        """With everything inside."""
        for each in self.below(name):
            del self.left[each]
        return self.take(name)

    def below(self, name: str) -> list[str]:
        """What is left inside."""
        if not name:
            return [each for each in self.left if each]
        ordered = self._ordered
        first, end = bisect_left(ordered, f"{name}."), bisect_left(ordered, f"{name}/")  # "/" comes after "."
        return [each for each in ordered[first:end] if each in self.left]

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self.left)


def _has_inside(node: Any) -> bool:
    return is_container(node) and "ranks" not in node and any(True for _ in children(node))


def _inside(node: Any, name: str) -> Iterator[Place]:
    if is_container(node):
        for key, each in children(node):
            place = joined(name, key)
            if place:
                yield Place(each, place)
            yield from _inside(each, place)
