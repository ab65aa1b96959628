"""The other workers: connections to them, and who is lost.

[Note: noticing] A worker that dies closes its sockets, and whoever has a connection to it knows at once. A host that
vanishes is noticed by the kernel's keep-alive, on a connection on which nothing is sent: the one that the peer dialled. So over TCP
whoever is dialled dials back. (Where data is under way the kernel has no keep-alive, and its TCP_USER_TIMEOUT takes a peer that does not
read, because it computes or was stopped, for one that is gone.) Connections are made when they are needed, so not everyone has one to
everyone. Therefore each worker keeps one to the next in rank, whoever notices a loss tells all others, each of
them makes sure before it believes it, and the ring closes over the gap.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from farstep.errors import (
    AuthenticationError,
    DuplicateName,
    ProtocolError,
    RpcError,
    RpcTimeout,
    UnknownWorker,
    WorkerLost,
)
from farstep.rpc import handshake, joining
from farstep.rpc.connection import Receiver
from farstep.rpc.departure import ENDED, Leaving
from farstep.rpc.dialling import Dialler, Unreachable, check_introduction
from farstep.rpc.gather import Gatherings
from farstep.rpc.listener import Listener, keep_alive
from farstep.rpc.membership import Card, OpenRoster, WorkerInfo, host_key
from farstep.rpc.peer import Attempt, Peer, PeerState, SelfPeer
from farstep.rpc.receive_pool import ReceivePool
from farstep.rpc.records import MacSocket
from farstep.rpc.rendezvous import AskedStore
from farstep.rpc.rounds import Rounds
from farstep.rpc.schema import MAX_REASON_CHARS
from farstep.rpc.sender import Sender
from farstep.rpc.shm import Lender, SharedBudget
from farstep.rpc.tls import TlsReceiver, fingerprint_met, make_credentials
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.stores import Store

__all__ = ["Links"]

log = logging.getLogger("farstep.rpc")
ROOMY: Final = 4
"""With a core for every worker that has something to do, looking for a reply takes nothing from anyone."""
CORES: Final = os.cpu_count() or 1
GOODBYE_S: Final = 1.0
"""For how long a peer that does not read may hold up a goodbye."""
MAX_FORMER: Final = 10_000
"""So many incarnations that others have replaced are remembered, to be refused."""
ENDING_S: Final = 30.0
"""A process that was about to end and has not ended by then is given up."""
LostCallback = Callable[[WorkerInfo, str], None]


class Links:
    """All that one agent knows of its peers."""

    def __init__(self, agent: Agent) -> None:
        options = agent.options
        self._agent = agent
        self._key = handshake.group_key(options.shared_secret) if options.shared_secret else b""
        uses_tcp = options.transport == "tcp" or (options.transport == "auto" and bool(self._key))
        credentials = None
        if uses_tcp and not options.dangerously_unencrypted_tcp:
            credentials = make_credentials(options, agent.info.name)
        self._budget = SharedBudget(options.shared_memory_bytes)
        self._receive_pool = ReceivePool()
        self._lock = threading.Lock()
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._lost_callbacks: list[LostCallback] = []
        self._gone_callbacks: dict[int, list[Callable[[], None]]] = {}
        self._store: Store | None = None
        self.roster: OpenRoster | None = None
        self._former: deque[str] = deque(maxlen=MAX_FORMER)
        self.is_open = False
        self._has_joined = False
        self._leaving = False
        self._closed = False
        self.gatherings = Gatherings(agent)
        self.refused = joining.Refused(self)
        self._listener = Listener(
            agent.info.name, options, self._key, credentials, self._admit, self.refused.hear
        )
        card = Card(
            name=agent.info.name,
            id=agent.info.id,
            incarnation=uuid.uuid4().hex,
            host=host_key(),
            unix=self._listener.unix_path,
            tcp=self._listener.tcp_address,
            certificate=None if credentials is None else credentials.fingerprint,
            has_authority=credentials is not None and bool(options.tls_cert),
        )
        self.dialler = Dialler(card, self._key, credentials, options.heartbeat_s, lambda: self._closed)
        self.me = SelfPeer(agent, card, agent.inbox.deliver_to_self)
        self._enter(self.me)

    def _enter(self, peer: Peer) -> None:
        with self._lock:
            self._by_id[peer.id] = peer
            self._by_name[peer.name] = peer

    # -- the group

    def join(self, store: Store, world_size: int | None, timeout_s: float) -> None:
        """Meet the others. Peers may call this worker from the moment its card is in the store."""
        self.is_open = world_size is None
        self._store = store  # rank 0 may serve it, for as long as it is kept
        asked = AskedStore(store, self.me.name)
        for sock in self._listener.sockets:
            self._agent.reactor.watch(sock.fileno(), lambda sock=sock: self._knock(sock))  # type: ignore[misc]
        if world_size is None:
            self.roster = OpenRoster(asked, self.me.card, self.dialler.answers)
            joining.join_open(self, self.roster, timeout_s)
        else:
            joining.meet(self, Rounds(asked, self.me.card, world_size, self.dialler.answers), timeout_s)
        self._has_joined = True

    def learn(self, card: Card) -> Peer:
        """A card, from the store or from an introduction. The first one of an incarnation counts."""
        with self._lock:
            known = self._by_id.get(card.id) or self._by_name.get(card.name)
            if known is not None and known.card.incarnation == card.incarnation:
                return known
            if card.incarnation in self._former:
                raise UnknownWorker(_former(card))
            if known is not None and known.state is PeerState.PRESENT:
                raise DuplicateName(
                    f"{card.name!r} (rank {card.id}) is not unique: {known.name!r} has that name or rank"
                )
            if known is not None:
                self._former.append(known.card.incarnation)
            peer = Peer(self._agent, card)
            self._by_id[card.id] = peer
            self._by_name[card.name] = peer
            self.refused.forget(card)
            return peer

    def is_present(self, worker_id: int) -> bool:
        """As far as is known here; asks nobody."""
        peer = self._by_id.get(worker_id)
        return peer is not None and peer.state is PeerState.PRESENT

    def incarnation_of(self, worker_id: int) -> str | None:
        peer = self._by_id.get(worker_id)
        return None if peer is None else peer.card.incarnation

    def has(self, name: str) -> bool:
        """Whether a worker of that name is here, as far as is known."""
        peer = self._by_name.get(name)
        return peer is not None and peer.state is PeerState.PRESENT

    def is_gone(self, worker_id: int) -> bool:
        peer = self._by_id.get(worker_id)
        return peer is not None and peer.state is not PeerState.PRESENT

    @property
    def spin_s(self) -> float:
        """How long a thread that waits looks before it sleeps: longer where every worker of this host can have a core, but for the one that waits."""
        host = self.me.card.host
        with self._lock:
            here = [p for p in self._by_id.values() if p.state is PeerState.PRESENT and p.card.host == host]
        return self._agent.options.spin_s * (ROOMY if len(here) <= CORES + 1 else 1)

    def peers(self) -> list[Peer]:
        """All that were ever known, this worker among them, by rank."""
        with self._lock:
            return [self._by_id[id] for id in sorted(self._by_id)]

    def find(self, target: str | int | WorkerInfo) -> Peer | None:
        if type(target) is str and target in self._by_name:
            return self._by_name[target]
        key = target.id if isinstance(target, WorkerInfo) else target
        table: dict[Any, Peer] = self._by_name if isinstance(key, str) else self._by_id
        peer = table.get(key)
        if peer is None or (isinstance(target, WorkerInfo) and peer.name != target.name):
            peer = self._look_again(table, key)
        return peer

    def _look_again(self, table: dict[Any, Peer], key: str | int) -> Peer | None:
        if not self.is_open or self.roster is None or self._closed:
            return None
        self.refused.check(key)
        for card in self.roster.new_cards():
            with contextlib.suppress(DuplicateName, UnknownWorker):
                self.learn(card)
        return table.get(key)

    # -- connections

    def dial(self, peer: Peer, deadline: float | None) -> Sender:
        """The connection to a peer, made now if there is none.

        A dial once begun is finished, or the peer would take its end for a death. A caller with less time
        than that leaves it to a thread.
        """
        if peer.sender is not None:
            return peer.sender
        left = None if deadline is None else deadline - time.monotonic()
        if left is None or left >= handshake.TIMEOUT_S:
            return self._dial(peer)
        with self._lock:
            attempt = peer.attempt
            if attempt is None or attempt.is_over:
                attempt = peer.attempt = Attempt(lambda: self._dial(peer), f"farstep-{self.me.name}-dial")
        return attempt.wait(left, f"worker {self.me.name!r} is still dialling {peer.name!r}")

    def _dial(self, peer: Peer) -> Sender:
        if not peer.dial_lock.acquire(timeout=2 * handshake.TIMEOUT_S):
            raise RpcTimeout(f"worker {self.me.name!r} is still dialling {peer.name!r}")
        try:
            if peer.sender is not None:
                return peer.sender
            if peer.state is not PeerState.PRESENT:
                raise peer.lost_error()
            self.dialler.check_reachable(peer.card)
            try:
                sock = self.dialler.connect(peer.card)
            except Unreachable as exc:
                self.lose(peer, f"{exc}{peer.hearsay}")
                raise peer.lost_error() from exc
            options = self._agent.options
            sender = Sender(sock, options.max_frame_bytes, options.max_bytes_per_peer // 4)
            self._see_to_backlog(peer, sender)
            if sender.shares_host and self._agent.options.shared_memory_bytes:
                peer.lender = Lender(self._budget)
            peer.sender = sender
            self._agent.reactor.watch(
                sock.fileno(),
                lambda: self._sender_ended(peer, sender),
                lambda: self._sender_writable(peer, sender),
            )
            if peer.state is not PeerState.PRESENT or self._closed:  # lost meanwhile
                self._hang_up(peer)
                raise peer.lost_error()
            return sender
        finally:
            peer.dial_lock.release()

    def _see_to_backlog(self, peer: Peer, sender: Sender) -> None:
        reactor, fd = self._agent.reactor, sender.sock.fileno()
        sender.arm = lambda for_writing: reactor.arm(fd, for_writing=for_writing)
        sender.on_full = partial(reactor.hold, peer.lane)

    def _sender_writable(self, peer: Peer, sender: Sender) -> None:
        try:
            sender.flush_now()
        except OSError as exc:
            self.lose(peer, f"writing to it failed: {exc}")

    def _knock(self, sock: socket.socket) -> None:
        try:
            self._listener.on_knock(sock)
        finally:
            if not self._closed:
                self._agent.reactor.arm(sock.fileno())

    def _admit(self, sock: socket.socket, introduction: handshake.Introduction) -> None:
        """A peer has passed the handshake: take its connection, if it is one of the group."""
        card = check_introduction(introduction, self.me.card, sock)
        if introduction.is_question:  # whether this worker is still there: see [Note: taking over]
            introduction.welcome(self.me.card.to_json(), fingerprint_met(sock))
            sock.close()
            return
        try:
            peer = self._await_card(card)
            with self._lock:
                if peer.state is not PeerState.PRESENT or peer.is_arriving or self._closed:
                    raise ProtocolError(
                        f"worker {card.name!r} is {peer.state.value}, or is connected already"
                    )
                peer.is_arriving = True
        except RpcError as exc:
            introduction.refuse(str(exc), tampered=isinstance(exc, AuthenticationError))
            raise
        try:
            frame_key = introduction.welcome(self.me.card.to_json(), fingerprint_met(sock))
        except BaseException:
            peer.is_arriving = False
            raise
        over_tcp = sock.family != socket.AF_UNIX
        if over_tcp:
            keep_alive(sock, self._agent.options.heartbeat_s, is_only_read=True)
            if not isinstance(sock, TlsReceiver):
                sock = MacSocket(sock, frame_key)
        receiver = Receiver(
            sock, peer.id, self._agent.options.max_frame_bytes, self.spin_s, self._receive_pool
        )
        peer.receiver = receiver
        peer.intake.resume = lambda: self._agent.inbox.arm(peer, receiver)
        self._agent.reactor.watch(receiver.fd, lambda: self._agent.inbox.on_readable(peer, receiver))
        if peer.state is not PeerState.PRESENT or self._closed:
            self._hang_up(peer)
        elif over_tcp and peer.sender is None:
            self._agent.submit(0, lambda: self._dial_back(peer))

    def _dial_back(self, peer: Peer) -> None:
        """See [Note: noticing]."""
        with contextlib.suppress(RpcError):
            self.dial(peer, None)

    def _await_card(self, card: Card) -> Peer:
        """In a group of known size a peer may knock before this worker has read the cards."""
        if self.is_open:
            self._make_room(card)
            return self._checked(self.learn(card), card)
        deadline = time.monotonic() + handshake.TIMEOUT_S
        while (peer := self._by_id.get(card.id)) is None and time.monotonic() < deadline and not self._closed:
            time.sleep(0.005)
        if peer is not None and peer.name == card.name and peer.card.incarnation != card.incarnation:
            raise UnknownWorker(_former(card))
        if peer is None or peer.card.incarnation != card.incarnation or peer.is_self:
            raise UnknownWorker(f"{card.name!r} (rank {card.id}) is not of this group")
        return self._checked(peer, card)

    def _make_room(self, card: Card) -> None:
        """A newcomer has the name or rank of a worker that is known here: see whether that one is still there."""
        with self._lock:
            known = [self._by_id.get(card.id), self._by_name.get(card.name)]
        for peer in known:
            if (
                peer is not None
                and not peer.is_self
                and peer.state is PeerState.PRESENT
                and peer.card.incarnation != card.incarnation
                and card.incarnation not in self._former
                and not self.dialler.answers(peer.card)
            ):
                self.lose(peer, f"it no longer answers, and {card.name!r} has come in its place")

    @staticmethod
    def _checked(peer: Peer, card: Card) -> Peer:
        """What a worker says of itself is what the store said of it."""
        if peer.card != card:
            raise AuthenticationError(
                f"the rendezvous store has another card of worker {card.name!r} than the worker itself: somebody has changed it"
            )
        return peer

    def _sender_ended(self, peer: Peer, sender: Sender) -> None:
        """Nothing is ever read from a dialled connection: readable means ended, or that the peer breaks the rule.

        Where the peer dialled too, that connection ends as well, and a goodbye may still be in it.
        """
        try:
            has_data = bool(socket.socket.recv(sender.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            sender.arm(sender.has_backlog)
            return
        except OSError:
            has_data = False
        if has_data:
            self.broken(peer, ProtocolError("bytes on a connection on which it has nothing to send"))
            return
        is_unread = peer.intake.is_paused or (peer.receiver is None and not peer.is_arriving)
        if peer.sender is sender and is_unread:
            self.broken(peer, EOFError("it closed the connection"))

    def broken(self, peer: Peer, error: BaseException) -> None:
        """A connection of this peer's ended, or brought what is not a frame."""
        if isinstance(error, ProtocolError):
            log.error("worker %r: %r sent what is not a message: %s", self.me.name, peer.name, error)
        if isinstance(error, EOFError):
            self.lose(peer, f"its connection closed ({error}); its process has probably died")
        else:
            self.lose(peer, f"its connection broke: {error}")

    # -- losing and leaving

    def lose(self, peer: Peer, reason: str) -> None:
        """This worker noticed that a peer is gone."""
        reason = peer.ending or reason
        if self._end(peer, PeerState.LOST, reason) and not peer.is_accused:
            log.warning("worker %r lost %r: %s", self.me.name, peer.name, reason)
            self._agent.submit(0, lambda: self._spread(peer, reason))

    def left(self, peer: Peer, why: str, how: int) -> None:
        """A peer said goodbye. On the reader's thread: what follows is a job.

        Where its process is about to end it is lost when that has ended. See [Note: the first to end].
        """
        if how == Leaving.PROCESS_ENDS:
            if peer.ending:  # it has said so, and a timer runs
                return
            peer.ending = why or ENDED
            timer = threading.Timer(ENDING_S, lambda: self.lose(peer, peer.ending))
            timer.daemon = True
            timer.start()
            return
        peer.ran_out_of_time = how == Leaving.OUT_OF_TIME
        if self._mark(peer, PeerState.LEFT, why or "it has shut down and left the group"):
            self._agent.submit(0, lambda: self._clear_up(peer))

    def heard_lost(self, teller: Peer, name: str, incarnation: str, reason: str) -> None:
        """A peer says that another is gone. It may be wrong, or lie: believe it only where there is no getting through.

        With a connection of its own to that worker this one would know; without one it dials.
        """
        peer = self._by_name.get(name)
        if (
            peer is None
            or peer.card.incarnation != incarnation
            or peer.is_self
            or peer.is_accused  # one look is enough, however many say so
            or peer.sender
            or peer.receiver
        ):
            return
        peer.is_accused = True  # what this dial finds is no news to the others
        peer.hearsay = f"; worker {teller.name!r} says that {reason}"
        try:
            self.dial(peer, self._agent.soon())
        except RpcError:
            log.warning(
                "worker %r heard from %r that %r is lost: %s", self.me.name, teller.name, name, reason
            )
            self.watch_next(self._agent.soon())
        finally:
            peer.is_accused = False

    def _end(self, peer: Peer, state: PeerState, reason: str) -> bool:
        """True for the one caller that noticed first."""
        if not self._mark(peer, state, reason):
            return False
        self._clear_up(peer)
        return True

    def _mark(self, peer: Peer, state: PeerState, reason: str) -> bool:
        with self._lock:
            if peer.state is not PeerState.PRESENT or self._leaving or peer.is_self:
                return False
            peer.state = state
            peer.reason = reason
            return True

    def _clear_up(self, peer: Peer) -> None:
        """A peer is gone: fail what waits for it, and forget what it held. Not with its read lock held."""
        self._hang_up(peer)
        self._agent.fail_calls(peer, lambda p: p.lost_error())
        self._agent.rrefs.worker_gone(peer.id, peer.name)
        if self._agent.has_extension:
            self._agent.extension.worker_gone(peer.id)
        self.gatherings.worker_gone()
        with self._lock:
            peer.is_cleared = True
            waiting = self._gone_callbacks.pop(peer.id, [])
        for callback in waiting:
            callback()
        if peer.state is PeerState.LOST:
            for told in list(self._lost_callbacks):
                self._agent.submit(0, lambda told=told: _tell_user(told, peer.info, peer.reason))  # type: ignore[misc]
            if self.is_open and self._has_joined:  # a newcomer that cannot get through has no say
                self._agent.submit(0, lambda: self._mark_gone(peer))

    def _mark_gone(self, peer: Peer) -> None:
        """Free a lost worker's name and rank. One that still answers keeps them: it may be this worker that is cut off."""
        if self.roster is not None and not self.dialler.answers(peer.card):
            self.roster.mark_gone(peer.card.incarnation)

    def _hang_up(self, peer: Peer) -> None:
        sender, receiver = peer.sender, peer.receiver
        peer.turns.end()
        if sender is not None:
            self._agent.reactor.forget(sender.sock.fileno())
            sender.close()
        if receiver is not None and not receiver.is_closed:
            self._agent.reactor.forget(receiver.fd)
            with contextlib.suppress(OSError):
                socket.socket.shutdown(receiver.sock, socket.SHUT_RDWR)  # wakes a caller that reads here
            if receiver.read_lock.acquire(timeout=1.0):
                receiver.close()
                receiver.read_lock.release()
        if peer.lender is not None:
            peer.lender.close()
        peer.borrower.close()

    def _spread(self, lost: Peer, reason: str) -> None:
        """See [Note: noticing]."""
        head = (lost.name, lost.card.incarnation, reason[:MAX_REASON_CHARS])
        for peer in self.peers():
            if not peer.is_self and peer.state is PeerState.PRESENT and not self._closed:
                try:
                    peer.post(Kind.LOST, 0, head, deadline=time.monotonic() + 5.0, soon=True)
                except RpcError:
                    continue
        self.watch_next(self._agent.soon())

    def watch_next(self, deadline: float) -> None:
        """Keep a connection to the next worker in rank that is there."""
        peers = self.peers()
        at = peers.index(self.me)
        for peer in peers[at + 1 :] + peers[:at]:
            if peer.state is PeerState.PRESENT and not self._closed:
                try:
                    self.dial(peer, deadline)
                    return
                except WorkerLost:
                    continue
                except RpcTimeout:
                    return

    def on_lost(self, callback: LostCallback) -> None:
        self._lost_callbacks.append(callback)

    def when_gone(self, worker_id: int, callback: Callable[[], None]) -> None:
        """Call back when nothing more can arrive from that worker."""
        with self._lock:
            peer = self._by_id.get(worker_id)
            if peer is not None and not peer.is_cleared and (peer.receiver or peer.is_arriving):
                self._gone_callbacks.setdefault(worker_id, []).append(callback)
                return
        callback()

    def close(self, deadline: float, why: str | None, how: Leaving) -> None:
        """Say goodbye to everyone and close every connection."""
        self._say_goodbye(deadline, None if why is None else (why, int(how)))
        for peer in self.peers():
            self._hang_up(peer)
            if peer.state is PeerState.PRESENT:
                peer.state = PeerState.LEFT
                peer.reason = f"{self.me.name!r} has shut down"

    def announce_end(self, deadline: float, why: str) -> None:
        """Tell everyone why this process is about to end."""
        self._say_goodbye(deadline, (why, int(Leaving.PROCESS_ENDS)))

    def _say_goodbye(self, deadline: float, head: tuple[str, int] | None) -> None:
        with self._lock:
            self._leaving = True  # from here on, nobody else's end is news
        for peer in self.peers():
            if (peer.sender or peer.receiver) and peer.state is PeerState.PRESENT:
                patience_s = max(GOODBYE_S / 20, min(GOODBYE_S, deadline - time.monotonic()))
                with contextlib.suppress(RpcError, OSError):
                    peer.post(Kind.GOODBYE, 0, head, deadline=time.monotonic() + patience_s)
        with self._lock:
            self._closed = True
        if self.roster is not None:
            self.roster.mark_gone(self.me.card.incarnation)
        for sock in self._listener.sockets:
            self._agent.reactor.forget(sock.fileno())
        self._listener.close()

    def leave_to_kernel(self) -> None:
        """Leave the connections open, for the kernel to close when this process has ended."""
        for peer in self.peers():
            for end in (peer.sender, peer.receiver):
                if end is not None:
                    with contextlib.suppress(OSError):
                        end.sock.detach()

    def after_fork(self) -> None:
        """In a child process: these connections are the parent's. Close the copies, quietly."""
        for peer in list(self._by_id.values()):
            for end in (peer.sender, peer.receiver):
                if end is not None:
                    with contextlib.suppress(OSError):
                        _detach(end.sock)
        self._listener.after_fork()


def _former(card: Card) -> str:
    return (
        f"this worker {card.name!r} (rank {card.id}) is of an earlier incarnation: the group has counted it as gone, and "
        f"another has come in its place. End this process; it can only join anew"
    )


def _detach(sock: socket.socket) -> None:
    os.close(sock.detach())


def _tell_user(callback: LostCallback, info: WorkerInfo, reason: str) -> None:
    try:
        callback(info, reason)
    except Exception:
        log.exception("a callback of on_worker_lost failed for %s", info)
