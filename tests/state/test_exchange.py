"""Exchanges between real processes: what arrives is what slicing the full tensor gives, in bounded memory, and a lost rank is noticed."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from farstep.errors import ExchangeError, LayoutError, StateError
from farstep.state import Box, Layout, Shards, Spread, exchange, plan, respread
from state.spreads import fresh, held, random_layout

F32 = torch.float32
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


@pytest.fixture(scope="module", params=[None, False], ids=["memory", "messages"])
def four(request):
    """Four ranks on one host, which by default read large regions from each other's memory."""
    with Ranks(4) as ranks:
        ranks.run(set_same_host, request.param)
        yield ranks


def set_same_host(default):
    for function in (exchange, respread):
        function.__wrapped__.__kwdefaults__["same_host"] = default  # within torch.no_grad


# -- in the ranks' processes


def rows_of(shape, ranks, dtype=F32) -> Spread:
    """Split along the first dimension, as evenly as it goes."""
    n, k = shape[0], len(ranks)
    cuts = [n * i // k for i in range(k + 1)]
    return Spread.of(
        shape,
        dtype,
        {
            rank: [Box((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]))]
            for rank, a, b in zip(ranks, cuts, cuts[1:], strict=False)
        },
    )


def columns_of(shape, ranks, dtype=F32) -> Spread:
    flipped = rows_of((shape[1], shape[0]), ranks, dtype)
    return Spread(shape, dtype, flipped.ranks, flipped.offsets[:, ::-1], flipped.sizes[:, ::-1])


def filled(spread, full, rank) -> Shards:
    return Shards(spread, [full[box.slices].clone() for box in spread.boxes(rank)])


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


def test_any_layout_to_any_other_between_four(four):
    four.run(try_random_layouts, range(10, 20), 1 << 18)


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
def test_every_dtype(four, dtype):
    four.run(try_dtype, dtype)


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


def test_packing_takes_no_more_memory_than_the_budget(four):
    for budget_bytes in (1 << 20, 8 << 20):
        for extra, held_bytes in four.run(try_memory, budget_bytes):
            assert held_bytes >= 16 << 20
            assert extra <= budget_bytes + (1 << 20)  # and some for Python


def try_gather():
    """To one rank, the others have nothing to hold."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((64, 8), F32)
    target = {"w": Shards.empty(Spread.whole(full.shape, F32, [2]), rank)}
    respread({"w": filled(rows_of(full.shape, ranks), full, rank)}, target)
    assert [torch.equal(t, full) for t in target["w"].tensors] == [True] * (rank == 2)


def test_to_one_rank_alone(four):
    four.run(try_gather)


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


def test_progress_ends_at_all(four):
    for seen in four.run(try_progress):
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


def test_views_are_read_and_written_as_they_are(four):
    four.run(try_views)


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


def test_subgroups_and_threads(four):
    four.run(try_subgroups)


def outcome(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except StateError as exc:
        return type(exc), str(exc)
    return None, ""


def try_disagreement():
    """Rank 1 has another idea of the target."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((8, 8), F32)
    spread = rows_of(full.shape, ranks) if rank != 1 else columns_of(full.shape, ranks)
    target = Shards.empty(spread, rank)
    before = [t.fill_(5) for t in target.tensors]
    result = outcome(respread, {"w": filled(rows_of(full.shape, ranks), full, rank)}, {"w": target})
    assert all((t == 5).all() for t in before)
    return result


def test_ranks_that_disagree_move_nothing(four):
    results = four.run(try_disagreement)
    assert any("would send" in text for kind, text in results if kind is ExchangeError)
    assert all(kind is ExchangeError for kind, _ in results)


def try_bad_tensor():
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((8, 8), F32)
    shards = filled(rows_of(full.shape, ranks), full, rank)
    if rank == 2:
        shards.tensors[0] = shards.tensors[0].double()
    return outcome(respread, {"w": shards}, {"w": Shards.empty(columns_of(full.shape, ranks), rank)})


def try_gap():
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((8, 8), F32)
    part = Spread.of((8, 8), F32, {0: [Box((0, 0), (7, 8))]})
    return outcome(
        respread, {"w": filled(part, full, rank)}, {"w": Shards.empty(rows_of(full.shape, ranks), rank)}
    )


def test_a_rank_that_cannot_begin_is_named_everywhere(four):
    for function, who, words in (
        (try_bad_tensor, 2, "'w' [4:6, 0:8] on rank 2 has the dtype torch.float64"),
        (try_gap, 3, "no rank of the source has [7:8, 0:8] of 'w'"),
    ):
        results = four.run(function)
        assert results[who][0] is LayoutError
        assert words in results[who][1]
        for rank, (kind, text) in enumerate(results):
            if rank != who:
                assert kind is ExchangeError
                assert f"rank {who} could not begin" in text


# -- ranks that are lost


def try_with_a_lost_rank(timeout_s):
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((2000, 2000), F32)
    began = time.monotonic()
    kind, text = outcome(
        respread,
        {"w": filled(columns_of(full.shape, ranks), full, rank)},
        {"w": Shards.empty(rows_of(full.shape, ranks), rank)},
        timeout_s=timeout_s,
        check=False,
    )
    return kind, text, time.monotonic() - began


def test_a_rank_that_is_killed_is_named_by_the_others():
    with Ranks(3) as ranks:
        ranks.run(try_gather_of_three)
        ranks.workers[1].kill()
        results = [each.result(20) for each in ranks.start(try_with_a_lost_rank, 3.0)]
    for kind, text, seconds in results:
        assert kind is ExchangeError
        assert "'w' [" in text
        assert "rank 1, which may be lost" in text
        assert seconds < 10


def try_gather_of_three():
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((30, 8), F32)
    respread(
        {"w": filled(rows_of(full.shape, ranks), full, rank)},
        {"w": Shards.empty(columns_of(full.shape, ranks), rank)},
    )


def test_a_rank_that_does_not_answer_is_late_by_the_timeout():
    with Ranks(2) as ranks:
        ranks.run(try_gather_of_three)
        ranks.workers[1].stop()
        kind, text, seconds = ranks.workers[0].start(try_with_a_lost_rank, 1.0).result(20)
        ranks.workers[1].cont()
    assert kind is ExchangeError
    assert "rank 1" in text
    assert 0.5 < seconds < 10


def die_in_the_middle():
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((2000, 2000), F32)

    def progress(done, total):
        if rank == 1 and done > total // 3:
            import os

            os._exit(1)

    return outcome(
        respread,
        {"w": filled(columns_of(full.shape, ranks), full, rank)},
        {"w": Shards.empty(rows_of(full.shape, ranks), rank)},
        budget_bytes=1 << 18,
        progress=progress,
        timeout_s=5.0,
    )


def test_a_rank_that_dies_in_the_middle():
    with Ranks(3) as ranks:
        pending = ranks.start(die_in_the_middle)
        results = [pending[rank].result(20) for rank in (0, 2)]
    assert all(kind is ExchangeError for kind, _ in results)
    assert any("rank 1, which may be lost" in text for _, text in results)


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


def test_memory_that_is_read_and_written():
    memory = torch.arange(24.0).reshape(6, 4)
    whole = Spread.whole((6, 4), F32, [0])
    turned = Spread.of((6, 4), F32, {0: [Box((3, 0), (3, 4)), Box((0, 0), (3, 4))]})
    with pytest.raises(StateError, match=r"'w' \[3:6, 0:4\] shares memory with the source 'w'"):
        respread({"w": Shards(whole, [memory])}, {"w": Shards(turned, [memory[:3], memory[3:]])})
    # onto itself is no copy at all
    before = memory.clone()
    parts = Spread.of((6, 4), F32, {0: [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]})
    respread({"w": Shards(whole, [memory])}, {"w": Shards(parts, [memory[:3], memory[3:]])})
    assert torch.equal(memory, before)


def test_a_budget_that_is_too_small():
    with pytest.raises(ValueError, match="budget_bytes is at least"):
        respread({}, {}, budget_bytes=10)


def test_nothing_at_all():
    respread({}, {})
