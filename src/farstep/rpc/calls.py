"""Calls under way: who waits for which reply, and until when.

Three ways to wait, one interface. `complete` is called once, by whichever thread has the outcome.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farstep.errors import RemoteError, RpcTimeout

if TYPE_CHECKING:
    from farstep.rpc.message import Message
    from farstep.rpc.peer import Peer
    from farstep.rpc.replies import Replies

__all__ = [
    "AsyncCall",
    "Call",
    "CallFuture",
    "Deadlines",
    "HookCall",
    "SyncCall",
    "fresh",
    "timeout_error",
    "without_frames",
]

_Future: Any = torch.futures.Future.__bases__[0]
"""The class in C++ behind torch's."""


def without_frames(error: BaseException) -> BaseException:
    """The same exception, and those behind it, without the frames they passed. See [Note: fresh exceptions]."""
    behind: BaseException | None = error
    for _ in range(100):  # a chain may be a ring
        if behind is None:
            break
        behind.__traceback__ = None
        behind = behind.__cause__ or behind.__context__
    return error


def fresh(error: BaseException) -> BaseException:
    """A copy to raise, so that the original stays free of frames; the original where it cannot be copied."""
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    if type(twin) is not type(error):
        return error
    twin.__cause__ = error.__cause__
    return twin.with_traceback(None)


def timeout_error(worker: str, call: Call) -> RpcTimeout:
    if call.waits_for_turn:
        return RpcTimeout(
            f"call {call.what} from {worker!r} to {call.peer.name!r} was not sent within its timeout "
            f"({call.timeout_s * 1000:g} ms): {call.peer.turns.why()}"
        )
    return RpcTimeout(
        f"RPC ran for more than set timeout ({call.timeout_s * 1000:g} ms): call {call.what} from {worker!r} to "
        f"{call.peer.name!r} has no answer. The callee may still be running it; pass a larger timeout "
        f"(0 for none) or see what {call.peer.name!r} is doing"
    )


class Call:
    """One request that has no reply yet."""

    __slots__ = ("charge", "counts", "deadline", "depth", "id", "peer", "timeout_s", "waits_for_turn", "what")

    def __init__(self, id: int, peer: Peer, what: str, depth: int, timeout_s: float) -> None:
        self.id = id
        self.peer = peer
        self.what = what
        self.depth = depth
        self.timeout_s = timeout_s
        self.counts = True
        self.waits_for_turn = False
        self.charge = 0
        """What it counts for until it is answered. See `Turns`."""
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else None

    def complete(self, message: Message | None, error: BaseException | None) -> None:
        raise NotImplementedError  # pragma: no cover


class SyncCall(Call):
    """The caller's own thread waits."""

    __slots__ = ("_ready", "error", "message")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.message: Message | None = None
        self.error: BaseException | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def complete(self, message: Message | None, error: BaseException | None) -> None:
        self.message = message
        self.error = error
        try:
            self._ready.release()
        except RuntimeError:
            pass  # completed twice: the first outcome woke the waiter already

    @property
    def done(self) -> bool:
        return self.message is not None or self.error is not None

    def wait(self) -> bool:
        """Sleep until the outcome is there or the deadline has passed."""
        if self.deadline is None:
            return self._ready.acquire()
        return self._ready.acquire(timeout=max(0.0, self.deadline - time.monotonic()))


class AsyncCall(Call):
    """A future is completed; `finish` turns the outcome into its value."""

    __slots__ = ("_finish", "arrived", "future", "is_awaited")

    def __init__(
        self, id: int, peer: Peer, what: str, depth: int, timeout_s: float, finish: Callable[[Message], Any]
    ) -> None:
        Call.__init__(self, id, peer, what, depth, timeout_s)
        self._finish = finish
        self.arrived: Replies | None = None
        """The reply is here, among others, and nobody has taken it to complete the future."""
        self.is_awaited = False
        self.future: CallFuture = CallFuture()

    def complete(self, message: Message | None, error: BaseException | None) -> None:
        try:
            if message is not None:
                value = self._finish(message)
        except BaseException as exc:
            error = exc
        self.future.await_reply = None  # it holds this call, and this call the future
        if isinstance(error, Exception):
            self.future.set_exception(error)
        elif error is not None:  # torch's futures take no SystemExit and the like
            self.future.set_exception(
                RemoteError(self.peer.name, type(error).__name__, "raised while the reply was opened")
            )
        else:
            self.succeed(value)

    def succeed(self, value: Any) -> None:
        """Complete with a value that is there already."""
        future = self.future
        future.await_reply = None
        _Future.set_result(future, value)


class HookCall(Call):
    """A function of the agent's own is told."""

    __slots__ = ("_hook",)

    def __init__(self, *args: Any, hook: Callable[[Message | None, BaseException | None], None]) -> None:
        super().__init__(*args)
        self._hook = hook

    def complete(self, message: Message | None, error: BaseException | None) -> None:
        self._hook(message, error)


class CallFuture(torch.futures.Future[Any]):
    """The future of a call. A thread that waits on it reads its own reply, when no other thread reads.

    [Note: fresh exceptions] A raised exception holds the frames it passed, and they hold the future. Through torch's C++
    future that is a cycle which the garbage collector cannot see. So each `wait` raises a copy.
    """

    await_reply: Callable[[], tuple[Any] | None] | None = None
    """Completes this future, if it can; and says with which value, if that is at hand."""
    bind: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] | None = None
    """What the layer above makes of a callback; see extension.py."""
    has_callbacks = False
    _exception: BaseException | None = None

    def __init__(self) -> None:
        _Future.__init__(self, [])  # as torch's class does, which costs more

    def wait(self) -> Any:
        await_reply = self.await_reply  # another thread may complete the call meanwhile, and takes it away
        if await_reply is not None and not _Future.done(self):
            value = await_reply()
            if value is not None:
                return value[0]
        if self._exception is None or not self.done():
            try:
                return _Future.wait(self)
            except BaseException as exc:
                if exc is not self._exception:
                    raise
        raise fresh(without_frames(self._exception))

    def value(self) -> Any:
        if self._exception is not None and self.done():
            raise fresh(self._exception)
        return super().value()

    def set_exception(self, result: Any) -> None:
        self._exception = without_frames(result)
        super().set_exception(result)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        self.has_callbacks = True
        return super().then(callback if self.bind is None else self.bind(callback))

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.has_callbacks = True
        super().add_done_callback(callback if self.bind is None else self.bind(callback))


class Deadlines:
    """Fires calls whose deadline has passed, from one thread that sleeps until the next one is due.

    Calls with the same timeout fall due in the order they were made, so each timeout has one ordered dict and
    adding or removing a call costs the same however many there are.
    """

    def __init__(self, name: str, fire: Callable[[Call], None]) -> None:
        self._name = name
        self._fire = fire
        self._due: dict[float, dict[Call, float]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wakes_at = float("inf")
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, call: Call, deadline: float) -> None:
        with self._lock:
            calls = self._due.get(call.timeout_s)
            if calls is None:
                calls = self._due[call.timeout_s] = {}
            calls[call] = deadline
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name=f"farstep-{self._name}-timer", daemon=True
                )
                self._thread.start()
            elif deadline < self._wakes_at:
                self._changed.notify()

    def remove(self, call: Call) -> None:
        calls = self._due.get(call.timeout_s)
        if calls is not None:
            calls.pop(call, None)
            if not calls:
                with self._lock:
                    if not calls and self._due.get(call.timeout_s) is calls:
                        del self._due[call.timeout_s]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                fired = self._take_due(now)
                if not fired:
                    self._wakes_at = min(
                        (_first(calls)[1] for calls in self._due.values()), default=float("inf")
                    )
                    self._changed.wait(None if self._wakes_at == float("inf") else self._wakes_at - now)
                    continue
            for call in fired:
                self._fire(call)
            fired = []

    def _take_due(self, now: float) -> list[Call]:
        fired = []
        for timeout_s, calls in list(self._due.items()):
            while True:
                call, deadline = _first(calls)
                if call is None or deadline > now:
                    break
                if calls.pop(call, None) is not None:
                    fired.append(call)
            if not calls:
                del self._due[timeout_s]
        return fired


def _first(calls: dict[Call, float]) -> tuple[Call | None, float]:
    """The call that was added first, and its deadline. Calls are removed without a lock."""
    while calls:
        try:
            return next(iter(calls.items()))
        except (RuntimeError, StopIteration):
            pass  # one was removed just now
    return None, float("inf")
