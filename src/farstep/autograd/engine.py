"""Running a part of the local graph, and saying what came out of it.

Gradient that has reached a node waits there as a *part* until the node may run. Torch's engine then runs the nodes that may, from
these parts to the ends among them: leaves and recvs. Where all that is below may run too, that is one call.

Otherwise there is a *border*: nodes below that may not run yet, where parts must wait on. The engine cannot stop there. It runs every node
from which it reaches something that it was asked for, so, asked for two nodes of the border, it would run the upper to
get to the lower; it leaves out gradients that lead to nothing it was asked for; and it runs the hooks of what it hands out,
which here is a part only. So the nodes from which gradient flows over the border, the *ferries*, are run by hand, one by one, in the
order of the graph. The engine runs what is between them, in layers: a layer ends above the next ferries, each of which gets all
of its gradient, after its hooks, as any node does. Every node runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from farstep.autograd import leaves
from farstep.autograd.adapters import input_count, run_engine, run_node
from farstep.autograd.gradients import add
from farstep.autograd.segments import ACCUMULATE, ENDS, RECEIVE

__all__ = ["Outcome", "Parts", "Rules", "run", "takes_parts"]

Place = tuple[Any, int]
"""A node and the number of one of its inputs."""
Parts = dict[Place, torch.Tensor]
"""Gradient that has arrived somewhere so far."""


@dataclass
class Outcome:
    """What a run gave."""

    leaves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    reduced: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    """Leaves of DistributedDataParallel: the node and its gradient, before any hook."""
    recvs: list[tuple[Any, list[torch.Tensor | None]]] = field(default_factory=list)
    """The node of a recv, and the gradients of its outputs."""


@dataclass(frozen=True)
class Rules:
    """What holds for the whole of a pass."""

    retain_graph: bool
    create_graph: bool
    reduced: dict[torch.Tensor, int]


def takes_parts(node: Any, reduced: dict[torch.Tensor, int]) -> bool:
    """Whether it does not matter when gradient arrives there: a leaf that nobody watches is a sum."""
    return (
        type(node) is ACCUMULATE and not (reduced and node.variable in reduced) and not leaves.has_hooks(node)
    )


def run(nodes: list[Node], parts: Parts, rules: Rules, *, may_have_border: bool = True) -> Outcome:
    """Run these nodes, given from top to bottom, from the parts that wait at them, which are used up; parts at the border are added."""
    outcome = Outcome()
    left: list[Any] = nodes
    if not may_have_border:
        _run_layer(left, [], list(parts), parts, rules, outcome)
        return outcome
    members: set[Any] = set(nodes)
    while left:
        layer, ferries, left = _first_layer(left, members)
        inside = set(layer) if left or ferries else members
        starts = [place for place in parts if place[0] in inside]
        _run_layer(layer, ferries, starts, parts, rules, outcome)
    return outcome


def _first_layer(nodes: list[Any], members: set[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The nodes down to the first ferries, the ferries among them, and what is left below."""
    ferries = {
        node
        for node in nodes
        if type(node) not in ENDS and any(b is not None and b not in members for b, _ in node.next_functions)
    }
    if not ferries:
        return nodes, [], []
    while True:
        lower: set[Any] = set()
        for node in nodes:
            if type(node) not in ENDS and (node in ferries or node in lower):
                lower.update(other for other, _ in node.next_functions if other is not None)
        # A node above them all from which gradient flows past them to what is below: it must be run by hand, too.
        more = {
            node
            for node in nodes
            if node not in lower
            and node not in ferries
            and type(node) not in ENDS
            and any(other in lower for other, _ in node.next_functions)
        }
        if not more:
            break
        ferries |= more
    layer = [node for node in nodes if node not in lower]
    return layer, [node for node in layer if node in ferries], [node for node in nodes if node in lower]


def _run_layer(
    layer: list[Any], ferries: list[Any], starts: list[Place], parts: Parts, rules: Rules, outcome: Outcome
) -> None:
    gradients = [parts.pop(place) for place in starts]
    recvs, whole = [], []
    for node in layer:
        kind = type(node)
        if kind is ACCUMULATE:
            whole.append(node)
        elif kind is RECEIVE:
            recvs.append(node)
    places = [GradientEdge(node, number) for node in recvs for number in range(node.outputs)]
    places += [GradientEdge(node, 0) for node in whole]
    places += [GradientEdge(node, number) for node in ferries for number in range(input_count(node))]
    results: Sequence[torch.Tensor | None] = [None] * len(places)
    if starts and places:
        with _guarded([node.variable for node in whole], rules):
            results = run_engine(
                tuple([GradientEdge(node, number) for node, number in starts]),
                tuple(gradients),
                tuple(places),
                retain_graph=rules.retain_graph or rules.create_graph,
                create_graph=rules.create_graph,
            )
    found = iter(results)
    for node in recvs:
        outcome.recvs.append((node, list(islice(found, node.outputs))))
    has_hooks = leaves.nodes_have_hooks(whole)
    for node in whole:
        gradient = next(found)
        if gradient is not None:
            _finish_leaf(node, gradient, has_hooks, rules, outcome)
    for node in ferries:
        _ferry(node, list(islice(found, input_count(node))), parts, rules, outcome)


_NOTHING_TO_GUARD = nullcontext()


def _guarded(leaves_below: list[torch.Tensor], rules: Rules) -> AbstractContextManager[None]:
    """Around a run: see `leaves.lifted`."""
    hooked = [leaf for leaf in leaves_below if leaf._backward_hooks]
    if not hooked:
        return _NOTHING_TO_GUARD
    return leaves.lifted([leaf for leaf in hooked if leaf in rules.reduced], hooked)


def _finish_leaf(node: Any, gradient: torch.Tensor, has_hooks: bool, rules: Rules, outcome: Outcome) -> None:
    leaf = node.variable
    if rules.reduced and leaf in rules.reduced:
        outcome.reduced.append((node, gradient))
        return
    whole = leaves.run_node_hooks(node, gradient) if has_hooks else gradient
    if whole is not None:
        outcome.leaves.append((leaf, whole))


def _ferry(
    node: Any, gradients: list[torch.Tensor | None], parts: Parts, rules: Rules, outcome: Outcome
) -> None:
    """Run one node by hand. What flows over its edges waits below."""
    if all(gradient is None for gradient in gradients):
        return
    before, after = leaves.node_hooks(node)
    for hook in list(before.values()):
        changed = hook(tuple(gradients))
        if changed is not None:
            gradients = list(changed) if isinstance(changed, tuple) else [changed]
    with torch.set_grad_enabled(rules.create_graph):
        flowing = run_node(node, gradients)
    for hook in list(after.values()):
        changed = hook(tuple(flowing), tuple(gradients))
        if changed is not None:
            flowing = list(changed) if isinstance(changed, tuple) else [changed]
    for gradient, (other, number) in zip(flowing, node.next_functions, strict=True):
        if gradient is None or other is None:
            continue
        if takes_parts(other, rules.reduced):
            outcome.leaves.append((other.variable, gradient))
        else:
            parts[other, number] = add(parts.get((other, number)), gradient)
