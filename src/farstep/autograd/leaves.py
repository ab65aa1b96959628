"""Leaves: what torch's own backward would do at them, done for a gradient that must not go to `.grad`.

Torch's engine hands out a leaf's gradient after the hooks on the tensor, and does not run the node behind it
(AccumulateGrad). The hooks on that node are run here. Parameters in DistributedDataParallel are the exception: its reducer
must see the real node run, so they are let accumulate, and `.grad` is put back as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from farstep.autograd.locks import ParameterLocks, held
from farstep.autograd.reduced import is_reduced
from farstep.errors import AutogradError

__all__ = ["accumulate_for_real", "has_hooks", "lifted", "node_hooks", "run_node_hooks"]

_locks = ParameterLocks(reentrant=True)
PATIENCE_S = 1800.0
"""A reducer waits for all ranks, as long as its process group lets it."""


def _nothing(*_: Any) -> None:
    pass


def node_hooks(node: Node) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks that `register_prehook` and `register_hook` have put on a node, as they are kept.

    A node does not show its hooks; but a handle of one more hook shows the dict that it shares with the others.
    """
    probe = node.register_prehook(_nothing)
    before: Any = probe.hooks_dict_ref()
    del before[probe.id]  # as probe.remove() does, in a fifth of the time
    probe = node.register_hook(_nothing)
    after: Any = probe.hooks_dict_ref()
    del after[probe.id]
    return before, after


def run_node_hooks(node: Node, gradient: torch.Tensor) -> torch.Tensor | None:
    """What AccumulateGrad would have been given, with its hooks run; None where a hook took the gradient away."""
    before, after = node_hooks(node)
    if not (before or after):
        return gradient
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
    return bool(node.variable._backward_hooks) or any(node_hooks(node))


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
