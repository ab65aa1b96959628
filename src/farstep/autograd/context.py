"""One context: what crossed this worker's border in one forward pass, and the gradients of its leaves.

A context has the same id on every worker that it touches. Each has its own part of it: the *sends* (tensors that left, each with the
place in the local graph where its gradient will enter), the *recvs* (nodes at which tensors came in, whose gradient must
go back to the peer), the gradients so far, and the workers that it knows to have a part too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farstep.autograd.gradients import Gradients
from farstep.errors import AutogradError, UnknownContext

if TYPE_CHECKING:
    from farstep.autograd.passes import Pass

__all__ = ["COUNTER_BITS", "Context", "PassId", "Recv", "Send", "edge_of", "receive"]

COUNTER_BITS = 48
"""An id is a worker's rank and a number that counts up on it, so that no two workers make the same one."""

PassId = tuple[int, int]
"""One backward pass: the worker that runs `backward`, and a number of its own."""


@dataclass(frozen=True)
class Send:
    """A message that left with tensors which require a gradient."""

    id: int
    worker: int
    edges: tuple[GradientEdge | None, ...]
    """Where their gradients enter the local graph; None for one that wants none after all."""
    devices: tuple[torch.device, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """Where gradients enter the local graph; the name that autograd's own nodes have for it."""
        return tuple((edge.node, edge.output_nr) for edge in self.edges if edge is not None)

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    def fit(self, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What a peer gives as the gradients of these tensors, on their devices and in their dtypes."""
        if len(gradients) != len(self.edges):
            raise AutogradError(
                f"{len(gradients)} gradients for message {self.id}, which had {len(self.edges)} tensors"
            )
        fitting = list(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                if not gradient.is_nested and gradient.shape != self.shapes[i]:
                    raise AutogradError(
                        f"a gradient of shape {tuple(gradient.shape)} for a tensor of shape {self.shapes[i]} in message {self.id}"
                    )
                fitting[i] = gradient.to(self.devices[i], self.dtypes[i])
        return fitting


@dataclass(frozen=True)
class Recv:
    """A message that arrived with such tensors: they are the outputs of `node`."""

    id: int
    worker: int
    node: Any
    outputs: int
    nbytes: int


@dataclass
class Context:
    """This worker's part of a context. Its lock is held for moments only, never while gradients are computed."""

    id: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    sends: dict[int, Send] = field(default_factory=dict)
    recvs: dict[int, Recv] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)
    """Those that this worker has called in it, and will tell when it is released."""
    callers: set[int] = field(default_factory=set)
    """Those that have called this worker in it, and will tell."""
    handed_over: set[int] = field(default_factory=set)
    """Those that have dropped their part of it already, at this worker's request: see `Link.hand_over`."""
    gradients: Gradients = field(default_factory=Gradients)
    passes: dict[PassId, Pass] = field(default_factory=dict)
    failed: set[PassId] = field(default_factory=set)
    """Passes that were ended before they were over: what still arrives for them is late."""
    reduced: dict[torch.Tensor, int] = field(default_factory=dict)
    """Parameters of modules in DistributedDataParallel that ran inside this context, numbered in their order."""

    @property
    def opener(self) -> int:
        return self.id >> COUNTER_BITS

    def add_send(self, id: int, worker: int, tensors: Sequence[torch.Tensor]) -> Send:
        send = Send(
            id,
            worker,
            tuple([edge_of(t) for t in tensors]),
            tuple([t.device for t in tensors]),
            tuple([t.dtype for t in tensors]),
            tuple([tuple(t.shape) for t in tensors]),
            _nbytes(tensors),
        )
        with self.lock:
            self.sends[id] = send
        return send

    def add_recv(self, id: int, worker: int, tensors: Sequence[torch.Tensor]) -> None:
        node = receive(self.id, id, tensors)
        nbytes = _nbytes(tensors)
        with self.lock:
            self.recvs[id] = Recv(id, worker, node, len(tensors), nbytes)

    def recv(self, id: int) -> Recv:
        found = self.recvs.get(id)
        if found is None:
            raise UnknownContext(self.id)  # it has been released meanwhile
        return found

    # -- the names of torch's own tests

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Send]:
        with self.lock:
            return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        with self.lock:
            return {id: recv.node for id, recv in self.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.workers)


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum([(t if t.layout is torch.strided else _values(t)).nbytes for t in tensors])


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sparse tensor."""
    return tensor._values() if tensor.layout in (torch.sparse_coo, torch.jagged) else tensor.detach().values()


class _Touch(torch.autograd.Function):
    """Takes any tensor and does nothing with it, so that the node before it shows, whatever the tensor's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor enters the local graph.

    None for a view of a leaf that was made without gradients: it says that it requires one, and has no node.
    """
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    if tensor.layout is torch.strided:
        try:
            return get_gradient_edge(tensor)
        except AssertionError:
            return None
    with torch.enable_grad():
        touched = _Touch.apply(tensor)  # type: ignore[no-untyped-call]
    return GradientEdge(*touched.grad_fn.next_functions[0])


def _forward(ctx: Any, anchor: torch.Tensor, where: tuple[int, int], *tensors: torch.Tensor) -> Any:
    ctx.mark_dirty(*tensors)  # they become the outputs themselves, so that they may be changed in place
    ctx.where = where
    ctx.outputs = len(tensors)
    return tensors


def _backward(ctx: Any, *gradients: torch.Tensor) -> Any:
    raise RuntimeError(
        f"a gradient has reached a tensor that was received from another worker in context {ctx.where[0]}, in an ordinary "
        f"backward(). Use farstep.autograd.backward(context_id, roots), which takes it back to that worker"
    )


_Receive = type(
    "torch::distributed::autograd::RecvRpc",  # its node has torch's name, with "Backward" behind it
    (torch.autograd.Function,),
    {"forward": staticmethod(_forward), "backward": staticmethod(_backward)},
)
_anchor = torch.zeros((), requires_grad=True)


def receive(context_id: int, recv_id: int, tensors: Sequence[torch.Tensor]) -> Any:
    """Make fresh tensors the outputs of one node, and return the node. `node.where` says what it is."""
    if torch.is_grad_enabled():
        _Receive.apply(_anchor, (context_id, recv_id), *tensors)  # type: ignore[attr-defined]
    else:
        with torch.enable_grad():
            _Receive.apply(_anchor, (context_id, recv_id), *tensors)  # type: ignore[attr-defined]
    return tensors[0].grad_fn
