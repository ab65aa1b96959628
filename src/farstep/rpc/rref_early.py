"""Words about forks that reach the owner before the ADD, which takes another connection."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from farstep.rpc.rref import GlobalId

if TYPE_CHECKING:
    from farstep.rpc.message import Message

__all__ = ["MAX_EARLY", "EarlyWords"]

MAX_EARLY: Final = 16_384
"""So many words may wait for ADDs, of one holder about forks of one maker. Far more than fit between two sockets. It is counted for
each pair, so that a maker which promises forks and never adds them costs only itself."""


class EarlyWords:
    """What holders said of forks that the owner does not know yet. Under the table's lock."""

    def __init__(self) -> None:
        self._confirms: dict[tuple[int, GlobalId], Message] = {}
        self._deletes: dict[tuple[int, GlobalId], None] = {}
        self._counts: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        return len(self._confirms) + len(self._deletes)

    def confirm(self, holder: int, fork: GlobalId, message: Message) -> bool:
        """Keep a CONFIRM until the ADD comes. False where there is no room, or it waits already."""
        if (holder, fork) in self._confirms or self._counts[holder, fork[0]] >= MAX_EARLY:
            return False
        self._counts[holder, fork[0]] += 1
        self._confirms[holder, fork] = message
        return True

    def delete(self, holder: int, fork: GlobalId) -> Message | None:
        """Remember a DELETE until the ADD comes. Returns the holder's CONFIRM, if it waits."""
        waiting = self._pop_confirm(holder, fork)
        # Without room the fork will stay until its holder goes.
        if (holder, fork) not in self._deletes and self._counts[holder, fork[0]] < MAX_EARLY:
            self._counts[holder, fork[0]] += 1
            self._deletes[holder, fork] = None
        return waiting

    def take(self, holder: int, fork: GlobalId) -> tuple[Message | None, bool]:
        """The ADD has come: the CONFIRM that waits for it, and whether the fork has been deleted already."""
        was_deleted = (holder, fork) in self._deletes
        if was_deleted:
            del self._deletes[holder, fork]
            self._uncount(holder, fork)
        return self._pop_confirm(holder, fork), was_deleted

    def worker_gone(self, worker: int) -> list[Message]:
        """Forget what it said, and what was said of its forks. Returns the CONFIRMs among that."""
        for holder, fork in [key for key in self._deletes if worker in (key[0], key[1][0])]:
            del self._deletes[holder, fork]
            self._uncount(holder, fork)
        keys = [key for key in self._confirms if worker in (key[0], key[1][0])]
        return [message for key in keys if (message := self._pop_confirm(*key)) is not None]

    def _pop_confirm(self, holder: int, fork: GlobalId) -> Message | None:
        message = self._confirms.pop((holder, fork), None)
        if message is not None:
            self._uncount(holder, fork)
        return message

    def _uncount(self, holder: int, fork: GlobalId) -> None:
        self._counts[holder, fork[0]] -= 1
        if not self._counts[holder, fork[0]]:
            del self._counts[holder, fork[0]]
