"""A remote reference: a handle to a value that lives on its owner.

What a user can do with one is here; when the owner may forget the value is `rref_table.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from farstep.errors import NotInitialized, RpcError, RpcTimeout, RRefError
from farstep.rpc import extension
from farstep.rpc.calls import fresh
from farstep.rpc.current import current_agent, find_agent
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.options import UNSET_RPC_TIMEOUT
from farstep.rpc.payload import Packer, Reduction, ref_slot, register_reducer

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["RRef", "RRefProxy"]

T = TypeVar("T")
GlobalId = tuple[int, int]
"""(the worker that made it, a number of that worker's)."""

context_backward: Callable[[int, torch.Tensor, bool], None] | None = None
"""Set by farstep.autograd: run the backward of a context from a root on this worker."""


def id_str(id: GlobalId) -> str:
    return f"GloballyUniqueId(created_on={id[0]}, local_id={id[1]})"


@dataclass
class Fork:
    """One user's reference, as the owner has it written down."""

    holder: int
    parent: int
    """The worker that gave it to the holder."""
    confirmed: bool
    """Whether the holder is known to have got it."""


class Confirmation:
    """The owner's word on a reference that a third worker sent: awaited, or given."""

    __slots__ = ("_given", "error")

    def __init__(self) -> None:
        self._given = threading.Event()
        self.error: BaseException | None = None

    def give(self, error: BaseException | None) -> None:
        self.error = error
        self._given.set()

    def wait(self, deadline: float | None) -> bool:
        return self._given.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class Value:
    """What an owner keeps: a value, an error, or neither yet."""

    def __init__(self, id: GlobalId) -> None:
        self.id = id
        self.forks: dict[GlobalId, Fork] = {}
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Callable[[], None]] = []

    # -- who holds it: under the lock of the table

    def add_fork(self, id: GlobalId, fork: Fork) -> None:
        self.forks[id] = fork
        self._holders[fork.holder] = self._holders.get(fork.holder, 0) + 1

    def drop_fork(self, id: GlobalId) -> None:
        holder = self.forks.pop(id).holder
        self._holders[holder] -= 1
        if not self._holders[holder]:
            del self._holders[holder]

    def is_held_by(self, worker: int) -> bool:
        return worker in self._holders

    # -- the value itself

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._ready.is_set():
                return
            self._value, self._error = value, error
            self._ready.set()
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    @property
    def is_set(self) -> bool:
        return self._ready.is_set()

    def when_set(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._ready.is_set():
                self._waiting.append(callback)
                return
        callback()

    def get(self, timeout_s: float) -> Any:
        if not self._ready.wait(timeout_s if timeout_s > 0 else None):
            raise RpcTimeout(
                f"RPC ran for more than set timeout ({timeout_s * 1000:g} ms): the value of RRef {id_str(self.id)} "
                f"is still being made on this worker"
            )
        if self._error is not None:
            raise fresh(self._error)  # See [Note: fresh exceptions]
        return self._value


class RRef(Generic[T]):
    """A reference to a value on some worker. `RRef(value)` makes this worker its owner."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = find_agent()
        if agent is None:
            raise NotInitialized(
                "Current RPC agent is not set! Did you initialize the RPC framework by calling `rpc.init_rpc`?"
            )
        kept = Value(agent.rrefs.new_id())
        kept.set(value)
        self._become_owner(agent, kept)

    def _become_owner(self, agent: Agent, kept: Value) -> RRef[T]:
        self._agent = agent
        self._owner = agent.info
        self._id = kept.id
        self._kept: Value | None = kept
        self._fork: GlobalId | None = None
        self._confirmed = True
        self._pending = False
        self._awaited: Confirmation | None = None
        self._creation: torch.futures.Future[Any] | None = None
        self._type: torch.futures.Future[type] | None = None
        self._deleted = False
        self._not_created: str | None = None
        return self

    def _become_user(
        self, agent: Agent, owner: WorkerInfo, id: GlobalId, fork: GlobalId, confirmed: bool, awaited: bool
    ) -> RRef[T]:
        self._agent = agent
        self._owner = owner
        self._incarnation = agent.links.incarnation_of(owner.id)
        self._id = id
        self._kept = None
        self._fork = fork
        self._confirmed = confirmed
        self._pending = not confirmed
        self._awaited = Confirmation() if awaited else None
        self._creation = None
        self._type = None
        self._deleted = False
        self._not_created = None
        agent.rrefs.register_user(self)
        return self

    def __del__(self) -> None:
        fork = getattr(self, "_fork", None)
        if fork is not None and not self._deleted:
            self._agent.rrefs.let_go(self._owner.id, self._id, fork)  # queues it, and sends nothing

    # -- where it is

    def owner(self) -> WorkerInfo:
        """The worker that holds the value."""
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker holds the value."""
        return self._kept is not None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to know of this reference."""
        return self._confirmed

    # -- the value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value: itself on its owner, a copy elsewhere. Waits until it has been made."""
        if self._kept is not None:
            return self._kept.get(self._agent.effective_timeout(timeout))  # type: ignore[no-any-return]
        self._check_usable("to_here()")
        if self._awaited is not None:
            timeout = self._await_owner_within(timeout)
        return self._agent.fetch(self._owner, self._id, timeout)  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """The value itself. Only on its owner."""
        if self._kept is None:
            raise RRefError(
                f"For UserRRef(rref_id={id_str(self._id)}, fork_id={id_str(self._fork or (-1, -1))}), can't call "
                f"localValue() on user {self._agent.info}. Call it on owner {self._owner}, or use to_here() for a copy"
            )
        return self._kept.get(self._agent.effective_timeout(UNSET_RPC_TIMEOUT))  # type: ignore[no-any-return]

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when the value has been made, or has failed to be. For a reference made by `remote`."""
        if self._creation is None:
            self._creation = torch.futures.Future()
            self._creation.set_result(None)
        return self._creation

    _get_future = get_future

    def _check_usable(self, what: str) -> None:
        if self._deleted:
            raise RRefError(f"{self} has been deleted by shutdown. Cannot call {what} on it after deletion.")
        if self._incarnation != self._agent.links.incarnation_of(self._owner.id):
            raise RRefError(
                f"{self} is of an earlier incarnation of worker {self._owner.name!r}: its value was lost with that one"
            )
        if self._not_created is not None:
            raise RRefError(
                f"RRef creation via rpc.remote() timed out, so its value may not exist on {self._owner.name!r}: "
                f"{self._not_created}"
            )

    def _await_owner_within(self, timeout: float) -> float:
        """As `_await_owner`. Returns what is left of the timeout."""
        seconds = self._agent.effective_timeout(timeout)
        if not seconds:
            self._await_owner(None)
            return 0.0
        deadline = time.monotonic() + seconds
        self._await_owner(deadline)
        return max(0.001, deadline - time.monotonic())

    def _await_owner(self, deadline: float | None) -> None:
        """Wait until the owner knows that this worker holds the reference. See [Note: who holds] in rref_table.py."""
        awaited = self._awaited
        if awaited is None:
            return
        self._agent.about_to_wait()
        if not awaited.wait(deadline):
            raise RpcTimeout(
                f"{self}: its owner, worker {self._owner.name!r}, has not confirmed in time that this worker holds it"
            )
        if awaited.error is not None:
            raise fresh(awaited.error)

    # -- calls on the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.rpc_sync().method(*args)` runs the method where the value is, and returns its result."""
        return RRefProxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.rpc_async().method(*args)` likewise, and returns a future."""
        return RRefProxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.remote().method(*args)` likewise, and returns an RRef of the result."""
        return RRefProxy(self, "remote", timeout)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value, or a future of it. Asked of the owner once."""
        if self._type is None:
            if self._kept is not None:
                self._type = torch.futures.Future()
                self._type.set_result(type(self.local_value()))
            else:
                self._check_usable("_get_type()")
                label = f"rpc_async#_rref_typeof_on_owner({self._agent.info.name} -> {self._owner.name})"
                with torch.profiler.record_function(label):
                    self._type = self._agent.call_async(
                        self._owner, _rref_typeof_on_owner, (self,), {}, timeout
                    )
        return self._type.wait() if blocking else self._type

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run backward from the value, where it is. Without a context the gradients go to `.grad` there."""
        if self._kept is not None:
            _backward_here(self, dist_autograd_ctx_id, retain_graph)
        else:
            self._check_usable("backward()")
            if dist_autograd_ctx_id == -1:
                raise RRefError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            args = (self, dist_autograd_ctx_id, retain_graph)
            self._agent.call_sync(self._owner, _backward_here, args, {}, UNSET_RPC_TIMEOUT)

    # -- how it looks

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({id_str(self._id)})"
        return f"UserRRef(RRefId = {id_str(self._id)}, ForkId = {id_str(self._fork)})"

    def __setstate__(self, state: Any) -> None:
        raise RRefError("the state of a reference cannot be set")

    def __reduce__(self) -> Any:
        raise RRefError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC. A file takes values, which to_here() "
            "gives; of an optimizer, state_dict() gives a state that can be saved, and state_dict(sharded=True) one that cannot"
        )


def user_rref(
    agent: Agent, owner: WorkerInfo, id: GlobalId, fork: GlobalId, *, confirmed: bool, awaited: bool = False
) -> RRef[Any]:
    """A user's reference. `awaited`: it may be used when the owner has confirmed it."""
    return RRef.__new__(RRef)._become_user(agent, owner, id, fork, confirmed, awaited)


def owner_rref(agent: Agent, kept: Value) -> RRef[Any]:
    return RRef.__new__(RRef)._become_owner(agent, kept)


def _reduce_rref(packer: Packer, rref: RRef[Any]) -> Reduction:
    if rref._deleted:
        raise RRefError(f"{rref} has been deleted by shutdown. Cannot call fork an UserRRef after deletion.")
    return ref_slot, (packer.add_ref(rref),)


register_reducer(RRef, _reduce_rref)


class RRefProxy:
    """Turns attribute access into a call on a reference's value."""

    def __init__(self, rref: RRef[Any], mode: str, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._invoke, name)

    def _invoke(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        rref, agent, timeout = self._rref, self._rref._agent, self._timeout
        if self._mode == "rpc_async":
            return self._invoke_async(name, args, kwargs)
        function = _method_runner(rref._get_type(timeout), name)
        call = agent.call_sync if self._mode == "rpc_sync" else agent.remote
        return call(rref.owner(), function, (rref, name, args, kwargs), {}, timeout)

    def _invoke_async(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.futures.Future[Any]:
        rref, agent, timeout = self._rref, self._rref._agent, self._timeout

        def call(kind: torch.futures.Future[type]) -> torch.futures.Future[Any]:
            return agent.call_async(
                rref.owner(), _method_runner(kind.value(), name), (rref, name, args, kwargs), {}, timeout
            )

        kind = rref._get_type(timeout, blocking=False)
        result: torch.futures.Future[Any] = torch.futures.Future()
        if kind.done():
            try:
                return call(kind)
            except BaseException as exc:
                result.set_exception(exc)
                return result

        def pass_on(done: torch.futures.Future[Any]) -> None:
            try:
                result.set_result(done.value())
            except BaseException as exc:
                result.set_exception(exc)

        def go_on(done: torch.futures.Future[type]) -> None:
            try:
                call(done).add_done_callback(pass_on)
            except BaseException as exc:
                result.set_exception(exc)

        kind.add_done_callback(go_on)
        return result


def _method_runner(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)
    return _call_async_method if hasattr(method, "_wrapped_async_rpc_function") else _call_method


def local_value_of(rref: Any) -> Any:
    """The value of a reference that a peer sent. It must be one: a look-alike could answer what it likes."""
    if type(rref) is not RRef or rref._agent is not current_agent():
        raise RRefError(f"a reference is wanted here, not a {type(rref).__name__}")
    return rref.local_value()


def _call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = local_value_of(rref)
    current_agent().trust.check_method(value, name)
    return getattr(value, name)(*args, **kwargs)


def _call_async_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _call_method(rref, name, args, kwargs)


_call_async_method._wrapped_async_rpc_function = _call_method  # type: ignore[attr-defined]


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    return type(local_value_of(rref))


def _backward_here(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = local_value_of(rref)
    if not isinstance(value, torch.Tensor):
        raise RRefError(f"RRef should contain a tensor for .backward(), it holds a {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    extension.load()
    if context_backward is None:
        raise RpcError("backward in a context needs farstep.autograd")
    context_backward(context_id, value, retain_graph)
