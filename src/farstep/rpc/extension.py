"""What a layer above may add to messages, without this one knowing what it is.

A message has one field, `extra`, that belongs to the layer above: gradients across workers, which must know what every
message carried. That layer registers itself with `register`; an agent makes its extension when it is first needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.message import Message
    from farstep.rpc.payload import Packed
    from farstep.rpc.peer import Peer

__all__ = ["Extension", "Extra", "load", "make", "register"]

_HOME = "farstep.autograd"
"""Imported when a message with an extra arrives and nobody has registered yet: the sender had it, so this worker needs it."""

_factory: Callable[[Agent], Extension] | None = None


Extra = tuple[tuple[int, ...], Any]
"""Rides on a message: the numbers of the tensors that arrive without `requires_grad`, for the extension to see to, and
plain values of its own."""


class Extension(Protocol):
    """One agent's part of the layer above. Each method says which thread calls it."""

    def is_head(self, head: Any) -> bool:
        """The reader: whether a message of the extension's own may say this. Before anything is done with it."""

    def is_extra(self, extra: Any) -> bool:
        """The reader: the same, for the plain values in an `Extra`."""

    def leaving(self, peer: Peer, packed: Packed) -> Extra | None:
        """The thread that calls: a call is about to be sent."""

    def answering(self, message: Message, packed: Packed) -> Extra | None:
        """The thread that answers: so is the result of `message`, which came with an extra."""

    def left(self, peer: Peer, extra: Extra) -> None:
        """The same thread: a call with this extra has been sent."""

    def left_behind(self, extra: Extra) -> None:
        """The same thread: it was not sent after all."""

    def check(self, message: Message) -> None:
        """The reader: a message with an extra. ProtocolError where it is none that this peer can have sent."""

    def arrived(self, message: Message) -> None:
        """The reader, in the order of arrival: a call with an extra. Must not block."""

    def opened(self, message: Message, tensors: list[torch.Tensor]) -> None:
        """The thread that opens a message: these are its bare tensors, and those that could not be sent plainly."""

    def around(self, message: Message) -> AbstractContextManager[None]:
        """The thread that runs a call: entered around the function."""

    def bind(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The thread that adds a callback to a call's future: what is to be run instead, by any thread."""

    def control(self, message: Message) -> Callable[[], None] | None:
        """The reader, in the order of arrival: a message of the extension's own. What it returns is run as a job."""

    def serves(self, message: Message) -> bool:
        """The reader: whether that is work for the peer, which will probably send more of it."""

    def worker_gone(self, worker: int) -> None:
        """Whoever noticed: nothing more will come from that worker."""

    def close(self) -> None:
        """The agent has shut down."""


def register(factory: Callable[[Agent], Extension]) -> None:
    """Called once, by the layer above, when it is imported."""
    global _factory
    _factory = factory


def load() -> None:
    """See to it that there is a layer above."""
    if _factory is None:
        importlib.import_module(_HOME)


def make(agent: Agent) -> Extension:
    load()
    if _factory is None:
        raise ImportError(f"{_HOME} has not registered itself")
    return _factory(agent)
