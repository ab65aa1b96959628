"""Running calls for peers, and answering them."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from farstep.errors import (
    NotInitialized,
    PayloadError,
    RemoteError,
    RemoteTraceback,
    RpcError,
    RpcTimeout,
    WorkerLost,
)
from farstep.rpc.calls import without_frames
from farstep.rpc.current import running
from farstep.rpc.forked import end_child
from farstep.rpc.message import EMPTY, Message
from farstep.rpc.payload import Packed, pack
from farstep.rpc.schema import brief, cut
from farstep.rpc.trust import Trust
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["Service", "describe_function", "rebuild_error"]

ANSWER_TIMEOUT_S = 30.0
MAX_RIDING = 4096
"""With so many answers waiting to go together, further ones do not wait with them."""
CALL = int(Kind.CALL)
FUTURE = torch.futures.Future.__bases__[0]
"""What `then` returns: the class below torch's Future."""
log = logging.getLogger("farstep.rpc")


class Service:
    """The callee's side of one agent. Its methods run as jobs of the reactor."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def serve(self, message: Message, kept: Any = None) -> None:
        """Run a call for a peer."""
        if message.refs:
            self.when_confirmed(message, message.depth, partial(self._serve_confirmed, message, kept))
        else:
            self._serve_now(message, kept)

    def when_confirmed(
        self, message: Message, depth: int, then: Callable[[BaseException | None], None]
    ) -> None:
        """Go on when the owners have confirmed the references that a message brought; with an error where one has not."""
        strangers = [r for r in message.refs if r._awaited is not None]
        if strangers:
            lane = message.peer.lane
            self._agent.rrefs.confirm(
                strangers, lambda error: self._agent.submit(depth, partial(then, error), lane)
            )
        else:
            then(None)

    def _serve_confirmed(self, message: Message, kept: Any, error: BaseException | None) -> None:
        if error is None:
            self._serve_now(message, kept)
        else:
            self._conclude(message, kept, None, error)

    def confirm_later(self, message: Message, depth: int) -> None:
        """References in a result: the owner is told, and only who uses one waits. `depth`: below that of any who may."""
        strangers = [r for r in message.refs if r._awaited is not None]
        if strangers:
            self._agent.submit(depth, partial(self._agent.rrefs.confirm, strangers, _nothing))

    def _serve_now(self, message: Message, kept: Any) -> None:
        name = function = None
        try:
            name = message.head if kept is None else message.head[0]
            function, args, kwargs = message.open(self._agent.trust)
            if name is not None:
                function = self._find(*name)
            if not self._agent.trust.is_open:
                self._agent.trust.check_called(function)
            running.caller = message.peer.id
            if message.extra is None:
                result = function(*args, **kwargs)
            else:
                with self._agent.extension.around(message):
                    result = function(*args, **kwargs)
            is_async = hasattr(function, "_wrapped_async_rpc_function")
            del args, kwargs
            if is_async and not isinstance(result, FUTURE):
                raise RpcError(
                    f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                    f"(that is @rpc.functions.async_execution) but {describe_function(function)} returned "
                    f"{type(result).__name__}"
                )
        except BaseException as exc:
            if self._agent.reactor.is_forked:
                end_child(exc)
            log.warning(
                "worker %r: %s, called by %r, failed: %s: %s",
                self._agent.info.name,
                name or "a call" if function is None else describe_function(function),
                message.peer.name,
                type(exc).__name__,
                _text(exc),  # a log record must not keep the exception's frames
            )
            self._conclude(message, kept, None, exc)
            return
        if self._agent.reactor.is_forked:
            end_child(None)
        if is_async:
            result.add_done_callback(partial(self._conclude_future, message, kept))
        else:
            self._conclude(message, kept, result, None)

    def functions_running(self) -> list[str]:
        """The functions that this worker's threads run for peers now, and for whom. For error messages."""
        threads = self._agent.reactor.thread_ids()
        found = []
        for id, frame in sys._current_frames().items():
            at: FrameType | None = frame if id in threads else None
            while at is not None:
                if at.f_code is Service._serve_now.__code__ and at.f_locals.get("function") is not None:
                    caller = at.f_locals["message"].peer.name
                    found.append(f"{describe_function(at.f_locals['function'])} called by {caller!r}")
                at = at.f_back
        return sorted(found)

    def _find(self, module: str, qualname: str) -> Any:
        try:
            return self._agent.trust.find(module, qualname)
        except (AttributeError, ImportError) as exc:
            raise PayloadError(
                f"worker {self._agent.info.name!r} has no {module}.{qualname} ({exc}). A call carries a function's name: the "
                f"RPC pickler does not serialize its code, so the module must be importable, and the same, on both workers"
            ) from exc

    def _conclude_future(self, message: Message, kept: Any, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except BaseException as exc:
            self._conclude(message, kept, None, exc)
        else:
            self._conclude(message, kept, value, None)

    def _conclude(self, message: Message, kept: Any, value: Any, error: BaseException | None) -> None:
        if kept is not None:
            kept.set(value, error if error is None else _annotated(error, self._agent.info.name))
            value = None
        if error is None:
            self.answer(message, value)
        else:
            self.answer_error(message, error)

    def send_value(self, message: Message, kept: Any) -> None:
        try:
            value = kept.get(0)
        except BaseException as exc:
            self.answer_error(message, exc.with_traceback(None))  # it carries the text of where it was raised
        else:
            self.answer(message, value)

    def answer(self, message: Message, value: Any) -> None:
        """Send the result of a call, or why it cannot be sent."""
        try:
            packed = pack((value,))
        except PayloadError as exc:
            self.answer_error(
                message, PayloadError(f"the result of a call on {self._agent.info.name!r} {exc}")
            )
            return
        self._post_answer(message, Kind.REPLY, None, packed)

    def answer_error(self, message: Message, error: BaseException) -> None:
        """Send the exception of a call. Whatever the exception is like, something is answered."""
        packed = EMPTY
        if isinstance(error, Exception):  # SystemExit and the like must not act on the caller
            try:
                packed = pack((error,))
            except PayloadError:
                pass
        self._post_answer(message, Kind.ERROR, _error_head(error, self._agent.info.name), packed)

    def _post_answer(self, message: Message, kind: Kind, head: Any, packed: Packed) -> None:
        extra = None
        if message.extra is not None and kind is Kind.REPLY:
            try:
                extra = self._agent.extension.answering(message, packed)
            except Exception as exc:
                self.answer_error(message, exc)
                return
        try:
            if (
                extra is None
                and self._agent.reactor.queued
                and message.peer.riders < MAX_RIDING
                and self._answer_later(message, kind, head, packed)
            ):
                return
            deadline = time.monotonic() + max(self._agent.rpc_timeout, ANSWER_TIMEOUT_S)
            message.peer.post(
                kind,
                message.call_id,
                head,
                packed,
                depth=message.depth,
                deadline=deadline,
                extra=extra,
                soon=True,
            )
        except (WorkerLost, NotInitialized) as exc:
            if kind is Kind.REPLY and isinstance(exc, WorkerLost) and exc.worker != message.peer.name:
                self.answer_error(message, exc)  # the owner of a reference in the answer is lost
                return
            # Otherwise nobody is there to hear it.
        except RpcTimeout as exc:
            log.warning("worker %r cannot answer %r: %s", self._agent.info.name, message.peer.name, exc)
        except RpcError as exc:
            if kind is Kind.REPLY:
                self.answer_error(message, exc)  # it counts the call
                return
            log.warning("worker %r cannot answer %r: %s", self._agent.info.name, message.peer.name, exc)
        self._answered(message)

    def _answered(self, message: Message) -> None:
        """The call is over, for this worker."""
        if message.kind != Kind.GATHER:
            self._agent.tally.serve()
        if message.charge:
            if message.kind == CALL:  # as `finished`, in short
                charge, message.charge = message.charge, 0
                intake = message.peer.intake
                intake.end(intake.calls, message.depth, charge)
            else:
                message.peer.finished(message)

    def _answer_later(self, message: Message, kind: Kind, head: Any, packed: Packed) -> bool:
        """A small answer may go together with those of the calls that this thread runs next."""
        if not message.peer.ride(kind, message.call_id, head, packed, message.depth):
            return False
        self._agent.send_together(message.peer)
        # Only now that it rides may the reactor be told: a tick between the two would pass it by.
        if not self._agent.reactor.cork():
            message.peer.flush_soon()
        self._answered(message)
        return True


def _nothing(error: BaseException | None) -> None:
    pass


def describe_function(function: Any) -> str:
    name = (
        getattr(function, "__qualname__", None)
        or getattr(function, "__name__", None)
        or type(function).__name__
    )
    return str(name)


def _text(error: BaseException) -> str:
    """What an exception says, also where it cannot say it; plain, whatever its class makes of strings."""
    try:
        return cut("".join(str(error)))
    except BaseException as exc:
        return f"(an exception whose text cannot be had: {type(exc).__name__})"


def _error_head(error: BaseException, worker: str) -> tuple[str, str, str, str]:
    try:
        trace = getattr(error, "remote_traceback", None) if error.__traceback__ is None else None
        trace = trace or "".join(traceback.format_exception(error)).rstrip()
        origin = "".join(getattr(error, "remote_worker", worker))
        return "".join(type(error).__qualname__), _text(error), origin, cut("".join(trace))
    except BaseException as exc:
        return (
            type(error).__name__,
            _text(error),
            worker,
            f"(a traceback that cannot be formatted: {type(exc).__name__})",
        )


def _annotated(error: BaseException, worker: str) -> BaseException:
    """Remember where it was raised, for those who fetch the value later."""
    try:
        error.remote_worker = getattr(error, "remote_worker", worker)  # type: ignore[attr-defined]
        error.remote_traceback = "".join(traceback.format_exception(error)).rstrip()  # type: ignore[attr-defined]
    except Exception:
        return error
    return without_frames(error)


def rebuild_error(message: Message, trust: Trust) -> BaseException:
    """The callee's exception, of its own class where that can be had, with its traceback attached."""
    type_name, text, worker, trace = message.head
    error: BaseException | None = None
    why = "it ends a process, or its class cannot be pickled"
    try:
        error = message.value(trust)
    except (Exception, SystemExit, GeneratorExit) as exc:  # opening it may run what ends a process, too
        why = brief(exc)
    if error is None or not issubclass(
        type(error), Exception
    ):  # by its type: its __class__ may say otherwise
        error = RemoteError(
            worker, type_name, f"{text} (Original exception on remote side was {type_name}; {why})"
        )
    try:
        error.remote_worker = worker  # type: ignore[attr-defined]
        error.remote_traceback = trace  # type: ignore[attr-defined]
    except Exception:
        pass
    error.__cause__ = RemoteTraceback(worker, trace)
    return error
