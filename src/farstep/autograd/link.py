"""An agent's contexts, and what its messages carry for them.

Every call made inside a context has the context's id with it, and creates the context where it arrives. Tensors that require a gradient
are noted as a send where they leave, arrive without history, and become the outputs of a recv.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from farstep.autograd import heads, reduced
from farstep.autograd.conductor import Conductor
from farstep.autograd.context import COUNTER_BITS, Context
from farstep.autograd.messages import check_extra
from farstep.errors import AutogradError, ProtocolError, RpcError, UnknownContext, WorkerLost
from farstep.rpc.extension import Extra
from farstep.rpc.message import Message
from farstep.rpc.payload import Packed
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.peer import Peer

__all__ = ["Link", "current_id"]

log = logging.getLogger("farstep.autograd")
RELEASE_PATIENCE_S = 10.0

current_id: ContextVar[int | None] = ContextVar("farstep_autograd_context", default=None)
"""The context that this thread is in."""


class Link:
    """One agent's `Extension`: see there for who calls what."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._numbers = itertools.count(1)
        self.conductor = Conductor(agent, self)

    # -- contexts ---------------------------------------------------------------------------------------

    def new_id(self) -> int:
        """For a context or a message: no other worker makes the same one."""
        return (self._agent.info.id << COUNTER_BITS) + next(self._numbers)

    def new_context_id(self) -> int:
        """Nobody can guess it: whoever names a context has been reached by it. See [Note: in one's own name]."""
        return (self._agent.info.id << COUNTER_BITS) + 1 + secrets.randbits(COUNTER_BITS - 1)

    def max_id(self) -> int:
        return (self._agent.info.id << COUNTER_BITS) + (1 << COUNTER_BITS) - 1

    def open(self) -> Context:
        context = Context(self.new_context_id())
        with self._lock:
            self._contexts[context.id] = context
        reduced.watch()
        return context

    def contexts(self) -> list[Context]:
        with self._lock:
            return list(self._contexts.values())

    def find(self, id: int) -> Context | None:
        return self._contexts.get(id)

    def get(self, id: int) -> Context:
        context = self._contexts.get(id)
        if context is None:
            raise UnknownContext(id)
        return context

    def current(self) -> Context | None:
        id = current_id.get()
        return None if id is None else self._contexts.get(id)

    # -- messages ---------------------------------------------------------------------------------------

    is_head = staticmethod(heads.is_head)
    is_extra = staticmethod(heads.is_extra)

    def leaving(self, peer: Peer, packed: Packed) -> Extra | None:
        context = self.current()
        if context is None:
            return None
        if not peer.is_self:
            with context.lock:
                context.workers.add(peer.id)
                context.handed_over.clear()  # through this peer any of them may have a part in it again
        return self._attach(context, peer, packed, torch.is_grad_enabled())

    def answering(self, message: Message, packed: Packed) -> Extra | None:
        id, _, wants_gradient = message.extra[1]
        return self._attach(self._contexts.get(id), message.peer, packed, wants_gradient, id)

    def _attach(
        self, context: Context | None, peer: Peer, packed: Packed, wants_gradient: bool, id: int = 0
    ) -> Extra:
        """Note the tensors that require a gradient as a send. Without a context, or where no gradient is wanted, they go bare."""
        bare = tuple(i for i, tensor in enumerate(packed.tensors) if tensor.requires_grad)
        send_id = 0
        if context is not None and wants_gradient and (bare or packed.odd):
            send_id = self.new_id()
            context.add_send(send_id, peer.id, [packed.tensors[i] for i in bare] + list(packed.odd))
        return bare, (context.id if context is not None else id, send_id, wants_gradient)

    def left(self, peer: Peer, extra: Extra) -> None:
        """Should the context have been released while the call was being sent, the word of that may have overtaken it."""
        id = extra[1][0]
        if id not in self._contexts:
            self._post(peer.id, ("release", id))

    def left_behind(self, extra: Extra) -> None:
        id, send_id, _ = extra[1]
        context = self._contexts.get(id)
        if context is not None and send_id:
            with context.lock:
                context.sends.pop(send_id, None)

    def check(self, message: Message) -> None:
        check_extra(message)

    def arrived(self, message: Message) -> None:
        id = message.extra[1][0]
        opener = id >> COUNTER_BITS
        with self._lock:
            # One that its opener has released, or cannot release any more, must not come to life again.
            may_be_new = opener != self._agent.info.id and not message.peer.is_self
            if may_be_new and id not in self._contexts and self._agent.is_present(opener):
                self._contexts[id] = Context(id)
            context = self._contexts.get(id)
            if context is not None:
                context.callers.add(message.peer.id)
        reduced.watch()

    def opened(self, message: Message, tensors: list[torch.Tensor]) -> None:
        id, send_id, _ = message.extra[1]
        context = self._contexts.get(id)
        if context is not None and send_id and tensors:
            context.add_recv(send_id, message.peer.id, tensors)

    def around(self, message: Message) -> AbstractContextManager[None]:
        id, _, wants_gradient = message.extra[1]
        return _entered(id if id in self._contexts else None, wants_gradient)

    def bind(self, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        id = current_id.get()
        return callback if id is None else partial(_call_in, id, callback)

    def control(self, message: Message) -> Callable[[], None] | None:
        head = message.head
        if type(head) is not tuple or not head or type(head[0]) is not str:
            raise ProtocolError("a message about gradients that says nothing")
        if head[0] == "release":
            return self._heard_release(message, message.head[1])
        if head[0] == "joined":
            return partial(self._joined, message, message.head[1])
        return self.conductor.control(message)

    def serves(self, message: Message) -> bool:
        return bool(message.head[0] == "grad" and message.head[1][0] != self._agent.info.id)

    # -- the end of a context -----------------------------------------------------------------------------

    def release(self, id: int) -> None:
        """Forget a context here and on every worker that it reached, and wait until they have."""
        with self._lock:
            context = self._contexts.pop(id, None)
        if context is None:
            raise UnknownContext(id)
        _empty(context)
        for error in self.ask_all(context._known_worker_ids(), ("release", id), RELEASE_PATIENCE_S):
            log.warning(
                "worker %r: context %d was released here, but perhaps not everywhere: %s",
                self._agent.info.name,
                id,
                error,
            )

    def hand_over(self, id: int) -> set[int] | None:
        """Drop this worker's part of a context before its end, for its opener. Returns those that this worker would have told of the release, for
        whoever asked to `take_over`; they are not told yet, as they may still be needed. None where this worker opened the context, and keeps it.
        """
        with self._lock:
            if id >> COUNTER_BITS == self._agent.info.id:
                return None
            context = self._contexts.pop(id, None)
        if context is None:
            return set()
        _empty(context)
        return context._known_worker_ids()

    def take_over(self, context: Context, told: dict[int, set[int]]) -> None:
        """These workers have handed over, each with the workers that it would have told."""
        with context.lock:
            context.handed_over |= told.keys()
            context.workers.update(w for below in told.values() for w in below if type(w) is int)
            context.workers -= {*context.handed_over, self._agent.info.id}

    def ask_all(self, workers: Iterable[int], head: Any, patience_s: float) -> list[RpcError]:
        """Tell several workers something, and wait until each has done it. Returns what went wrong with those that are there."""
        asked, errors = [], []
        for worker in workers:
            try:
                asked.append(self._agent.ask(self._agent.peer(worker), Kind.EXTENSION, head, patience_s))
            except RpcError:
                pass  # it is gone, and its part of every context with it
        for call in asked:
            try:
                self._agent.answer_to(call)
            except WorkerLost:
                pass
            except RpcError as exc:
                errors.append(exc.with_traceback(None))
        return errors

    def _heard_release(self, message: Message, id: int) -> Callable[[], None]:
        """Its opener ends a context. One that has called this worker in it only takes back its own calls.

        When no caller is left, the context has nobody who would end it. While there are others the opener is asked, for they may
        be workers which this one has called itself, and which wait for its word.
        """
        worker = message.peer.id
        answer = partial(self._answer_release, message)
        with self._lock:
            context = self._contexts.get(id)
            if context is None:
                return answer
            if worker != context.opener:
                if context.opener == self._agent.info.id or worker not in context.callers:
                    log.warning(
                        "worker %r: rank %d has no say in context %d, and wants it released",
                        self._agent.info.name,
                        worker,
                        id,
                    )
                    return answer
                context.callers.discard(worker)
                if context.callers:
                    return partial(self._ask_opener, context, answer)
            del self._contexts[id]
        return partial(self._release_below, context, answer)

    def _answer_release(self, message: Message) -> None:
        if message.call_id:
            self._agent.service.answer(message, None)

    def _ask_opener(self, context: Context, then: Callable[[], None]) -> None:
        """End a context if its opener has. When the opener is lost, that ends it too."""

        def hook(message: Message | None, error: BaseException | None) -> None:
            is_over = message is not None and message.kind == Kind.REPLY and message.value(trust) is False
            with self._lock:
                is_over = is_over and self._contexts.pop(context.id, None) is context
            if is_over:
                self._release_below(context, then)
            else:
                then()

        trust = self._agent.trust
        try:
            opener = self._agent.peer(context.opener)
            self._agent.request(opener, Kind.EXTENSION, ("joined", context.id), hook)
        except RpcError:
            then()

    def _release_below(self, context: Context, then: Callable[[], None]) -> None:
        """Pass the word on to the workers that this one has called in the context; `then` when all have answered.

        Nobody finds the context any more, so its graph need not be gone before the answer: a large one takes its time.
        """
        for current in list(context.passes.values()):
            current.end()
        workers = context._known_worker_ids()
        left = itertools.count(len(workers), -1)
        lock = threading.Lock()

        def one_is_done(*_: object) -> None:
            with lock:
                is_last = next(left) == 0
            if is_last:
                then()

        for worker in workers:
            try:
                peer = self._agent.peer(worker)
                self._agent.request(peer, Kind.EXTENSION, ("release", context.id), one_is_done)
            except RpcError:
                one_is_done()  # it is gone, and its part of the context with it
        one_is_done()
        _empty(context)

    def worker_gone(self, worker: int) -> None:
        self.conductor.worker_gone(worker)
        with self._lock:
            orphans = [c for c in self._contexts.values() if c.opener == worker]
            for context in orphans:
                del self._contexts[context.id]
        for context in orphans:
            _empty(context)
        for context in self.contexts():
            with context.lock:
                context.workers.discard(worker)
                is_cut_off = worker in context.callers and context.callers <= {worker}
                context.callers.discard(worker)
            if is_cut_off and context.opener != self._agent.info.id:
                # Nobody is left who would pass the word of its release on: ask the opener to.
                self._agent.submit(0, partial(self._post, context.opener, ("joined", context.id)))

    def _joined(self, message: Message, id: int) -> None:
        """A worker has a part in a context, and some that called it there have gone, or let go of it. Tell it whether this is over."""
        context = self._contexts.get(id)
        if context is not None:
            with context.lock:
                context.workers.add(message.peer.id)
        if message.call_id:
            self._agent.service.answer(message, context is not None)
        elif context is None:
            self._post(message.peer.id, ("release", id))

    def _post(self, worker: int, head: tuple[str, int]) -> None:
        try:
            self._agent.peer(worker).post(Kind.EXTENSION, 0, head, deadline=self._agent.soon(), soon=True)
        except RpcError:
            pass  # it is gone, and its part of the context with it

    def close(self) -> None:
        self.conductor.close()
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            _empty(context)


def _empty(context: Context) -> None:
    for current in list(context.passes.values()):
        current.end()
    with context.lock:
        context.passes.clear()
        context.sends.clear()
        context.recvs.clear()
        context.reduced.clear()
    context.gradients.clear()


class _entered:
    """While this is entered the thread is in that context, or in none."""

    __slots__ = ("_before", "_grad_before", "_id", "_wants_gradient")

    def __init__(self, id: int | None, wants_gradient: bool) -> None:
        self._id = id
        self._wants_gradient = wants_gradient

    def __enter__(self) -> None:
        self._before = current_id.get()
        self._grad_before = torch.is_grad_enabled()
        current_id.set(self._id)
        if not self._wants_gradient:
            torch.set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if not self._wants_gradient:
            torch.set_grad_enabled(self._grad_before)
        current_id.set(self._before)


def _call_in(id: int, callback: Callable[[Any], Any], future: Any) -> Any:
    with _entered(id, wants_gradient=True):
        return callback(future)


def link_of(agent: Agent) -> Link:
    extension = agent.extension
    if not isinstance(extension, Link):
        raise AutogradError(f"worker {agent.info.name!r} has another extension than farstep.autograd")
    return extension
