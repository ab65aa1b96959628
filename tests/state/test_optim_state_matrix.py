"""Training that is saved under one parallelism, loaded under another and continued is training that was never interrupted."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from farstep.state import Shards, load_optim_state_dict, optim_state_dict
from state import training, uneven
from state.holdings import Net
from state.training import Flat, FlatOriginal, Fsdp2, Strips, TwoD, Zero, bits_of, reference


def close(found, wanted, what):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def travelling(kinds, sharded):
    """One training that goes from kind to kind: each loads what the one before has read, takes a
    step, and is read.
    """
    reference = uneven.Reference()
    first = dist.get_rank() == 0
    fleet = {kind: [kind(seed=1), kind(seed=2)] for kind in dict.fromkeys(kinds)}
    here = kinds[0](seed=0)
    state, by_first = optim_state_dict(here.model, here.optimizer, full=not sharded), False
    for step, kind in enumerate(kinds[1:]):
        there = next(each for each in fleet[kind] if each is not here)
        if step % 3 == 0:
            there.optimizer = there.optimized()  # in other steps it has the state of an earlier visit
        what = f"step {step}, {type(here).__name__} -> {kind.__name__}:"
        load_optim_state_dict(there.model, there.optimizer, state, broadcast_from_rank0=by_first)
        there.take_parameters(here)
        there.train(step)
        parameters, wanted = reference.after(step + 1)
        close(there.whole(), parameters, what)
        before = bits_of(there.optimizer)
        by_first = not sharded and step % 2 == 0
        state = optim_state_dict(there.model, there.optimizer, full=not sharded, rank0_only=by_first)
        whole = state
        if sharded:
            assert {name: each["step"] for name, each in state["state"].items()} == {
                name: each["step"] for name, each in wanted.items()
            }, what
            whole = optim_state_dict(there.model, there.optimizer, full=True) if step % 3 == 0 else None
        assert bits_of(there.optimizer) == before, f"{what} was changed by reading"
        if by_first and not first:
            assert whole == {}, what
        elif whole is not None:
            assert set(whole["state"]) == set(wanted), what
            for name, values in wanted.items():
                close(whole["state"][name], values, f"{what} {name}")
        here = there


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_kind_to_every_kind_on_two_ranks_whole(two):
    kinds = [uneven.KINDS[number] for number in uneven.tour(len(uneven.KINDS))]
    two.run(travelling, kinds, False, timeout_s=170)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_second_pair_on_four_ranks_in_shards(four):
    count = len(uneven.KINDS)
    kinds = [uneven.KINDS[number] for number in uneven.tour(count, range(1, count, 2))]
    four.run(travelling, kinds, True, timeout_s=170)


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
