"""Which tensors share memory, told from where they begin and how they stride. No element is looked at.

Two tensors share a byte where a sum of whole steps, each a stride so many times, leads from the beginning of the one to that of the
other. From the longest stride to the shortest there are seldom more than two choices, so the sum is found, or there is none, in a few trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

__all__ = ["repeats", "share", "sharing"]

_TRIALS = 20_000
"""What has not been found out by then is taken to be so."""

_Step = tuple[int, int, int]
"""A stride in bytes, and how many times it may be taken: at least, at most."""


def repeats(tensor: Tensor) -> bool:
    """Whether two elements of a tensor are the same memory, as in one that was expanded."""
    if tensor.is_contiguous():
        return False
    steps = sorted(
        ((s, n - 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1), reverse=True
    )
    if not tensor.numel():
        return False
    for at, (stride, most) in enumerate(steps):
        shorter = [(s, -n, n) for s, n in steps[at + 1 :]]
        if _leads([(stride, 1, most), *shorter], 0, [_TRIALS]):
            return True
    return False


def share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    begin, distance = one.data_ptr(), other.data_ptr() - one.data_ptr()
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    if not (begin < other.data_ptr() + _reach(other) and other.data_ptr() < begin + _reach(one)):
        return False
    times: dict[int, tuple[int, int]] = {1: (0, 0)}
    for tensor, sign in ((one, 1), (other, -1)):
        item = tensor.itemsize
        for stride, most in [
            (1, item - 1),
            *((s * item, n - 1) for n, s in zip(tensor.shape, tensor.stride(), strict=True)),
        ]:
            low, high = times.get(stride, (0, 0))
            times[stride] = (low, high + most) if sign > 0 else (low - most, high)
    steps = [(stride, low, high) for stride, (low, high) in sorted(times.items(), reverse=True)]
    return _leads(steps, distance, [_TRIALS])


def sharing(
    written: Sequence[Tensor], read: Sequence[Tensor]
) -> Iterator[tuple[int, int | None, int | None]]:
    """Those written, by number, that share memory: each with another that is written, or one that is read."""
    tensors = [*written, *read]
    begin = np.fromiter((t.data_ptr() for t in tensors), np.int64, len(tensors))
    end = begin + np.fromiter(map(_reach, tensors), np.int64, len(tensors))
    order = np.argsort(begin, kind="stable")
    if (begin[order][1:] >= np.maximum.accumulate(end[order])[:-1]).all():
        return
    under_way: tuple[list[int], list[int]] = ([], [])
    for here in order.tolist():
        if begin[here] == end[here]:
            continue
        is_read = here >= len(written)
        for side in (0,) if is_read else (0, 1):
            under_way[side][:] = [k for k in under_way[side] if end[k] > begin[here]]
            for there in under_way[side]:
                if share(tensors[here], tensors[there]):
                    one, other = min(here, there), max(here, there)
                    yield (one, other, None) if other < len(written) else (one, None, other - len(written))
        under_way[is_read].append(here)


def _reach(tensor: Tensor) -> int:
    """From its first byte to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    return (
        sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    ) * tensor.itemsize


def _leads(steps: Sequence[_Step], distance: int, trials: list[int]) -> bool:
    """Whether some of the steps, which come from long to short, lead exactly so far."""
    if not steps:
        return distance == 0
    (stride, fewest, most), rest = steps[0], steps[1:]
    if stride == 0:
        return fewest <= most and _leads(rest, distance, trials)
    nearest, farthest = sum(s * n for s, n, _ in rest), sum(s * n for s, _, n in rest)
    fewest = max(fewest, -((farthest - distance) // stride))
    most = min(most, (distance - nearest) // stride)
    for times in range(fewest, most + 1):
        trials[0] -= 1
        if trials[0] < 0 or _leads(rest, distance - times * stride, trials):
            return True
    return False
