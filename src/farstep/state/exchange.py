"""Runs a plan over a process group.

Each rank knows from its part of the plan which messages it sends to and receives from whom, and in which order. Messages are
ordered by their number between two ranks, then by the distance between these: an order that all ranks share. Each rank begins its
messages in it, a bounded number ahead, and finishes them in it.

[Note: messages in one order] Of all messages that are not finished, take the first in the order. Both its ranks have finished all
before it, and have room to begin at least two, the most that a rank has at one place of the order: one to send, one to receive. So
both have begun it, and it finishes. That is why nothing can wait for ever on anything but a rank that is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import ExchangeError, StateError
from farstep.state.agreement import agree
from farstep.state.layout import Layout
from farstep.state.local import Local
from farstep.state.messages import Arena, Message, aligned, messages
from farstep.state.neighbours import Neighbours
from farstep.state.plans import Plan
from farstep.state.reshard import plan as plan_copies
from farstep.state.shards import Shards

__all__ = ["BUDGET_BYTES", "Progress", "exchange", "respread"]

Progress = Callable[[int, int], None]
BUDGET_BYTES = 32 << 20
_LEAST_BUDGET_BYTES = 64 << 10
_LARGEST_MESSAGE_BYTES = 4 << 20
_AHEAD = 32  # messages begun and not finished
_TAG = 0x57A7E  # keeps these messages apart from others that the program sends in the group


@torch.no_grad()
def exchange(
    plan: Plan,
    source: Mapping[str, Sequence[Tensor]],
    target: Mapping[str, Sequence[Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    same_host: bool | None = None,
) -> None:
    """Fill `target` from `source`, on all ranks of the group at once.

    The plan is everyone's or this rank's part; its ranks are those within `group`. `source` and `target` have this rank's local tensors by
    name, one for each of its boxes in the layout; those that the rank has no copies of may be left out. The target's are written in place.
    Without an initialized process group this process is rank 0 of one.

    At most `budget_bytes`, the same on all ranks, are used for packing; contiguous regions of more than 64 KiB go from memory to memory
    and need none. `progress(bytes_done, bytes_total)` is called on this thread, for what this rank sends, receives and copies within
    itself. `timeout_s` bounds the wait for each message, by default the group's timeout does.

    Before anything is sent, ranks compare what they are to send one another, and whether each has its tensors; `check=False` leaves
    that out, on all ranks alike. Where the ranks of a gloo group can read each other's memory, large regions are read and not sent; not with
    `same_host=False`. Raises LayoutError if local tensors don't fit the layout, StateError if a target shares memory with a source
    that goes elsewhere, ExchangeError if ranks disagree or one is lost or late; then targets may be partly written.
    """
    _exchange(
        plan, None, source, target, group, _Options(budget_bytes, progress, timeout_s, check, same_host)
    )


@torch.no_grad()
def respread(
    source: Mapping[str, Shards],
    target: Mapping[str, Shards],
    group: dist.ProcessGroup | None = None,
    *,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    timeout_s: float | None = None,
    check: bool = True,
    same_host: bool | None = None,
) -> None:
    """Fill the target's tensors from the source's, on all ranks at once: each plans its part and runs it. Options as for `exchange`.

    If one rank cannot plan its part, all raise.
    """
    part, failure = None, None
    source, target = _shards_by_name(source), _shards_by_name(target)
    try:
        part = plan_copies(
            Layout({name: each.spread for name, each in source.items()}),
            Layout({name: each.spread for name, each in target.items()}),
            _Place.of(group).rank,
        )
    except StateError as exc:
        failure = exc
    _exchange(
        part,
        failure,
        {name: each.tensors for name, each in source.items()},
        {name: each.tensors for name, each in target.items()},
        group,
        _Options(budget_bytes, progress, timeout_s, check, same_host),
    )


def _shards_by_name(given: Mapping[str, Shards]) -> Mapping[str, Shards]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"Shards by name are wanted, not a {type(given).__name__}: of a model, give named_shards(model)"
        )
    for name, value in given.items():
        if not isinstance(value, Shards):
            raise TypeError(f"{name!r} is a {type(value).__name__}, and not Shards: give shards_of(it)")
    return given


@dataclass(frozen=True, slots=True)
class _Options:
    budget_bytes: int
    progress: Progress | None
    timeout_s: float | None
    check: bool
    same_host: bool | None

    def __post_init__(self) -> None:
        if self.budget_bytes < _LEAST_BUDGET_BYTES:
            raise ValueError(f"budget_bytes is at least {_LEAST_BUDGET_BYTES}, not {self.budget_bytes}")

    @property
    def message_bytes(self) -> int:
        return min(_LARGEST_MESSAGE_BYTES, self.budget_bytes // 4)  # See [Note: messages in one order]

    @property
    def timeout(self) -> timedelta | None:
        return None if self.timeout_s is None else timedelta(seconds=self.timeout_s)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this process is in the group."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Place:
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


def _exchange(
    plan: Plan | None,
    failure: StateError | None,
    source: Mapping[str, Sequence[Tensor]],
    target: Mapping[str, Sequence[Tensor]],
    group: dist.ProcessGroup | None,
    options: _Options,
) -> None:
    place = _Place.of(group)
    local = None
    if plan is not None:
        try:
            local = Local(plan.part(place.rank), place.rank, place.ranks, source, target)
        except StateError as exc:
            failure = exc
    if options.check and place.ranks > 1:
        agree(
            local, failure, options.message_bytes, place.rank, place.ranks, group, options.timeout, place.name
        )
    if local is None or failure is not None:
        assert failure is not None
        raise failure
    _Run(local, place, options, _neighbours(place, options)).run()


def _neighbours(place: _Place, options: _Options) -> Neighbours | None:
    if place.ranks == 1 or options.same_host is False or place.device is None:
        return None
    found = Neighbours.known(place.group)
    if found is None and options.same_host:
        raise ExchangeError("same_host=True, and the ranks cannot read each other's memory")
    return found


class _Begun:
    """A message on its way."""

    __slots__ = ("message", "packed", "peer", "sending", "work")

    def __init__(self, message: Message, peer: int, sending: bool) -> None:
        self.message, self.peer, self.sending = message, peer, sending
        self.packed: Tensor | None = None
        self.work: dist.Work | None = None


class _Run:
    """The messages of one rank, begun and finished in the order that all share."""

    def __init__(self, local: Local, place: _Place, options: _Options, neighbours: Neighbours | None) -> None:
        self._local, self._place, self._options = local, place, options
        self._neighbours = neighbours
        self._begun: deque[_Begun] = deque()
        self._bytes_done = 0
        self._most_bytes = 0  # that packing could ever take
        self._arena: Arena | None = None
        self._readers: dict[tuple[int, bool], _Begun] = {}
        """Between whom memory is read: the first message to or from each."""

    def run(self) -> None:
        ordered = self._ordered()
        to_begin = deque(ordered if self._neighbours is None else self._read(ordered, self._neighbours))
        self._begin(to_begin)
        self._keep()
        while self._begun:
            self._finish(self._begun.popleft())
            self._begin(to_begin)
        self._part()

    def _read(self, ordered: list[_Begun], neighbours: Neighbours) -> list[_Begun]:
        """Take what lies in one piece in the giver's memory from there. What is left is to be sent.

        First every giver tells its takers where each of its messages lies, 0 if it is to be packed; in the end every taker says that it has read.
        """
        firsts: dict[tuple[int, bool], _Begun] = {}
        lying: dict[tuple[int, bool], list[int]] = {}
        for each in ordered:
            firsts.setdefault((each.peer, each.sending), each)
            memory = self._in_place(each) if each.sending else None
            lying.setdefault((each.peer, each.sending), []).append(0 if memory is None else memory.data_ptr())
        addresses = {key: torch.tensor(found, dtype=torch.int64) for key, found in lying.items()}
        self._swap(firsts, addresses)
        self._readers = firsts
        places = {key: iter(found.tolist()) for key, found in addresses.items()}
        left = []
        for each in ordered:
            address = next(places[each.peer, each.sending])
            if not address:
                left.append(each)
            elif not each.sending:
                self._read_message(each, address, neighbours)
        return left

    def _part(self) -> None:
        """Nobody goes on while another may still read its memory."""
        self._swap(
            {(peer, not sending): first for (peer, sending), first in self._readers.items()},
            {(peer, not sending): torch.zeros(1) for peer, sending in self._readers},
        )

    def _swap(self, firsts: dict[tuple[int, bool], _Begun], tensors: dict[tuple[int, bool], Tensor]) -> None:
        """Send or receive one tensor for each peer and direction. An error names the first message between the two."""
        group, begun = self._place.group, []
        for (peer, sending), first in firsts.items():
            tensor = tensors[peer, sending]
            try:
                if sending:
                    begun.append((first, dist.isend(tensor, group=group, group_dst=peer, tag=_TAG)))
                else:
                    begun.append((first, dist.irecv(tensor, group=group, group_src=peer, tag=_TAG)))
            except RuntimeError as exc:
                raise self._failure(first, exc) from exc
        for first, work in begun:
            assert work is not None
            self._wait(first, work)

    def _wait(self, each: _Begun, work: dist.Work) -> None:
        timeout = self._options.timeout
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as exc:
            raise self._failure(each, exc) from exc

    def _read_message(self, each: _Begun, address: int, neighbours: Neighbours) -> None:
        memory = self._in_place(each)
        if memory is None:
            memory = each.packed = self._room(each.message.nbytes)
            assert memory is not None  # nothing else is under way yet
        nbytes = each.message.nbytes
        try:
            neighbours.read(each.peer, [(address, nbytes)], [(memory.data_ptr(), nbytes)])
        except ExchangeError as exc:
            raise self._failure(each, exc) from exc
        if each.packed is not None:
            self._unpack(each)
            assert self._arena is not None
            self._arena.give_back()
        self._done(nbytes)

    def _ordered(self) -> list[_Begun]:
        """See [Note: messages in one order]"""
        place, limit = self._place, self._options.message_bytes
        found = []
        for sending, peers in ((True, self._local.sent), (False, self._local.received)):
            for peer, rows in peers.items():
                distance = (peer - place.rank if sending else place.rank - peer) % place.ranks
                for number, message in enumerate(messages(self._local.copies(rows, sending), limit)):
                    found.append((number, distance, _Begun(message, peer, sending)))
        self._most_bytes = sum(aligned(each.message.nbytes) for _, _, each in found)
        found.sort(key=lambda each: each[:2])
        return [each for _, _, each in found]

    def _keep(self) -> None:
        """Copies within the rank, while the first messages are under way."""
        plan, rows = self._local.plan, self._local.kept
        sources = self._local.copies(rows, sending=True)
        targets = self._local.copies(rows, sending=False)
        for (name, here, box, itemsize), (_, there, _, _) in zip(sources, targets, strict=True):
            self._local.target(name, there, box).copy_(self._local.source(name, here, box))
            self._done(box.numel * itemsize)
        left_in_place = self._local.bytes_kept - int(plan.nbytes[rows].sum())
        if left_in_place:
            self._done(left_in_place)

    def _begin(self, to_begin: deque[_Begun]) -> None:
        """As many as there is room for."""
        while to_begin and len(self._begun) < _AHEAD:
            each = to_begin[0]
            memory = self._in_place(each)
            if memory is None:
                memory = each.packed = self._room(each.message.nbytes)
                if memory is None:
                    return
                if each.sending:
                    self._pack(each)
            to_begin.popleft()
            group = self._place.group
            try:
                if each.sending:
                    each.work = dist.isend(memory, group=group, group_dst=each.peer, tag=_TAG)
                else:
                    each.work = dist.irecv(memory, group=group, group_src=each.peer, tag=_TAG)
            except RuntimeError as exc:
                raise self._failure(each, exc) from exc
            self._begun.append(each)

    def _finish(self, each: _Begun) -> None:
        assert each.work is not None
        self._wait(each, each.work)
        if each.packed is not None:
            if not each.sending:
                self._unpack(each)
            assert self._arena is not None
            self._arena.give_back()
        self._done(each.message.nbytes)

    def _in_place(self, each: _Begun) -> Tensor | None:
        """The memory of a message's one region, as bytes, if it can be sent from there or received there."""
        if len(each.message.pieces) > 1:
            return None
        view = self._view(each, 0)
        device = self._place.device
        if (
            not view.is_contiguous()
            or view.is_conj()
            or view.is_neg()
            or (device is not None and view.device != device)
        ):
            return None
        return view.reshape(-1).view(torch.uint8)

    def _view(self, each: _Begun, which: int) -> Tensor:
        piece = each.message.pieces[which]
        side = self._local.source if each.sending else self._local.target
        return side(piece.name, piece.number, piece.box)

    def _regions(self, each: _Begun) -> Iterator[tuple[Tensor, Tensor]]:
        """The regions of a packed message: in the rank's tensors, and in the message."""
        assert each.packed is not None
        for which, piece in enumerate(each.message.pieces):
            view = self._view(each, which)
            part = each.packed[piece.at : piece.at + view.nbytes]
            yield view, part.view(view.dtype).reshape(view.shape)

    def _pack(self, each: _Begun) -> None:
        for view, part in self._regions(each):
            part.copy_(view)

    def _unpack(self, each: _Begun) -> None:
        for view, part in self._regions(each):
            view.copy_(part)

    def _room(self, nbytes: int) -> Tensor | None:
        if self._arena is None:
            room = min(self._options.budget_bytes, self._most_bytes)
            self._arena = Arena(room, self._place.device or torch.device("cpu"))
        return self._arena.take(nbytes)

    def _done(self, nbytes: int) -> None:
        self._bytes_done += nbytes
        if self._options.progress is not None:
            self._options.progress(self._bytes_done, self._local.bytes_total)

    def _failure(self, each: _Begun, exc: RuntimeError) -> ExchangeError:
        first, more = each.message.pieces[0], len(each.message.pieces) - 1
        what = f"{first.name!r} {first.box}" + (f" and {more} more regions" if more else "")
        act = "send {} to" if each.sending else "receive {} from"
        return ExchangeError(
            f"{self._place.name(self._place.rank)} could not {act.format(what)} {self._place.name(each.peer)}, which may be lost: {exc}"
        )
