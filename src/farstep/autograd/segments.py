"""The local graph, cut into segments.

A *source* is where gradient enters this worker's graph: the roots of a pass, and each send. Number the sources; the *reach* of a node is
the set of sources from which it can be reached, as the bits of an int. Nodes with the same reach are a *segment*.
A node may run when every source of its reach has fired, and what may run at one time runs in one call of torch's
own engine, however many segments that is. So every node runs once, and the number of calls is at most the number of sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from farstep.autograd.context import receive

__all__ = ["ACCUMULATE", "ENDS", "RECEIVE", "Segments", "reached_recvs"]

ACCUMULATE: Final[Any] = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
RECEIVE: Final[Any] = type(receive(0, 0, [torch.zeros(())]))
ENDS: Final = frozenset({ACCUMULATE, RECEIVE})


class Segments:
    """Which sources reach which nodes.

    [Note: nodes in Python] While a leaf's AccumulateGrad has a Python object, torch 2.13 takes the GIL under the leaf's mutex, and a thread
    that indexes the leaf takes them in the other order: the process may freeze. So nodes are not kept longer than needed.
    """

    def __init__(self, sources: Sequence[Sequence[GradientEdge | None]]) -> None:
        self.reach: dict[Node, int] = {}
        self.waiting: dict[int, list[Node]] = {}
        """Reach -> the nodes that have it and have not run."""
        for number, edges in enumerate(sources):
            for edge in edges:
                if edge is not None:
                    self.reach[edge.node] = self.reach.get(edge.node, 0) | 1 << number
        reach = self.reach
        self._place: dict[Node, int] = {}
        if len(set(reach.values())) == 1:
            self._all_reached_alike()
            return
        order = _finish_order(list(reach))
        order.reverse()
        for place, node in enumerate(order):
            mine = reach[node]
            self._place[node] = place
            self.waiting.setdefault(mine, []).append(node)
            if type(node) not in ENDS:
                for other, _ in node.next_functions:
                    if other is not None:
                        reach[other] = reach.get(other, 0) | mine

    def _all_reached_alike(self) -> None:
        """The usual case of one source: one segment, which needs no order."""
        (mine,) = set(self.reach.values())
        self.waiting[mine] = _below(self.reach)

    def take(self, fired: int, expected: int) -> list[Node]:
        """The nodes that may run now: all that is expected to reach them has fired, and something has.

        Each is given out once; those above before those below, unless they are all that is left.
        """
        ready = [reach for reach in self.waiting if reach & fired and not reach & expected & ~fired]
        taken = [node for reach in ready for node in self.waiting.pop(reach)]
        if len(ready) > 1:
            taken.sort(key=self._place.__getitem__)
        if not self.waiting:
            self.reach, self._place = {}, {}  # see [Note: nodes in Python]
        return taken


def _below(starts: Iterable[Node]) -> list[Node]:
    """All nodes below, in any order."""
    seen = dict.fromkeys(starts)
    stack: list[Any] = list(seen)
    while stack:
        node = stack.pop()
        if type(node) not in ENDS:
            for other, _ in node.next_functions:
                if other is not None and other not in seen:
                    seen[other] = None
                    stack.append(other)
    return list(seen)


def _finish_order(starts: Iterable[Node]) -> list[Node]:
    """All nodes below, each after everything that is below it."""
    order: list[Node] = []
    is_finished: dict[Node, bool] = {}
    stack: list[Any] = list(starts)
    while stack:
        node = stack[-1]
        state = is_finished.get(node)
        if state is None:
            is_finished[node] = False
            if type(node) not in ENDS:
                for other, _ in node.next_functions:
                    if other is not None and other not in is_finished:
                        stack.append(other)
        else:
            stack.pop()
            if not state:
                is_finished[node] = True
                order.append(node)
    return order


def reached_recvs(starts: Iterable[Node], seen: set[Node]) -> list[tuple[int, int]]:
    """`where` of every recv below, past nodes that were not seen before. Adds to `seen`."""
    found = []
    stack: list[Any] = [node for node in starts if node not in seen]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node) is RECEIVE:
            found.append(node.where)
        elif type(node) is not ACCUMULATE:
            stack.extend(other for other, _ in node.next_functions if other is not None)
    return found
