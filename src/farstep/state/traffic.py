"""The messages of one rank's part of a plan: what it sends, receives, reads from its neighbours' memory, and copies within itself.

Each rank knows from its part of the plan which messages it sends to and receives from whom, and in which order. Messages are
ordered by their number between two ranks, then by the distance between these: an order that all ranks share. Each rank begins its
messages in it, a bounded number ahead, and finishes them in it.

[Note: messages in one order] Of all messages that are not finished, take the first in the order. Both its ranks have finished all
before it, and have room to begin at least two, the most that a rank has at one place of the order: one to send, one to receive. So
both have begun it, and it finishes. That is why nothing can wait for ever on anything but a rank that is lost.

[Note: a rank that fails goes on] Others wait for a rank's messages. So if a callback raises, or a copy does, the rank keeps that in mind, sends and
receives what is left, whatever is in it, and all are told in the end. Only where nobody would be told does it raise at once.
"""

from __future__ import annotations

import heapq
import math
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import waiting
from farstep.errors import ExchangeError, StateError
from farstep.state.box import Box
from farstep.state.local import Local
from farstep.state.messages import Arena, Copies, Message, aligned, messages, places
from farstep.state.neighbours import Neighbours
from farstep.state.reads import Reads

__all__ = ["BUDGET_BYTES", "Options", "Place", "Progress", "Traffic"]

Progress = Callable[[int, int], None]
BUDGET_BYTES = 32 << 20
_LEAST_BUDGET_BYTES = 64 << 10
_LARGEST_MESSAGE_BYTES = 4 << 20
_AHEAD = 32  # messages begun and not finished
_THREAD_BYTES = 8 << 20  # for less another thread is not worth its start
_TAG = 0x57A7E  # keeps these messages apart from others that the program sends in the group


@dataclass(frozen=True, slots=True)
class Options:
    budget_bytes: int
    progress: Progress | None
    timeout_s: float | None
    check: bool
    same_host: bool | None

    def __post_init__(self) -> None:
        if self.budget_bytes < _LEAST_BUDGET_BYTES:
            raise ValueError(f"budget_bytes is at least {_LEAST_BUDGET_BYTES}, not {self.budget_bytes}")
        if self.progress is not None and not callable(self.progress):
            raise TypeError(f"progress is a function or None, not a {type(self.progress).__name__}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is some seconds or None, not {self.timeout_s}")

    @property
    def message_bytes(self) -> int:
        return min(_LARGEST_MESSAGE_BYTES, self.budget_bytes // 4)  # See [Note: messages in one order]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process is in the group."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Place:
        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise StateError("this process is not in the group it was to exchange tensors in")
        return cls(group, rank, dist.get_world_size(group))

    @property
    def device(self) -> torch.device | None:
        """Where a tensor has to be to be sent; None for wherever it is."""
        return torch.device("cpu") if "gloo" in dist.get_backend(self.group) else None

    def name(self, peer: int) -> str:
        if self.group is None or self.group is dist.group.WORLD:
            return f"rank {peer}"
        return f"rank {peer} of the group (rank {dist.get_global_rank(self.group, peer)} of all)"


class _Begun:
    """A message on its way."""

    __slots__ = ("message", "packed", "peer", "sending", "work")

    def __init__(self, message: Message, peer: int, sending: bool) -> None:
        self.message, self.peer, self.sending = message, peer, sending
        self.packed: Tensor | None = None
        self.work: dist.Work | None = None


class Traffic:
    """The messages of one rank, begun and finished in the order that all share. It runs once.

    `failure` is what went wrong here without the messages being stopped by it. See [Note: a rank that fails goes on]
    """

    def __init__(self, local: Local, place: Place, options: Options) -> None:
        self.local, self.place, self.options = local, place, options
        self.failure: Exception | None = None
        self._told = options.check and place.ranks > 1
        self._begun: deque[_Begun] = deque()
        self._bytes_done = 0
        self._readers: dict[tuple[int, bool], _Begun] = {}
        """Between whom memory is read: the first message to or from each."""
        self._streams = [
            (peer, sending, local.copies(rows))
            for sending, peers in ((True, local.sent), (False, local.received))
            for peer, rows in peers.items()
        ]
        packing = sum(int(aligned(copies.nbytes).sum()) for _, _, copies in self._streams)
        self._arena = Arena(min(options.budget_bytes, packing), torch.device("cpu"))

    @property
    def settings(self) -> int:
        """What all ranks are to have the same."""
        return self.options.message_bytes * 4 + {None: 0, False: 1, True: 2}[self.options.same_host]

    def run(self, neighbours: Neighbours | None) -> None:
        """Raises ExchangeError if another rank is lost or late. All else is left in `failure`, if the ranks tell one another in the end."""
        reads: Reads[_Begun] = Reads(neighbours, self._threads)
        to_begin = self._ordered() if neighbours is None else self._after_reading(neighbours, reads)
        with reads.begun():
            waiting = self._begin(None, to_begin)
            self._keep()
            for each, error in reads.rest():
                if error is not None:
                    self._fail(self._lost(each, error))
                self._received(each)
        while self._begun:
            self._finish(self._begun.popleft())
            waiting = self._begin(waiting, to_begin)
        if not self._told:
            self._part()

    @property
    def _threads(self) -> int:
        """That read for this rank: others, who only give, need no core meanwhile."""
        received = sum(int(copies.nbytes.sum()) for _, sending, copies in self._streams if not sending)
        if self.local.sent or received < _THREAD_BYTES:
            return 0
        return min(len(self.local.received), (os.cpu_count() or 1) - 1)

    def _ordered(self) -> Iterator[_Begun]:
        """All messages, made as they are needed. See [Note: messages in one order]"""
        return (
            each for _, _, each in heapq.merge(*(self._stream(*each) for each in self._streams), key=_place)
        )

    def _stream(self, peer: int, sending: bool, copies: Copies) -> Iterator[tuple[int, int, _Begun]]:
        rank, ranks = self.place.rank, self.place.ranks
        distance = (peer - rank if sending else rank - peer) % ranks
        for number, message in enumerate(messages(copies, self.options.message_bytes)):
            yield number, distance, _Begun(message, peer, sending)

    def _after_reading(self, neighbours: Neighbours, reads: Reads[_Begun]) -> Iterator[_Begun]:
        """Take what lies in one piece in the giver's memory from there. What is left is to be sent.

        First every giver tells its takers where each of its messages lies, 0 if it is to be packed; in the end every taker says that it has read.
        """
        firsts: dict[tuple[int, bool], _Begun] = {}
        lying: dict[tuple[int, bool], array[int]] = {}
        for each in self._ordered():
            firsts.setdefault((each.peer, each.sending), each)
            memory = self._in_place(each) if each.sending else None
            lying.setdefault((each.peer, each.sending), array("q")).append(
                0 if memory is None else memory.data_ptr()
            )
        addresses = {key: torch.frombuffer(found, dtype=torch.int64) for key, found in lying.items()}
        self._swap(firsts, addresses)
        self._readers = firsts
        for each, address in self._with_addresses(lying):
            if address and not each.sending:
                memory = self._in_place(each)
                if memory is None:
                    self._read_message(each, address, neighbours)
                else:
                    reads.add(each, each.peer, address, memory)
        return (each for each, address in self._with_addresses(lying) if not address)

    def _with_addresses(self, lying: dict[tuple[int, bool], array[int]]) -> Iterator[tuple[_Begun, int]]:
        found = {key: iter(addresses) for key, addresses in lying.items()}
        return ((each, next(found[each.peer, each.sending])) for each in self._ordered())

    def _part(self) -> None:
        """Nobody goes on while another may still read its memory."""
        self._swap(
            {(peer, not sending): first for (peer, sending), first in self._readers.items()},
            {(peer, not sending): torch.zeros(1) for peer, sending in self._readers},
        )

    def _swap(self, firsts: dict[tuple[int, bool], _Begun], tensors: dict[tuple[int, bool], Tensor]) -> None:
        """Send or receive one tensor for each peer and direction. An error names the first message between the two."""
        begun = [
            (first, self._started(first, tensors[peer, sending], peer, sending))
            for (peer, sending), first in firsts.items()
        ]
        for first, work in begun:
            self._wait(first, work)

    def _started(self, each: _Begun, memory: Tensor, peer: int, sending: bool) -> dist.Work:
        group = self.place.group
        with self._waiting(each):
            if sending:
                work = dist.isend(memory, group=group, group_dst=peer, tag=_TAG)
            else:
                work = dist.irecv(memory, group=group, group_src=peer, tag=_TAG)
        assert work is not None
        return work

    def _wait(self, each: _Begun, work: dist.Work) -> None:
        with self._waiting(each):
            work.wait()

    def _waiting(self, each: _Begun) -> waiting:
        return waiting(
            self.place.group,
            lambda: self._described(each),
            peers=(each.peer,),
            help="Targets may be partly written",
        )

    def _read_message(self, each: _Begun, address: int, neighbours: Neighbours) -> None:
        """One that is packed here."""
        memory = each.packed = self._arena.take(each.message.nbytes)
        assert memory is not None  # nothing else is under way yet
        nbytes = each.message.nbytes
        try:
            neighbours.read(each.peer, [(address, nbytes)], [(memory.data_ptr(), nbytes)])
        except ExchangeError as exc:
            self._fail(self._lost(each, exc))
        self._received(each)

    def _keep(self) -> None:
        """Copies within the rank, while the first messages are under way."""
        local, rows = self.local, self.local.kept
        nbytes = local.plan.nbytes[rows]
        for here, there in zip(local.source.views(rows), local.target.views(rows), strict=True):
            self._try(there.copy_, here)
            self._done(here.nbytes)
        left_in_place = local.bytes_kept - int(nbytes.sum())
        if left_in_place:
            self._done(left_in_place)

    def _begin(self, waiting: _Begun | None, to_begin: Iterator[_Begun]) -> _Begun | None:
        """As many as there is room for. The one that has to wait."""
        while len(self._begun) < _AHEAD:
            each = waiting or next(to_begin, None)
            if each is None:
                return None
            waiting = each
            memory = self._in_place(each)
            if memory is None:
                memory = each.packed = self._arena.take(each.message.nbytes)
                if memory is None:
                    return each
                if each.sending:
                    self._try(self._pack, each)
            each.work = self._started(each, memory, each.peer, each.sending)
            self._begun.append(each)
            waiting = None
        return waiting

    def _finish(self, each: _Begun) -> None:
        assert each.work is not None
        self._wait(each, each.work)
        self._received(each)

    def _received(self, each: _Begun) -> None:
        """Or sent."""
        if each.packed is not None:
            if not each.sending and self.failure is None:
                self._try(self._unpack, each)
            self._arena.give_back()
        self._done(each.message.payload_bytes)

    def _in_place(self, each: _Begun) -> Tensor | None:
        """The memory of a message's one region, as bytes, if it can be sent from there or received there."""
        if len(each.message.rows) > 1:
            return None
        side = self.local.source if each.sending else self.local.target
        view = side.view(int(each.message.rows[0]), each.message.part)
        device = self.place.device
        if (
            not view.is_contiguous()
            or view.is_conj()
            or view.is_neg()
            or (device is not None and view.device != device)
        ):
            return None
        return view.as_strided((view.numel(),), (1,)).view(
            torch.uint8
        )  # of one element the stride may be any

    def _regions(self, each: _Begun) -> Iterator[tuple[Tensor, Tensor]]:
        """The regions of a packed message: in the rank's tensors, and in the message."""
        packed, message = each.packed, each.message
        assert packed is not None
        side = self.local.source if each.sending else self.local.target
        if message.part is not None:
            view = side.view(int(message.rows[0]), message.part)
            yield view, packed.view(view.dtype).view(view.shape)
            return
        typed: dict[torch.dtype, Tensor] = {}
        nbytes = self.local.plan.nbytes[message.rows].tolist()
        for view, at, n in zip(side.views(message.rows), places(nbytes), nbytes, strict=True):
            dtype = view.dtype
            if dtype not in typed:
                whole = len(packed) - len(packed) % dtype.itemsize
                typed[dtype] = packed[:whole].view(dtype)
            first = at // dtype.itemsize
            yield view, typed[dtype][first : first + n // dtype.itemsize].view(view.shape)

    def _pack(self, each: _Begun) -> None:
        for view, part in self._regions(each):
            part.copy_(view)

    def _unpack(self, each: _Begun) -> None:
        for view, part in self._regions(each):
            view.copy_(part)

    def _done(self, nbytes: int) -> None:
        self._bytes_done += nbytes
        if self.options.progress is not None and self.failure is None:
            self._try(self.options.progress, self._bytes_done, self.local.bytes_total)

    def _try(self, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except Exception as exc:
            self._fail(exc)

    def _fail(self, exc: Exception) -> None:
        """See [Note: a rank that fails goes on]"""
        if not self._told:
            raise exc
        self.failure = self.failure or exc

    def _described(self, each: _Begun) -> str:
        """What is sent to whom, in words."""
        first, more = self.local.plan[int(each.message.rows[0])], len(each.message.rows) - 1
        box, part = first.box, each.message.part
        if part is not None:
            dims = len(box.sizes)
            box = Box(
                tuple(a + b for a, b in zip(box.offsets, part.offsets[:dims], strict=True)), part.sizes[:dims]
            )
        what = f"{first.name!r} {box}" + (f" and {more} more regions" if more else "")
        act = "sending {} to" if each.sending else "receiving {} from"
        return f"{act.format(what)} {self.place.name(each.peer)}"

    def _lost(self, each: _Begun, exc: RuntimeError) -> ExchangeError:
        return ExchangeError(f"{self.place.name(self.place.rank)} failed {self._described(each)}: {exc}")


def _place(each: tuple[int, int, _Begun]) -> tuple[int, int]:
    return each[:2]
