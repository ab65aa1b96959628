"""Names that were saved, and those that parameters have here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from farstep.errors import StateMismatch
from farstep.state.optim_roster import Roster

__all__ = ["Rename", "Translation", "cleaned"]

Rename = Mapping[str, str] | Callable[[str], str] | None
"""Saved names -> those here. Names that a mapping does not have stay as they are."""


class Translation:
    """A saved name -> the parameter's own here. What the user says comes first, then what wrappers put into names is left out."""

    def __init__(self, roster: Roster, rename: Rename = None) -> None:
        self._roster, self._rename = roster, rename

    def __call__(self, saved: str) -> str:
        name = self._renamed(saved)
        if name not in self._roster.known:
            name = cleaned(name, self._roster.known.__contains__)
        return self._roster.aliases.get(name, name)

    def is_known(self, saved: str) -> bool:
        return self(saved) in self._roster.known

    def _renamed(self, saved: str) -> str:
        if self._rename is None:
            return saved
        if not callable(self._rename) and not isinstance(self._rename, Mapping):
            raise TypeError(
                f"rename is a function or a dict, from saved names to those here, not a {type(self._rename).__name__}"
            )
        new = self._rename.get(saved, saved) if isinstance(self._rename, Mapping) else self._rename(saved)
        if not isinstance(new, str):
            raise StateMismatch(
                f"rename gives {new!r} for {saved!r}, which is no name; nothing has been loaded"
            )
        return new


def cleaned(name: str, known: Callable[[str], bool]) -> str:
    """A name without what wrappers put into it, if the model knows it so."""
    bare = re.sub(r"\b(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.", "", name)
    for candidate in (bare, bare.removeprefix("module.")):
        if known(candidate):
            return candidate
    return bare
