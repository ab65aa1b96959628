"""What a context's graph looks like, over all workers: as plain data, and as a picture.

Each worker knows its own part only. The one that asks goes from worker to worker, as far as the context has come, and puts the
parts together. Looking changes nothing, and may be done before backward, after it, and when a worker is lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from farstep.autograd import svg
from farstep.autograd.context import COUNTER_BITS, Context, Recv, Send
from farstep.autograd.link import current_id, link_of
from farstep.autograd.segments import ACCUMULATE, RECEIVE, Segments
from farstep.errors import WorkerLost
from farstep.rpc.current import current_agent
from farstep.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent

__all__ = ["draw", "graph"]

Data = dict[str, Any]


def graph(context_id: int) -> Data:
    """The graph of a context on all workers that it has reached, as plain data: dicts, lists, strings and numbers.

        context, opener   its id, and the rank of the worker that opened it
        lost              names of workers that had a part in it and are lost
        edges             messages with tensors that require a gradient: id, from, to (ranks), tensors, bytes, and
                          received: whether the receiver has noted it
        workers           by rank; one that is lost, or has no part in it yet or any more, has empty lists
            rank, name
            sends, recvs  in order: id, peer (a rank), tensors (how many), shapes, dtypes, bytes
            nodes         how many functions the sends depend on, here; leaves and recvs are not among them
            segments      what the same sends depend on: sends and recvs (ids), nodes and leaves (how many)
            leaves        shape, dtype, has_gradient (so far, in this context), and segment: its number, or None for one that
                          no send depends on. Such leaves are known once they have a gradient

    Shapes and dtypes that cannot be told are None. A wait for a worker's answer is as long as for any call.
    """
    agent = current_agent()
    mine = _describe(link_of(agent).get(context_id))
    token = current_id.set(None)  # asking is not a part of the forward pass
    try:
        parts, lost = _gather(agent, context_id, mine)
    finally:
        current_id.reset(token)
    peers = {message["peer"] for part in parts.values() for message in (*part["sends"], *part["recvs"])}
    workers = {
        rank: _worker(agent, rank, parts.get(rank)) for rank in sorted(parts.keys() | lost.keys() | peers)
    }
    return {
        "context": context_id,
        "opener": context_id >> COUNTER_BITS,
        "lost": [lost[rank] for rank in sorted(lost)],
        "workers": list(workers.values()),
        "edges": _edges(workers),
    }


def draw(context_id: int, path: str | os.PathLike[str]) -> None:
    """Draw the graph of a context into an SVG file: a lane for each worker, messages from left to right.

    Boxes are the parts of a worker's graph, as `graph` counts them. The path ends in .svg.
    """
    target = Path(path)
    if target.suffix != ".svg":
        raise ValueError(f"draw() writes SVG, to a path that ends in .svg, not {str(path)!r}")
    target.write_text(svg.render(graph(context_id)), encoding="utf-8")


def _gather(agent: Agent, context_id: int, mine: Data) -> tuple[dict[int, Data], dict[int, str]]:
    """The parts by rank, and the names of lost workers. All workers that are as far away are asked at the same time."""
    me = agent.info.id
    parts: dict[int, Data] = {me: mine}
    lost: dict[int, str] = {}
    seen, todo = {me}, set(mine["neighbours"])
    while todo := todo - seen:
        seen |= todo
        futures = [
            (rank, agent.call_async(rank, _describe_here, (context_id,), {}, UNSET_RPC_TIMEOUT))
            for rank in sorted(todo)
        ]
        todo = set()
        for rank, future in futures:
            try:
                part = future.wait()
            except WorkerLost as exc:
                lost[rank] = exc.worker
                todo |= {info.id for info in agent.get_worker_infos()}  # it may have known of others
            else:
                if part is not None:
                    parts[rank] = part
                    todo |= set(part["neighbours"])
    return parts, lost


def _worker(agent: Agent, rank: int, part: Data | None) -> Data:
    known = part or {"sends": [], "recvs": [], "nodes": 0, "segments": [], "leaves": []}
    named = {"rank": rank, "name": agent.get_worker_info(rank).name, **known}
    named.pop("neighbours", None)
    return named


def _edges(workers: dict[int, Data]) -> list[Data]:
    """Every message once, by its id, from whichever of its two ends is known."""
    found: dict[int, Data] = {}
    for rank, worker in workers.items():
        for send in worker["sends"]:
            found[send["id"]] = _edge(send, rank, send["peer"], False)
    for rank, worker in workers.items():
        for recv in worker["recvs"]:
            found[recv["id"]] = _edge(recv, recv["peer"], rank, True)
    return [found[id] for id in sorted(found)]


def _edge(message: Data, sender: int, receiver: int, received: bool) -> Data:
    return {
        "id": message["id"],
        "from": sender,
        "to": receiver,
        "tensors": message["tensors"],
        "bytes": message["bytes"],
        "received": received,
    }


# -- on each worker


def _describe_here(context_id: int) -> Data | None:
    """Called by the worker that asks. None: this one has no part in the context, or none any more."""
    context = link_of(current_agent()).find(context_id)
    return None if context is None else _describe(context)


def _describe(context: Context) -> Data:
    with context.lock:
        sends = [context.sends[id] for id in sorted(context.sends)]
        recvs = list(context.recvs.values())
        near = {context.opener, *context.workers, *(s.worker for s in sends), *(r.worker for r in recvs)}
    segments = Segments([send.edges for send in sends])
    parts, leaves = _describe_segments(context, segments, [send.id for send in sends])
    return {
        "neighbours": sorted(near),
        "sends": [_describe_send(send) for send in sends],
        "recvs": [_describe_recv(recv) for recv in recvs],
        "nodes": sum(part["nodes"] for part in parts),
        "segments": parts,
        "leaves": leaves,
    }


def _describe_segments(context: Context, found: Segments, ids: list[int]) -> tuple[list[Data], list[Data]]:
    with_gradient = context.gradients.snapshot()
    parts: list[Data] = []
    leaves: list[Data] = []
    reached: set[torch.Tensor] = set()
    by_sends = {
        tuple(id for bit, id in enumerate(ids) if reach >> bit & 1): nodes
        for reach, nodes in found.waiting.items()
    }
    for number, sends in enumerate(sorted(by_sends)):
        nodes = by_sends[sends]
        ends: list[Any] = [node for node in nodes if type(node) is ACCUMULATE or type(node) is RECEIVE]
        variables = [node.variable for node in ends if type(node) is ACCUMULATE]
        recvs = [node.where[1] for node in ends if type(node) is RECEIVE and node.where[0] == context.id]
        parts.append(
            {
                "sends": list(sends),
                "recvs": sorted(recvs),
                "nodes": len(nodes) - len(ends),
                "leaves": len(variables),
            }
        )
        leaves += [_describe_leaf(leaf, leaf in with_gradient, number) for leaf in variables]
        reached.update(variables)
    leaves += [_describe_leaf(leaf, True, None) for leaf in with_gradient if leaf not in reached]
    return parts, leaves


def _describe_leaf(leaf: torch.Tensor, has_gradient: bool, segment: int | None) -> Data:
    return {
        "shape": list(leaf.shape),
        "dtype": _name(leaf.dtype),
        "has_gradient": has_gradient,
        "segment": segment,
    }


def _describe_send(send: Send) -> Data:
    return {
        "id": send.id,
        "peer": send.worker,
        "tensors": len(send.edges),
        "shapes": [list(shape) for shape in send.shapes],
        "dtypes": [edge and _metadata(edge.node, edge.output_nr)[1] for edge in send.edges],
        "bytes": send.nbytes,
    }


def _describe_recv(recv: Recv) -> Data:
    known = [_metadata(recv.node, number) for number in range(recv.outputs)]
    return {
        "id": recv.id,
        "peer": recv.worker,
        "tensors": recv.outputs,
        "shapes": [shape for shape, _ in known],
        "dtypes": [dtype for _, dtype in known],
        "bytes": recv.nbytes,
    }


def _metadata(node: Any, number: int) -> tuple[list[int] | None, str | None]:
    """The shape and dtype of an output of a node, where torch tells them: it does not for every kind of tensor."""
    try:
        about = node._input_metadata[number]
        return list(about.shape), _name(about.dtype)
    except (AttributeError, IndexError, RuntimeError):
        return None, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
