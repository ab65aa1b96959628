"""Some of many, for a message that stays short."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["listed", "named"]

_SHOWN = 10
_LETTERS = 200


def listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return (
        ", ".join(text if len(text) <= _LETTERS else f"{text[:_LETTERS]}..." for text in texts[:_SHOWN])
        + more
    )


def named(names: Sequence[str]) -> str:
    """Names, as in a state; the state itself has none."""
    return listed([repr(name) if name else "the state itself" for name in names])
