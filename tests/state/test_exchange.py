"""Exchanges between real processes: what arrives is what slicing the full tensor gives, in bounded memory, and a lost rank is noticed."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from farstep.errors import LayoutError, StateError
from farstep.state import Box, Layout, Shards, Spread, exchange, plan, respread
from state.spreads import F32, columns_of, filled, fresh, held, random_layout, rows_of, set_same_host

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


# -- in the ranks' processes


def is_sliced(layout, full, got, rank) -> bool:
    wanted = held(layout, full, rank)
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for name in wanted
        for a, b in zip(got[name], wanted[name], strict=True)
    )


def try_random_layouts(seeds, budget_bytes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in seeds:
        rng = random.Random(seed)
        dtype = rng.choice([F32, torch.bfloat16, torch.uint8])
        shapes = {
            "a": (rng.randint(1, 700), 301),
            "b": (40, 11, rng.randint(0, 30)),
            "c": (),
            "d": (1 << 17,),
        }
        full = {name: fresh(shape, dtype, seed) for name, shape in shapes.items()}
        one, other = (random_layout(rng, shapes, dtype, ranks) for _ in range(2))
        there = {name: Shards.empty(spread, rank).tensors for name, spread in other.items()}
        exchange(plan(one, other, rank), held(one, full, rank), there, budget_bytes=budget_bytes)
        assert is_sliced(other, full, there, rank), seed
        back = {name: Shards.empty(spread, rank).tensors for name, spread in one.items()}
        exchange(plan(other, one), there, back)  # everyone's plan does as well
        assert is_sliced(one, full, back, rank), seed


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_any_layout_to_any_other_between_processes(world_size):
    with Ranks(world_size) as ranks:
        ranks.run(set_same_host, False if world_size == 3 else None)
        ranks.run(try_random_layouts, range(6), 64 << 10)
        ranks.run(try_random_layouts, range(6, 10), 32 << 20)


def test_any_layout_to_any_other_between_four(four_ways):
    four_ways.run(try_random_layouts, range(10, 20), 1 << 18)


def try_dtype(dtype):
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = {"small": fresh((9, 5), dtype), "large": fresh((300, 300), dtype), "one": fresh((), dtype)}
    source, target = {}, {}
    for name, tensor in full.items():
        whole = Spread.whole(tensor.shape, dtype, [1])
        cut = columns_of(tensor.shape, ranks, dtype) if tensor.dim() else Spread.whole((), dtype, [0, 2])
        source[name], target[name] = filled(whole, tensor, rank), Shards.empty(cut, rank)
    respread(source, target)
    layout = Layout({name: each.spread for name, each in target.items()})
    assert is_sliced(layout, full, {name: each.tensors for name, each in target.items()}, rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(four_ways, dtype):
    four_ways.run(try_dtype, dtype)


def try_memory(budget_bytes):
    """64 MB, none of it contiguous where it comes from, to rank 0."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((4096, 4096), F32)
    source = {"w": filled(columns_of(full.shape, ranks), full, rank)}
    target = {"w": Shards.empty(Spread.whole(full.shape, F32, [0]), rank)}
    for tensor in target["w"].tensors:
        tensor.zero_()
    held_bytes = sum(each.tensors[0].nbytes for each in (*source.values(), *target.values()) if each.tensors)
    respread(source, target, budget_bytes=budget_bytes)  # buffers of the group and the like
    for tensor in target["w"].tensors:
        tensor.zero_()
    dist.barrier()
    before = peak_bytes(reset=True)
    respread(source, target, budget_bytes=budget_bytes)
    extra = peak_bytes() - before
    assert all(torch.equal(tensor, full) for tensor in target["w"].tensors)
    return extra, held_bytes


def peak_bytes(reset: bool = False) -> int:
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_packing_takes_no_more_memory_than_the_budget(four_ways):
    for budget_bytes in (1 << 20, 8 << 20):
        for extra, held_bytes in four_ways.run(try_memory, budget_bytes):
            assert held_bytes >= 16 << 20
            assert extra <= budget_bytes + (1 << 20)  # and some for Python


def peak_of_many_boxes(count):
    """From rank 0 to rank 1, in boxes of one element; bytes beyond those of the tensors."""
    rank = dist.get_rank()
    at = torch.arange(count).numpy()[:, None]
    source, target = (Spread((count,), F32, 0 * at[:, 0] + holder, at, 0 * at + 1) for holder in (0, 1))
    memory = fresh((count,), F32) if rank == 0 else torch.zeros(count)
    tensors = [t.view(1) for t in memory.unbind()]
    here = {"w": Shards(source, tensors if rank == 0 else [])}
    there = {"w": Shards(target, tensors if rank == 1 else [])}
    dist.barrier()
    before = peak_bytes(reset=True)
    respread(here, there, budget_bytes=1 << 20)
    assert torch.equal(memory, fresh((count,), F32))
    return peak_bytes() - before


def test_many_small_boxes_need_columns_only(two):
    two.run(peak_of_many_boxes, 1000)  # what is needed once
    for extra in two.run(peak_of_many_boxes, 50_000):
        assert extra < 50_000 * 300  # 16 numbers and some for each, beyond the budget


def try_gather():
    """To one rank, the others have nothing to hold."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((64, 8), F32)
    target = {"w": Shards.empty(Spread.whole(full.shape, F32, [2]), rank)}
    respread({"w": filled(rows_of(full.shape, ranks), full, rank)}, target)
    assert [torch.equal(t, full) for t in target["w"].tensors] == [True] * (rank == 2)


def test_to_one_rank_alone(four_ways):
    four_ways.run(try_gather)


def try_progress():
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((1000, 1000), F32)
    seen = []
    respread(
        {"w": filled(rows_of(full.shape, ranks), full, rank)},
        {"w": Shards.empty(columns_of(full.shape, ranks), rank)},
        budget_bytes=1 << 18,
        progress=lambda done, total: seen.append((done, total)),
    )
    return seen


def test_progress_ends_at_all(four_ways):
    for seen in four_ways.run(try_progress):
        done = [d for d, _ in seen]
        assert len(seen) > 5
        assert done == sorted(done)
        # of its million bytes a rank keeps a quarter and sends the rest, and receives as much
        assert {total for _, total in seen} == {1_750_000}
        assert seen[-1][0] == seen[-1][1]


def try_views():
    """Parameters that need gradients, views with strides and of larger memory, a conjugate."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((400, 400), F32)
    spread = rows_of(full.shape, ranks)
    (box,) = spread.boxes(rank)
    memory = torch.zeros(400, 2, 100)
    target = torch.nn.Parameter(memory[:, 1, :].t())
    swapped = full.roll(1, 0)
    source = Shards(
        columns_of(full.shape, ranks),
        [swapped[:, b.slices[1]] for b in columns_of(full.shape, ranks).boxes(rank)],
    )
    respread({"w": source}, {"w": Shards(spread, [target])})
    assert torch.equal(target.detach(), swapped[box.slices])
    assert not memory[:, 0].any()
    mine, ours = (
        Spread.whole((300, 300), torch.complex64, [0]),
        Spread.whole((300, 300), torch.complex64, ranks),
    )
    number = torch.complex(full[:300, :300], full[100:, 100:])
    there = Shards.empty(ours, rank)
    respread({"z": Shards(mine, [number.conj()] if rank == 0 else [])}, {"z": there})
    assert torch.equal(there.tensors[0], number.conj())


def test_views_are_read_and_written_as_they_are(four_ways):
    four_ways.run(try_views)


def try_subgroups():
    """Ranks are those within the group; two groups at once, from two threads."""
    me = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in ((3, 1), (0, 2), (2, 3))}
    full = fresh((90, 90), F32)
    wrong = []

    def within(group):
        rank = dist.get_rank(group)
        target = {"w": Shards.empty(Spread.whole(full.shape, F32, [1]), rank)}
        respread({"w": filled(rows_of(full.shape, [0, 1]), full, rank)}, target, group)
        if [torch.equal(t, full) for t in target["w"].tensors] != [True] * (rank == 1):
            wrong.append(rank)

    threads = [threading.Thread(target=within, args=(g,)) for ranks, g in groups.items() if me in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    if me == 0:
        with pytest.raises(StateError, match="not in the group"):
            within(groups[2, 3])


def test_subgroups_and_threads(four_ways):
    four_ways.run(try_subgroups)


# -- without a group


def test_one_process_needs_no_group():
    full = {"w": fresh((6, 4), F32), "s": fresh((), F32)}
    one = Layout({"w": rows_of((6, 4), [0]), "s": Spread.whole((), F32, [0])})
    cut = [Box((0, 0), (6, 1)), Box((2, 1), (4, 3)), Box((0, 1), (2, 3))]
    other = Layout({"w": Spread.of((6, 4), F32, {0: cut}), "s": one["s"]})
    target = {name: Shards.empty(spread, 0).tensors for name, spread in other.items()}
    seen = []
    exchange(plan(one, other), held(one, full, 0), target, progress=lambda *now: seen.append(now))
    assert is_sliced(other, full, target, 0)
    assert seen[-1] == (100, 100)


def test_a_plan_for_more_ranks_than_there_are():
    spread = Layout({"w": rows_of((6, 4), [0, 1])})
    with pytest.raises(LayoutError, match=r"rank 1.* only 1 ranks"):
        exchange(plan(spread, Layout({"w": Spread.whole((6, 4), F32, [0])})), {}, {})


def test_the_part_of_another_rank():
    layout = Layout({"w": Spread.whole((6, 4), F32, [0])})
    with pytest.raises(ValueError, match="part of rank 3"):
        exchange(plan(layout, layout, 3), {}, {})


def spread_in_many_ways():
    """Plain tensors, DTensors and Shards, as they are."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    full = fresh((7, 6), F32)
    source = {
        "plain": full,
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "shards": filled(rows_of((7, 6), range(ranks)), full, rank),
    }
    columns = distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)])
    parameter = torch.nn.Parameter(torch.zeros(7, 6))
    other = torch.zeros(7, 6)
    respread(source, {"plain": columns, "rows": parameter, "shards": other})
    assert torch.equal(columns.full_tensor(), full)
    assert torch.equal(parameter.detach(), full)
    assert torch.equal(other, full)


def test_tensors_need_no_wrapping(two):
    two.run(spread_in_many_ways)


def test_what_is_no_tensor_is_named():
    with pytest.raises(LayoutError, match=r"'w' is a builtins.list"):
        respread({"w": [torch.zeros(2)]}, {"w": torch.zeros(2)})
    with pytest.raises(TypeError, match="of a model, give named_shards"):
        respread(torch.nn.Linear(2, 2), {})


def test_a_budget_that_is_too_small():
    with pytest.raises(ValueError, match="budget_bytes is at least"):
        respread({}, {}, budget_bytes=10)


def test_nothing_at_all():
    respread({}, {})
