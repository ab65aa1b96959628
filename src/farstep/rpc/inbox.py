"""Reading what peers send, and sorting it out.

Two kinds of thread read: the reactor's, and callers that wait for a reply. Whoever holds a connection's read lock
reads; frames are taken in the order of arrival, so that references change hands in the order they were sent.

[Note: never unread] Whatever goes wrong with a reader, the connection is armed again, or it is broken and the peer lost.
Only a peer that has sent too much is not read for a while: see [Note: back-pressure].
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from farstep.errors import PayloadError, ProtocolError
from farstep.rpc.bundle import Rider, unbundle
from farstep.rpc.calls import AsyncCall, Call, SyncCall
from farstep.rpc.connection import Receiver
from farstep.rpc.departure import Leaving
from farstep.rpc.message import Message, no_memory, read_message
from farstep.rpc.peer import Peer
from farstep.rpc.pressure import BUFFER_COST, RIDER_COST
from farstep.rpc.reactor import OWN, Job, Work
from farstep.rpc.replies import Replies
from farstep.rpc.schema import brief
from farstep.rpc.service import Service
from farstep.rpc.trust import Trust
from farstep.rpc.wire import CALLS, Frame, Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["Inbox"]

STAY_S = 1.0
HANDED_ON = 2
INTERRUPTED = "a message was being taken in when this thread was interrupted, and is lost"
CALL, REPLY = int(Kind.CALL), int(Kind.REPLY)
ANSWERED = frozenset({Kind.CALL, Kind.FETCH, Kind.GATHER})
"""Requests whose sender can be told of an error without more than the frame's header."""
TOO_MANY = "too many requests of {!r} wait at {!r} for values that are not made yet, or for others to come to an all_gather"


class _Arrivals:
    """What one read brought: jobs to run, and replies to settle."""

    __slots__ = ("_agent", "claim", "claimed", "jobs", "replies", "served")

    def __init__(self, agent: Agent, claim: Callable[[Message], bool] | None = None) -> None:
        self._agent = agent
        self.claim = claim
        self.claimed: list[Job] = []
        """The extension's messages that the reading thread wants to deal with itself."""
        self.served = 0
        """How many of the messages were work for the peer that sent them."""
        self.jobs: list[Work] = []
        self.replies: dict[int, Replies] = {}

    def replies_at(self, depth: int) -> Replies:
        replies = self.replies.get(depth)
        if replies is None:
            replies = self.replies[depth] = Replies(depth, self._agent.tally)
        return replies

    def take_replies(self) -> list[Replies]:
        if not self.replies:
            return []
        replies, self.replies = list(self.replies.values()), {}
        return replies

    def take_jobs(self) -> list[Work]:
        """The jobs, and one for each lot of replies."""
        jobs, self.jobs = self.jobs, []
        for replies in self.take_replies():
            jobs.append((replies.depth, OWN, partial(self._agent.settlement.settle, replies)))
        return jobs


class Inbox:
    """The reading side of one agent."""

    def __init__(self, agent: Agent, service: Service) -> None:
        self._agent = agent
        self._service = service

    def read_until(
        self, receiver: Receiver, peer: Peer, done: Callable[[], bool], deadline: float | None
    ) -> list[Replies]:
        """Read on a user's thread, with the read lock held; give it back at the end.

        Only what cannot run the user's code is handled here: a thread that waits may hold locks that a call, a
        callback or an unpickled class needs. The rest becomes jobs for the reactor; but replies that came when this
        thread was done are returned, and it may take its own out of them. See [Note: replies together].
        """
        self._agent.reactor.disarm(receiver.fd)
        arrivals = _Arrivals(self._agent)
        handed_on = 0
        error: BaseException | None = None
        try:
            while not done():
                if arrivals.jobs or arrivals.replies:
                    jobs = arrivals.take_jobs()
                    self._agent.submit_all(jobs)
                    handed_on += len(jobs)
                    if handed_on > HANDED_ON:
                        break  # this worker serves more than it waits: the reactor reads without the hand-over
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._dispatch(peer, receiver, receiver.read_waiting(left), arrivals)
                receiver.is_taking_in = False
                if peer.intake.is_paused:
                    break
        except Exception as exc:
            error = _what_broke(exc)
        except BaseException:  # Ctrl-C, on the main thread
            if receiver.is_taking_in:
                error = ProtocolError(INTERRUPTED)
            arrivals.jobs = arrivals.take_jobs()
            raise
        finally:
            receiver.read_lock.release()
            self.arm(peer, receiver)
            if arrivals.jobs:
                self._agent.submit_all(arrivals.jobs)
            if error is not None:
                self._agent.links.broken(peer, error)
        return arrivals.take_replies()

    def look_out(
        self, peers: Sequence[Peer], claim: Callable[[Message], bool], done: Callable[[], bool], until: float
    ) -> list[Job]:
        """Look again and again for messages of these peers, on a user's thread that waits for some of them.

        Ends when there are any that it claims, which it is given; when it is done; or at `until`, by time.perf_counter.
        """
        held: list[tuple[Peer, Receiver]] = []
        broken: list[tuple[Peer, BaseException]] = []
        arrivals = _Arrivals(self._agent, claim)
        try:
            for peer in peers:
                if peer.receiver is not None and not peer.intake.is_paused and peer.receiver.take_read_lock():
                    held.append((peer, peer.receiver))
                    self._agent.reactor.disarm(peer.receiver.fd)
            while held and not (arrivals.claimed or broken or done()) and time.perf_counter() < until:
                for peer, receiver in held:
                    if peer.intake.is_paused or not receiver.is_ready:
                        continue
                    try:
                        self._dispatch(peer, receiver, receiver.read(), arrivals)
                        receiver.is_taking_in = False
                    except Exception as exc:
                        broken.append((peer, _what_broke(exc)))
                if arrivals.jobs or arrivals.replies:
                    self._agent.submit_all(arrivals.take_jobs())
                os.sched_yield()
        except BaseException:  # Ctrl-C, on the main thread
            broken += [(p, ProtocolError(INTERRUPTED)) for p, receiver in held if receiver.is_taking_in]
            self._agent.submit_all([(1, OWN, job) for job in arrivals.claimed])
            raise
        finally:
            for peer, receiver in held:
                receiver.read_lock.release()
                self.arm(peer, receiver)
            self._agent.submit_all(arrivals.take_jobs())
            for peer, error in broken:
                self._agent.links.broken(peer, error)
        return arrivals.claimed

    def on_readable(self, peer: Peer, receiver: Receiver) -> None:
        """A reactor thread: something arrived from this peer."""
        if peer.intake.is_paused or not receiver.take_read_lock():
            return  # a waiting caller reads, and arms the connection when it is done
        arrivals = _Arrivals(self._agent)
        error: BaseException | None = None
        try:
            self._dispatch(peer, receiver, receiver.read(), arrivals)
        except BaseException as exc:  # See [Note: never unread]
            error = _what_broke(exc)
        finally:
            receiver.read_lock.release()
        if error is not None:
            self._agent.submit_all(arrivals.take_jobs())
            self._agent.links.broken(peer, error)
            return
        self.arm(peer, receiver)
        if arrivals.replies and self._agent.settlement.is_caller_busy:
            for replies in arrivals.take_replies():
                self._agent.settlement.put_aside(replies)
        jobs = arrivals.take_jobs()
        if jobs:
            self._agent.reactor.run(jobs)
            stay = len(jobs) == arrivals.served == 1
            jobs.clear()  # it holds what the call carried
            if stay:
                self._stay(peer, receiver)

    def _stay(self, peer: Peer, receiver: Receiver) -> None:
        """Having served one call, wait for the next one at the connection itself: one system call less for each.

        Only while another thread listens to everything else, and only for calls and their like: whatever else arrives
        means that this worker calls that peer too, and then the caller should find the connection free.
        """
        if self._agent.reactor.may_stay():
            try:
                while self._stay_once(peer, receiver):
                    pass
            finally:
                self._agent.reactor.moved_on()

    def _stay_once(self, peer: Peer, receiver: Receiver) -> bool:
        if peer.intake.is_paused or not receiver.take_read_lock():
            return False
        self._agent.reactor.disarm(receiver.fd)
        arrivals = _Arrivals(self._agent)
        frames: list[Frame] = []
        error: BaseException | None = None
        try:
            frames = receiver.read_waiting(STAY_S)
            self._dispatch(peer, receiver, frames, arrivals)
        except BaseException as exc:
            error = _what_broke(exc)
        finally:
            receiver.read_lock.release()
        if error is not None:
            self._agent.submit_all(arrivals.take_jobs())
            self._agent.links.broken(peer, error)
            return False
        self.arm(peer, receiver)
        jobs = arrivals.take_jobs()
        if jobs:
            self._agent.reactor.run(jobs)
        return len(frames) == arrivals.served == 1

    def arm(self, peer: Peer, receiver: Receiver) -> None:
        """After a read, or when the peer may be read again."""
        if not receiver.is_closed and not peer.intake.is_paused:
            self._agent.reactor.arm(receiver.fd)
            if receiver.records is not None and receiver.records.has_more:
                self._agent.submit(0, partial(self.on_readable, peer, receiver))

    def deliver_to_self(self, frame: Frame) -> None:
        arrivals = _Arrivals(self._agent)
        self._dispatch(self._agent.links.me, None, [frame], arrivals)
        self._agent.submit_all(arrivals.take_jobs())

    def _dispatch(
        self, peer: Peer, receiver: Receiver | None, frames: list[Frame], arrivals: _Arrivals
    ) -> None:
        """Sort out what arrived, in order. Nothing here runs foreign code or blocks."""
        for frame in frames:
            try:
                if frame.missing_bytes and not frame.meta:
                    self._dispatch_unread(peer, frame, arrivals)
                    continue
                if frame.kind == Kind.BUNDLE:
                    self._dispatch_bundle(peer, unbundle(frame, self._agent.trust.is_open), arrivals)
                    continue
                message = read_message(frame, peer, self._agent.trust.is_open)
                if frame.fds and receiver is not None:
                    message.admit_segments(receiver.take_fds(frame.fds))
                if message.refs:
                    message.refs = [self._agent.rrefs.adopt(note, peer) for note in message.refs]
                if frame.size:  # this worker's own messages have none
                    message.charge = frame.size + BUFFER_COST * len(frame.buffers)
                self._dispatch_one(peer, message, arrivals)
            except (ProtocolError, KeyboardInterrupt):
                raise
            except BaseException as exc:  # what a pickle does is up to its sender
                raise ProtocolError(
                    f"a message of kind {frame.kind} that makes no sense: {brief(exc)}"
                ) from exc
        if receiver is not None and receiver.fds:
            receiver.check_fds()

    def _dispatch_unread(self, peer: Peer, frame: Frame, arrivals: _Arrivals) -> None:
        """A frame that there was no memory for, not even for its meta: its sender is told, if that is enough."""
        error = no_memory(peer, frame.missing_bytes)
        if frame.kind in (Kind.REPLY, Kind.ERROR):
            call = self._agent.take_answered(peer, frame.call_id)
            if call is not None:
                arrivals.jobs.append((call.depth + 1, OWN, partial(self._agent.complete, call, None, error)))
        elif frame.kind in ANSWERED and not frame.fds:
            message = Message(frame.kind, frame.call_id, frame.depth, peer, None, None)
            if frame.kind != Kind.GATHER:
                self._agent.tally.receive()
            self._add_job(message, partial(self._service.answer_error, message, error), arrivals)
        else:
            raise ProtocolError(str(error))

    def _add_job(self, message: Message, job: Job, arrivals: _Arrivals) -> None:
        """Something that a peer sent and that is not a call: it counts until the job is over. See [Note: back-pressure]."""
        charge, message.charge = message.charge, 0
        job = _counted(message, charge, job)
        arrivals.jobs.append((message.depth, message.peer.control_lane, job))

    def _keep(self, message: Message, arrivals: _Arrivals) -> bool:
        """A request that waits for something else to happen. Where there are too many of them it gets an error instead."""
        message.is_kept = True
        if not message.charge or message.peer.intake.keep(message.depth, message.charge):
            return True
        error = PayloadError(TOO_MANY.format(message.peer.name, self._agent.info.name))
        self._add_job(message, partial(self._service.answer_error, message, error), arrivals)
        return False

    def _dispatch_bundle(self, peer: Peer, riders: list[Rider], arrivals: _Arrivals) -> None:
        """The same, for many small messages at a time."""
        agent, serve, jobs, intake = self._agent, self._service.serve, arrivals.jobs, peer.intake
        received = 0
        for kind, call_id, depth, head, body in riders:
            if kind == CALL:
                received += 1
                message = Message(kind, call_id, depth, peer, head, body)
                message.charge = RIDER_COST
                intake.begin(intake.calls, depth, RIDER_COST)
                jobs.append((depth, peer.lane, partial(serve, message)))
                continue
            call = agent.take_answered(peer, call_id)
            if (
                kind == REPLY
                and isinstance(call, AsyncCall)
                and not (call.future.has_callbacks or type(body) is bytes)
            ):
                args = body[0]
                arrivals.replies_at(call.depth + 1).add(call, None, args[0] if args else None)
            else:
                message = Message(kind, call_id, depth, peer, head, body)
                message.charge = RIDER_COST
                self._sort_reply(call, message, arrivals)
        if received:
            agent.tally.receive(received)

    def _sort_reply(self, call: Call | None, message: Message, arrivals: _Arrivals) -> None:
        if message.refs and call is not None:
            self._service.confirm_later(message, call.depth + 2)
        if call is None:
            # Too late; open it all the same, so that what it carries is let go.
            self._add_job(message, partial(_open_and_drop, message, self._agent.trust), arrivals)
        elif isinstance(call, SyncCall):
            self._agent.complete(call, message, None)
        elif isinstance(call, AsyncCall) and message.is_plain and not call.future.has_callbacks:
            arrivals.replies_at(call.depth + 1).add(call, message)
        else:
            arrivals.jobs.append((call.depth + 1, OWN, partial(self._agent.complete, call, message, None)))

    def _dispatch_one(self, peer: Peer, message: Message, arrivals: _Arrivals) -> None:
        kind = message.kind
        jobs = arrivals.jobs
        if message.extra is not None:
            self._agent.extension.check(message)
            if kind in CALLS:
                self._agent.extension.arrived(message)
        if kind == Kind.REPLY or kind == Kind.ERROR:
            self._sort_reply(self._agent.take_answered(peer, message.call_id), message, arrivals)
        elif kind == Kind.CALL:
            self._agent.tally.receive()
            if message.charge:
                peer.intake.begin(peer.intake.calls, message.depth, message.charge)
            arrivals.served += 1
            jobs.append((message.depth, peer.lane, partial(self._service.serve, message)))
        elif kind == Kind.REMOTE:
            self._agent.tally.receive()
            if message.charge:
                peer.intake.begin(peer.intake.calls, message.depth, message.charge)
            name, id, fork = message.head
            kept = self._agent.rrefs.expect(id, fork, peer)
            jobs.append((message.depth, peer.lane, partial(self._service.serve, message, kept)))
        elif kind == Kind.FETCH:
            self._agent.tally.receive()
            held = self._agent.rrefs.held(message.head, peer)
            if held is None:
                error = self._agent.rrefs.not_held(message.head, peer)
                self._add_job(message, partial(self._service.answer_error, message, error), arrivals)
            elif self._keep(message, arrivals):
                send = partial(self._service.send_value, message, held)
                held.when_set(partial(self._agent.submit, message.depth, send, peer.lane))
        elif kind == Kind.GATHER:
            gatherings = self._agent.links.gatherings
            call = gatherings.check(message)
            if self._keep(message, arrivals):
                jobs.append((0, peer.control_lane, partial(gatherings.receive, message, call)))
        elif kind == Kind.RREF:
            if message.call_id:
                self._agent.tally.receive()
            self._control(message, arrivals)
        elif kind == Kind.RELEASE:
            released, dropped = message.head
            if peer.lender is not None:
                peer.lender.returned(released)
            peer.borrower.unmap(dropped)
        elif kind == Kind.LOST:
            name, incarnation, reason = message.head
            heard = partial(self._agent.links.heard_lost, peer, name, incarnation, reason)
            self._add_job(message, heard, arrivals)
        elif kind == Kind.GOODBYE:
            self._agent.links.left(peer, *(message.head or ("", Leaving.SHUT_DOWN)))
        elif kind == Kind.EXTENSION:
            if message.call_id:
                self._agent.tally.receive()
            charge, message.charge = message.charge, 0
            job = self._agent.extension.control(message)
            if job is not None and arrivals.claim is not None and arrivals.claim(message):
                arrivals.claimed.append(_counted(message, charge, job))
            elif job is not None:
                arrivals.served += self._agent.extension.serves(message)
                jobs.append((message.depth, peer.control_lane, _counted(message, charge, job)))

    def _control(self, message: Message, arrivals: _Arrivals) -> None:
        """About references. Some of it is answered, at once or when a worker is gone."""
        intake = message.peer.intake
        verb = message.head[0]
        if verb == "check":
            if not self._keep(message, arrivals):
                return
        elif verb == "confirm" and message.charge:
            intake.begin(intake.jobs, message.depth, message.charge)
        else:
            message.charge = 0
        self._agent.rrefs.control(message)


def _counted(message: Message, charge: int, job: Job) -> Job:
    """The same job, which counts against its sender until it is over."""
    if not charge:
        return partial(job)
    intake = message.peer.intake
    intake.begin(intake.jobs, message.depth, charge)
    return partial(_run_counted, message.peer, message.depth, charge, job)


def _run_counted(peer: Peer, depth: int, charge: int, job: Job) -> None:
    try:
        job()
    finally:
        peer.intake.end(peer.intake.jobs, depth, charge)


def _what_broke(exc: BaseException) -> BaseException:
    """Why a connection can't be read on. Without its frames: they hold all that came."""
    if not isinstance(exc, EOFError | OSError | ProtocolError):
        exc = ProtocolError(f"it cannot be read on: {type(exc).__name__}: {exc}")
    return exc.with_traceback(None)


def _open_and_drop(message: Message, trust: Trust) -> None:
    try:
        message.open(trust)
    except Exception:
        pass
