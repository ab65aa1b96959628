"""Memory of other processes on this host."""

import ctypes
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farstep.errors import ExchangeError, OptimError, StateError
from farstep.optim import ShardedOptimizer
from farstep.state import Box, Shards, Spread, neighbours, on_rank, respread
from farstep.state.neighbours import MOST_SPANS, Neighbours


def reading():
    found = Neighbours.of(None)
    assert found is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(5000, dtype=torch.int32) + 10_000 * rank
    addresses = [None] * ranks
    dist.all_gather_object(addresses, mine.data_ptr())
    into = torch.zeros(5000, dtype=torch.int32)
    for other in range(ranks):
        # More spans than one call takes, back to front.
        count = 2 * MOST_SPANS + 1
        there = [(addresses[other] + 4 * i, 4) for i in range(count)]
        here = [(into.data_ptr() + 4 * (count - 1 - i), 4) for i in range(count)]
        found.read(other, there, here)
        assert into[:count].tolist() == [10_000 * other + i for i in reversed(range(count))]
    dist.barrier()
    with pytest.raises(ExchangeError, match=r"the memory of rank 1 .* cannot be read"):
        found.read(1, [(8, 4)], [(into.data_ptr(), 4)])
    # A call may stop half-way.
    real, found._readv = found._readv, lambda pid, a, n, b, m, flags: real_part(real, pid, a, b)
    into.zero_()
    found.read(
        1 - rank,
        [(addresses[1 - rank], 400), (addresses[1 - rank] + 400, 400)],
        [(into.data_ptr(), 400), (into.data_ptr() + 400, 400)],
    )
    assert into[:200].tolist() == [10_000 * (1 - rank) + i for i in range(200)]
    dist.barrier()


def real_part(real, pid, local, remote):
    """As the kernel, but at most 100 bytes of the first span."""
    span = neighbours._Span
    a, b = local[0], remote[0]
    count = min(a.nbytes, 100)
    return real(pid, (span * 1)(span(a.address, count)), 1, (span * 1)(span(b.address, count)), 1, 0)


def not_allowed():
    """One rank may not: then nobody does, and the steps are the same."""
    real = neighbours._readv
    if dist.get_rank() == 1:
        neighbours._readv = lambda: None
    try:
        assert Neighbours.of(None) is None
        named = {"a": nn.Parameter(torch.zeros(1000))}
        with pytest.raises(OptimError, match="same_host=True, and the ranks cannot read each other's memory"):
            ShardedOptimizer(named, torch.optim.SGD, lr=1.0, same_host=True)
        sharded = ShardedOptimizer(named, torch.optim.SGD, lr=1.0)
        named["a"].grad = torch.full((1000,), float(dist.get_rank()))
        sharded.step()
        assert torch.equal(named["a"].detach(), torch.full((1000,), -0.5))
    finally:
        neighbours._readv = real


def another_process():
    """A number that belongs to another process: what is read there is not the token."""
    real = ctypes.create_string_buffer
    found = Neighbours([0, 0])
    cards = [("", 0, ctypes.addressof(real(b"x" * 16, 16)), b"y" * 16)]
    assert not found._can_read(cards)


@pytest.mark.parametrize("body", [reading, not_allowed, another_process], ids=lambda body: body.__name__)
def test_on_two_ranks(two, body):
    two.run(body)


def gathered(cores):
    """Much, by a rank that gives nothing: other threads read, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = 300
    source, target, told, readers = {}, {}, [], set()
    for number in range(8):
        whole = torch.arange(rows * ranks * 1000, dtype=torch.float32).reshape(rows * ranks, 1000) + number
        spread = Spread.of(
            whole.shape, whole.dtype, {r: [Box((r * rows, 0), (rows, 1000))] for r in range(ranks)}
        )
        source[str(number)] = Shards(spread, [whole[rank * rows : (rank + 1) * rows].clone()])
        target[str(number)] = on_rank(torch.zeros_like(whole), 0)
    real, cpu_count = Neighbours.read, os.cpu_count
    Neighbours.read = lambda *args: (readers.add(threading.current_thread().name), real(*args))[1]
    os.cpu_count = lambda: cores
    try:
        respread(source, target, progress=lambda *counts: told.append(counts))
    finally:
        Neighbours.read, os.cpu_count = real, cpu_count
    if rank == 0:
        for number, each in enumerate(target.values()):
            assert torch.equal(
                each.tensors[0].reshape(-1), torch.arange(rows * ranks * 1000, dtype=torch.float32) + number
            )
        assert told[-1][0] == told[-1][1]
        assert [done for done, _ in told] == sorted(done for done, _ in told)
    return readers


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_a_rank_that_only_takes_reads_with_the_others_cores(three, cores):
    first, *others = three.run(gathered, cores)
    assert first
    assert ("farstep-read" in first) == (cores > 1)
    assert not any("farstep-read" in each for each in others)


def lost_meanwhile():
    """What cannot be read is told of, by all, whoever was to read it."""
    ranks = range(dist.get_world_size())
    spread = Spread.of((3, 3_000_000), torch.float32, {r: [Box((r, 0), (1, 3_000_000))] for r in ranks})
    source = {"x": Shards(spread, [torch.ones(1, 3_000_000)])}
    target = {"x": on_rank(torch.zeros(3, 3_000_000), 0)}
    real = Neighbours.read

    def fails(*args):
        raise ExchangeError("that rank has died")

    Neighbours.read = fails
    try:
        with pytest.raises(StateError, match="that rank has died"):
            respread(source, target)
    finally:
        Neighbours.read = real


def test_what_cannot_be_read_is_told_of_by_all(three):
    three.run(lost_meanwhile)
