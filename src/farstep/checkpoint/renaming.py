"""What a checkpoint has, by the names that it is to have in the state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farstep.checkpoint.tree import children, is_container, joined
from farstep.errors import CheckpointMismatch

__all__ = ["Index", "Place", "Rename", "new_name"]

Rename = Mapping[str, str] | Callable[[str], str]


def new_name(rename: Rename | None, name: str) -> str:
    """Of the entries of a mapping that go for a name, the longest counts."""
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    head = name
    while head:
        if head in rename:
            return rename[head] + name[len(head) :]
        head = head.rpartition(".")[0]
    return name


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


class Index:
    """`places` are all values and what they are nested in, by new names. A value is left over until somebody takes it."""

    def __init__(self, tree: Any, rename: Rename | None) -> None:
        self.places: dict[str, Place] = {}
        self.left: dict[str, None] = {}
        for place in _all(tree, ""):
            name = new_name(rename, place.name)
            other = self.places.get(name)
            if other is not None and not (is_container(other.node) and is_container(place.node)):
                raise CheckpointMismatch(
                    f"{other.name!r} and {place.name!r} of the checkpoint would both be called {name!r}; nothing has been loaded"
                )
            self.places[name] = place
            if not _has_inside(place.node):
                self.left[name] = None

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
        ordered = self._ordered
        first, end = bisect_left(ordered, f"{name}."), bisect_left(ordered, f"{name}/")  # "/" comes after "."
        return [each for each in ordered[first:end] if each in self.left]

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self.left)


def _has_inside(node: Any) -> bool:
    return is_container(node) and "ranks" not in node and any(True for _ in children(node))


def _all(node: Any, name: str) -> Iterator[Place]:
    if name:
        yield Place(node, name)
    if is_container(node):
        for key, each in children(node):
            yield from _all(each, joined(name, key))
