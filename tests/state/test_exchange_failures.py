"""Exchanges in which one rank fails: all ranks hear of it, and none waits for ever."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks

from farstep.errors import ExchangeError, LayoutError, RankLost, StateError
from farstep.state import Box, Layout, Shards, Spread, exchange, plan, respread
from state.spreads import F32, columns_of, filled, fresh, rows_of


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


def test_ranks_that_disagree_move_nothing(four_ways):
    results = four_ways.run(try_disagreement)
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


def test_a_rank_that_cannot_begin_is_named_everywhere(four_ways):
    for function, who, words in (
        (try_bad_tensor, 2, "'w' [4:6, 0:8] on rank 2 has the dtype torch.float64"),
        (try_gap, 3, "no rank of the source has [7:8, 0:8] of 'w'"),
    ):
        results = four_ways.run(function)
        assert results[who][0] is LayoutError
        assert words in results[who][1]
        for rank, (kind, text) in enumerate(results):
            if rank != who:
                assert kind is ExchangeError
                assert f"rank {who} could not begin" in text


def fail_on_one_rank(how, who):
    """Rank `who` makes a mistake that is no StateError. What each raises, and how long it took."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((600, 600), F32)
    one, other = rows_of(full.shape, ranks), columns_of(full.shape, ranks)
    source, target = {"w": filled(one, full, rank)}, {"w": Shards.empty(other, rank)}
    options = {"budget_bytes": 1 << 20}
    if rank == who and how == "budget":
        options["budget_bytes"] = 1
    elif rank == who and how == "budgets that differ":
        options["budget_bytes"] = 1 << 19
    elif rank == who and how == "same_host that differs":
        options["same_host"] = False if respread.__wrapped__.__kwdefaults__["same_host"] is None else None
    elif rank == who and how == "no mapping":
        source = [source]
    elif rank == who and how == "no tensor":
        target["w"].tensors[0] = "a tensor"
    elif rank == who and how == "timeout":
        options["timeout_s"] = "soon"
    elif rank == who and how == "progress":
        options["progress"] = 3
    elif rank == who and how in ("callback", "late callback"):
        options["progress"] = callback(how == "late callback")
    try:
        if how == "another's plan":
            layouts = Layout({"w": one}), Layout({"w": other})
            part = plan(*layouts, (rank + 1) % len(ranks) if rank == who else rank)
            exchange(part, {"w": source["w"].tensors}, {"w": target["w"].tensors})
        else:
            respread(source, target, **options)
    except Exception as exc:
        result = type(exc), str(exc)
    # and the group is as good as before
    again = {"w": Shards.empty(other, rank)}
    respread({"w": filled(one, full, rank)}, again)
    assert torch.equal(again["w"].tensors[0], full[other.boxes(rank)[0].slices])
    return result


def callback(late):
    def progress(done, total):
        if done > (total // 2 if late else 0):
            raise KeyError("the callback has none")

    return progress


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("budget", ValueError, "budget_bytes is at least"),
        ("no mapping", TypeError, "tensors by name are wanted"),
        ("no tensor", LayoutError, "is a str, and no tensor"),
        ("timeout", TypeError, "'<' not supported"),
        ("progress", TypeError, "progress is a function or None"),
        ("another's plan", ValueError, "part of rank 3"),
        ("callback", KeyError, "the callback has none"),
        ("late callback", KeyError, "the callback has none"),
    ],
)
def test_whatever_one_rank_raises_all_raise(four_ways, how, kind, words):
    results = four_ways.run(fail_on_one_rank, how, 2, timeout_s=15)  # half of what a message may take
    for rank, (raised, text) in enumerate(results):
        assert words in text
        assert raised is (kind if rank == 2 else ExchangeError)
        assert rank == 2 or ("rank 2 " in text and kind.__name__ in text)


@pytest.mark.parametrize("how", ["budgets that differ", "same_host that differs"])
def test_options_that_differ(four_ways, how):
    results = four_ways.run(fail_on_one_rank, how, 2, timeout_s=15)
    assert {kind for kind, _ in results} == {ExchangeError}
    assert any("not given the same budget_bytes and same_host" in text for _, text in results)


def fail_in_a_copy():
    """Memory that cannot be written: a rank finds out when its messages are under way."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    full = fresh((600, 600), F32)
    target = Shards.empty(columns_of(full.shape, ranks), rank)
    if rank == 1:
        target.tensors[0] = Stubborn(target.tensors[0])
    try:
        respread({"w": filled(rows_of(full.shape, ranks), full, rank)}, {"w": target})
    except Exception as exc:
        return type(exc), str(exc)


class Stubborn(torch.Tensor):
    """Cannot be copied into."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise RuntimeError("this memory is not to be written")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_copy_that_fails_on_one_rank(four_ways):
    results = four_ways.run(fail_in_a_copy, timeout_s=15)
    for rank, (kind, text) in enumerate(results):
        assert kind is (RuntimeError if rank == 1 else ExchangeError)
        assert "this memory is not to be written" in text
        assert rank == 1 or "rank 1 failed in the exchange" in text


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
        assert kind is RankLost
        assert "'w' [" in text
        assert "rank 1 died or ended" in text
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
    assert kind is RankLost
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
    assert all(issubclass(kind, ExchangeError) for kind, _ in results)
    assert all("rank 1" in text and "died" in text for _, text in results)
