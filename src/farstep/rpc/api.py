"""torch.distributed.rpc's functions, over the current agent."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from farstep.errors import RpcError, UnknownWorker
from farstep.rpc import gather
from farstep.rpc.agent import Agent, Target
from farstep.rpc.current import current_agent, default_agent, find_agent, set_default_agent
from farstep.rpc.group import join_group, leave_group
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.options import UNSET_RPC_TIMEOUT, RpcOptions
from farstep.rpc.rendezvous import create_store
from farstep.rpc.rref import RRef
from farstep.rpc.stores import PrefixStore, Store

__all__ = [
    "all_gather",
    "barrier",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_initialized",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "wait_all_calls",
]


_init_lock = threading.Lock()
_inits = 0


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker of a group, ready to call and to be called.

    Args:
        name: unique in the group; letters, digits, `_`, `-` and `:`, shorter than 128 characters.
        backend: accepted for torch's sake; there is one.
        rank: 0 to `world_size` - 1. Default: the environment's RANK.
        world_size: how many workers the group has. None: workers may join and leave at any time.
        rpc_backend_options: an `RpcOptions`, or torch's `TensorPipeRpcBackendOptions`.
    """
    options = RpcOptions() if rpc_backend_options is None else RpcOptions.from_torch(rpc_backend_options)
    if default_agent() is not None:
        raise RpcError("RPC is already initialized in this process: shutdown() first")
    rank = _resolve_rank(rank, world_size)
    WorkerInfo(name, rank)  # a name that cannot be is refused before anyone is waited for
    store = create_store(options.init_method, rank, world_size, options.init_deadline_s)
    start(next_store(store, world_size), name, rank, world_size, options)


def _resolve_rank(rank: int, world_size: int | None) -> int:
    if rank < 0 and "RANK" in os.environ:
        rank = int(os.environ["RANK"])
    if rank < 0:
        raise ValueError("init_rpc needs a rank: pass rank=, or set the environment variable RANK")
    if world_size is not None and rank >= world_size:
        raise ValueError(f"rank must be between 0 and {world_size - 1}, not {rank}")
    return rank


def next_store(store: Store, world_size: int | None) -> Store:
    """Keep the keys of each init_rpc of a process apart, and apart from a process group's.

    A group that workers join and leave has one set of keys: a worker may come again after others have come once.
    """
    global _inits
    if world_size is None:
        return PrefixStore("farstep_rpc_open", store)
    with _init_lock:
        number, _inits = _inits, _inits + 1
    return PrefixStore(f"farstep_rpc_{number}", store)


def start(store: Store, name: str, rank: int, world_size: int | None, options: RpcOptions) -> Agent:
    """Join the group in a store and make the agent this process's own."""
    with _init_lock:
        if default_agent() is not None:
            raise RpcError("RPC is already initialized in this process: shutdown() first")
    agent = join_group(store, name, rank, world_size, options)
    set_default_agent(agent)
    return agent


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Leave the group.

    Graceful: wait until every worker has come here and no call is under way. `timeout` bounds that in seconds; with 0
    it lasts as long as all are alive. A worker that is lost is not waited for. Whatever happens this worker has
    shut down when the call returns or raises; `ShutdownTimeout` says who was missing.
    """
    agent = current_agent()
    try:
        leave_group(agent, graceful=graceful, timeout_s=timeout)
    finally:
        if default_agent() is agent:
            set_default_agent(None)


def _args(args: Sequence[Any] | None) -> tuple[Any, ...]:
    if args is None:
        return ()
    if isinstance(args, torch.Tensor | str | bytes):
        raise TypeError(
            f"args is a tuple of arguments, not a {type(args).__name__}: for one argument, args=(x,)"
        )
    return tuple(args)


def rpc_sync(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run `func(*args, **kwargs)` on worker `to` and return its result.

    `to` is a name, a rank or a `WorkerInfo`. `timeout` is in seconds; 0 means none, and unset the default.
    """
    agent = current_agent()
    return agent.call_sync(_target(to), _callable(func), _args(args), kwargs or {}, timeout)


def rpc_async(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Like `rpc_sync`, and returns a `torch.futures.Future` at once. Tensors are taken as they are now."""
    agent = current_agent()
    future = agent.call_async(_target(to), _callable(func), _args(args), kwargs or {}, timeout)
    collected = getattr(thread_local, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


def remote(
    to: Target,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run `func(*args, **kwargs)` on worker `to`, leave the result there, and return an `RRef` to it at once."""
    agent = current_agent()
    return agent.remote(_target(to), _callable(func), _args(args), kwargs or {}, timeout)


def _target(to: Any) -> Target:
    if type(to) is not str and (isinstance(to, bool) or not isinstance(to, str | int | WorkerInfo)):
        raise UnknownWorker(f"a worker is named by its name, rank or WorkerInfo, not by {to!r}")
    return to


def _callable(func: Any) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError(f"function should be callable, not {type(func).__name__}")
    return func  # type: ignore[no-any-return]


def get_worker_info(worker_name: Target | None = None) -> WorkerInfo:
    """The `WorkerInfo` of a worker, or of this one."""
    return current_agent().get_worker_info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the group that are there now, by rank."""
    return current_agent().get_worker_infos()


def is_initialized() -> bool:
    return find_agent() is not None


def get_rpc_timeout() -> float:
    """The default timeout of a call in seconds; 0 means none."""
    return current_agent().rpc_timeout


def set_rpc_timeout(timeout: float) -> None:
    """Change the default for calls from now on."""
    if timeout < 0:
        raise ValueError(f"a timeout is 0 (none) or positive, not {timeout}")
    current_agent().rpc_timeout = timeout


def on_worker_lost(callback: Callable[[WorkerInfo, str], None]) -> None:
    """Have `callback(info, reason)` called, on a thread of the agent's, when a worker is lost."""
    current_agent().links.on_lost(callback)


def all_gather(
    obj: Any, worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Everyone's `obj` by worker name, once all of `worker_names` (default: all workers) have called this."""
    agent = current_agent()
    return gather.all_gather(agent, obj, worker_names, agent.effective_timeout(timeout))


def barrier(worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Wait until all of `worker_names` (default: all workers) have called this."""
    all_gather(None, worker_names, timeout)


thread_local = threading.local()


@contextlib.contextmanager
def wait_all_calls() -> Iterator[None]:
    """On leaving, wait for every `rpc_async` that this thread began inside."""
    thread_local.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(thread_local.future_list)
        finally:
            del thread_local.future_list
