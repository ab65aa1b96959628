"""The names of torch.distributed.autograd, with the same arguments and meanings, and what it never had."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType

import torch

from farstep.autograd.context import Context
from farstep.autograd.gradients import add
from farstep.autograd.heads import MODES
from farstep.autograd.link import Link, current_id, link_of
from farstep.errors import AutogradError, FarstepError
from farstep.rpc.current import current_agent
from farstep.rpc.options import UNSET_RPC_TIMEOUT
from farstep.rpc.reactor import current_depth

__all__ = ["backward", "backward_async", "context", "get_gradients", "populate_grad"]


class context:
    """A forward pass and its backward: `with context() as context_id`.

    Calls inside take the context to other workers. At the end it is released on all of them, and that is waited for.
    """

    def __init__(self) -> None:
        self._link: Link | None = None
        self._id = -1

    def __enter__(self) -> int:
        self._link = _link()
        self._id = _new_context().id
        return self._id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_id.set(None)
        link, self._link = self._link, None
        if link is not None and link.find(self._id) is not None:
            link.release(self._id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: str = "smart",
    create_graph: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Compute the gradients of all leaves that the roots depend on, on whichever worker they are.

    They gather in the context, on the leaf's worker: see `get_gradients`. `mode` "smart" is right for any program; "fast" counts on
    every tensor that crossed workers being used, and raises where one is not. `timeout` is how many seconds
    nothing may be heard from any worker (0: for ever); without it, that of calls.
    """
    seconds = current_agent().effective_timeout(timeout)
    _run(_link(), context_id, roots, retain_graph, mode, create_graph, seconds)


def backward_async(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: str = "smart",
    create_graph: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[None]:
    """`backward` as a future. The arguments are checked at once; all else happens on other threads."""
    link, agent = _link(), current_agent()
    seconds = agent.effective_timeout(timeout)
    _check(link, context_id, roots, mode)
    future: torch.futures.Future[None] = torch.futures.Future()
    id = current_id.get()

    def run() -> None:
        current_id.set(id)
        try:
            _run(link, context_id, roots, retain_graph, mode, create_graph, seconds)
        except Exception as exc:
            future.set_exception(exc)  # type: ignore[arg-type]
        else:
            future.set_result(None)
        finally:
            current_id.set(None)

    agent.submit(current_depth() + 1, run)
    return future


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that the context holds on this worker: leaf -> gradient."""
    return _link().get(context_id).gradients.snapshot()


def populate_grad(context_id: int) -> None:
    """Add the context's gradients to `.grad`, on every worker that it reached, so that ordinary optimizers can step."""
    agent, link = current_agent(), _link()
    _populate_here(context_id)
    found = link.get(context_id)
    seen, todo = {agent.info.id}, {found.opener, *found._known_worker_ids()}
    while todo := todo - seen:
        seen |= todo
        futures = [
            agent.call_async(worker, _populate_here, (context_id,), {}, UNSET_RPC_TIMEOUT) for worker in todo
        ]
        todo = set().union(*(future.wait() for future in futures))


_populating = threading.Lock()
"""Several trainers may populate the same parameters at once."""


def _populate_here(context_id: int) -> set[int]:
    context = _link().get(context_id)
    with _populating:
        for leaf, gradient in context.gradients.snapshot().items():
            leaf.grad = gradient.detach().clone() if leaf.grad is None else add(leaf.grad, gradient.detach())
    return context._known_worker_ids()


def _run(
    link: Link,
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool,
    mode: str,
    create_graph: bool,
    timeout_s: float,
) -> None:
    found = _check(link, context_id, roots, mode)
    tracker = link.conductor.begin(context_id, bool(retain_graph), bool(create_graph), mode)
    try:
        link.conductor.start(tracker, found, roots)
        link.conductor.wait(tracker, min(timeout_s, threading.TIMEOUT_MAX))
    except BaseException:  # Ctrl-C, on the main thread
        tracker.fail(AutogradError("backward was interrupted"))
        with contextlib.suppress(FarstepError):
            link.conductor.finish(tracker)
        raise
    link.conductor.finish(tracker)


def _check(link: Link, context_id: int, roots: Sequence[torch.Tensor], mode: str) -> Context:
    if (
        isinstance(context_id, bool)
        or not isinstance(context_id, int)
        or not isinstance(roots, list | tuple)
        or not all(isinstance(root, torch.Tensor) for root in roots)
    ):
        raise TypeError(
            f"backward(): incompatible function arguments: a context's id and a list of tensors are wanted, not "
            f"{type(context_id).__name__} and {type(roots).__name__}"
        )
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    found = link.get(context_id)
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not root.requires_grad:
            raise AutogradError(f"requires_grad not set on root {number}")
        if root.numel() != 1:
            raise AutogradError(f"root {number} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise AutogradError(f"root {number} does not have a valid gradient function")
    return found


def _link() -> Link:
    return link_of(current_agent())


# -- the helpers that torch's own tests use


def _new_context() -> Context:
    if current_id.get() is not None:
        raise AutogradError(
            f"Already have an autograd context id for this thread: {current_id.get()}. Contexts nest in different threads only"
        )
    opened = _link().open()
    current_id.set(opened.id)
    return opened


def _release_context(context_id: int) -> None:
    if current_id.get() == context_id:
        current_id.set(None)
    _link().release(context_id)


def _current_context() -> Context:
    found = _link().current()
    if found is None:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
        )
    return found


def _retrieve_context(context_id: int) -> Context:
    return _link().get(context_id)


def _is_valid_context(context_id: int) -> bool:
    return _link().find(context_id) is not None


def _get_max_id() -> int:
    return _link().max_id()


def _init(worker_id: int) -> None:
    """Torch's own must be told its rank; an agent knows it."""


def _get_debug_info() -> dict[str, str]:
    link = _link()
    return {
        "num_current_backward_passes": str(link.conductor.running),
        "num_autograd_contexts": str(len(link.contexts())),
    }


def backward_of_reference(context_id: int, value: torch.Tensor, retain_graph: bool) -> None:
    """RRef.backward in a context, on the owner, which has looked at the value."""
    backward(context_id, [value], retain_graph)
