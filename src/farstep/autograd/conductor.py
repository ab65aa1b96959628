"""Backward passes between workers: gradients, reports and commands as messages.

    root                         peer                         another
     │ run what may run           │                              │
     ├── grad: send 7 fires ─────▶│ run what may run             │
     │                            ├── grad: send 12 fires ──────▶│ run what may run
     │◀── report: 7 done, ────────┤                              │
     │    12 passed on            │                              │
     │◀── report: 12 done, nothing waits ────────────────────────┤
     over

Nobody waits but the thread in `backward`. Reports go straight to the root, so a chain of n hops takes n messages and one report, and not
n replies. What happens when gradient waits somewhere at the end is told in tracker.py.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from farstep.autograd.context import Context, PassId
from farstep.autograd.messages import opened
from farstep.autograd.passes import ROOTS, Fire, Key, Pass, Settings, Step
from farstep.autograd.tracker import Command, Report, Tracker
from farstep.errors import (
    AutogradError,
    BackwardError,
    RemoteTraceback,
    RpcError,
    UnknownContext,
    WorkerLost,
)
from farstep.rpc.connection import Looking
from farstep.rpc.message import EMPTY, Message
from farstep.rpc.payload import Packed, pack
from farstep.rpc.reactor import current_depth
from farstep.rpc.schema import cut
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.autograd.link import Link
    from farstep.rpc.agent import Agent

__all__ = ["Conductor"]

ABORT_PATIENCE_S = 5.0
MAX_WAITS_WITHOUT = 16
Failure = tuple[str, Any]


class Conductor:
    """Runs one agent's part of every pass. Its handlers are jobs of the reactor."""

    def __init__(self, agent: Agent, link: Link) -> None:
        self._agent = agent
        self._link = link
        self._me = agent.info.id
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._trackers: dict[PassId, Tracker] = {}
        self._looking = Looking(MAX_WAITS_WITHOUT)
        self._handlers: dict[str, Callable[..., None]] = {
            "grad": self._on_grad,
            "wave": self._on_wave,
            "settle": self._on_settle,
            "abort": self._on_abort,
        }

    def control(self, message: Message) -> Callable[[], None] | None:
        """On the reader's thread: what must be done about this message, as a job. A report is taken at once."""
        verb, settings, rest = opened(message, self._me)
        if verb != "report":
            return partial(self._handlers[verb], message, settings, *rest)
        commands = self._hear(settings, rest[0], rest[1], message.peer.name)
        return partial(self._command, settings, commands) if commands else None

    @property
    def running(self) -> int:
        """How many passes this worker has a part in at the moment."""
        busy = {id for c in self._link.contexts() for id, p in list(c.passes.items()) if p.is_busy}
        return len(busy | self._trackers.keys())

    # -- the root ---------------------------------------------------------------------------------------

    def begin(self, context_id: int, retain_graph: bool, create_graph: bool, mode: str) -> Tracker:
        """A pass with this worker as its root. `start` it, `wait` for it and `finish` it."""
        with self._lock:
            number = next(self._numbers)
            under_way = [
                t.settings.id[1] for t in self._trackers.values() if t.settings.context_id == context_id
            ]
            settings = Settings(
                (self._me, number),
                context_id,
                retain_graph,
                create_graph,
                mode,
                min(under_way, default=number),
            )
            tracker = self._trackers[settings.id] = Tracker(settings, self._me, self._name_of)
            return tracker

    def start(self, tracker: Tracker, context: Context, roots: Sequence[torch.Tensor]) -> None:
        """Run the roots' part of the local graph, on this thread."""
        settings = tracker.settings
        edges = [GradientEdge(root.grad_fn, root.output_nr) for root in roots]  # type: ignore[arg-type]
        fire = Fire(ROOTS, edges, [torch.ones_like(root) for root in roots])
        self._fire(self._pass(context, settings), [fire])

    def wait(self, tracker: Tracker, timeout_s: float) -> None:
        """Wait until a pass of this worker's is over.

        At first this thread reads what concerns the pass itself, and runs this worker's part of it: no thread need be
        woken for that. Where nothing comes for a while it sleeps, and others do so.
        """
        if self._looking.pays():
            self._look_out(tracker)
            self._looking.ended(in_vain=not tracker.is_over)
        tracker.wait(timeout_s)

    def _look_out(self, tracker: Tracker) -> None:
        id = tracker.settings.id

        def claim(message: Message) -> bool:
            return bool(message.head[0] == "grad" and message.head[1] == id)

        spin_s = self._agent.links.spin_s
        while not tracker.is_over:
            found = [self._agent.links.find(worker) for worker in tracker.expected_from()]
            peers = [peer for peer in found if peer is not None and not peer.is_self]
            until = time.perf_counter() + spin_s
            jobs = self._agent.inbox.look_out(peers, claim, lambda: tracker.is_over, until)
            if not jobs:
                break
            for job in jobs:
                job()

    def finish(self, tracker: Tracker) -> None:
        """It is over: forget it, and end it everywhere if it failed. Raises its error."""
        settings = tracker.settings
        if tracker.error is not None:
            self._abort(settings, tracker.participants)
        self._trackers.pop(settings.id, None)
        context = self._link.find(settings.context_id)
        if context is not None:
            context.passes.pop(settings.id, None)
        if tracker.error is not None:
            try:
                raise tracker.error
            finally:
                tracker.error = None  # or error, frame and tracker would keep each other

    def _command(self, settings: Settings, commands: list[Command]) -> None:
        for worker, verb, key in commands:
            self._post(worker, (verb, *self._settings_head(settings), key, None), settings)

    def _abort(self, settings: Settings, participants: set[int]) -> None:
        """Nothing of a failed pass may run any more when its error is raised: its gradients would be added to the next one's."""
        others = [worker for worker in participants if worker != self._me]
        context = self._link.find(settings.context_id)
        if context is not None:
            self._end(context, settings)
            others += [worker for worker in context.workers if worker not in participants]
        self._link.ask_all(others, ("abort", *self._settings_head(settings)), ABORT_PATIENCE_S)

    def worker_gone(self, worker: int) -> None:
        for tracker in list(self._trackers.values()):
            if tracker.concerns(worker):
                tracker.fail(self._loss_of(worker, tracker.settings.context_id))

    def _loss_of(self, worker: int, context_id: int) -> WorkerLost:
        return WorkerLost(self._name_of(worker), f"it took part in backward of context {context_id}")

    def close(self) -> None:
        for tracker in list(self._trackers.values()):
            tracker.fail(AutogradError(f"worker {self._agent.info.name!r} has shut down during backward"))

    def _name_of(self, worker: int) -> str:
        peer = self._agent.links.find(worker)
        return peer.name if peer is not None else f"rank {worker}"

    # -- everyone ---------------------------------------------------------------------------------------

    def _end(self, context: Context, settings: Settings) -> set[int]:
        """End this worker's part of a failed pass. Returns those whom it has told of the pass."""
        with context.lock:
            context.failed.add(settings.id)
            current = context.passes.pop(settings.id, None)
        if current is None:
            return set()
        current.end()
        return current.peers

    def _pass(self, context: Context, settings: Settings) -> Pass:
        with context.lock:
            if settings.id in context.failed:
                late = Pass(context, settings)
                late.end()
                return late
            found = context.passes.get(settings.id)
            if found is None:
                for id in [i for i in context.passes if i[0] == settings.root and i[1] < settings.oldest]:
                    del context.passes[id]
                found = context.passes[settings.id] = Pass(context, settings)
            return found

    def _fire(self, current: Pass, fires: list[Fire]) -> None:
        """Run what these sources make possible, and tell everyone whom it concerns."""
        settings = current.settings
        try:
            for step in current.fire(fires):
                self._tell(current, step)
        except BaseException as exc:
            self._tell_failure(settings, exc)
            _pass_on_interrupts(exc)

    def _tell(self, current: Pass, step: Step) -> None:
        settings = current.settings
        if step.recvs and settings.create_graph:
            raise AutogradError(
                "create_graph=True: this backward goes on to another worker, and gradients of gradients do not cross "
                "workers. Compute the part that needs them on one worker"
            )
        context = self._link.get(settings.context_id)
        by_worker: dict[int, list[tuple[int, list[torch.Tensor | None]]]] = {}
        for id, gradients in step.recvs:
            by_worker.setdefault(context.recv(id).worker, []).append((id, gradients))
        passed_on: list[tuple[Key, int]] = [
            (id, worker) for worker, items in by_worker.items() for id, _ in items
        ]
        report = Report(self._me, step.done, passed_on, step.is_blocked, step.number)
        current.peers |= by_worker.keys()
        # The root last: its gradient brings the report along, which may end the pass there.
        for worker, items in sorted(by_worker.items(), key=lambda item: item[0] == settings.root):
            ids = [(id, [g is not None for g in gradients]) for id, gradients in items]
            packed = pack(tuple(_portable(g) for _, gs in items for g in gs if g is not None))
            takes_report = worker == settings.root != self._me
            head = (
                "grad",
                *self._settings_head(settings),
                ids,
                current.is_settled,
                _plain(report) if takes_report else None,
            )
            self._post(worker, head, settings, packed, must=True)
            if takes_report:
                report = None  # type: ignore[assignment]
        if report is not None:
            self._report(settings, report)

    def _report(self, settings: Settings, report: Report, failure: Failure | None = None) -> None:
        if settings.root == self._me:
            self._command(settings, self._hear(settings, report, failure, self._agent.info.name))
        else:
            self._post(
                settings.root, ("report", *self._settings_head(settings), _plain(report), failure), settings
            )

    def _tell_failure(self, settings: Settings, exc: BaseException) -> None:
        failure: Failure
        text = "".join(str(exc))  # plain, whatever its class makes of strings
        if type(exc) is AutogradError:
            failure = ("AutogradError", cut(text))
        elif type(exc) is WorkerLost and type(exc.worker) is type(exc.reason) is str:
            failure = ("WorkerLost", (exc.worker, cut(exc.reason)))
        elif isinstance(exc, UnknownContext) and exc.context_id == settings.context_id:
            failure = ("UnknownContext", settings.context_id)
        else:
            trace = "".join(traceback.format_exception(exc)).rstrip()
            failure = ("BackwardError", (self._agent.info.name, self._me, cut(text), cut(trace)))
        self._report(settings, Report(self._me, [], []), failure)

    def _post(
        self, worker: int, head: Any, settings: Settings, packed: Packed = EMPTY, *, must: bool = False
    ) -> None:
        try:
            self._agent.peer(worker).post(
                Kind.EXTENSION,
                0,
                head,
                packed,
                depth=current_depth() + 1,
                deadline=self._agent.soon(),
                soon=True,
            )
        except RpcError as exc:
            if must:
                raise
            if settings.root == self._me:
                tracker = self._trackers.get(settings.id)
                if tracker is not None:
                    tracker.fail(exc)

    # -- messages ---------------------------------------------------------------------------------------

    @staticmethod
    def _settings_head(settings: Settings) -> tuple[PassId, int, bool, bool, str, int]:
        return (
            settings.id,
            settings.context_id,
            settings.retain_graph,
            settings.create_graph,
            settings.mode,
            settings.oldest,
        )

    def _on_grad(
        self,
        message: Message,
        settings: Settings,
        ids: list[tuple[int, list[bool]]],
        is_settled: bool,
        report: Report | None,
    ) -> None:
        try:
            gradients = iter(message.open(self._agent.trust)[1])
            context = self._link.get(settings.context_id)
            fires = []
            for id, present in ids:
                send = context.sends.get(id)
                if send is None or send.worker != message.peer.id:
                    raise AutogradError(
                        f"{message.peer.name!r} has sent a gradient for message {id}, which it has not been sent"
                    )
                given = [next(gradients) if is_there else None for is_there in present]
                fires.append(Fire(id, send.edges, send.fit(given)))
            current = self._pass(context, settings)
            if is_settled:
                current.settle()
        except BaseException as exc:
            self._tell_failure(settings, exc)
            _pass_on_interrupts(exc)
            return
        self._fire(current, fires)
        if report is not None:
            self._command(settings, self._hear(settings, report, None, message.peer.name))

    def _hear(
        self, settings: Settings, report: Report, failure: Failure | None, teller: str
    ) -> list[Command]:
        tracker = self._trackers.get(settings.id)
        if tracker is None or tracker.settings != settings:  # it has not been in this pass
            return []
        if failure is not None:
            tracker.fail(self._rebuild(failure, teller))
        commands = tracker.report(report)
        for _, worker in report.passed_on:
            # It may have been lost before it was known to take part.
            if worker != self._me and not self._agent.is_present(worker):
                tracker.fail(self._loss_of(worker, settings.context_id))
        return commands

    def _on_wave(self, message: Message, settings: Settings, key: Key, sends: list[int] | None) -> None:
        """The wave starts here, or comes through: `sends` of this worker's will fire."""
        try:
            context = self._link.get(settings.context_id)
            for id in sends or ():
                send = context.sends.get(id)
                if send is not None and send.worker != message.peer.id:
                    raise AutogradError(
                        f"{message.peer.name!r} says that message {id} will have a gradient, which it has not been sent"
                    )
            current = self._pass(context, settings)
            by_worker: dict[int, list[int]] = {}
            for id in current.mark(sends):
                by_worker.setdefault(context.recv(id).worker, []).append(id)
            current.peers |= by_worker.keys()
            passed_on: list[tuple[Key, int]] = []
            for worker, ids in by_worker.items():
                onward = ("mark", self._me, next(self._numbers))
                passed_on.append((onward, worker))
                self._post(worker, ("wave", *self._settings_head(settings), onward, ids), settings, must=True)
            self._report(settings, Report(self._me, [key], passed_on))
        except BaseException as exc:
            self._tell_failure(settings, exc)

    def _on_settle(self, message: Message, settings: Settings, key: Key, _: None) -> None:
        try:
            current = self._pass(self._link.get(settings.context_id), settings)
        except UnknownContext as exc:
            self._tell_failure(settings, exc)
            return
        current.settle()
        self._fire(current, [Fire(key)])

    def _on_abort(self, message: Message, settings: Settings) -> None:
        context = self._link.find(settings.context_id)
        if context is not None and self._may_abort(context, settings, message.peer.id):
            for worker in self._end(context, settings) - {settings.root, self._me}:
                self._post(worker, ("abort", *self._settings_head(settings)), settings)
        if message.call_id:
            self._agent.service.answer(message, None)

    @staticmethod
    def _may_abort(context: Context, settings: Settings, worker: int) -> bool:
        """The root may end a pass, and so may those who pass its word on: a pass comes from where tensors have gone."""
        with context.lock:
            return worker == settings.root or any(send.worker == worker for send in context.sends.values())

    def _rebuild(self, failure: Failure, teller: str) -> BaseException:
        kind, what = failure
        if kind == "WorkerLost":
            worker, reason = what
            if self._agent.links.has(worker):  # hearsay, so far
                reason = f"{reason} (so says worker {teller!r})"
            return WorkerLost(worker, reason)
        if kind == "UnknownContext":
            return UnknownContext(what)
        if kind == "BackwardError":
            worker, rank, text, trace = what
            error = BackwardError(worker, rank, text)
            error.remote_worker, error.remote_traceback = worker, trace
            error.__cause__ = RemoteTraceback(worker, trace)
            return error
        return AutogradError(str(what))


def _pass_on_interrupts(exc: BaseException) -> None:
    """Ctrl-C is for the thread that it has met, too."""
    if not isinstance(exc, Exception):
        raise exc


def _plain(report: Report) -> tuple[Any, ...]:
    return report.worker, report.done, report.passed_on, report.is_blocked, report.number


def _portable(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients travel through CPU memory; the receiver puts them where the tensor was."""
    return gradient.detach() if gradient.device.type == "cpu" else gradient.detach().cpu()
