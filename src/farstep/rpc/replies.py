"""Replies that came together, and who gives them to their futures.

[Note: replies together] Setting a future's result gives up the interpreter's lock, so a reactor thread that completes
futures while the caller's thread is busy fights with it over each. So replies are put aside: a thread that waits for
a future takes its reply and completes it, and the reactor settles in one job what nobody came for in time.

A future's callbacks run on the thread that completes it. Those added through Python are seen, and make a job of
their own; those that hang on `torch.futures.collect_all` can't be seen. One of these may block, or wait for a reply
that came with its own. So whoever completes a future holds no lock that reading or completing needs, a waiting thread
completes no future but its own, and a job that settles replies leaves another one behind it.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from farstep.rpc.calls import AsyncCall

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.message import Message
    from farstep.rpc.tally import Tally

__all__ = ["Replies", "Settlement"]

PATIENCE_TICKS = 5
"""For so long replies wait for a busy caller."""

BUSY_TICKS = 2
"""For so long a caller counts as busy. One would not do: a tick is also when threads change places."""

log = logging.getLogger("farstep.rpc")


class Replies:
    """Plain replies to asynchronous calls of one depth. Filled by one reader; then any thread takes from them."""

    __slots__ = ("_left", "_patience", "_tally", "depth")

    def __init__(self, depth: int, tally: Tally) -> None:
        self.depth = depth
        self._tally = tally
        self._patience = PATIENCE_TICKS
        self._left: dict[AsyncCall, tuple[Message | None, Any]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, call: AsyncCall, message: Message | None, value: Any = None) -> None:
        """A message yet to be opened; or, without one, the value itself."""
        self._left[call] = message, value
        call.arrived = self

    @property
    def are_awaited(self) -> bool:
        """Whether a thread waits that did not find its reply here.

        Such a thread says that it waits and then looks whether its reply has arrived; a reader does it the other way
        round, so one of the two sees the other.
        """
        return any(call.is_awaited for call in list(self._left))

    def may_wait(self) -> bool:
        """Asked at each tick: whether they may wait for another one."""
        self._patience -= 1
        return self._patience >= 0

    def settle_one(self, call: AsyncCall) -> tuple[Any] | None:
        """Complete a call, unless another thread has taken it to complete. Its value, where that is at hand."""
        reply = self._left.pop(call, None)
        if reply is None:
            return None
        call.arrived = None
        message, value = reply
        try:
            if message is None:
                call.succeed(value)
            else:
                call.complete(message, None)
        finally:
            if call.counts:
                self._tally.end()
        return (value,) if message is None else None

    def settle(self) -> None:
        """Complete all that nobody else has taken to complete."""
        for call in list(self._left):
            try:
                self.settle_one(call)
            except Exception:
                log.exception("the future of %s could not be completed", call.what)


class Settlement:
    """Sees to it that the replies which one agent's readers bring are settled. Any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._waiting: deque[Replies] = deque()
        self._busy_ticks = 0

    def caller_is_busy(self) -> None:
        """A thread has made a call that rides, or taken a reply: it may soon take others."""
        self._busy_ticks = BUSY_TICKS

    @property
    def is_caller_busy(self) -> bool:
        return self._busy_ticks > 0

    def await_reply(self, call: AsyncCall) -> tuple[Any] | None:
        """On a thread that waits: complete the call's future, if its reply has arrived or can be read. See `CallFuture`."""
        if call.arrived is None:
            self._read_for(call)
            call.is_awaited = True  # and only then is looked: see `Replies.are_awaited`
        arrived = call.arrived
        if arrived is None:
            return None
        self._busy_ticks = BUSY_TICKS
        value = arrived.settle_one(call)
        if value is None and not call.future.done():
            self._agent.reactor.about_to_wait()  # for another thread, which has taken it
        return value

    def _read_for(self, call: AsyncCall) -> None:
        self._agent.reactor.about_to_wait()
        peer = call.peer
        if peer.riders:
            peer.flush(call.deadline)
        receiver = peer.receiver
        if receiver is None or peer.intake.is_paused or not receiver.take_read_lock():
            return
        # Until the reply is taken, by whichever thread: that one sees to the future.
        read = self._agent.inbox.read_until(receiver, peer, lambda: call.id not in peer.calls, call.deadline)
        for replies in read:
            if len(replies) > 1 or replies is not call.arrived:
                self.put_aside(replies)

    def put_aside(self, replies: Replies) -> None:
        """Replies for threads that may come for them soon."""
        if replies.are_awaited:
            self._agent.submit(replies.depth, partial(self.settle, replies))
        else:
            self._later(replies)

    def _later(self, replies: Replies) -> None:
        self._waiting.append(replies)
        self._agent.reactor.tick_soon()
        if self._agent.closed:  # there may be no tick any more
            self.finish()

    def settle(self, replies: Replies) -> None:
        """As a job."""
        if len(replies) > 1:
            # For the thread that takes over from a stuck one: see [Note: stalls].
            self._agent.submit(replies.depth, partial(self.settle, replies))
        replies.settle()

    def tick(self) -> None:
        busy = self.is_caller_busy
        if busy:
            self._busy_ticks -= 1
        for _ in range(len(self._waiting)):
            try:
                replies = self._waiting.popleft()
            except IndexError:
                break
            if not replies:
                continue
            if busy and replies.may_wait():
                self._later(replies)
            else:
                self._agent.submit(replies.depth, partial(self.settle, replies))

    def finish(self) -> None:
        """At the end, on this thread."""
        while self._waiting:
            try:
                replies = self._waiting.popleft()
            except IndexError:
                break
            replies.settle()
