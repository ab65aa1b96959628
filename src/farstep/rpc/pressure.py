"""How much may be under way between two workers: a sender waits for its turn, a receiver stops reading.

[Note: back-pressure] Three bounds, each for one peer, so that only the peer that breaks one is slowed.

* `Turns`, at the caller: so many calls, and so many bytes of calls, are sent to a peer before it answers. A call
  beyond that waits for its turn, until its deadline. A call that timed out keeps its place until its answer comes.
* `Intake`, at the callee: what a peer has sent and is not dealt with, counted in the same way. A peer that goes beyond
  twice what honest callers allow themselves is not read until half of it is done: its socket fills, and it waits.
* The backlog of a `Sender`: answers that the peer does not read. While that is full, the peer's calls are not run.

Why workers that keep to this never stop each other:

1. Nobody is paused for its calls. The calls that a callee counts are some of those that the caller counts, and what
   is counted can only be less for fewer calls; so the callee never counts more than the caller's bound.
2. So everybody's connection is read, all answers are taken in, and no backlog stays full.
3. A call waits only for deeper ones, and a call that is alone at its depth never waits for a turn. Take the deepest
   depth at which a call waits for its turn: another one of that depth is under way to the same peer. What it waits for
   in turn is deeper, so it has been sent; it is read, by 2; and it is run, see [Note: depth]. When it is answered, the
   first in line goes. An async_execution function holds no thread meanwhile, and its calls are deeper just the same. If
   its future waits for other calls of its own depth, as a batch for its last member, then so many must fit in
   at once: that is what `max_calls_per_peer` bounds.
4. What agents send of their own accord (references, gradients, losses) waits for no turn. It is counted until its job
   is over, which waits for no message of that peer; so a pause for these ends by itself.
5. What is kept until something else happens (a value that is not made yet, a part of an all_gather) is never a
   reason to stop reading: too much of it is answered with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from farstep.errors import RpcTimeout

if TYPE_CHECKING:
    from farstep.rpc.calls import Call

__all__ = ["BUFFER_COST", "RIDER_COST", "Intake", "Ledger", "NoTurn", "Turns"]

LARGE_BYTES: Final = 1 << 20
"""Messages of at least this size are looked at one by one: a single one may be as large as it likes."""

EXEMPT_DEPTHS: Final = 32
"""The largest message of a depth does not count against the bytes, at so many depths."""

BUFFER_COST: Final = 256
"""A message counts for its bytes and this for each of its buffers, to its sender and its receiver alike."""

RIDER_COST: Final = 1024
"""What a call that came in a bundle counts for, whatever its size: that is small."""

SLACK_CALLS: Final = 1024
SLACK_BYTES: Final = 64 << 20
"""A callee allows twice what callers allow themselves, and this: calls that are alone at their depth go beyond the bound."""

KEPT_CALLS: Final = 8192
"""So many requests of one peer may wait for something else to happen."""

log = logging.getLogger("farstep.rpc")


class NoTurn(RpcTimeout):
    """As many calls are under way to a peer as may be, and none was answered in time."""


class Ledger:
    """Messages and bytes under way. Not thread-safe. See [Note: back-pressure]."""

    __slots__ = ("_large", "calls", "exempt", "nbytes")

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0
        self.exempt = 0
        """Of these bytes, how many do not count against a bound."""
        self._large: dict[int, list[int]] = {}

    def add(self, depth: int, nbytes: int) -> None:
        self.calls += 1
        self.nbytes += nbytes
        if nbytes >= LARGE_BYTES:
            self._large.setdefault(depth, []).append(nbytes)
            self._find_exempt()

    def remove(self, depth: int, nbytes: int) -> None:
        self.calls -= 1
        self.nbytes -= nbytes
        if nbytes >= LARGE_BYTES:
            large = self._large[depth]
            large.remove(nbytes)
            if not large:
                del self._large[depth]
            self._find_exempt()

    def _find_exempt(self) -> None:
        largest = sorted((max(large) for large in self._large.values()), reverse=True)
        self.exempt = sum(largest[:EXEMPT_DEPTHS])

    def excess_with(self, depth: int, nbytes: int) -> int:
        """The bytes that would count against a bound with one more message."""
        if nbytes < LARGE_BYTES:
            return self.nbytes - self.exempt + nbytes
        self.add(depth, nbytes)
        excess = self.nbytes - self.exempt
        self.remove(depth, nbytes)
        return excess


class Turns:
    """The calls of this worker's that a peer has not answered. Any thread."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ledger = Ledger()
        self._depths: dict[int, int] = {}
        """How many calls are under way at each depth."""
        self._lines: dict[int, deque[Call]] = {}
        self._late: dict[int, tuple[int, int]] = {}
        self._ended = False

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in list(self._lines.values()))

    def take_now(self, call: Call, nbytes: int) -> bool:
        """The usual case, in short: a small call that is alone at its depth. False where it is not, and must `take` its turn."""
        depth = call.depth
        with self._lock:
            if nbytes >= LARGE_BYTES or depth in self._depths or depth in self._lines:
                return False
            call.charge = nbytes
            self._ledger.calls += 1
            self._ledger.nbytes += nbytes
            self._depths[depth] = 1
            return True

    def take(self, call: Call, nbytes: int, before_waiting: Callable[[], None]) -> bool:
        """Wait until the call may be sent. False where the peer is gone, NoTurn at the call's deadline."""
        depth = call.depth
        with self._lock:
            if depth not in self._lines and self._fits(depth, nbytes):
                self._add(call, nbytes)
                return True
        call.waits_for_turn = True
        before_waiting()
        with self._lock:
            line = self._lines.setdefault(depth, deque())
            line.append(call)
            try:
                while not (line[0] is call and self._fits(depth, nbytes)):
                    left = None if call.deadline is None else call.deadline - time.monotonic()
                    if self._ended:
                        return False
                    if (left is not None and left <= 0) or not self._changed.wait(left):
                        raise NoTurn(self.why())
                self._add(call, nbytes)
                return not self._ended
            finally:
                line.remove(call)
                if not line:
                    del self._lines[depth]
                self._changed.notify_all()

    def _fits(self, depth: int, nbytes: int) -> bool:
        is_alone = depth not in self._depths
        if is_alone:
            return True
        if self._ledger.calls >= self._max_calls:
            return False
        return self._ledger.excess_with(depth, nbytes) <= self._max_bytes

    def _add(self, call: Call, nbytes: int) -> None:
        call.charge = nbytes
        call.waits_for_turn = False
        self._ledger.add(call.depth, nbytes)
        self._depths[call.depth] = self._depths.get(call.depth, 0) + 1

    def _remove(self, depth: int, nbytes: int) -> None:
        if nbytes < LARGE_BYTES:
            self._ledger.calls -= 1
            self._ledger.nbytes -= nbytes
        else:
            self._ledger.remove(depth, nbytes)
        left = self._depths[depth] - 1
        if left:
            self._depths[depth] = left
        else:
            del self._depths[depth]
        if self._lines:
            self._changed.notify_all()

    def why(self) -> str:
        """Why a call is not sent."""
        return (
            f"it waited for its turn: {self._ledger.calls} calls of {self._ledger.nbytes} bytes are "
            f"unanswered there, {len(self._late)} of them past their timeout. Wait for results as you go, or raise "
            f"RpcOptions.max_calls_per_peer ({self._max_calls}) or max_bytes_per_peer ({self._max_bytes}) on all workers"
        )

    def give(self, call: Call) -> None:
        """The call has its answer, or was not sent after all."""
        with self._lock:
            if call.charge:
                self._remove(call.depth, call.charge)
                call.charge = 0
            elif self._late:
                self._remove_late(call.id)

    def abandon(self, call: Call) -> None:
        """Nobody waits for the call any more, but the peer may still have it."""
        with self._lock:
            if call.charge:
                self._late[call.id] = call.depth, call.charge
                call.charge = 0

    def late(self, call_id: int) -> None:
        """The answer to a call that nobody waits for."""
        if self._late:
            with self._lock:
                self._remove_late(call_id)

    def _remove_late(self, call_id: int) -> None:
        charge = self._late.pop(call_id, None)
        if charge is not None:
            self._remove(*charge)

    def end(self) -> None:
        """The peer is gone: nobody waits for it."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()


class Intake:
    """What one peer has sent and this worker has not dealt with. Added to by the reader, taken from by any thread."""

    def __init__(self, names: tuple[str, str], max_calls: int, max_bytes: int) -> None:
        self._names = names
        self._max_calls = 2 * max_calls + SLACK_CALLS
        self._max_bytes = 2 * max_bytes + SLACK_BYTES
        self._lock = threading.Lock()
        self._kept = Ledger()
        self._was_told = False
        self.calls = Ledger()
        self.jobs = Ledger()
        self.is_paused = False
        """The peer is not read."""
        self.resume: Callable[[], None] = lambda: None
        """Called without a lock, when the peer may be read again."""

    @property
    def counts(self) -> tuple[int, int]:
        """Messages and bytes."""
        ledgers = (self.calls, self.jobs, self._kept)
        return sum(x.calls for x in ledgers), sum(x.nbytes for x in ledgers)

    def begin(self, ledger: Ledger, depth: int, nbytes: int) -> None:
        """A message came that is work for this worker: one of `calls`, or one of `jobs`."""
        with self._lock:
            if nbytes < LARGE_BYTES:
                ledger.calls += 1
                ledger.nbytes += nbytes
            else:
                ledger.add(depth, nbytes)
            if ledger.calls > self._max_calls or ledger.nbytes - ledger.exempt > self._max_bytes:
                self.is_paused = True
        if self.is_paused and not self._was_told:
            self._was_told = True
            log.warning(
                "worker %r does not read from %r until it has done more of what that sent: %d messages, %d bytes",
                *self._names,
                *self.counts,
            )

    def end(self, ledger: Ledger, depth: int, nbytes: int) -> None:
        """That is over."""
        with self._lock:
            if nbytes < LARGE_BYTES:
                ledger.calls -= 1
                ledger.nbytes -= nbytes
            else:
                ledger.remove(depth, nbytes)
            if not self.is_paused or not self._is_light(self.calls) or not self._is_light(self.jobs):
                return
            self.is_paused = False
        self.resume()

    def _is_light(self, ledger: Ledger) -> bool:
        return 2 * ledger.calls <= self._max_calls and 2 * (ledger.nbytes - ledger.exempt) <= self._max_bytes

    def keep(self, depth: int, nbytes: int) -> bool:
        """A request came that must wait for something else to happen. False where there are too many of them."""
        with self._lock:
            if self._kept.calls >= KEPT_CALLS or self._kept.excess_with(depth, nbytes) > self._max_bytes:
                return False
            self._kept.add(depth, nbytes)
            return True

    def let_go(self, depth: int, nbytes: int) -> None:
        """It has been answered."""
        with self._lock:
            self._kept.remove(depth, nbytes)
