"""all_gather, barrier, and the end of a group: what workers do together.

The worker with the smallest name leads. Each sends it its part; the leader answers all when the last part is in, so
a gathering is one round trip. A participant that is lost fails a gathering of named workers, and is left out of
one of all workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farstep.errors import (
    ProtocolError,
    RemoteTraceback,
    RpcError,
    RpcTimeout,
    ShutdownTimeout,
    WorkerLost,
)
from farstep.rpc.current import current_agent
from farstep.rpc.payload import pack
from farstep.rpc.peer import Peer, PeerState
from farstep.rpc.schema import is_id

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.message import Message

__all__ = ["Gatherings", "all_gather", "check_cut_off", "join"]

log = logging.getLogger("farstep.rpc")
Key = tuple[str, int]
MISSING = "Missing:"
KEPT_FAILURES = 16
MAX_LED = 4096
"""With more gatherings than this under way at a leader, no member may wait in more than an eighth of them."""
MAX_NAMED = 5
"""An error message names so many calls of each kind."""
LATE_ANSWER = "its last one ended so late that no time was left to ask the others about theirs"
ASK_AFTER = 0.9
"""A gathering waits for this part of its time; the rest is for asking the leader who is missing."""


class _Gathering:
    """One all_gather, as its leader sees it."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self.names = names
        self.parts: dict[str, Any] = {}
        self.answers: list[Callable[[dict[str, Any] | None, BaseException | None], None]] = []


class Invitation(NamedTuple):
    """What a member's message says about a gathering, checked."""

    key: Key
    names: frozenset[str] | None
    timeout_s: float


class Gatherings:
    """The gatherings that one agent takes part in, and those that it leads."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._led: dict[Key, _Gathering] = {}
        self._given_up: dict[Key, list[str]] = {}

    def next_key(self, names: frozenset[str] | None, purpose: str) -> Key:
        """The k-th gathering of the same workers meets the others' k-th."""
        label = purpose + "/" + ("*" if names is None else ",".join(sorted(names)))
        with self._lock:
            number = self._numbers.get(label, 0)
            self._numbers[label] = number + 1
        return label, number

    def check(self, message: Message) -> Invitation:
        """On the reader's thread. A member brings a part in its own name, to a gathering that is called by its members and that this worker leads."""
        peer = message.peer
        label, number, name, names, timeout_s = message.head
        if name != peer.name:
            raise ProtocolError(f"{peer.name!r} brings a part of a gathering in the name of another worker")
        if names is not None:
            is_theirs = peer.name in names and names == sorted(set(names))
            if not is_theirs or names[0] != self._agent.info.name:
                raise ProtocolError(
                    f"a gathering that {peer.name!r} is no member of, or another worker leads"
                )
        _, _, members = label.partition("/")
        if members != ("*" if names is None else ",".join(names)):
            raise ProtocolError("a gathering that is not called by its members")
        return Invitation((label, number), None if names is None else frozenset(names), float(timeout_s))

    def receive(self, message: Message, call: Invitation, error: BaseException | None = None) -> None:
        """A member's part, at the leader. It counts for as long as the member waits."""
        if message.refs and error is None and any(ref._awaited is not None for ref in message.refs):
            # The leader sends references on, to all members: it must hold them first.
            self._agent.service.when_confirmed(message, 0, partial(self.receive, message, call))
            return
        try:
            if error is not None:
                raise error
            part = message.value(self._agent.trust)
        except Exception as exc:
            self._agent.service.answer_error(message, exc.with_traceback(None))
            return
        key, members, timeout_s = call

        def answer(parts: dict[str, Any] | None, error: BaseException | None) -> None:
            if error is not None:
                self._agent.service.answer_error(message, error)
            else:
                self._agent.service.answer(message, parts)

        # This worker's own part is answered last: it may leave the group once it has the answer.
        expires = time.monotonic() + timeout_s if timeout_s else float("inf")
        self._add(key, members, message.peer.name, (part, expires), answer, last=message.peer.is_self)

    def _add(
        self, key: Key, names: frozenset[str] | None, name: str, part: Any, answer: Any, *, last: bool
    ) -> None:
        with self._lock:
            is_full = key not in self._led and len(self._led) >= MAX_LED and self._is_in_many(name)
            if not is_full:
                gathering = self._led.setdefault(key, _Gathering(names))
                gathering.parts[name] = part
                if last:
                    gathering.answers.append(answer)
                else:
                    gathering.answers.insert(0, answer)
        if is_full:
            answer(
                None, RpcError(f"worker {name!r} waits in too many gatherings that nobody else has come to")
            )
        else:
            self._check(key)

    def _is_in_many(self, name: str) -> bool:
        """Whether a member has begun more than its share of gatherings. Those that it does not wait for any more are forgotten."""
        now = time.monotonic()
        for key, gathering in list(self._led.items()):
            gathering.parts = {n: part for n, part in gathering.parts.items() if part[1] > now}
            if not gathering.parts:
                del self._led[key]
        return sum(name in gathering.parts for gathering in self._led.values()) >= MAX_LED // 8

    def worker_gone(self) -> None:
        with self._lock:
            keys = list(self._led)
        for key in keys:
            self._agent.submit(0, lambda key=key: self._check(key))  # type: ignore[misc]

    def _check(self, key: Key) -> None:
        """Answer everyone if nobody is missing any more."""
        present = {p.name for p in self._agent.links.peers() if p.state is PeerState.PRESENT}
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None:
                return
            now = time.monotonic()
            gathering.parts = {n: part for n, part in gathering.parts.items() if part[1] > now}
            names = present if gathering.names is None else gathering.names
            missing = names - gathering.parts.keys()
            lost = missing - present
            if missing and not lost:
                return
            del self._led[key]
        error = None
        if lost:
            name = min(lost)
            peer = self._agent.links.find(name)
            error = peer.lost_error() if peer else WorkerLost(name, "it is not in the group")
        for answer in gathering.answers:
            answer(None if error else {name: part for name, (part, _) in gathering.parts.items()}, error)

    def missing(self, key: Key) -> list[str]:
        """Who has not come yet, at the leader."""
        present = {p.name for p in self._agent.links.peers() if p.state is PeerState.PRESENT}
        with self._lock:
            gathering = self._led.get(key)
            if gathering is None:
                return self._given_up.get(key, [])
            return sorted((gathering.names or present) - gathering.parts.keys())

    def give_up(self, key: Key, error: BaseException) -> None:
        """The leader's own time is up: tell the others why, for they cannot ask once it has left."""
        missing = self.missing(key)
        with self._lock:
            gathering = self._led.pop(key, None)
            self._given_up[key] = missing
            while len(self._given_up) > KEPT_FAILURES:
                del self._given_up[next(iter(self._given_up))]
        for answer in gathering.answers if gathering else ():
            answer(None, error)


def all_gather(
    agent: Agent,
    part: Any,
    worker_names: Sequence[str] | None,
    timeout_s: float,
    purpose: str = "user",
    asked_s: float | None = None,
) -> dict[str, Any]:
    """Everyone's part by name. `timeout_s` 0 waits as long as everyone is alive.

    `asked_s` is the timeout that the user gave, for error messages, where it is not this one.
    """
    names = None if worker_names is None else frozenset(worker_names)
    if names is not None and agent.info.name not in names:
        raise ValueError(
            f"worker {agent.info.name!r} takes part in a gathering of {sorted(names)} and is not among them"
        )
    for name in names or ():
        agent.peer(name)
    key = agent.links.gatherings.next_key(names, purpose)
    deadline = time.monotonic() + timeout_s if timeout_s else None
    while True:
        present = sorted(p.name for p in agent.links.peers() if p.state is PeerState.PRESENT)
        leader = agent.peer(min(names) if names is not None else present[0])
        left = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
        head = (*key, agent.info.name, None if names is None else sorted(names), left * ASK_AFTER)
        future = agent.start_gather(leader, head, pack((part,)), left)
        try:
            if left and not _is_done_within(future, left * ASK_AFTER):
                raise _who_is_missing(agent, leader, key, asked_s or timeout_s, deadline, future)
            parts = future.wait()
            if type(parts) is not dict or not {str}.issuperset(map(type, parts)):
                raise ProtocolError(
                    f"the leader {leader.name!r} of an all_gather answered with no parts by name"
                )
            return parts
        except RpcTimeout as exc:
            if MISSING in str(exc):
                raise
            raise _who_is_missing(agent, leader, key, asked_s or timeout_s, deadline, future) from exc
        except WorkerLost as exc:
            if names is not None or exc.worker != leader.name or agent.closed or _is_said_by_a_peer(exc):
                raise  # a gathering of all goes on under the next leader


def _is_said_by_a_peer(error: BaseException) -> bool:
    """A leader that says of itself that it is lost lies; asked again, it would say so for ever."""
    return isinstance(error.__cause__, RemoteTraceback)


def _is_done_within(future: torch.futures.Future[Any], timeout_s: float) -> bool:
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(timeout_s)


def _who_is_missing(
    agent: Agent,
    leader: Peer,
    key: Key,
    timeout_s: float,
    deadline: float | None,
    future: torch.futures.Future[Any],
) -> BaseException:
    """Ask the leader. One that has given up and left said so before it went, and that is the answer then."""
    patience_s = min(2.0, max(0.05, (deadline or 0.0) - time.monotonic()))
    try:
        missing = agent.call_sync(leader.name, _missing_here, key, {}, patience_s)
        who = ", ".join(missing) or "nobody any more"
    except RpcError as exc:
        if isinstance(exc, WorkerLost) and _is_done_within(future, patience_s):
            try:
                future.wait()
            except RpcError as said:
                if MISSING in str(said):
                    return said
        who = f"cannot be told by the leader {leader.name!r} ({exc})"
    error = RpcTimeout(
        f"RPC ran for more than {timeout_s:.3g} s while worker {agent.info.name!r} waited for others. {MISSING} {who}"
    )
    if leader.is_self:
        agent.links.gatherings.give_up(key, error)
    return error


def _missing_here(label: str, number: int) -> list[str]:
    return current_agent().links.gatherings.missing((label, number))


def join(agent: Agent, timeout_s: float, asked_s: float) -> None:
    """Wait until every worker is here and no call is under way anywhere.

    Each round waits for this worker's own calls and gathers how many calls each has sent and served. When
    the sums are equal and the same as in the round before, nothing was under way in between. Workers that are gone took
    their counts with them, and in a group that workers join and leave not all know of them: there the same sums are enough.

    `asked_s` is the timeout of the whole shutdown, for error messages.
    """
    deadline = time.monotonic() + timeout_s if timeout_s else None
    before: tuple[int, int] | None = None
    while True:
        agent.tally.wait_idle(_left(deadline))
        left = _left(deadline)
        if left is not None and left <= 0:
            raise ShutdownTimeout(
                f"worker {agent.info.name!r}: calls were still under way when the timeout of its shutdown, "
                f"{asked_s:g} s, had passed: {_under_way(agent) or LATE_ANSWER}"
            )
        try:
            parts = all_gather(agent, agent.tally.totals(), None, left or 0.0, "join", asked_s)
        except ShutdownTimeout:
            raise
        except RpcTimeout as exc:
            raise ShutdownTimeout("; ".join(filter(None, [f"shutdown: {exc}", _under_way(agent)]))) from exc
        counts = [
            part for part in parts.values() if is_id(part)
        ]  # of two numbers; a liar's part counts for nothing
        now = (sum(c[0] for c in counts), sum(c[1] for c in counts))
        some_are_gone = agent.links.is_open or len(counts) < len(agent.links.peers())
        if now == before and (now[0] == now[1] or some_are_gone):
            return
        before = now


def _under_way(agent: Agent) -> str:
    """The calls that this worker waits for in vain, and those that it runs. For error messages."""
    calls = [f"{c.what} on {p.name!r}" for p in agent.links.peers() for c in list(p.calls.values())]
    parts = []
    for what, items, count in (
        ("has no answer yet to", calls, len(calls)),
        ("got no answer to", agent.cut_off, len(agent.cut_off)),
        ("still runs", agent.service.functions_running(), agent.tally.serving),
    ):
        if count:
            more = [f"{count - MAX_NAMED} more"] if count > MAX_NAMED else []
            named = ", ".join(items[:MAX_NAMED] + more) or f"{count} calls"
            parts.append(f"{agent.info.name!r} {what} {named}")
    return "; ".join(parts)


def check_cut_off(agent: Agent) -> None:
    """ShutdownTimeout where workers that ran out of time in their shutdown left calls of this one unanswered."""
    if agent.cut_off:
        gone = [p.lost_error() for p in agent.links.peers() if p.ran_out_of_time]
        raise ShutdownTimeout("; ".join([f"shutdown: {_under_way(agent)}", *map(str, gone[:MAX_NAMED])]))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
