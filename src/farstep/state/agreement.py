"""Before anything is sent: does every rank expect what the others are about to send it?"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import ExchangeError, StateError
from farstep.state.local import Local
from farstep.state.sweep import Ints

__all__ = ["agree"]

_READY, _FAILED = 0, 1
SAME = (
    "All ranks are to give the same layouts and the same budget_bytes. What only one rank shall hold is given on all of them: "
    "on_rank(tensor, 0), with a tensor on the meta device elsewhere"
)


def agree(
    local: Local | None,
    failure: StateError | None,
    message_bytes: int,
    rank: int,
    ranks: int,
    group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    name: Callable[[int], str],
) -> None:
    """Each tells each what it will send it, or that it cannot begin. Raises ExchangeError if that is not what is expected.

    If this rank is the one that cannot begin, its failure is raised, once the others know.
    """
    told = torch.zeros(ranks, 4, dtype=torch.int64)
    if failure is not None or local is None:
        told[:, 0] = _FAILED
    else:
        for peer, rows in local.sent.items():
            told[peer, 1:] = torch.tensor(_digest(local, rows, message_bytes))
    heard = torch.empty_like(told)
    try:
        work = dist.all_to_all_single(heard, told, group=group, async_op=True)
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as exc:
        raise ExchangeError(f"rank {rank} could not compare plans with the other ranks: {exc}") from exc
    if failure is not None:
        raise failure
    assert local is not None
    failed = [peer for peer in range(ranks) if heard[peer, 0] == _FAILED]
    if failed:
        raise ExchangeError(
            f"nothing was exchanged, because {', '.join(map(name, failed))} could not begin; see the error there"
        )
    wrong = _mismatch(local, heard, message_bytes, rank, ranks, name)
    # Of two ranks that differ only the one that is to receive sees it; and the others would begin.
    found = torch.tensor([wrong is not None], dtype=torch.int64)
    try:
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=group, async_op=True)
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as exc:
        raise ExchangeError(f"rank {rank} could not compare plans with the other ranks: {exc}") from exc
    if wrong is not None:
        raise ExchangeError(f"nothing was exchanged: {wrong}. {SAME}")
    if found.item():
        raise ExchangeError(
            f"nothing was exchanged: other ranks do not expect the same; see the errors there. {SAME}"
        )


def _mismatch(
    local: Local, heard: Tensor, message_bytes: int, rank: int, ranks: int, name: Callable[[int], str]
) -> str | None:
    """What this rank was told by others and does not expect."""
    for peer in range(ranks):
        expected = (0, 0, 0)
        if peer in local.received:
            expected = _digest(local, local.received[peer], message_bytes)
        if tuple(heard[peer, 1:].tolist()) != expected:
            count, nbytes, _ = heard[peer, 1:].tolist()
            return (
                f"{name(peer)} would send {count} regions of {nbytes:,} bytes to {name(rank)}, which expects "
                f"{expected[0]} of {expected[1]:,}"
            )
    return None


def _digest(local: Local, rows: Ints, message_bytes: int) -> tuple[int, int, int]:
    """Number, bytes and checksum of regions that go from one rank to another."""
    plan = local.plan
    tensors = np.unique(plan.tensor[rows])
    labels = [zlib.crc32(f"{plan.names[t]} {plan.target[plan.names[t]].dtype}".encode()) for t in tensors]
    label = np.array(labels, dtype=np.int64)[np.searchsorted(tensors, plan.tensor[rows])]
    table = np.column_stack([label, plan.offsets[rows], plan.sizes[rows]])
    return len(rows), int(plan.nbytes[rows].sum()), zlib.crc32(table.tobytes(), message_bytes & 0xFFFFFFFF)
