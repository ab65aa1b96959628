"""Pieces of gradients to their owners, and pieces of parameters from them: point to point, several under way at once.

Point to point into place is what is fast: a piece of a large parameter goes from the sender's memory into the receiver's, and while one is under
way the one before it is being updated. `docs/decisions/0006-sharded-optimizer.md` has the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import waiting
from farstep.optim.partition import Piece
from farstep.state.kept import keep

__all__ = ["BROKEN", "Gather", "Live", "Rounds", "Transport", "in_place", "pack", "room_for"]

DEPTH = 3
"""Pieces under way at once. One is not enough to overlap; more only take memory."""
GRADIENTS, VALUES = 0x57A9D, 0x57A9E
"""Tags that keep these messages apart from those of the program's own."""

BROKEN = "Some parameters may have been updated and others not: start again from a checkpoint"

Live = list[list[int]]
"""For each rank, the numbers of those of its pieces that take part."""
Rounds = Iterator[tuple[int, int | None, Tensor | None]]
"""Round by round: its number, this rank's piece, and the mean of all ranks' gradients for it, which is good until the next round."""


class Gather(Protocol):
    """Brings updated pieces to the other ranks, and theirs into place."""

    def publish(self, n: int) -> None:
        """This rank's piece of the n-th round is updated."""

    def finish(self, has_failed: bool) -> bool:
        """All are, or this rank has failed to. Returns whether some rank has."""


@dataclass
class _Post:
    """Messages that were begun together, and what to do when they are there."""

    what: str
    ops: list[dist.P2POp]
    works: list[dist.Work]
    then: list[Callable[[], None]]
    waited: set[int] = field(default_factory=set)
    """Nothing is waited for twice: gloo would wait for another message."""

    def receive(self) -> None:
        """Wait for what is to come, and not yet for what is to go; where a backend has one work for all, for both."""
        separate = len(self.works) == len(self.ops)
        self._wait(
            [i for i, op in enumerate(self.ops) if op.op is dist.irecv]
            if separate
            else range(len(self.works))
        )

    def finish(self) -> None:
        self._wait(range(len(self.works)))
        for each in self.then:
            each()

    def _wait(self, which: Iterable[int]) -> None:
        for i in [i for i in which if i not in self.waited]:
            self.waited.add(i)
            # Where a backend has one work for all messages, it waits for all peers.
            peers = (self.ops[i].group_peer,) if len(self.works) == len(self.ops) else None
            with waiting(self.ops[i].group, self.what, peers=peers, help=BROKEN):
                self.works[i].wait()


class Transport:
    """`owned` are the pieces of each rank; `names` and `shapes` those of the parameters."""

    def __init__(
        self, group: dist.ProcessGroup | None, owned: list[list[Piece]], names: Sequence[str]
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = len(owned)
        self._owned = owned
        self._names = names
        every = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._peers = [(rank, every[rank]) for rank in range(self._ranks) if rank != self._rank]
        self._scratch: list[list[Tensor]] = []

    def live(self, has_gradient: Sequence[bool]) -> Live:
        """The pieces in which some parameter has a gradient."""
        return [
            [k for k, piece in enumerate(pieces) if any(has_gradient[s.parameter] for s in piece)]
            for pieces in self._owned
        ]

    def reduced(
        self, gradients: Sequence[Tensor | None], like: Sequence[Tensor], live: Live, *, reduce: bool = True
    ) -> Rounds:
        """The means of gradients, or the gradients themselves if they are not to be reduced.

        Some ranks have fewer pieces than others. `like` are the parameters, and stand for gradients that this rank has not.
        """
        most = max(map(len, live))
        mine = live[self._rank]
        posts: deque[tuple[_Post, list[Tensor]]] = deque()
        if reduce:
            posts.extend(self._post_gradients(n, gradients, like, live) for n in range(min(DEPTH, most)))
        for n in range(most):
            received: list[Tensor] = []
            if reduce:
                post, received = posts.popleft()
                post.receive()
            if n < len(mine):
                own = pack(gradients, like, self._owned[self._rank][mine[n]])
                yield n, mine[n], self._mean(own, received) if reduce else own
            else:
                yield n, None, None
            if reduce:
                post.finish()
            if reduce and n + DEPTH < most:
                posts.append(self._post_gradients(n + DEPTH, gradients, like, live))

    def _post_gradients(
        self, n: int, gradients: Sequence[Tensor | None], like: Sequence[Tensor], live: Live
    ) -> tuple[_Post, list[Tensor]]:
        ops = []
        about: Piece = ()
        for rank, peer in self._peers:
            if n < len(live[rank]):
                about = self._owned[rank][live[rank][n]]
                part = pack(gradients, like, about)
                ops.append(dist.P2POp(dist.isend, part, peer, self._group, GRADIENTS))
        received = []
        if n < len(live[self._rank]):
            about = self._owned[self._rank][live[self._rank][n]]
            received = self._buffers(n, about, like)
            ops += [
                dist.P2POp(dist.irecv, buffer, peer, self._group, GRADIENTS)
                for buffer, (_, peer) in zip(received, self._peers, strict=True)
            ]
        return self._begin(ops, [], f"reducing the gradient of {self._name(about)}"), received

    def _buffers(self, n: int, piece: Piece, like: Sequence[Tensor]) -> list[Tensor]:
        """Where the n-th round's gradients of the peers go. They are used again `DEPTH` rounds later."""
        first = like[piece[0].parameter]
        nbytes = sum(s.numel for s in piece) * first.element_size()
        if not self._scratch:
            self._scratch = [[] for _ in range(DEPTH)]
        ring = self._scratch[n % DEPTH]
        if not ring or ring[0].numel() < nbytes or ring[0].device != first.device:
            ring[:] = [torch.empty(nbytes, dtype=torch.uint8, device=first.device) for _ in self._peers]
        return [buffer[:nbytes].view(first.dtype) for buffer in ring]

    def _mean(self, own: Tensor, received: list[Tensor]) -> Tensor:
        """Added up in the order of ranks, into the first buffer."""
        terms = [*received[: self._rank], own, *received[self._rank :]]
        into = received[0]
        if own.dtype is torch.float16:  # their sum may be too large for it
            terms = [term / self._ranks for term in terms]
        torch.add(terms[0], terms[1], out=into)
        for term in terms[2:]:
            into.add_(term)
        return into if own.dtype is torch.float16 else into.div_(self._ranks)

    def gather(self, values: Sequence[Tensor], live: Live) -> Gather:
        return _Gather(self, values, live)

    def _post_values(self, n: int, values: Sequence[Tensor], live: Live) -> _Post:
        ops, then = [], []
        about: Piece = ()
        if n < len(live[self._rank]):
            about = self._owned[self._rank][live[self._rank][n]]
            part = pack(values, values, about)
            ops += [dist.P2POp(dist.isend, part, peer, self._group, VALUES) for _, peer in self._peers]
        for rank, peer in self._peers:
            if n < len(live[rank]):
                about = self._owned[rank][live[rank][n]]
                into, unpack = room_for(values, about)
                then.append(unpack)
                ops.append(dist.P2POp(dist.irecv, into, peer, self._group, VALUES))
        return self._begin(ops, then, f"exchanging the values of {self._name(about)}")

    def end(self, has_failed: bool) -> bool:
        """By this all ranks have come to the end. Whether one has failed."""
        return any(each.item() for each in self._collect([has_failed], "the end of a step"))

    def _collect(self, own: list[int] | list[bool], what: str) -> list[Tensor]:
        """Every rank's numbers."""
        device = torch.device("cpu" if "gloo" in dist.get_backend(self._group) else "cuda")
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in range(self._ranks)]
        keep(mine, *found)
        with waiting(self._group, what, help=BROKEN):
            dist.all_gather(found, mine, self._group)
        return found

    def _begin(self, ops: list[dist.P2POp], then: list[Callable[[], None]], what: str) -> _Post:
        if not ops:
            return _Post(what, ops, [], then)
        with waiting(self._group, what, help=BROKEN):
            return _Post(what, ops, dist.batch_isend_irecv(ops), then)

    def _name(self, piece: Piece) -> str:
        if not piece:
            return "nothing"
        rest = f" and {len(piece) - 1} more" if len(piece) > 1 else ""
        return repr(self._names[piece[0].parameter]) + rest


class _Gather:
    """By messages, round by round."""

    def __init__(self, transport: Transport, values: Sequence[Tensor], live: Live) -> None:
        self._transport, self._values, self._live = transport, values, live
        self._posts: deque[_Post] = deque()

    def publish(self, n: int) -> None:
        self._posts.append(self._transport._post_values(n, self._values, self._live))
        if len(self._posts) > DEPTH:
            self._posts.popleft().finish()

    def finish(self, has_failed: bool) -> bool:
        while self._posts:
            self._posts.popleft().finish()
        return self._transport.end(has_failed)


def in_place(tensors: Sequence[Tensor | None], piece: Piece) -> Tensor | None:
    """The piece as a view of its one parameter's memory, if it is that."""
    first, *others = piece
    tensor = tensors[first.parameter]
    if others or tensor is None or not tensor.is_contiguous():
        return None
    return tensor.view(-1)[first.start : first.stop]


def pack(tensors: Sequence[Tensor | None], like: Sequence[Tensor], piece: Piece) -> Tensor:
    """The piece's elements in one dimension: a view where it can be, else a copy. Zeros for tensors that are not there."""
    view = in_place(tensors, piece)
    if view is not None:
        return view
    parts = []
    for s in piece:
        tensor = tensors[s.parameter]
        if tensor is None:
            parts.append(torch.zeros(s.numel, dtype=like[s.parameter].dtype, device=like[s.parameter].device))
        else:
            parts.append(tensor.reshape(-1)[s.start : s.stop])
    return torch.cat(parts)


def room_for(values: Sequence[Tensor], piece: Piece) -> tuple[Tensor, Callable[[], None]]:
    """Where to receive a piece: in place, where it can be, else a buffer. And what then puts it in its places."""
    view = in_place(values, piece)
    if view is not None:
        return view, _nothing
    first = values[piece[0].parameter]
    buffer = torch.empty(sum(s.numel for s in piece), dtype=first.dtype, device=first.device)

    def unpack() -> None:
        at = 0
        for s in piece:
            value, part = values[s.parameter], buffer[at : at + s.numel]
            if value.is_contiguous():
                value.view(-1)[s.start : s.stop].copy_(part)
            else:
                value.copy_(part.view(value.shape))
            at += s.numel

    return buffer, unpack


def _nothing() -> None:
    pass
