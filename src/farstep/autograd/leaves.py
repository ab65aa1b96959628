"""Leaves: what torch's own backward would do at them, done for a gradient that must not go to `.grad`.

Torch's engine hands out a leaf's gradient after the hooks on the tensor, and does not run the node behind it
(AccumulateGrad). The hooks on that node are run here. Parameters in DistributedDataParallel are the exception: its reducer
must see the real node run, so they are let accumulate, and `.grad` is put back as it was.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from farstep.autograd.locks import ParameterLocks, held
from farstep.autograd.reduced import is_reduced
from farstep.errors import AutogradError

__all__ = ["accumulate_for_real", "has_hooks", "lifted", "node_hooks", "nodes_have_hooks", "run_node_hooks"]

_locks = ParameterLocks(reentrant=True)
PATIENCE_S = 1800.0
"""A reducer waits for all ranks, as long as its process group lets it."""


def _nothing(*_: Any) -> None:
    pass


class _Unhooked:
    """The leaves that are known to have no hooks on their nodes.

    To see a node's hooks takes longer than to compute a small gradient. But every hook that is registered anywhere, on a node, a tensor or a
    module, is numbered by one counter of torch's. A leaf whose node had no hooks when the counter stood where it stands
    now has none now, be its node the same one or a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._as_of = -1

    def all_known(self, leaves: list[torch.Tensor]) -> bool:
        if self._as_of != RemovableHandle.next_id:
            return False
        for leaf in leaves:
            known = self._leaves.get(id(leaf))
            if known is None or known() is not leaf:
                return False
        return True

    def looked(self, before: int) -> None:
        """A node has been looked at, which moved the counter on from `before`."""
        with self._lock:
            if self._as_of == before and RemovableHandle.next_id == before + HOOKS_TO_LOOK:
                self._as_of += HOOKS_TO_LOOK

    def add(self, leaves: list[torch.Tensor], before: int) -> None:
        """These have none: each has been looked at since the counter stood at `before`."""
        with self._lock:
            now = RemovableHandle.next_id
            if now != before + HOOKS_TO_LOOK * len(leaves):
                return  # somebody has registered a hook meanwhile
            if self._as_of != now:
                self._leaves.clear()
                self._as_of = now
            for leaf in leaves:
                key = id(leaf)
                self._leaves[key] = weakref.ref(leaf, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self._leaves.pop(key, None)


HOOKS_TO_LOOK: Final = 2
_unhooked = _Unhooked()


def node_hooks(node: Node) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks that `register_prehook` and `register_hook` have put on a node, as they are kept.

    A node does not show its hooks; but a handle of one more hook shows the dict that it shares with the others.
    """
    counter = RemovableHandle.next_id
    probe = node.register_prehook(_nothing)
    before: Any = probe.hooks_dict_ref()
    del before[probe.id]  # as probe.remove() does, in a fifth of the time
    probe = node.register_hook(_nothing)
    after: Any = probe.hooks_dict_ref()
    del after[probe.id]
    _unhooked.looked(counter)
    return before, after


def nodes_have_hooks(nodes: list[Any]) -> bool:
    """Whether any of these leaves' nodes has hooks."""
    leaves = [node.variable for node in nodes]
    if _unhooked.all_known(leaves):
        return False
    counter = RemovableHandle.next_id
    if any(any(node_hooks(node)) for node in nodes):
        return True
    _unhooked.add(leaves, counter)
    return False


def run_node_hooks(node: Node, gradient: torch.Tensor) -> torch.Tensor | None:
    """What AccumulateGrad would have been given, with its hooks run; None where a hook took the gradient away."""
    before, after = node_hooks(node)
    for hook in list(before.values()):
        changed = hook((gradient,))
        if changed is not None:
            gradient = changed[0] if isinstance(changed, tuple) else changed
            if gradient is None:
                return None
    for hook in list(after.values()):
        hook((), (gradient,))
    return gradient


def has_hooks(node: Any) -> bool:
    """Whether a leaf's gradient must be whole before anybody may see it."""
    return bool(node.variable._backward_hooks) or nodes_have_hooks([node])


class lifted:
    """While this is entered, the hooks on the leaves `lift` do not run: they will when AccumulateGrad itself does.

    Whoever runs the hooks of such leaves enters it too, so that nobody lifts them meanwhile; of other leaves none is ever lifted.
    """

    def __init__(self, lift: list[torch.Tensor], hooked: list[torch.Tensor]) -> None:
        self._lift = lift
        self._guarded = lift + [leaf for leaf in hooked if is_reduced(leaf)]
        self._kept: list[tuple[Any, dict[Any, Any]]] = []
        self._held = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._guarded:
            locks = _locks.of(self._guarded)
            self._held.enter_context(held(locks, "backward with hooks on leaves", PATIENCE_S, AutogradError))
            for leaf in self._lift:
                hooks: Any = leaf._backward_hooks
                self._kept.append((hooks, dict(hooks)))
                hooks.clear()

    def __exit__(self, *_: object) -> None:
        if self._guarded:
            for hooks, kept in self._kept:
                added = dict(hooks)
                hooks.clear()
                hooks.update(kept)
                hooks.update(added)
            self._held.close()


def accumulate_for_real(found: list[tuple[Any, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run AccumulateGrad itself for these leaves, take what it left in `.grad`, and put back what was there before."""
    leaves = [node.variable for node, _ in found]
    with held(_locks.of(leaves), "backward of DistributedDataParallel", PATIENCE_S, AutogradError):
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch.autograd.backward([GradientEdge(node, 0) for node, _ in found], [g for _, g in found])
            return [(leaf, leaf.grad.clone()) for leaf in leaves if leaf.grad is not None]
        finally:
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad
