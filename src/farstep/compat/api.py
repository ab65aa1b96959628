"""torch.distributed.rpc.api, with the private names that torch's own tests and some users reach for.

Its shutdown goes torch's way step by step, by the names in this module, so that code which replaces one of the steps
finds its replacement called. Everything else is farstep's own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from farstep.compat.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farstep.compat.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    deserialize,
)
from farstep.compat.unsupported import PROFILER, TORCHSCRIPT, unsupported, unsupported_class
from farstep.compat.utils import _group_membership_management, _update_group_membership
from farstep.errors import NotInitialized, RpcError, RpcTimeout, WorkerLost
from farstep.rpc import gather
from farstep.rpc.agent import Agent
from farstep.rpc.api import get_rpc_timeout, get_worker_info, remote, rpc_async, rpc_sync
from farstep.rpc.api import thread_local as _thread_local_var
from farstep.rpc.api import wait_all_calls as _wait_all
from farstep.rpc.current import current_agent, default_agent, find_agent, set_default_agent
from farstep.rpc.departure import Leaving, why_out_of_time, why_shut_down
from farstep.rpc.group import RREF_PATIENCE_S, Ending, release_references
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.peer import PeerState
from farstep.rpc.rref import RRef

__all__ = [
    "AllGatherStates",
    "RRef",
    "WorkerInfo",
    "_thread_local_var",
    "_wait_all",
    "get_rpc_timeout",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("farstep.rpc")
PyRRef = RRef
_LOOK_S = 0.2
_shutting_down = threading.local()
"""Its `end` says how long the steps of the `shutdown` that this thread is in may take."""
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_RE_EXPORTED = (PythonUDF, _group_membership_management, _update_group_membership)

T = TypeVar("T")
_P = ParamSpec("_P")
_R = TypeVar("_R")
GenericWithOneTypeVar = Generic[T]  # type: ignore[index]

RemoteProfilerManager = unsupported_class("RemoteProfilerManager", PROFILER)
_OPERATOR = "call it with rpc_sync, rpc_async or remote, which take any operator"
_invoke_rpc_builtin = unsupported("_invoke_rpc_builtin", _OPERATOR)
_invoke_remote_builtin = unsupported("_invoke_remote_builtin", _OPERATOR)
_invoke_rpc_torchscript = unsupported("_invoke_rpc_torchscript", TORCHSCRIPT)
_invoke_remote_torchscript = unsupported("_invoke_remote_torchscript", TORCHSCRIPT)


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _is_current_rpc_agent_set() -> bool:
    return find_agent() is not None


def _get_current_rpc_agent() -> Agent:
    return current_agent()


def _set_and_start_rpc_agent(agent: Any) -> None:
    set_default_agent(agent)


def _init_rpc_states(agent: Any) -> None:
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _require_agent() -> Agent:
    if not _is_current_rpc_agent_set():
        raise NotInitialized("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
    return current_agent()


def _require_initialized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function raise `NotInitialized` where there is no agent."""

    @functools.wraps(func)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _require_agent()
        return func(*args, **kwargs)

    return wrapper


class AllGatherStates:
    """One `_all_gather`, on one worker."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


class _Gatherings:
    """The `_all_gather`s of one agent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers: dict[str, int] = {}
        self.states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(AllGatherStates)


def _gatherings() -> _Gatherings:
    agent = current_agent()
    found: _Gatherings = agent.__dict__.setdefault("compat_gatherings", _Gatherings())
    return found


def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str]) -> None:
    gatherings = _gatherings()
    with gatherings.lock:
        states = gatherings.states[sequence_id]
        states.gathered_objects[worker_name] = obj
        if worker_names == states.gathered_objects.keys():
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    gatherings = _gatherings()
    with gatherings.lock:
        states = gatherings.states[sequence_id]
    states.gathered_objects = objects_map
    states.proceed_signal.set()


def _all_gather(obj: Any, worker_names: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """torch's two phases: all send to the worker with the smallest name, which then sends all to all."""
    return _gather(obj, worker_names, timeout, skip_lost=False)


def _gather(obj: Any, worker_names: Any, timeout: float, *, skip_lost: bool) -> dict[str, Any]:
    """With `skip_lost` it goes on without those who are lost, under another leader where need be."""
    agent = _require_agent()
    names = set(worker_names) if worker_names else {p.name for p in agent.links.peers()}
    gatherings = _gatherings()
    with gatherings.lock:
        label = ",".join(sorted(names))
        number = gatherings.numbers.get(label, 0)
        gatherings.numbers[label] = number + 1
    while True:
        leader = min(names - _lost(agent, names) if skip_lost else names)
        try:
            return _gather_at(leader, f"{label}/{number}/{leader}", obj, names, timeout, skip_lost)
        except WorkerLost:
            if not skip_lost or not _lost(agent, {leader}):
                raise


def _gather_at(
    leader: str, sequence_id: str, obj: Any, names: set[str], timeout: float, skip_lost: bool
) -> dict[str, Any]:
    agent, gatherings = current_agent(), _gatherings()
    me = agent.info.name
    no_limit = timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT)
    rpc_timeout = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    if me == leader:
        _gather_to_leader(sequence_id, me, obj, names)
    else:
        rpc_sync(leader, _gather_to_leader, args=(sequence_id, me, obj, names), timeout=rpc_timeout)
    with gatherings.lock:
        states = gatherings.states[sequence_id]
    awaited = names if me == leader or not skip_lost else {leader}
    _wait_for(agent, states, awaited, None if no_limit else timeout, skip_lost and me == leader)
    if me == leader:
        followers = names - {leader} - (_lost(agent, names) if skip_lost else set())
        _send_to_followers(sequence_id, states.gathered_objects, followers, rpc_timeout, skip_lost)
    with gatherings.lock:
        gatherings.states.pop(sequence_id, None)
    return states.gathered_objects


def _lost(agent: Agent, names: set[str]) -> set[str]:
    return {name for name in names if not agent.is_present(agent.peer(name).id)}


def _wait_for(
    agent: Agent, states: AllGatherStates, names: set[str], timeout_s: float | None, skip_lost: bool
) -> None:
    """Unlike torch's, this wait ends when someone who should come is lost."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not states.proceed_signal.wait(
        _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
    ):
        missing = names - states.gathered_objects.keys()
        lost = _lost(agent, missing)
        if lost and skip_lost and lost == missing:
            return
        if lost and not skip_lost:
            errors = [agent.peer(name).lost_error() for name in sorted(lost)]
            reasons = "; ".join(map(str, errors))
            raise WorkerLost(errors[0].worker, f"_all_gather cannot complete: {reasons}")
        if deadline is not None and time.monotonic() >= deadline:
            raise RpcError(
                f"timed out in _all_gather after {timeout_s:.2f} seconds. Missing: {', '.join(sorted(missing))}"
            )


def _send_to_followers(
    sequence_id: str, objects: dict[str, Any], followers: set[str], rpc_timeout: float, skip_lost: bool
) -> None:
    futures = {
        name: rpc_async(name, _broadcast_to_followers, args=(sequence_id, objects), timeout=rpc_timeout)
        for name in followers
    }
    errors = []
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as exc:
            has_died = current_agent().peer(name).state is PeerState.LOST
            if not (skip_lost and has_died and isinstance(exc, WorkerLost)):
                errors.append((name, exc))
    if errors:
        raise RpcError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {rpc_timeout:.2f} seconds. "
            f"The first exception is {errors[0][1]}"
        )


def _barrier(worker_names: Any) -> None:
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker has come here. Unlike torch's, it does not wait for those that are lost."""
    _gather(None, None, timeout, skip_lost=True)


def _delete_all_user_and_unforked_owner_rrefs(timeout: Any = None) -> None:
    end: Ending | None = getattr(_shutting_down, "end", None)
    patience_s = RREF_PATIENCE_S if end is None else end.left(RREF_PATIENCE_S)
    release_references(current_agent(), patience_s if timeout is None else timeout)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """torch.distributed.rpc.shutdown."""
    agent = _require_agent()
    leaks: list[str] = []
    end = Ending(timeout)
    why, how = why_shut_down(), Leaving.SHUT_DOWN
    try:
        if graceful:
            agent.is_shutting_down = True
            _wait_all_workers(end.left(DEFAULT_SHUTDOWN_TIMEOUT))
            _shutting_down.end = end
            _delete_all_user_and_unforked_owner_rrefs()
            leaks = agent.rrefs.leaks()
            gather.join(agent, end.left(0.0), timeout)
            why = None
    except RpcTimeout:
        if why is None:  # else the exception that unwinds is the cause that the others should hear of
            why, how = why_out_of_time(timeout), Leaving.OUT_OF_TIME
        raise
    finally:
        _shutting_down.end = None
        agent.close(end.left_to_close(), why, how)
        if default_agent() is agent:
            set_default_agent(None)
    gather.check_cut_off(agent)
    if leaks and not _ignore_rref_leak:
        raise RpcError(f"Leaking RRef(s) on {agent.info.name!r} at shutdown: {'; '.join(leaks)}")


def _finalize_shutdown() -> None:
    """Leave without waiting for anybody."""
    shutdown(graceful=False)


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Let go of all references, and raise if somebody still holds one of this worker's and that is no matter to ignore."""
    agent = _require_agent()
    release_references(agent)
    leaks = agent.rrefs.leaks()
    if leaks and not ignore_rref_leak:
        raise RpcError(f"Leaking RRef(s) on {agent.info.name!r}: {'; '.join(leaks)}")


def _reset_current_rpc_agent() -> None:
    """Forget the agent, which goes on by itself: shut it down before."""
    set_default_agent(None)


def _cleanup_python_rpc_handler() -> None:
    """torch lets go of functions here that farstep's agents do not keep: closing the agent is enough."""


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return _require_agent().get_worker_info(to)
    raise ValueError(f"a worker is a name, a rank or a WorkerInfo, not {to!r}")


def _rref_typeof_on_owner(rref: Any, blocking: bool = True) -> Any:
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(rref: Any, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    return rref._get_type(timeout=timeout, blocking=blocking)


def _invoke_rpc(
    to: Any,
    func: Any,
    rpc_type: RPCExecMode,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function; return a future whatever the mode, as torch's does."""
    return rpc_async(to, func, args=args, kwargs=kwargs, timeout=rpc_timeout)


def _invoke_rpc_python_udf(
    dst: Any, pickled_python_udf: bytes, tensors: list[torch.Tensor], rpc_timeout: float, *_: Any
) -> Any:
    """Call what `internal.serialize(PythonUDF(…))` has packed; return a future."""
    udf = deserialize(pickled_python_udf, tensors)
    return rpc_async(dst, udf.func, args=udf.args, kwargs=udf.kwargs, timeout=rpc_timeout)


def _invoke_remote_python_udf(
    dst: Any, pickled_python_udf: bytes, tensors: list[torch.Tensor], rpc_timeout: float, *_: Any
) -> RRef[Any]:
    """The same; return a reference to the result."""
    udf = deserialize(pickled_python_udf, tensors)
    return remote(dst, udf.func, args=udf.args, kwargs=udf.kwargs, timeout=rpc_timeout)


def _get_should_profile() -> bool:
    """No call is profiled by torch's legacy profiler."""
    return False


def _enable_rpc_profiler(
    should_profile: bool, qualified_name: str | None, func: Any, rpc_type: RPCExecMode, dst_worker_info: Any
) -> contextlib.AbstractContextManager[Any]:
    """Record what is done inside under the name that torch gives to a call, on this worker."""
    if not should_profile:
        return contextlib.nullcontext()
    name = qualified_name or func.__qualname__
    key = _build_rpc_profiling_key(rpc_type, name, get_worker_info().name, dst_worker_info.name)
    return torch.profiler.record_function(key)


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """Make a function that calls RRef's method of that name, with a docstring."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(RRef, method_name)(self, *args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__ or "")


def __getattr__(name: str) -> Any:
    """torch's variables for `_all_gather`: those of the current agent, of which a process may have many."""
    if name == "_ALL_WORKER_NAMES":
        agent = find_agent()
        return set() if agent is None else {info.name for info in agent.get_worker_infos()}
    field = _GATHERINGS.get(name)
    if field is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_gatherings() if _is_current_rpc_agent_set() else _Gatherings(), field)


_GATHERINGS = {
    "_all_gather_dict_lock": "lock",
    "_all_gather_sequence_id": "numbers",
    "_all_gather_sequence_id_to_states": "states",
}
