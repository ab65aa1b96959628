"""How an agent comes into a group and leaves it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from farstep.errors import RpcError, RpcTimeout, ShutdownTimeout
from farstep.rpc import current, gather
from farstep.rpc.agent import Agent
from farstep.rpc.departure import Leaving, why_out_of_time, why_process_ends, why_shut_down
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.options import RpcOptions
from farstep.rpc.peer import PeerState
from farstep.rpc.rounds import tell_failure
from farstep.rpc.stores import HashStore, PrefixStore, Store

__all__ = ["join_group", "leave_group", "local_agents"]

log = logging.getLogger("farstep.rpc")
RREF_PATIENCE_S = 10.0
CLOSE_S = 0.5
"""So much of a shutdown's timeout is kept for closing, and a tenth of it at most."""
EXIT_S = 1.0
_live: weakref.WeakSet[Agent] = weakref.WeakSet()


def join_group(
    store: Store, name: str, rank: int, world_size: int | None, options: RpcOptions | None = None
) -> Agent:
    """Start an agent and meet the others in the store. With `world_size` None it joins a group that others may join too."""
    options = options or RpcOptions()
    if world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1}, not {rank}")
    try:
        agent = Agent(WorkerInfo(name, rank), options)
    except BaseException as exc:
        if world_size is not None:  # the others wait for it: tell them why it does not come
            tell_failure(store, name, rank, exc)
        raise
    if world_size is None:
        agent.rrefs.count_from_anywhere()
    _end_with_process()
    _live.add(agent)  # before it is called, which may be before this worker has heard that all have joined
    try:
        agent.links.join(store, world_size, options.init_deadline_s)
    except BaseException:
        agent.close(why=why_shut_down())
        _live.discard(agent)
        raise
    if options.switch_interval_s is not None:
        sys.setswitchinterval(options.switch_interval_s)
    return agent


def leave_group(agent: Agent, *, graceful: bool = True, timeout_s: float = 0.0) -> None:
    """Shut an agent down. Graceful: when all workers are here and nothing is under way. 0 waits while all are alive.

    Whatever happens the agent is closed afterwards; ShutdownTimeout says who was missing, or what still ran.
    """
    end = Ending(timeout_s)
    why, how = why_shut_down(), Leaving.SHUT_DOWN
    try:
        if graceful:
            agent.is_shutting_down = True
            gather.join(agent, end.left(0.0), timeout_s)
            release_references(agent, end.left(RREF_PATIENCE_S))
            gather.join(agent, end.left(0.0), timeout_s)
            why = None
            lost = [p.name for p in agent.links.peers() if p.state is PeerState.LOST]
            if lost:
                log.warning("worker %r shuts down without %s, lost before", agent.info.name, ", ".join(lost))
    except RpcTimeout as exc:
        if why is None:  # else the exception that unwinds is the cause that the others should hear of
            why, how = why_out_of_time(timeout_s), Leaving.OUT_OF_TIME
        if isinstance(exc, ShutdownTimeout):
            raise
        raise ShutdownTimeout(str(exc)) from exc
    finally:
        agent.close(end.left_to_close(), why, how)
        _live.discard(agent)
    gather.check_cut_off(agent)


class Ending:
    """How long the steps of a shutdown may take, so that all of it ends within its timeout."""

    def __init__(self, timeout_s: float) -> None:
        """0 sets no limit to the waits for others."""
        self._end = time.monotonic() + timeout_s if timeout_s else None
        self._waits_end = None if self._end is None else self._end - min(CLOSE_S, timeout_s / 10)

    def left(self, without_limit: float) -> float:
        """For a step that waits for others; `without_limit` where the shutdown has no timeout."""
        return without_limit if self._waits_end is None else max(0.001, self._waits_end - time.monotonic())

    def left_to_close(self) -> float:
        """For closing, which comes last."""
        return CLOSE_S * 10 if self._end is None else max(0.0, self._end - time.monotonic())


def release_references(agent: Agent, patience_s: float = RREF_PATIENCE_S) -> None:
    """Let go of every reference this worker uses, and wait until the others have done so with its values."""
    agent.rrefs.delete_all_users()
    if not agent.rrefs.wait_until_unowned(patience_s):
        log.warning(
            "worker %r: others still hold references: %s", agent.info.name, "; ".join(agent.rrefs.leaks())
        )


@contextlib.contextmanager
def local_agents(
    count: int, options: RpcOptions | None = None, *, names: Sequence[str] | None = None
) -> Iterator[list[Agent]]:
    """Many workers in this one process, for tests and experiments: real sockets, real frames, one interpreter."""
    options = options or RpcOptions()
    store = HashStore()
    agents: list[Agent | None] = [None] * count
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            name = names[rank] if names else f"worker{rank}"
            agents[rank] = join_group(PrefixStore("rpc", store), name, rank, count, options)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if errors:
            raise errors[0]
        yield [a for a in agents if a is not None]
    finally:
        for agent in agents:
            if agent is not None:
                agent.close()


def _end_with_process() -> None:
    """See that the agents of this process tell their peers when it ends, however it was started.

    A child process of multiprocessing runs its finalizers while the exception that ends it unwinds, and may run nothing after
    them; other processes run what is registered with atexit.
    """
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        multiprocessing.util.Finalize(None, _close_all_at_exit, exitpriority=0)


_registered = -1


def _close_all_at_exit() -> None:
    why = why_process_ends()
    for agent in list(_live):
        with contextlib.suppress(RpcError):
            agent.end_with_process(why, EXIT_S)


def _pin_shared_memory() -> None:
    for agent in list(_live):
        for peer in agent.links.peers():
            peer.borrower.pin()


def _forget_in_child() -> None:
    """A forked child must not hold its parent's sockets open: the parent's death would go unnoticed."""
    current.set_default_agent(None)
    current.serving.set(None)
    for agent in list(_live):
        agent.closed = True
        agent.reactor.is_forked = True
        agent.links.after_fork()
    _live.clear()


atexit.register(_close_all_at_exit)
os.register_at_fork(before=_pin_shared_memory, after_in_child=_forget_in_child)
