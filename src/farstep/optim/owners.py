"""One message to each owner of parameters, all at once, and this worker's own share while the others work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from farstep.autograd.link import current_id
from farstep.rpc.current import running, serving
from farstep.rpc.membership import WorkerInfo

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.calls import SyncCall

__all__ = ["Outcome", "ask_owners"]


@dataclass
class Outcome:
    """What each owner answered, and what went wrong with the others."""

    results: dict[WorkerInfo, Any] = field(default_factory=dict)
    errors: dict[WorkerInfo, Exception] = field(default_factory=dict)

    def first_error(self) -> Exception | None:
        return next(iter(self.errors.values()), None)


def ask_owners(
    agent: Agent, function: Callable[..., Any], args: Mapping[WorkerInfo, tuple[Any, ...]], timeout_s: float
) -> Outcome:
    """Run `function(*args[owner])` on every owner, and wait until each has answered or failed."""
    outcome = Outcome()
    begun: dict[WorkerInfo, SyncCall] = {}
    with _outside_contexts():
        for owner, each in args.items():
            if owner.id != agent.info.id:
                try:
                    begun[owner] = agent.begin_sync(owner, function, each, {}, timeout_s)
                except Exception as exc:
                    outcome.errors[owner] = exc
        for own in args.keys() - begun.keys() - outcome.errors.keys():
            _note(outcome, own, partial(_run_here, agent, function, args[own]))
        for owner, call in begun.items():
            _note(outcome, owner, partial(agent.answer_to, call), is_remote=True)
    return outcome


def _note(outcome: Outcome, owner: WorkerInfo, run: Callable[[], Any], *, is_remote: bool = False) -> None:
    try:
        outcome.results[owner] = run()
    except Exception as exc:
        # A remote error brings its own traceback as its cause; these frames would only keep things alive.
        outcome.errors[owner] = exc.with_traceback(None) if is_remote else exc


def _run_here(agent: Agent, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    token, before = serving.set(agent), running.caller
    running.caller = agent.info.id
    try:
        return function(*args)
    finally:
        running.caller = before
        serving.reset(token)


@contextmanager
def _outside_contexts() -> Iterator[None]:
    """These messages are no part of a forward pass: they take no context to workers that it has not reached."""
    token = current_id.set(None)
    try:
        yield
    finally:
        current_id.reset(token)
