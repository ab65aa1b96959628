"""One worker: it sends calls, runs calls, matches replies, and notices who is gone.

An agent is an object. `init_rpc` makes one for the process; tests make many in one process. What it does is spread
over a few parts, each in a file of its own: the `Reactor` has the threads, the `Inbox` reads, the `Service` runs
calls for peers, `Links` has the peers and their connections, the `RRefTable` the references. This file is the
caller's side, and holds them together.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farstep.errors import (
    NotInitialized,
    PayloadError,
    RpcError,
    RpcTimeout,
    UnknownWorker,
    WorkerLost,
)
from farstep.rpc import extension
from farstep.rpc.calls import AsyncCall, Call, CallFuture, Deadlines, HookCall, SyncCall, timeout_error
from farstep.rpc.current import serving
from farstep.rpc.departure import Leaving
from farstep.rpc.extension import Extension
from farstep.rpc.inbox import Inbox
from farstep.rpc.links import Links
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.message import EMPTY, Message
from farstep.rpc.options import UNSET_RPC_TIMEOUT, RpcOptions
from farstep.rpc.payload import Packed, name_of, pack
from farstep.rpc.peer import Peer, PeerState
from farstep.rpc.pressure import NoTurn
from farstep.rpc.reactor import OWN, Job, Reactor, Work, current_depth
from farstep.rpc.replies import Settlement
from farstep.rpc.rref import RRef, owner_rref, user_rref
from farstep.rpc.rref_table import RRefTable
from farstep.rpc.schema import MAX_CALL_DEPTH
from farstep.rpc.service import Service, describe_function, rebuild_error
from farstep.rpc.tally import Tally
from farstep.rpc.trust import Trust
from farstep.rpc.wire import CALLS, Kind

__all__ = ["Agent"]

log = logging.getLogger("farstep.rpc")
CONTROL_TIMEOUT_S = 30.0
MIN_CLOSE_S = 0.05
"""Threads that wait need a moment to end; those that run a called function are left alone after it."""
MANY_CALLS = 8
"""With more calls than this under way to one peer, small asynchronous ones wait for others to leave with."""
CORK_CALLS = 64
"""So many do not wait any longer."""
TURNS = frozenset({Kind.CALL, Kind.REMOTE})
"""What waits for its turn. See [Note: back-pressure]."""
Target = str | int | WorkerInfo


class Agent:
    """A worker of a group. Made by `join_group`; every method may be called from any thread."""

    def __init__(self, info: WorkerInfo, options: RpcOptions) -> None:
        self.info = info
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self.trust = Trust(options.trusted, f"worker {info.name!r}")
        self.closed = False
        self._call_ids = itertools.count(1)
        self.tally = Tally()
        self.is_shutting_down = False
        self.cut_off: list[str] = []
        """Calls that got no answer while this worker shut down, because their callees ran out of time."""
        self._corked: set[Peer] = set()
        self.settlement = Settlement(self)
        self.reactor = Reactor(
            info.name,
            options.num_worker_threads,
            options.max_threads,
            on_thread_start=self._enter_thread,
            on_wake=self._on_wake,
            on_tick=self._tick,
        )
        self._deadlines = Deadlines(info.name, self._fire)
        self.rrefs = RRefTable(self)
        self.service = Service(self)
        self.inbox = Inbox(self, self.service)
        self._extension: Extension | None = None
        self._extension_lock = threading.Lock()
        self.links = Links(self)

    def _enter_thread(self) -> None:
        serving.set(self)
        torch.get_num_threads()  # takes torch.set_num_threads over, which a new thread's OpenMP does not know

    @property
    def extension(self) -> Extension:
        """The layer above, made when it is first needed."""
        if self._extension is None:
            with self._extension_lock:
                if self._extension is None:
                    self._extension = extension.make(self)
        return self._extension

    @property
    def has_extension(self) -> bool:
        return self._extension is not None

    # -- who ------------------------------------------------------------------------------------------

    def peer(self, target: Target) -> Peer:
        """The worker of that name, rank or info. UnknownWorker where there is none."""
        peer = self.links.find(target)
        if peer is None:
            known = ", ".join(info.name for info in self.get_worker_infos())
            hint = "; workers may still join it" if self.links.is_open else ""
            raise UnknownWorker(
                f"worker {self.info.name!r} could not find destination {target!r}; the group has: {known}{hint}"
            )
        return peer

    def is_present(self, worker_id: int) -> bool:
        return self.links.is_present(worker_id)

    def is_gone(self, worker_id: int) -> bool:
        """Whether it was known here, and is lost or has left."""
        return self.links.is_gone(worker_id)

    def get_worker_info(self, target: Target | None = None) -> WorkerInfo:
        return self.info if target is None else self.peer(target).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group that are neither lost nor gone, by rank."""
        return [p.info for p in self.links.peers() if p.state is PeerState.PRESENT]

    # -- calling --------------------------------------------------------------------------------------

    def effective_timeout(self, timeout: float) -> float:
        """Seconds; 0 for none."""
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"a timeout is a number of seconds (0 for none), not {timeout!r}")
        if timeout == UNSET_RPC_TIMEOUT:
            return self.rpc_timeout
        if not timeout >= 0:
            raise ValueError(f"a timeout is 0 (none) or positive, not {timeout}")
        return timeout

    def soon(self) -> float:
        """A deadline for what the agent itself sends."""
        return time.monotonic() + CONTROL_TIMEOUT_S

    def call_sync(
        self, to: Target, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> Any:
        """Run `function` on a worker and return what it returns."""
        return self.answer_to(self.begin_sync(to, function, args, kwargs, timeout))

    def begin_sync(
        self, to: Target, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> SyncCall:
        """The first half of `call_sync`, for a thread that has something to do before it waits with `answer_to`."""
        peer = self.peer(to)
        head, packed = self._pack_call(function, args, kwargs, peer)
        call = SyncCall(
            next(self._call_ids),
            peer,
            describe_function(function),
            current_depth(),
            self.effective_timeout(timeout),
        )
        self._send_call(call, Kind.CALL, head, packed)
        return call

    def call_async(
        self, to: Target, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> CallFuture:
        """Run `function` on a worker and return a future of what it returns."""
        peer = self.peer(to)
        head, packed = self._pack_call(function, args, kwargs, peer)
        return self._start_async(peer, Kind.CALL, head, packed, describe_function(function), timeout)

    def remote(
        self, to: Target, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> RRef[Any]:
        """Run `function` on a worker, leave the result there, and return a reference to it at once."""
        peer = self.peer(to)
        name, packed = self._pack_call(function, args, kwargs, peer)
        id = self.rrefs.new_id()
        fork = self.rrefs.new_id()
        if peer.is_self:
            rref = owner_rref(self, self.rrefs.begin_own(id))
        else:
            rref = user_rref(self, peer.info, id, fork, confirmed=False)
            self.rrefs.creating(rref)
        future = self._start_async(
            peer, Kind.REMOTE, (name, id, fork), packed, describe_function(function), timeout
        )
        rref._creation = future
        if not peer.is_self:
            future.add_done_callback(partial(_note_creation, self.rrefs, fork))
        return rref

    def fetch(self, owner: WorkerInfo, id: tuple[int, int], timeout: float) -> Any:
        """The value of a reference, from its owner."""
        call = SyncCall(
            next(self._call_ids),
            self.peer(owner.id),
            "RRef.to_here",
            current_depth(),
            self.effective_timeout(timeout),
        )
        self._send_call(call, Kind.FETCH, id, EMPTY)
        return self._result(self._await(call))

    def request(
        self, peer: Peer, kind: Kind, head: Any, hook: Callable[[Message | None, BaseException | None], None]
    ) -> None:
        """A message of the agent's own that wants an answer."""
        call = HookCall(next(self._call_ids), peer, kind.name, current_depth(), CONTROL_TIMEOUT_S, hook=hook)
        self._send_call(call, kind, head, EMPTY)

    def ask(self, peer: Peer, kind: Kind, head: Any, timeout_s: float) -> SyncCall:
        """The same, for a thread that will wait for the answer with `answer_to`."""
        call = SyncCall(next(self._call_ids), peer, kind.name, current_depth(), timeout_s)
        self._send_call(call, kind, head, EMPTY)
        return call

    def answer_to(self, call: SyncCall) -> Any:
        return self._result(self._await(call))

    def start_gather(self, peer: Peer, head: Any, packed: Packed, timeout_s: float) -> CallFuture:
        """This worker's part of an all_gather, to its leader."""
        return self._start_async(peer, Kind.GATHER, head, packed, "all_gather", timeout_s)

    def _start_async(
        self, peer: Peer, kind: Kind, head: Any, packed: Packed, what: str, timeout: float
    ) -> CallFuture:
        timeout_s = self.rpc_timeout if timeout is UNSET_RPC_TIMEOUT else self.effective_timeout(timeout)
        call = AsyncCall(next(self._call_ids), peer, what, current_depth(), timeout_s, self._result)
        if kind is Kind.GATHER:
            call.counts = False  # who waits for everyone waits long, and must not read for all meanwhile
        else:
            call.future.await_reply = partial(self.settlement.await_reply, call)
        if self._extension is not None:
            call.future.bind = self._extension.bind
        try:
            self._send_call(call, kind, head, packed)
        except (WorkerLost, RpcTimeout) as exc:
            # The caller meets it where it waits, as for a worker that is lost a moment later.
            call.future.await_reply = None
            if not call.future.done():
                call.future.set_exception(exc)
        return call.future

    def _pack_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> tuple[tuple[str, str] | None, Packed]:
        name = name_of(function)
        try:
            if name is None and "<" in getattr(function, "__qualname__", ""):
                raise PayloadError(
                    "cannot be sent: the function is defined inside another one, and a call carries only a function's "
                    "name; define it at module level"
                )
            return name, pack(args, kwargs, None if name else function)
        except PayloadError as exc:
            raise PayloadError(
                f"call {describe_function(function)} from {self.info.name!r} to {peer.name!r} {exc}"
            ) from exc

    def _send_call(self, call: Call, kind: Kind, head: Any, packed: Packed) -> None:
        if self.closed:
            raise NotInitialized(f"worker {self.info.name!r} has shut down. RPC has not been initialized")
        if call.depth > MAX_CALL_DEPTH:
            raise RpcError(
                f"calls are nested more than {MAX_CALL_DEPTH} deep: {call.what} calls itself without end"
            )
        peer = call.peer
        extra = None
        if self._extension is not None and kind in CALLS:
            extra = self._extension.leaving(peer, packed)
        peer.calls[call.id] = call
        if kind is not Kind.GATHER:
            self.tally.send()
        if call.deadline is not None and not isinstance(call, SyncCall):
            self._deadlines.add(call, call.deadline)
        try:
            if (
                len(peer.calls) <= MANY_CALLS
                or extra is not None
                or kind is not Kind.CALL
                or not isinstance(call, AsyncCall)
                or not self._send_later(call, head, packed)
            ):
                peer.post(
                    kind,
                    call.id,
                    head,
                    packed,
                    depth=call.depth + 1,
                    deadline=call.deadline,
                    extra=extra,
                    soon=isinstance(call, HookCall),
                    turn=call if kind in TURNS else None,
                )
        except BaseException as exc:
            if extra is not None and self._extension is not None and not getattr(exc, "began", False):
                self._extension.left_behind(extra)
            mine = self.take(peer, call.id) is not None
            if call.charge:
                peer.turns.abandon(call)  # it has been begun
            if kind is not Kind.GATHER:
                # Calls sent and calls received must come out even, or nobody sees that a group is idle.
                if getattr(exc, "began", False):  # the peer will get it
                    if mine:
                        self.tally.end()
                elif mine:
                    self.tally.unsend()
                else:
                    self.tally.unsend_ended()
            if not mine:
                return  # it has its outcome already: the peer was lost meanwhile, or its time was up
            if isinstance(exc, NoTurn):
                raise RpcTimeout(
                    f"call {call.what} from {self.info.name!r} to {peer.name!r} was not sent within its timeout "
                    f"({call.timeout_s * 1000:g} ms): {exc}"
                ) from None
            if isinstance(exc, RpcTimeout) and call.timeout_s:
                raise timeout_error(self.info.name, call) from exc
            raise
        if extra is not None and self._extension is not None:
            self._extension.left(peer, extra)
        if peer.state is not PeerState.PRESENT and self.take(peer, call.id) is not None:
            self._finish_call(call, None, peer.lost_error())  # it was lost while we wrote

    def _send_later(self, call: AsyncCall, head: Any, packed: Packed) -> bool:
        """With many calls under way to a peer, small asynchronous ones go together.

        They leave when there are CORK_CALLS of them, when a thread waits for one, with any other message to that peer,
        or when the reactor looks, a millisecond later.
        """
        peer = call.peer
        riders = peer.ride(Kind.CALL, call.id, head, packed, call.depth + 1, turn=call)
        if not riders:
            return False
        self._corked.add(peer)
        self.settlement.caller_is_busy()
        if riders >= CORK_CALLS:
            peer.flush(call.deadline)
        else:
            self.reactor.tick_soon()
        return True

    def take(self, peer: Peer, call_id: int) -> Call | None:
        """Whoever gets the call here completes it; nobody else will."""
        call = peer.calls.pop(call_id, None)
        if call is not None and not isinstance(call, SyncCall):
            self._deadlines.remove(call)
        return call

    def take_answered(self, peer: Peer, call_id: int) -> Call | None:
        """The same, where the peer has answered it."""
        call = self.take(peer, call_id)
        if call is None:
            peer.turns.late(call_id)
        elif call.charge:
            peer.turns.give(call)
        return call

    # -- waiting --------------------------------------------------------------------------------------

    def _await(self, call: SyncCall) -> Message:
        """Wait for a reply. The waiting thread reads the connection itself when no other thread does."""
        if call.depth:
            self.reactor.about_to_wait()
        receiver = call.peer.receiver
        if receiver is not None and not call.peer.intake.is_paused and receiver.take_read_lock():
            for replies in self.inbox.read_until(receiver, call.peer, lambda: call.done, call.deadline):
                self.settlement.put_aside(replies)
        if not call.done and not call.wait() and self.take(call.peer, call.id) is not None:
            self.tally.end()
            call.peer.turns.abandon(call)
            raise timeout_error(self.info.name, call)
        if not call.done:
            call.wait()  # another thread took it at the last moment and is about to complete it
        if call.error is not None:
            error, call.error = call.error, None  # or error, frame and call would keep each other
            try:
                raise error
            finally:
                del error
        if call.message is None:
            raise timeout_error(self.info.name, call)
        return call.message

    def about_to_wait(self) -> None:
        """This thread is about to wait for another worker."""
        if current_depth():
            self.reactor.about_to_wait()

    def send_together(self, peer: Peer) -> None:
        """Small messages ride for this peer: send them at the next tick, if nothing took them along before."""
        self._corked.add(peer)

    def _tick(self) -> None:
        """Send what waited to be sent together, and settle what nobody came for."""
        self.settlement.tick()
        while self._corked:
            try:
                peer = self._corked.pop()
            except KeyError:
                break
            peer.flush_soon()

    def _result(self, message: Message) -> Any:
        """The value of a reply, or the exception of an error."""
        if message.kind == Kind.REPLY:
            return message.value(self.trust)
        raise rebuild_error(message, self.trust)

    # -- ends -----------------------------------------------------------------------------------------

    def _fire(self, call: Call) -> None:
        if self.take(call.peer, call.id) is not None:
            call.peer.turns.abandon(call)
            self._finish_call(call, None, timeout_error(self.info.name, call))

    def _finish_call(self, call: Call, message: Message | None, error: BaseException | None) -> None:
        if isinstance(call, SyncCall):
            self.complete(call, message, error)
        else:
            self.submit(call.depth + 1, partial(self.complete, call, message, error))

    def complete(self, call: Call, message: Message | None, error: BaseException | None) -> None:
        try:
            call.complete(message, error)
        finally:
            if call.counts:
                self.tally.end()

    def fail_calls(self, peer: Peer | None, error: Callable[[Peer], BaseException]) -> None:
        """Complete every call pending on a peer (or on anyone) with an error."""
        for each in self.links.peers() if peer is None else [peer]:
            for call in list(each.calls.values()):
                if self.take(each, call.id) is not None:
                    if self.is_shutting_down and each.ran_out_of_time and _is_of_user(call):
                        self.cut_off.append(f"{call.what} on {each.name!r}")
                    self._finish_call(call, None, error(each))

    def _abandon_calls(self) -> None:
        """At the end, on this thread: the reactor will run nothing any more."""
        for peer in self.links.peers():
            for call in list(peer.calls.values()):
                if self.take(peer, call.id) is not None:
                    self.complete(call, None, WorkerLost(peer.name, f"{self.info.name!r} has shut down"))

    @property
    def pending_calls(self) -> int:
        return sum(len(peer.calls) for peer in self.links.peers())

    def lose(self, peer: Peer, reason: str) -> None:
        self.links.lose(peer, reason)

    def dial(self, peer: Peer, deadline: float | None) -> Any:
        return self.links.dial(peer, deadline)

    def when_gone(self, worker_id: int, callback: Callable[[], None]) -> None:
        self.links.when_gone(worker_id, callback)

    def submit(self, depth: int, job: Job, lane: int = OWN) -> None:
        self.submit_all([(depth, lane, job)])

    def submit_all(self, jobs: list[Work]) -> None:
        if jobs and not self.reactor.submit(jobs):
            self._finish_left_over([job for _, _, job in jobs])

    def _finish_left_over(self, jobs: list[Job]) -> None:
        """The reactor has closed. Most jobs are of no use then, but somebody may be waiting for an outcome."""
        for job in jobs:
            if isinstance(job, partial) and job.func in (self.complete, self.settlement.settle):
                job()

    def wake(self) -> None:
        self.reactor.wake()

    def _on_wake(self) -> None:
        if self.rrefs.has_dropped and not self.closed:
            self.submit(0, self.rrefs.send_dropped)

    def get_debug_info(self) -> dict[str, int]:
        """Figures about what is under way, for a person who wonders."""
        peers = self.links.peers()
        unanswered = [peer.intake.counts for peer in peers]
        return {
            "agent.client_active_calls": self.pending_calls,
            "agent.client_waiting_calls": sum(p.turns.waiting for p in peers),
            "agent.server_active_calls": self.tally.serving,
            "agent.server_unfinished_messages": sum(count for count, _ in unanswered),
            "agent.server_unfinished_bytes": sum(nbytes for _, nbytes in unanswered),
            "agent.queued_jobs": self.reactor.queued,
            "agent.paused_peers": sum(p.intake.is_paused for p in peers),
            "agent.unread_bytes": sum(p.sender.backlog_bytes for p in peers if p.sender),
            "agent.threads": self.reactor.thread_count,
            "agent.bytes_sent": sum(p.sender.sent_bytes for p in peers if p.sender),
            "agent.bytes_received": sum(p.receiver.received_bytes for p in peers if p.receiver),
        }

    def close(self, timeout_s: float = 5.0, why: str | None = None, how: Leaving = Leaving.SHUT_DOWN) -> None:
        """Leave the group now: say goodbye, fail what is pending, stop every thread.

        It takes at most about `timeout_s`, also where a function that a peer called runs on. `why` tells the peers
        why this worker leaves, if not because all have finished.
        """
        if not self.closed:
            self.closed = True
            deadline = time.monotonic() + timeout_s
            self.links.close(deadline, why, how)
            self._stop(deadline)

    def end_with_process(self, why: str, timeout_s: float) -> None:
        """The same at the end of a process that has not shut down. See [Note: the first to end]."""
        if not self.closed:
            self.closed = True
            deadline = time.monotonic() + timeout_s
            self.links.announce_end(deadline, why)
            self._stop(deadline)
            self.links.leave_to_kernel()

    def _stop(self, deadline: float) -> None:
        """Fail what is pending and end the threads."""
        self._abandon_calls()
        self._deadlines.close()
        self.rrefs.clear()
        if self._extension is not None:
            self._extension.close()
        stuck, left_over = self.reactor.close(max(MIN_CLOSE_S, deadline - time.monotonic()))
        self._finish_left_over(left_over)
        self.settlement.finish()
        self._abandon_calls()  # those made while it closed
        running = self.service.functions_running() if stuck else []
        if running:
            log.warning(
                "worker %r has shut down, but its threads still run functions that peers called: %s",
                self.info.name,
                ", ".join(running),
            )


def _is_of_user(call: Call) -> bool:
    """Not a message of the agent's own, and not a part of a gathering."""
    return call.counts and not isinstance(call, HookCall)


def _note_creation(rrefs: RRefTable, fork: tuple[int, int], future: torch.futures.Future[Any]) -> None:
    confirmed, failure = True, None
    try:
        future.value()
    except RpcTimeout as exc:
        confirmed, failure = False, str(exc)
    except WorkerLost:
        confirmed = False
    except BaseException:
        pass  # the owner knows the reference, and has the error
    rrefs.created(fork, confirmed=confirmed, failure=failure)
