"""A member that holds the secret, and what it sends over its own connections."""

from __future__ import annotations

import contextlib
from typing import Any

from farstep.rpc import Agent

__all__ = ["PATIENCE_S", "call", "increment", "inject"]

PATIENCE_S = 60.0


def increment(x: int) -> int:
    return x + 1


def call(agent: Agent, to: str, x: int = 1) -> Any:
    return agent.call_sync(to, increment, (x,), {}, PATIENCE_S)


def inject(sender: Agent, to: str, data: bytes) -> None:
    """Write these bytes on the connection by which a worker sends to another."""
    connection = sender.peer(to).sender
    assert connection is not None
    with contextlib.suppress(OSError):
        connection.sock.sendall(data)
