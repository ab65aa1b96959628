"""One worker's part of one backward pass.

Sources fire: the roots on the worker that calls `backward`, a send when the peer's gradient for it arrives. Firing puts gradient at the
places where the source enters the graph, and runs what may run now. Only one thread does so at a time; what fires
meanwhile is taken along by it.

*FAST* expects every send of the context to fire. *SMART* begins the same way, for that is right whenever all outputs are used, and costs
nothing. If everything has come to rest and some worker still holds gradient that waits for sends which have not fired, a
wave without tensors settles which of them will: see tracker.py. From then on only those are expected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, Node

from farstep.autograd import engine, leaves
from farstep.autograd.context import Context, PassId
from farstep.autograd.gradients import add
from farstep.autograd.segments import ACCUMULATE, Segments, reached_recvs
from farstep.errors import AutogradError

__all__ = ["ROOTS", "Fire", "Key", "Pass", "Settings", "Step"]

ROOTS = "roots"
"""The key of the roots, which are source 0. The sends are numbered from 1 on."""


@dataclass(frozen=True)
class Settings:
    """What `backward` was asked for; the same on every worker."""

    id: PassId
    context_id: int
    retain_graph: bool = False
    create_graph: bool = False
    mode: str = "smart"
    oldest: int = 0
    """Passes of this root's in this context with lower numbers are over."""

    @property
    def root(self) -> int:
        """The worker that runs `backward`."""
        return self.id[0]


Key = Hashable
"""What a worker has been told to do for a pass: an int is a send that fires, anything else is a command."""


@dataclass(frozen=True)
class Fire:
    """A source fires: the roots or a send (an int), with the gradient of each of its edges."""

    key: Key
    edges: Sequence[GradientEdge | None] = ()
    gradients: Sequence[torch.Tensor | None] = ()


@dataclass
class Step:
    """What a thread has done for a pass."""

    done: list[Key] = field(default_factory=list)
    recvs: list[tuple[int, list[torch.Tensor | None]]] = field(default_factory=list)
    """Gradients to send back: the number of the message that brought the tensors, and their gradients."""
    is_blocked: bool = False
    """Gradient waits here for sends that have not fired."""
    number: int = 0
    """Steps of one worker may be told of in another order than they were made; the highest number is the latest."""


class Pass:
    """Any thread."""

    def __init__(self, context: Context, settings: Settings) -> None:
        self.settings = settings
        self._context = context
        self._lock = threading.Lock()
        self._queue: deque[Fire] = deque()
        self._is_running = False
        self._is_ended = False
        self._steps = 0
        self._parts: engine.Parts = {}
        self._reduced: list[tuple[Any, torch.Tensor]] = []
        self._segments: Segments | None = None
        self._numbers: dict[int, int] = {}
        self._fired = 0
        self._is_settled = False
        self._marked: set[int] = set()
        self._walked: set[Node] = set()
        self._told: set[int] = set()
        self.peers: set[int] = set()
        """Those that this worker has sent something for this pass."""

    @property
    def is_busy(self) -> bool:
        return self._is_running or self._has_gradient

    @property
    def _has_gradient(self) -> bool:
        return bool(self._parts or self._reduced)

    def end(self) -> None:
        """It failed, or is over: nothing more runs."""
        with self._lock:
            self._is_ended = True
            self._queue.clear()
            if not self._is_running:
                self._drop()

    def _drop(self) -> None:
        self._parts.clear()
        self._reduced.clear()
        self._segments = None
        self._walked.clear()

    def fire(self, fires: Iterable[Fire]) -> Iterator[Step]:
        """Run what these make possible, and what fires meanwhile; nothing if another thread is at it already.

        Each step is given out as soon as it has been made, to be told of before the next one runs.
        """
        with self._lock:
            self._queue.extend(fires)
            if self._is_running or self._is_ended:
                return
            self._is_running = True
        try:
            while (taken := self._take()) is not None:
                yield self._run(taken)
        except BaseException:
            with self._lock:
                self._is_running = False
            raise

    def _take(self) -> list[Fire] | None:
        with self._lock:
            if self._is_ended:
                self._queue.clear()
                self._drop()
            if not self._queue:
                self._is_running = False
                return None
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def settle(self) -> None:
        """The wave is over: from the next firing on only the sends that it marked are expected to fire."""
        self._is_settled = True

    @property
    def is_settled(self) -> bool:
        return self._is_settled

    def _run(self, fires: list[Fire]) -> Step:
        step = Step()
        if self._segments is None or any(
            isinstance(f.key, int) and f.key not in self._numbers for f in fires
        ):
            self._survey(fires)
        for fire in fires:
            self._put(fire)
            step.done.append(fire.key)
        if self._segments is not None:
            nodes = self._segments.take(self._fired, self._expected())
            if nodes:
                self._run_nodes(nodes, step)
            if self._reduced and not self._is_ended:
                self._finish_reduced()
        with self._lock:
            self._steps += 1
            step.number = self._steps
            step.is_blocked = self._has_gradient
        return step

    def _survey(self, fires: list[Fire]) -> None:
        """Number the sources and find what each of them reaches."""
        if self._segments is not None:
            raise AutogradError(
                f"context {self._context.id}: tensors were sent while backward was running. End the forward pass first"
            )
        sends = self._context._send_functions()
        self._numbers = {id: number for number, id in enumerate(sends, start=1)}
        roots = next((f.edges for f in fires if f.key == ROOTS), ())
        self._segments = Segments([roots, *(send.edges for send in sends.values())])

    def _expected(self) -> int:
        if not self._is_settled:
            return -1
        expected = self._fired | 1
        for id in self._marked:
            expected |= 1 << self._numbers.get(id, 0)
        return expected

    def _put(self, fire: Fire) -> None:
        if fire.key == ROOTS:
            self._fired |= 1
        elif isinstance(fire.key, int):
            self._fired |= 1 << self._numbers[fire.key]
        at_leaves = []
        for edge, gradient in zip(fire.edges, fire.gradients, strict=True):
            if gradient is None or edge is None:
                continue
            if engine.takes_parts(edge.node, self._context.reduced):
                at_leaves.append((cast(Any, edge.node).variable, gradient))
            else:
                key = (edge.node, edge.output_nr)
                self._parts[key] = add(self._parts.get(key), gradient)
        if at_leaves:
            self._accumulate(at_leaves)

    def _accumulate(self, found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients of leaves go to the context, unless the pass has ended: then they would be counted in the next one's."""
        with self._lock:
            if not self._is_ended:
                self._context.gradients.accumulate(found)

    def _run_nodes(self, nodes: list[Node], step: Step) -> None:
        rules = engine.Rules(self.settings.retain_graph, self.settings.create_graph, self._context.reduced)
        is_rest = self._segments is not None and not self._segments.waiting
        outcome = engine.run(nodes, self._parts, rules, may_have_border=not is_rest)
        if self._is_ended:
            return
        self._reduced += outcome.reduced
        self._accumulate(outcome.leaves)
        for node, gradients in outcome.recvs:
            context_id, recv_id = node.where
            if context_id != self._context.id:
                raise AutogradError(
                    f"backward of context {self._context.id} has reached a tensor that was received in context "
                    f"{context_id}. Detach it, or run both forward passes in one context"
                )
            self._told.add(recv_id)
            step.recvs.append((recv_id, gradients))

    def _finish_reduced(self) -> None:
        """The leaves of DistributedDataParallel go together, in an order that all ranks share, when the last has its gradient.

        A reducer gives nothing back before it has everything.
        """
        expected = self._expected()
        reduced = self._context.reduced
        for reach, nodes in self._segments.waiting.items() if self._segments is not None else ():
            if reach & expected and any(
                type(n) is ACCUMULATE and cast(Any, n).variable in reduced for n in nodes
            ):
                return
        held = sorted(self._reduced, key=lambda item: reduced[item[0].variable])
        self._reduced = []
        self._accumulate(leaves.accumulate_for_real(held))

    # -- the wave

    def mark(self, sends: Sequence[int] | None) -> list[int]:
        """These sends will fire; None: gradient waits here. Returns the recvs below that have not sent theirs yet."""
        starts: list[Node] = [node for node, _ in self._parts] if sends is None else []
        for id in sends or ():
            self._marked.add(id)
            send = self._context.sends.get(id)
            if send is not None:
                starts.extend(edge.node for edge in send.edges if edge is not None)
        return [id for _, id in reached_recvs(starts, self._walked) if id not in self._told]
