"""Pieces of state that a user keeps beside those of torch's classes: what was read loads where it
came from.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from farstep import checkpoint
from farstep.errors import FarstepError, StateMismatch
from farstep.optim import NamedOptimizer, ShardedOptimizer
from farstep.state import load_optim_state_dict, optim_state_dict
from farstep.state.known import PIECES
from state.training import bits_of

FULL = StateDictOptions(full_state_dict=True)
ADAM = {"step", "exp_avg", "exp_avg_sq"}


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)


def adam(model):
    return torch.optim.Adam(model.parameters())


def named(model):
    return NamedOptimizer(model.named_parameters(), torch.optim.Adam)


def sharded(model):
    return ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam)


def take_a_step(model, optimizer):
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def add_pieces(optimizer, **more):
    for p, state in optimizer.state.items():
        state["ema"] = torch.full_like(p.detach(), 0.5)
        state["seen"] = 7
        state["scale"] = torch.tensor(2.5)
        state.update({key: make(p) for key, make in more.items()})


def change(optimizer):
    """So that a load is seen: every piece gets another value."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value.add_(3)
            elif isinstance(value, int):
                state[key] = value + 3


def whole(model, optimizer):
    return optim_state_dict(model, optimizer, full=True)


def assert_same(found, wanted):
    assert set(found["state"]) == set(wanted["state"])
    for name, state in wanted["state"].items():
        assert set(found["state"][name]) == set(state), name
        for key, value in state.items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=0, atol=0)


def every_way(folder, model, make):
    """Read and saved; then loaded, in every way, into the same optimizer and into a new one."""
    optimizer = make(model)
    take_a_step(model, optimizer)
    add_pieces(optimizer)
    wanted = whole(model, optimizer)
    for state in wanted["state"].values():
        assert {"ema", "seen", "scale"} <= set(state)
    own = optimizer.state_dict() if hasattr(optimizer, "named_params") else None
    checkpoint.save({"model": model, "optim": optimizer}, f"{folder}/saved")
    ways = [
        lambda to: load_optim_state_dict(model, to, wanted),
        lambda to: load_optim_state_dict(model, to, wanted, strict=False),
        lambda to: checkpoint.load({"model": model, "optim": to}, f"{folder}/saved"),
        lambda to: checkpoint.load({"model": model, "optim": to}, f"{folder}/saved", strict=False),
        lambda to: checkpoint.load_optimizer(model, to, f"{folder}/saved"),
    ]
    if make is not adam:
        ways.append(lambda to: to.load_state_dict(wanted if own is None else own))
        ways.append(lambda to: to.load_state_dict(wanted, strict=False))
    for load in ways:
        if own is not None:
            own = {**own, "state": {n: dict(s) for n, s in wanted["state"].items()}}
        change(optimizer)
        load(optimizer)
        assert_same(whole(model, optimizer), wanted)
        fresh = make(model)
        load(fresh)
        assert_same(whole(model, fresh), wanted)
        fresh.load_state_dict(fresh.state_dict())  # and once more, from itself
        assert_same(whole(model, fresh), wanted)
    take_a_step(model, fresh)  # the class steps beside them
    state = whole(model, fresh)["state"]
    assert {each["step"].item() for each in state.values()} == {2.0}
    assert all((each["ema"] == 0.5).all() for each in state.values())


@pytest.mark.parametrize("make", [adam, named, sharded])
def test_in_one_process(tmp_path, make):
    every_way(tmp_path, layers(), make)


def spread_over_ranks(folder):
    flat = FullyShardedDataParallel(layers(), use_orig_params=True, device_id=torch.device("cpu"))
    one = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
    for number, (model, make) in enumerate(
        [(fully_shard(layers()), adam), (flat, adam), (one, adam), (layers(), sharded)]
    ):
        path = f"{folder}/{number}"
        every_way(path, model, make)
    state = whole(model, _stepped(model))
    for target in (fully_shard(layers()), flat, one):  # and from one parallelism to another
        optimizer = adam(target)
        load_optim_state_dict(target, optimizer, state)
        assert_same(whole(target, optimizer), state)
        if target is not one:
            take_a_step(target, optimizer)
            theirs = get_optimizer_state_dict(target, optimizer, options=FULL)["state"]
            ours = whole(target, optimizer)["state"]
            if dist.get_rank() == 0:
                for name, each in ours.items():
                    torch.testing.assert_close(theirs[name]["ema"], each["ema"])
                    torch.testing.assert_close(theirs[name]["step"], each["step"])


def _stepped(model):
    optimizer = sharded(model)
    take_a_step(model, optimizer)
    add_pieces(optimizer)
    return optimizer


def test_on_ranks(two, tmp_path):
    two.run(spread_over_ranks, str(tmp_path))


@pytest.mark.parametrize("make", [adam, named])
def test_what_only_the_optimizer_that_has_it_can_take(tmp_path, make):
    """A table, a list, and a name that another class of torch's uses for its own: nothing tells a
    new optimizer that they are a user's.
    """
    pieces = {
        "table": lambda p: torch.arange(5.0),
        "history": lambda p: [torch.zeros(2), "text"],
        "prev": lambda p: torch.ones_like(p),
    }
    model = layers()
    for key, value in pieces.items():
        optimizer = make(model)
        take_a_step(model, optimizer)
        add_pieces(optimizer, **{key: value})
        wanted = whole(model, optimizer)
        checkpoint.save({"model": model, "optim": optimizer}, tmp_path / key)
        for load in (
            lambda to, given=wanted: load_optim_state_dict(model, to, given),
            lambda to, path=tmp_path / key: checkpoint.load({"model": model, "optim": to}, path),
            *([lambda to, given=wanted: to.load_state_dict(given)] if make is named else ()),
        ):
            change(optimizer)
            load(optimizer)
            again = whole(model, optimizer)
            for name, state in wanted["state"].items():
                if key != "history":
                    assert torch.equal(again["state"][name][key], state[key])
                else:
                    assert torch.equal(again["state"][name][key][0], state[key][0])
            if key != "history":
                fresh = make(model)
                with pytest.raises(FarstepError, match=f"{key}.*before the load|before the load.*{key}"):
                    load(fresh)
                assert not any(fresh.state.values())


def test_a_piece_keeps_its_dtype(tmp_path):
    """Averages in float32 of a bfloat16 model: torch's load_state_dict would round them."""
    for make in (adam, named, sharded):
        model = layers(torch.bfloat16)
        optimizer = make(model)
        take_a_step(model, optimizer)
        for p, state in optimizer.state.items():
            state["ema"] = torch.full_like(p.detach(), 1 / 3, dtype=torch.float32)
        wanted = whole(model, optimizer)
        checkpoint.save({"model": model, "optim": optimizer}, tmp_path / make.__name__)
        fresh = make(model)
        load_optim_state_dict(model, fresh, wanted)
        assert_same(whole(model, fresh), wanted)
        fresh = make(model)
        checkpoint.load({"model": model, "optim": fresh}, tmp_path / make.__name__)
        assert_same(whole(model, fresh), wanted)
        if make is not adam:
            fresh = make(model)
            fresh.load_state_dict(wanted)
            assert_same(whole(model, fresh), wanted)


CLASSES = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


def test_the_state_of_another_class_is_refused():
    """Every pair of torch's classes whose pieces differ; and a class of which nobody knows
    anything, into one that needs nothing.
    """
    model = layers()
    states = []
    for kind, options in CLASSES:
        optimizer = kind(model.parameters(), lr=0.01, **options)
        take_a_step(model, optimizer)
        states.append(whole(model, optimizer)["state"])
    keys = [set(state["0.weight"]) for state in states]
    for (a, state), (b, (kind, options)) in itertools.product(enumerate(states), enumerate(CLASSES)):
        if keys[a] != keys[b]:
            target = kind(model.parameters(), lr=0.01, **options)
            before = bits_of(target)
            with pytest.raises(StateMismatch, match="saved by another optimizer class"):
                load_optim_state_dict(model, target, {"state": state})
            assert bits_of(target) == before
    foreign = {name: {"sketch": torch.ones_like(p)} for name, p in model.named_parameters()}
    for kind, options in CLASSES:
        with pytest.raises(StateMismatch, match="saved by another optimizer class"):
            load_optim_state_dict(model, kind(model.parameters(), lr=0.01, **options), {"state": foreign})


def test_all_pieces_of_torchs_classes_are_known():
    """So that none is taken for a user's."""
    found = set()
    for kind in vars(torch.optim).values():
        if not isinstance(kind, type) or kind is torch.optim.Optimizer:
            continue
        for options in ({}, {"amsgrad": True}, {"momentum": 0.9, "centered": True}, {"momentum": 0.9}):
            found |= _pieces_of(kind, options)
    assert found > ADAM
    assert found <= PIECES


def _pieces_of(kind, options):
    pieces = set()
    for shape in ((3, 3), (3,)):
        p = nn.Parameter(torch.ones(shape))
        try:
            optimizer = kind([p], lr=0.1, **options)
        except (TypeError, ValueError):
            continue

        def closure(p=p):
            p.grad = p.detach().to_sparse() if kind is torch.optim.SparseAdam else p.detach() * 1.5
            return (p * p).sum()

        for _ in range(2):
            closure()
            optimizer.step(closure)
        pieces |= set(optimizer.state[p])
    return pieces


def by_torch():
    """Torch's own functions read and write the same."""
    model = fully_shard(layers())
    optimizer = adam(model)
    take_a_step(model, optimizer)
    for p, state in optimizer.state.items():
        state["ema"] = torch.full_like(p.detach(), 0.5)
    ours = whole(model, optimizer)
    fresh = adam(model)
    set_optimizer_state_dict(model, fresh, {**ours}, options=FULL)
    found = whole(model, fresh)["state"]
    theirs = get_optimizer_state_dict(model, optimizer, options=FULL)
    fresh = adam(model)
    load_optim_state_dict(model, fresh, theirs, broadcast_from_rank0=True)
    assert_same(whole(model, fresh), ours)
    for name, state in found.items():  # what torch loads of it is what it has here
        for key, value in state.items():
            torch.testing.assert_close(value, ours["state"][name][key])


def test_torchs_own_functions(two):
    two.run(by_torch)
