"""Which agent `rpc_sync` and its like mean, and for whom a function runs.

Inside a function that runs for a peer it is the agent that received the call; elsewhere it is the one that
`init_rpc` made. That is all the state the module-level API has.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from farstep.errors import NotInitialized

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["current_agent", "default_agent", "find_agent", "running", "serving", "set_default_agent"]

serving: ContextVar[Agent | None] = ContextVar("farstep_agent", default=None)


class _Running(threading.local):
    caller: int | None = None
    """The rank of the worker that called the function which this thread runs. Set before each; only such functions may look at it."""


running = _Running()
_default: Agent | None = None


def find_agent() -> Agent | None:
    return serving.get() or _default


def current_agent() -> Agent:
    agent = find_agent()
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized. Call init_rpc first. (Current RPC agent is not set! "
            "Did you initialize the RPC framework by calling `rpc.init_rpc`?)"
        )
    return agent


def default_agent() -> Agent | None:
    return _default


def set_default_agent(agent: Agent | None) -> None:
    global _default
    _default = agent
