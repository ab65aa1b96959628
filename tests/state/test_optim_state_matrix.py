"""Training that is saved under one parallelism, loaded under another and continued is training that was never interrupted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from farstep.state import Shards, load_optim_state_dict, optim_state_dict
from state import training
from state.holdings import Net
from state.training import KINDS, Flat, FlatOriginal, Fsdp2, Strips, TwoD, Zero, bits_of, reference


def close(found, wanted, what):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def every_pair(sharded):
    """Each kind's state, saved after two steps, is loaded by each kind, which takes the third. Full states go in turn by all ranks and by the first."""
    _, wanted = reference(2)
    parameters, _ = reference(3)
    first = dist.get_rank() == 0
    trained = [kind() for kind in KINDS]
    targets = [kind(seed=1) for kind in KINDS]
    for number, each in enumerate(trained):
        each.train(2)
        source = type(each).__name__
        before = bits_of(each.optimizer)
        state = optim_state_dict(each.model, each.optimizer, full=not sharded)
        if sharded:
            of_dtensors = source in ("Fsdp2", "Hsdp2", "Tp", "TwoD", "ShardedFsdp2")
            assert isinstance(
                state["state"]["first.weight"]["exp_avg"], DTensor if of_dtensors else Shards
            ), source
        else:
            for name, values in wanted.items():
                close(state["state"][name], values, f"{source} {name}")
            alone = optim_state_dict(each.model, each.optimizer, full=True, rank0_only=True)
            assert list(alone) == (["state", "param_groups"] if first else [])
        assert bits_of(each.optimizer) == before, f"{source} was changed by reading"
        for other, target in enumerate(targets):
            if sharded and (number + other) % 2:
                continue  # two ranks have all pairs
            by_first = not sharded and (number + other) % 2 == 0
            given = alone if by_first else state
            load_optim_state_dict(target.model, target.optimizer, given, broadcast_from_rank0=by_first)
            target.take_parameters(each)
            target.train(1)
            close(target.whole(), parameters, f"{source} -> {type(target).__name__}:")


@pytest.mark.slow
def test_every_kind_to_every_kind_on_two_ranks_whole(two):
    two.run(every_pair, False, timeout_s=50)


@pytest.mark.slow
def test_every_second_pair_on_four_ranks_in_shards(four):
    four.run(every_pair, True, timeout_s=55)


def saved(kind, full):
    each = getattr(training, kind)()
    each.train(2)
    return optim_state_dict(each.model, each.optimizer, full=full, rank0_only=full)


def continued(kind, state, broadcast):
    each = getattr(training, kind)(seed=1)
    given = state if not broadcast or dist.get_rank() == 0 else None
    load_optim_state_dict(each.model, each.optimizer, given, broadcast_from_rank0=broadcast)
    source = training.Plain()
    source.train(2)
    each.take_parameters(source)
    each.train(2)
    close(each.whole(), reference(4)[0], kind)


FEW = ["Fsdp2", "Flat", "FlatOriginal", "TwoD", "Zero", "Strips"]


@pytest.mark.parametrize("kind", FEW)
def test_another_number_of_ranks(two, four, kind):
    other = FEW[FEW.index(kind) - 1]
    two.run(continued, other, four.run(saved, kind, True)[0], True)
    four.run(continued, other, two.run(saved, kind, True)[0], False)


@pytest.mark.parametrize("kind", ["Flat", "FlatOriginal", "Zero", "Strips"])
def test_the_parts_that_more_ranks_saved(two, four, kind):
    """Each of two ranks is given all parts of four."""
    parts = four.run(saved, kind, False)
    two.run(continued, kind, parts, False)
    two.run(continued, "Fsdp2", parts, True)


def real_steps(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def really_trained():
    """Forward and backward, from FSDP1 to FSDP2 and back to FSDP1, in other wraps, against one process."""
    bare = Net(0)
    plain = torch.optim.Adam(bare.parameters(), lr=0.02)
    real_steps(bare, plain, range(6))
    first = FullyShardedDataParallel(Net(0), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(first.parameters(), lr=0.02)
    real_steps(first, optimizer, range(2))
    second = fully_shard(Net(1))
    other = torch.optim.Adam(second.parameters(), lr=0.02)
    _hand_over(first, optimizer, second, other)
    real_steps(second, other, range(2, 4))
    third = Net(2)
    third.inner = FullyShardedDataParallel(third.inner, device_id=torch.device("cpu"))
    third = FullyShardedDataParallel(third, device_id=torch.device("cpu"))
    last = torch.optim.Adam(third.parameters(), lr=0.02)
    _hand_over(second, other, third, last)
    real_steps(third, last, range(4, 6))
    with FullyShardedDataParallel.summon_full_params(third):
        found = {
            n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in third.named_parameters()
        }
    for name, p in bare.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)


def _hand_over(model, optimizer, new_model, new_optimizer):
    from farstep.state import named_shards, respread

    state = optim_state_dict(model, optimizer)
    load_optim_state_dict(new_model, new_optimizer, state)
    respread(named_shards(model), named_shards(new_model))


def test_real_training_from_fsdp1_to_fsdp2_and_back(two):
    two.run(really_trained)


def memory_kept():
    """Parameters that are read in shards are the optimizer's own memory."""
    for kind in (Fsdp2, Flat, FlatOriginal, TwoD, Zero, Strips):
        each = kind()
        each.train(1)
        state = optim_state_dict(each.model, each.optimizer)
        for values in state["state"].values():
            moments = values["exp_avg"]
            for t in moments.tensors if isinstance(moments, Shards) else [moments.to_local()]:
                t.fill_(7)
        full = optim_state_dict(each.model, each.optimizer, full=True)
        assert all((values["exp_avg"] == 7).all() for values in full["state"].values()), kind


def test_shards_are_views_and_full_tensors_are_copies(two):
    two.run(memory_kept)
