"""Another worker, as this one sees it: its card, its state, the connections, and how a message is put on the wire."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from farstep.errors import PayloadError, RpcTimeout, WorkerLost
from farstep.rpc.bundle import RIDER_BYTES, weight
from farstep.rpc.calls import fresh
from farstep.rpc.connection import Receiver
from farstep.rpc.lanes import OWN
from farstep.rpc.membership import Card, WorkerInfo
from farstep.rpc.memory import Bytes, bytes_of
from farstep.rpc.message import EMPTY, dump_meta
from farstep.rpc.payload import Packed
from farstep.rpc.pressure import BUFFER_COST, RIDER_COST, Intake, Turns
from farstep.rpc.sender import JOIN_BYTES, Sender, Stalled
from farstep.rpc.shm import MAX_NEW_PER_FRAME, Borrower, Lender, Segment
from farstep.rpc.tensors import Description, Outgoing, describe
from farstep.rpc.wire import MAX_BUFFERS, Frame, Kind, frame_bytes

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.calls import Call
    from farstep.rpc.extension import Extension
    from farstep.rpc.message import Message

__all__ = ["Peer", "PeerState", "SelfPeer"]


CALL, REMOTE = int(Kind.CALL), int(Kind.REMOTE)


class PeerState(Enum):
    PRESENT = "present"  # its card was read, or it introduced itself
    LEFT = "left"  # it said goodbye
    LOST = "lost"  # its connection broke, it cannot be dialled, or another worker saw it go


class Attempt:
    """One dial on a thread of its own, for however many callers wait for it."""

    def __init__(self, dial: Callable[[], Sender], name: str) -> None:
        self._dial = dial
        self._sender: Sender | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._sender = self._dial()
        except BaseException as exc:
            self._error = exc.with_traceback(None)
        finally:
            self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float, otherwise: str) -> Sender:
        if not self._over.wait(max(0.0, timeout_s)) or (self._sender is None and self._error is None):
            raise RpcTimeout(otherwise)
        if self._sender is None:
            raise fresh(self._error) if self._error is not None else RpcTimeout(otherwise)
        return self._sender


class Peer:
    """One other worker. Any thread."""

    def __init__(self, agent: Agent, card: Card) -> None:
        self.agent = agent
        self.card = card
        self.name = card.name
        self.id = card.id
        self.info = WorkerInfo(card.name, card.id)
        self.state = PeerState.PRESENT
        self.reason = ""
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.is_arriving = False
        self.is_cleared = False  # it is gone, and all that it ever sent has been read
        self.is_accused = False
        self.ran_out_of_time = False  # it left because the timeout of its shutdown had passed
        self.hearsay = ""  # what another worker says about its loss
        self.ending = ""  # why its process is about to end, as it said itself
        self.attempt: Attempt | None = None
        self.lender: Lender | None = None
        self.borrower = Borrower(agent.options.shared_memory_bytes)
        self.calls: dict[int, Call] = {}
        self.dial_lock = threading.Lock()
        limits = agent.options.max_calls_per_peer, agent.options.max_bytes_per_peer
        self.turns = Turns(*limits)
        self.intake = Intake((agent.info.name, self.name), *limits)
        self.lane = OWN if self.is_self else 2 * self.id
        """Of the calls that it makes. See lanes.py."""
        self.control_lane = OWN if self.is_self else 2 * self.id + 1
        """Of all else that it sends: that goes on while its calls are held."""
        self._rider_bytes = min(RIDER_BYTES, agent.options.max_frame_bytes)

    @property
    def is_self(self) -> bool:
        return False

    def layer_above(self) -> Extension:
        """What knows how the messages of the layer above look."""
        return self.agent.extension

    def lost_error(self) -> WorkerLost:
        return WorkerLost(self.name, self.reason or "its connection closed")

    def finished(self, message: Message) -> None:
        """What this peer asked for has been answered."""
        charge, message.charge = message.charge, 0
        kind, intake = message.kind, self.intake
        if kind in (CALL, REMOTE):
            intake.end(intake.calls, message.depth, charge)
        elif message.is_kept:
            intake.let_go(message.depth, charge)
        else:
            intake.end(intake.jobs, message.depth, charge)

    def post(
        self,
        kind: Kind,
        call_id: int,
        head: Any,
        packed: Packed = EMPTY,
        *,
        depth: int = 0,
        deadline: float | None = None,
        extra: Any = None,
        soon: bool = False,
        turn: Call | None = None,
    ) -> None:
        """Send one message. WorkerLost, RpcTimeout or PayloadError where it cannot be.

        `soon` is for what the agent sends of its own accord: see [Note: backlog]. `turn` is the call, if it is one that
        waits for its turn: see [Note: back-pressure].
        """
        if self.state is not PeerState.PRESENT:
            raise self.lost_error()
        sender = self.sender or self.agent.dial(self, deadline)
        load = _Load(self, sender, packed.tensors) if packed.tensors else None
        forks: list[Any] = []
        returns: _Returns | None = None
        try:
            for ref in packed.refs:
                forks.append(self.agent.rrefs.fork(ref, self, deadline))
            if load is None:
                frame = frame_bytes(kind, call_id, dump_meta(head, packed, (), forks, extra), depth=depth)
                nbytes, buffers = len(frame), 0
            else:
                meta = dump_meta(head, packed, load.descriptions, forks, extra)
                frame = frame_bytes(kind, call_id, meta, load.lengths, depth=depth, fds=len(load.fds))
                nbytes, buffers = len(frame) + sum(load.lengths), len(load.lengths)
            self._check_size(nbytes)
            if turn is not None and not self.turns.take_now(turn, nbytes + BUFFER_COST * buffers):
                self._take_turn(turn, nbytes + BUFFER_COST * buffers)
            if self.borrower.has_released or (self.lender is not None and self.lender.has_dropped):
                returns = _Returns(self)
                frame = returns.frame + frame
            if load is None:
                self._write(sender, [frame], deadline, soon=soon)
            else:
                self._write(sender, load.parts(frame), deadline, load.fds, soon=soon)
            if returns is not None:
                returns.have_left()
        except BaseException as exc:
            if getattr(exc, "began", False):
                if returns is not None:
                    returns.have_left()
            else:
                if turn is not None:
                    self.turns.give(turn)
                if load is not None:
                    load.take_back()
                if returns is not None:
                    returns.take_back()
                self.agent.rrefs.unfork(forks)
            raise
        finally:
            if load is not None:
                load.close_fds()

    def _take_turn(self, call: Call, nbytes: int) -> None:
        if not self.turns.take(call, nbytes, self.agent.reactor.about_to_wait):
            raise self.lost_error()
        if call.id not in self.calls:  # its time was up meanwhile
            raise RpcTimeout(f"call {call.what} to {self.name!r} waited too long for its turn")

    def _write(
        self,
        sender: Sender,
        parts: list[Bytes],
        deadline: float | None,
        fds: Sequence[int] = (),
        *,
        soon: bool = False,
    ) -> None:
        """A broken connection is a lost peer."""
        try:
            if soon:
                sender.send_soon(parts, deadline, fds)
            else:
                sender.send(parts, deadline, fds)
        except Stalled:
            raise
        except OSError as exc:
            self.agent.lose(self, f"writing to it failed: {exc}")
            raise self.lost_error() from exc

    def ride(
        self,
        kind: Kind,
        call_id: int,
        head: Any,
        packed: Packed,
        depth: int,
        turn: Call | None = None,
    ) -> int:
        """Queue a small message, to go with the next one or with `flush`. How many wait now; 0 where this one can't.

        `turn` is as in `post`.
        """
        sender = self.sender
        if sender is None or packed.tensors or packed.refs or self.state is not PeerState.PRESENT:
            return 0
        if weight(head, packed.body) > self._rider_bytes:
            return 0
        if turn is not None:
            try:
                self._take_turn(turn, RIDER_COST)
            except BaseException:
                self.turns.give(turn)
                raise
        return sender.ride((kind.value, call_id, depth, head, packed.body))

    @property
    def riders(self) -> int:
        return 0 if self.sender is None else self.sender.riders

    def flush(self, deadline: float | None) -> bool:
        """Send what rides. False where the peer did not read in time, and it waits on."""
        if self.sender is not None:
            try:
                self.sender.flush(deadline)
            except Stalled:
                return False
            except OSError as exc:
                self.agent.lose(self, f"writing to it failed: {exc}")
        return True

    def flush_soon(self) -> None:
        """Send what rides, without waiting for the peer to read."""
        if self.sender is not None:
            try:
                self.sender.flush_soon()
            except OSError as exc:
                self.agent.lose(self, f"writing to it failed: {exc}")

    def _check_size(self, nbytes: int) -> None:
        limit = self.agent.options.max_frame_bytes
        if nbytes > limit:
            raise PayloadError(
                f"a message of {nbytes} bytes to worker {self.name!r} is over the limit of {limit} bytes; "
                f"raise RpcOptions.max_frame_bytes on both workers, or send it in parts"
            )


class _Returns:
    """Shared memory to give back, and to unmap: it goes along with whatever is sent."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.released = peer.borrower.take_released()
        self.dropped = peer.lender.take_dropped() if peer.lender else {}
        self.frame = b""
        if self.released or self.dropped:
            self.frame = frame_bytes(
                Kind.RELEASE, 0, dump_meta((self.released, list(self.dropped)), EMPTY, (), (), None)
            )

    def have_left(self) -> None:
        if self.dropped and self._peer.lender is not None:
            self._peer.lender.told_dropped(self.dropped)

    def take_back(self) -> None:
        """The message did not leave."""
        self._peer.borrower.put_back(self.released)
        if self._peer.lender is not None:
            self._peer.lender.put_back(self.dropped)


class _Load:
    """The tensors of one message, each put into shared memory or left to be written by the socket."""

    def __init__(self, peer: Peer, sender: Sender, tensors: Sequence[torch.Tensor]) -> None:
        self._peer = peer
        self.descriptions: list[Description] = []
        self.buffers: list[Bytes] = []
        self.lengths: list[int] = []
        self.fds: list[int] = []
        self._keep: list[Outgoing] = []
        self._new: list[Segment] = []
        self._reused: list[int] = []
        if len(tensors) > MAX_BUFFERS:
            raise PayloadError(
                f"{len(tensors)} tensors in one message to {peer.name!r}; at most {MAX_BUFFERS} go"
            )
        options = peer.agent.options
        device_map = options.device_maps.get(peer.name) if options.device_maps else None
        lender = peer.lender if sender.shares_host else None
        try:
            for tensor in tensors:
                outgoing = describe(tensor, device_map, peer.name)
                if (
                    lender is None
                    or outgoing.nbytes < options.shared_memory_min_bytes
                    or not self._lend(lender, outgoing)
                ):
                    self._stream(outgoing)
        except BaseException:
            self.take_back()
            self.close_fds()
            raise

    def _lend(self, lender: Lender, outgoing: Outgoing) -> bool:
        if len(self._new) >= MAX_NEW_PER_FRAME:
            return False
        lent = lender.lend(outgoing)
        if lent is None:
            return False
        segment, is_new = lent
        if is_new:
            self._new.append(segment)
            self.fds.append(segment.fd)
        else:
            self._reused.append(segment.id)
        self.descriptions.append(outgoing.description((segment.id, segment.size if is_new else 0)))
        return True

    def _stream(self, outgoing: Outgoing) -> None:
        self._keep.append(outgoing)  # the view below does not keep the memory alive
        self.descriptions.append(outgoing.description(None))
        if outgoing.nbytes <= JOIN_BYTES:
            self.buffers.append(
                ctypes.string_at(outgoing.tensor.data_ptr(), outgoing.nbytes) if outgoing.nbytes else b""
            )
        else:
            self.buffers.append(bytes_of(outgoing.tensor, outgoing.nbytes))
        self.lengths.append(outgoing.nbytes)

    def parts(self, frame: bytes) -> list[Bytes]:
        """What is written: one piece while it is small, for copying a little is cheaper than scattering."""
        if len(frame) + sum(self.lengths) <= JOIN_BYTES:
            return [b"".join((frame, *self.buffers))]
        return [frame, *self.buffers]

    def take_back(self) -> None:
        """The message did not leave."""
        lender = self._peer.lender
        if lender is not None:
            lender.discard([s.id for s in self._new])
            lender.returned(self._reused)

    def close_fds(self) -> None:
        for segment in self._new:
            segment.close_fd()


class SelfPeer(Peer):
    """This worker as its own peer: the same messages, copied, without a socket."""

    def __init__(self, agent: Agent, card: Card, deliver: Callable[[Frame], None]) -> None:
        super().__init__(agent, card)
        self._deliver = deliver

    @property
    def is_self(self) -> bool:
        return True

    def ride(
        self,
        kind: Kind,
        call_id: int,
        head: Any,
        packed: Packed,
        depth: int,
        turn: Call | None = None,
    ) -> int:
        return 0

    def post(
        self,
        kind: Kind,
        call_id: int,
        head: Any,
        packed: Packed = EMPTY,
        *,
        depth: int = 0,
        deadline: float | None = None,
        extra: Any = None,
        soon: bool = False,
        turn: Call | None = None,
    ) -> None:
        if self.state is not PeerState.PRESENT:
            raise self.lost_error()
        frame = Frame(kind, call_id, depth, 0)
        descriptions = []
        device_map = self.agent.options.device_maps.get(self.name)
        for tensor in packed.tensors:
            outgoing = describe(tensor, device_map, self.name)
            count = outgoing.nbytes // outgoing.tensor.itemsize
            flat = outgoing.tensor.detach().as_strided((count,), (1,))
            frame.buffers.append(flat.view(torch.uint8).clone())
            descriptions.append(outgoing.description(None))
        forks: list[Any] = []
        try:
            for ref in packed.refs:
                forks.append(self.agent.rrefs.fork(ref, self, deadline))
            frame.meta = dump_meta(head, packed, descriptions, forks, extra)
        except BaseException:
            self.agent.rrefs.unfork(forks)
            raise
        self._deliver(frame)
