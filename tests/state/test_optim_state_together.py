"""Ranks that do the same or nothing: arguments, values, callbacks and errors of one rank concern all, and nobody waits in vain."""

import threading

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from farstep.errors import ExchangeError, LayoutError, StateError, StateMismatch
from farstep.fsdp import scatter_full_optim_state_dict
from farstep.state import RankOwned, Shards, load_optim_state_dict, optim_state_dict
from state.training import Ddp, Flat, FlatOriginal, Fsdp2, Plain, bits_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout_s=20) as ranks:
        yield ranks


def made():
    each = FlatOriginal()
    each.train(1)
    return each, optim_state_dict(each.model, each.optimizer, full=True)


def raises_alike(expected, said, act, *optimizers):
    """On both ranks, whoever it is that fails; and then all goes on as if nothing had been."""
    before = bits_of(*optimizers)
    with pytest.raises(expected, match=said):
        act()
    assert bits_of(*optimizers) == before
    dist.barrier()


def a_callback_that_raises():
    each, state = made()
    for values in state["state"].values():
        values["exp_avg"].add_(7)

    def progress(done, total):
        if dist.get_rank() == 1 and done == total:
            raise KeyError("the bar broke")

    options = {"progress": progress}
    raises_alike(
        (KeyError, StateError),
        "the bar broke",
        lambda: load_optim_state_dict(each.model, each.optimizer, state, **options),
        each.optimizer,
    )
    raises_alike(
        (KeyError, StateError),
        "the bar broke",
        lambda: optim_state_dict(each.model, each.optimizer, full=True, **options),
        each.optimizer,
    )
    load_optim_state_dict(each.model, each.optimizer, state)
    again = optim_state_dict(each.model, each.optimizer, full=True)
    for name, values in state["state"].items():
        assert torch.equal(values["exp_avg"], again["state"][name]["exp_avg"])


def test_a_callback_that_raises_on_one_rank(two):
    two.run(a_callback_that_raises)


def what_progress_counts():
    each = Fsdp2()
    each.train(1)
    for act in (
        lambda **o: optim_state_dict(each.model, each.optimizer, full=True, **o),
        lambda **o: load_optim_state_dict(
            each.model, each.optimizer, optim_state_dict(each.model, each.optimizer), **o
        ),
        lambda **o: load_optim_state_dict(
            each.model.bfloat16(),
            each.optimizer,
            optim_state_dict(each.model, each.optimizer, full=True),
            **o,
        ),
    ):
        calls = []
        act(progress=lambda done, total, calls=calls: calls.append((done, total)))
        assert len({total for _, total in calls}) == 1
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert calls[-1][0] == calls[-1][1]


def test_progress_ends_at_its_total(two):
    two.run(what_progress_counts)


def other_arguments():
    each, state = made()
    rank = dist.get_rank()
    model, optimizer = each.model, each.optimizer
    for said, act in {
        "budget_bytes is 65536 on rank 0 and 131072 on rank 1": lambda: optim_state_dict(
            model, optimizer, full=True, budget_bytes=65536 << rank
        ),
        "full is True on rank 0 and False on rank 1": lambda: optim_state_dict(
            model, optimizer, full=rank == 0
        ),
        "broadcast_from_rank0 is True on rank 0 and False on rank 1": lambda: load_optim_state_dict(
            model, optimizer, state, broadcast_from_rank0=rank == 0
        ),
        "strict is True on rank 0 and False on rank 1": lambda: load_optim_state_dict(
            model, optimizer, state, strict=rank == 0
        ),
    }.items():
        raises_alike(StateError, said, act, optimizer)
    for said, act in {
        "budget_bytes is at least 65536, not 1": lambda: load_optim_state_dict(
            model, optimizer, state, budget_bytes=1 if rank else 1 << 20
        ),
        "profile is a dict that is filled": lambda: optim_state_dict(
            model, optimizer, profile=[] if rank else {}
        ),
        "progress is a function": lambda: optim_state_dict(model, optimizer, progress=3 if rank else None),
        "optim_input has no parameters": lambda: scatter_full_optim_state_dict(
            state, model, optim_input=[] if rank else list(model.parameters())
        ),
        "rename is a function or a dict": lambda: load_optim_state_dict(
            model, optimizer, state, rename=3 if rank else None
        ),
    }.items():
        raises_alike((ValueError, TypeError, StateError), said, act, optimizer)


def test_arguments_that_are_wrong_or_differ_on_one_rank(two):
    two.run(other_arguments)


def what_cannot_be_told():
    each, state = made()
    rank = dist.get_rank()
    if rank == 0:
        state["param_groups"][0]["lock"] = threading.Lock()
    for options in ({}, {"broadcast_from_rank0": True}):
        raises_alike(
            StateError,
            "cannot be pickled",
            lambda options=options: load_optim_state_dict(each.model, each.optimizer, state, **options),
        )
    part = optim_state_dict(each.model, each.optimizer)
    if rank == 1:
        for values in part["state"].values():
            values["exp_avg"] = Shards(
                values["exp_avg"].spread, [t.to("meta") for t in values["exp_avg"].tensors]
            )
    raises_alike(
        (LayoutError, StateError),
        "is on the meta device",
        lambda: load_optim_state_dict(each.model, each.optimizer, part),
        each.optimizer,
    )


def test_what_one_rank_cannot_tell_or_give(two):
    two.run(what_cannot_be_told)


def other_values():
    rank = dist.get_rank()
    for kind in (Plain, Fsdp2, Flat):
        each = kind()
        each.train(1)
        state = optim_state_dict(each.model, each.optimizer, full=True)
        if rank == 1:
            state["state"]["first.weight"]["exp_avg"].add_(1)
        raises_alike(
            StateMismatch,
            r"'exp_avg' of parameter 'first.weight' has other elements on rank 1 than on rank 0",
            lambda each=each, state=state: load_optim_state_dict(each.model, each.optimizer, state),
            each.optimizer,
        )
    replicated = Ddp()
    replicated.train(1)
    part = optim_state_dict(replicated.model, replicated.optimizer)
    if rank == 1:
        part["state"]["scale"]["exp_avg"].tensors[0].add_(1)
    raises_alike(
        StateMismatch,
        "'exp_avg' of parameter 'scale' has other elements",
        lambda: load_optim_state_dict(replicated.model, replicated.optimizer, part),
    )


def test_replicas_and_whole_tensors_with_other_values(two):
    two.run(other_values)


class Blocks(torch.optim.SGD):
    """Keeps a state that belongs to each rank's part."""


def of_each_rank():
    rank = dist.get_rank()
    model = FullyShardedDataParallel(nn.Linear(8, 8, bias=False), device_id=CPU, use_orig_params=True)
    optimizer = Blocks(model.parameters(), lr=0.1)
    (p,) = model.parameters()

    def saved(size, value):
        optimizer.state[p]["q"] = torch.full((size,), value)
        return optim_state_dict(model, optimizer, full=True)

    a, b = saved(3, float(rank)), saved(5, rank + 10.0)
    assert isinstance(a["state"]["weight"]["q"], RankOwned)
    raises_alike(
        StateMismatch,
        r"\['q'\] of rank 0 is in several parts, which are not of one save",
        lambda: load_optim_state_dict(model, optimizer, [a, b] if rank == 0 else a),
    )
    raises_alike(
        StateMismatch,
        r"'q' of parameter 'weight' has other elements on rank 1 than on rank 0 \(rank 0's\)",
        lambda: load_optim_state_dict(model, optimizer, b if rank else a),
    )
    sharded = fully_shard(nn.Linear(4, 8, bias=False))
    other = Blocks(sharded.parameters(), lr=0.1)
    mesh = sharded.weight.device_mesh
    other.state[sharded.weight]["rows"] = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    state = optim_state_dict(sharded, other, full=True)
    other.state[sharded.weight]["rows"] = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    load_optim_state_dict(sharded, other, state)
    found = other.state[sharded.weight]["rows"]
    assert isinstance(found, DTensor)
    assert torch.equal(found.full_tensor(), torch.arange(8.0))


def test_state_of_each_ranks_own(two):
    two.run(of_each_rank)


def models_of_their_own():
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = FullyShardedDataParallel(
        nn.Linear(5, 7), device_id=CPU, use_orig_params=True, process_group=groups[dist.get_rank()]
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    with pytest.raises((StateError, LayoutError), match="group"):
        optim_state_dict(model, optimizer, full=True)
    dist.barrier()


def test_ranks_that_do_not_share_the_model_are_told_of_group(two):
    two.run(models_of_their_own)


def cast_in_rounds():
    """With the least budget nothing fits into one round."""
    source = Plain(lr=0.1)
    source.train(2)
    state = optim_state_dict(source.model, source.optimizer, full=True)
    wide = nn.Linear(300, 200)
    before = torch.optim.Adam(wide.parameters())
    wide(torch.ones(300)).sum().backward()
    before.step()
    large = optim_state_dict(wide, before, full=True)
    for make, given, inner in ((lambda: fully_shard(nn.Linear(300, 200).bfloat16()), large, 65536),):
        for from_rank0 in (False, True):
            model = make()
            optimizer = torch.optim.Adam(model.parameters())
            load_optim_state_dict(
                model, optimizer, given, broadcast_from_rank0=from_rank0, budget_bytes=inner
            )
            for name, p in model.named_parameters():
                found = optimizer.state[p]["exp_avg"].full_tensor()
                assert found.dtype == torch.bfloat16
                assert torch.equal(found, given["state"][name]["exp_avg"].bfloat16())
    flat = FullyShardedDataParallel(source.form(1).model.bfloat16(), device_id=CPU)
    optimizer = torch.optim.AdamW(flat.parameters())
    load_optim_state_dict(flat, optimizer, state, budget_bytes=65536)
    found = optim_state_dict(flat, optimizer, full=True)
    for name, values in state["state"].items():
        assert torch.equal(found["state"][name]["exp_avg"], values["exp_avg"].bfloat16())


def test_state_of_another_dtype_is_cast_in_rounds(two):
    two.run(cast_in_rounds)


def test_a_rank_that_is_gone_is_an_exchange_error():
    with Ranks(2, timeout_s=5) as ranks:
        first, _ = ranks.start(only_first)
        ranks.workers[1].kill()
        first.result()


def only_first():
    if dist.get_rank() == 1:
        return
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ExchangeError, match=r"has not called it|died or ended"):
        load_optim_state_dict(model, optimizer, optim_state_dict(model, optimizer))
