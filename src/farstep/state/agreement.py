"""Before anything is sent: does every rank expect what the others are about to send it? And in the end: has every rank come through?"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from farstep.dist import waiting
from farstep.errors import ExchangeError
from farstep.state.arrays import Ints
from farstep.state.kept import keep
from farstep.state.local import Local

__all__ = ["Agreement"]

_READY, _FAILED = 0, 1
_TEXT_BYTES = 2048
SAME = (
    "All ranks are to give the same layouts and the same budget_bytes and same_host. What only one rank shall hold is given on all of them: "
    "on_rank(tensor, 0), with a tensor on the meta device elsewhere"
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ranks of a group, which do the same or nothing. `name` is how an error calls one of them."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    name: Callable[[int], str]

    def begin(self, local: Local | None, failure: Exception | None, settings: int) -> None:
        """Each tells each what it will send it, or that it cannot begin.

        Raises ExchangeError if others cannot begin, or if that is not what is expected. A failure of this rank is raised once the others
        know. `settings` has to be the same everywhere.
        """
        told = torch.zeros(self.ranks, 5, dtype=torch.int64)
        told[:, 0] = _READY if failure is None else _FAILED
        told[:, 1] = settings
        if local is not None:
            for peer, rows in local.sent.items():
                told[peer, 2:] = torch.tensor(_digest(local, rows))
        heard = torch.empty_like(told)
        self._all_to_all(heard, told, "comparing plans")
        self._raise_failures(heard[:, 0], failure, "nothing was exchanged, because {} could not begin")
        assert local is not None
        wrong = self._mismatch(local, heard[:, 1:], settings)
        # Of two ranks that differ only the one that is to receive sees it; and the others would begin.
        any_wrong = torch.tensor([wrong is not None], dtype=torch.int64)
        keep(any_wrong)
        with waiting(self.group, "comparing plans"):
            dist.all_reduce(any_wrong, dist.ReduceOp.MAX, self.group)
        if wrong is not None:
            raise ExchangeError(f"nothing was exchanged: {wrong}. {SAME}")
        if any_wrong.item():
            raise ExchangeError(
                f"nothing was exchanged: other ranks do not expect the same; see the errors there. {SAME}"
            )

    def end(self, failure: Exception | None) -> None:
        """All have come through, or all raise.

        Each hears from each. So one that is lost, or that has given up and closed its connections, is noticed by all at once.
        """
        told = torch.full((self.ranks,), _READY if failure is None else _FAILED, dtype=torch.int64)
        heard = torch.empty_like(told)
        try:
            self._all_to_all(heard, told, "hearing whether all ranks came through")
            self._raise_failures(
                heard, failure, "{} failed in the exchange, and targets may be partly written"
            )
        except ExchangeError:
            if failure is not None:
                raise failure from None
            raise

    def _raise_failures(self, heard: Tensor, failure: Exception | None, what: str) -> None:
        failed = [peer for peer, status in enumerate(heard.tolist()) if status == _FAILED]
        if not failed:
            return
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if failure is not None:
            told = f"{type(failure).__name__}: {failure}".encode()[:_TEXT_BYTES]
            mine[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        keep(mine, *every)
        with waiting(self.group, "hearing why a rank failed"):
            dist.all_gather(every, mine, self.group)
        if failure is not None:
            raise failure
        text = bytes(every[failed[0]].tolist()).rstrip(b"\0").decode(errors="replace")
        raise ExchangeError(f"{what.format(', '.join(map(self.name, failed)))}: {text}")

    def _all_to_all(self, heard: Tensor, told: Tensor, what: str) -> None:
        keep(heard, told)
        with waiting(self.group, what):
            dist.all_to_all_single(heard, told, group=self.group)

    def _mismatch(self, local: Local, heard: Tensor, settings: int) -> str | None:
        """What this rank was told by others and does not expect."""
        for peer, (theirs, *sent) in enumerate(heard.tolist()):
            if theirs != settings:
                return f"{self.name(peer)} and {self.name(self.rank)} were not given the same budget_bytes and same_host"
            expected = [0, 0, 0] if peer not in local.received else [*_digest(local, local.received[peer])]
            if sent != expected:
                return (
                    f"{self.name(peer)} would send {sent[0]} regions of {sent[1]:,} bytes to {self.name(self.rank)}, which expects "
                    f"{expected[0]} of {expected[1]:,}"
                )
        return None


def _digest(local: Local, rows: Ints) -> tuple[int, int, int]:
    """Number, bytes and checksum of regions that go from one rank to another."""
    plan = local.plan
    tensors = np.unique(plan.tensor[rows])
    labels = [zlib.crc32(f"{plan.names[t]} {plan.target[plan.names[t]].dtype}".encode()) for t in tensors]
    label = np.array(labels, dtype=np.int64)[np.searchsorted(tensors, plan.tensor[rows])]
    checksum = 0
    for column in (label, *plan.offsets[rows].T, *plan.sizes[rows].T):
        checksum = zlib.crc32(column.tobytes(), checksum)
    return len(rows), int(plan.nbytes[rows].sum()), checksum
