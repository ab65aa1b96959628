"""A ShardedOptimizer's state: saved on one number of ranks, loaded on another, in every form, or not at all."""

import io

import pytest
import torch
import torch.distributed as dist

from farstep.errors import OptimError, StateMismatch
from farstep.optim import NamedOptimizer, ShardedOptimizer
from farstep.state import Shards
from optim.replicas import Scaled, assert_same, assert_same_state, give, give_mean, pair

OPTIONS = {"lr": 0.01, "amsgrad": True}


def trained(kind=torch.optim.AdamW, options=None, steps=3):
    """A ShardedOptimizer after some steps with the same gradients, however many ranks there are."""
    model = Scaled()
    sharded = ShardedOptimizer(
        dict(model.named_parameters()),
        kind,
        bucket_bytes=8192,
        reduce_gradients=False,
        **(options or OPTIONS),
    )
    for step in range(steps):
        give_mean(model, step, 1)
        if kind is torch.optim.Adafactor:
            model.nothing.grad = None
        sharded.step()
    return model, sharded


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def save(kind, options):
    _, sharded = trained(kind, options)
    return saved(sharded.state_dict()), saved(sharded.state_dict(full=True))


def resume(kind, options, files, full):
    """Load, go on for two steps, and say what has become of the parameters and the state."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, _ = trained(kind, options)
    sharded = ShardedOptimizer(
        dict(model.named_parameters()), kind, bucket_bytes=4096, reduce_gradients=False, lr=1.0
    )
    # Whatever files a rank happens to read: together the ranks have all.
    sharded.load_state_dict(loaded(full) if full else [loaded(data) for data in files[rank::ranks]])
    for step in (3, 4):
        give_mean(model, step, 1)
        if kind is torch.optim.Adafactor:
            model.nothing.grad = None
        sharded.step()
    return saved((model.state_dict(), sharded.state_dict(full=True)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, OPTIONS),
        (torch.optim.Adafactor, {"lr": 0.05, "foreach": False}),
    ],
    ids=["AdamW", "Adafactor"],
)
def test_saved_on_any_number_of_ranks_and_loaded_on_any(on_ranks, kind, options):
    files = {n: on_ranks(n, save, kind, options) for n in (1, 2, 3, 4)}
    found = []
    for n, written in files.items():
        for m in (1, 2, 3, 4):
            found += on_ranks(m, resume, kind, options, [part for part, _ in written], None)
            if m == 5 - n:
                found += on_ranks(m, resume, kind, options, [], written[0][1])
    weights, state = loaded(found[0])
    assert state["state"]["cube"]["step"] == 5
    for other in found[1:]:
        others_weights, others_state = loaded(other)
        assert all(torch.equal(weights[name], others_weights[name]) for name in weights)
        for name, entries in state["state"].items():
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(others_state["state"][name][key]))


def forms():
    rank = dist.get_rank()
    model, sharded = trained()
    state = sharded.state_dict()
    assert all(
        isinstance(each["exp_avg"], Shards) for name, each in state["state"].items() if name != "scale"
    )
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    held = sum(t.numel() for each in state["state"].values() for t in getattr(each["exp_avg"], "tensors", ()))
    total = sum(p.numel() for p in model.parameters())
    assert held < 0.6 * total
    mine = sharded.state_dict(full=True, rank0_only=True, cpu_offload=True)
    assert bool(mine) == (rank == 0)
    for given, broadcast in ((mine, True), (sharded.state_dict(full=True), False), (state, False)):
        fresh = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **OPTIONS)
        fresh.load_state_dict(given if given else None, broadcast_from_rank0=broadcast)
        one, two = fresh.state_dict(full=True)["state"], sharded.state_dict(full=True)["state"]
        assert all(torch.equal(one[name][key], two[name][key]) for name in two for key in two[name])
    # A state dict is not tied to later steps.
    full = sharded.state_dict(full=True)
    kept = full["state"]["cube"]["exp_avg"].clone()
    give_mean(model, 9, 1)
    sharded.step()
    assert torch.equal(full["state"]["cube"]["exp_avg"], kept)
    # And it is that of other optimizers by name.
    other = Scaled()
    named = NamedOptimizer(other.named_parameters(), torch.optim.AdamW, **OPTIONS)
    named.load_state_dict(full)
    named.load_state_dict(full)
    fresh.load_state_dict(named.state_dict())


def misfits():
    _, sharded = trained()
    good = sharded.state_dict(full=True)
    before = sharded.state_dict(full=True)

    def changed(**names):
        state = {name: dict(each) for name, each in good["state"].items()}
        for name, each in names.items():
            state[name] = each
        return {**good, "state": state}

    def without(name):
        groups = [{**g, "params": [n for n in g["params"] if n != name]} for g in good["param_groups"]]
        return {"state": {n: s for n, s in good["state"].items() if n != name}, "param_groups": groups}

    renamed = without("cube")
    renamed["param_groups"][0]["params"].append("sphere")
    renamed["state"]["sphere"] = good["state"]["cube"]
    tall = {**good["state"]["cube"], "exp_avg": torch.zeros(3, 5, 71)}
    sparse = {**good["state"]["cube"], "exp_avg": torch.zeros(3, 5, 70).to_sparse()}
    for state, error, text in (
        (renamed, StateMismatch, "Missing in the state: cube. Unexpected in the state: sphere"),
        (changed(cube=tall), StateMismatch, r"'exp_avg' of parameter 'cube' has shape \(3, 5, 71\)"),
        (changed(cube=sparse), StateMismatch, "sparse_coo"),
        (changed(cube=[1]), StateMismatch, "is a list, and not a dict"),
        ({}, StateMismatch, "no state dict by names"),
        (None, StateMismatch, "this is no state"),
    ):
        with pytest.raises(error, match=text):
            sharded.load_state_dict(state)
        now = sharded.state_dict(full=True)
        assert all(
            torch.equal(now["state"][n][k], v) for n, e in before["state"].items() for k, v in e.items()
        )
    # One rank's trouble is every rank's.
    with pytest.raises(
        OptimError, match=r"the ranks were given different states: 'exp_avg' of parameter 'cube'"
    ):
        sharded.load_state_dict(changed(cube=tall) if dist.get_rank() else good)
    # A part of the state that nobody has is not taken to be zero.
    parts = sharded.state_dict()
    if dist.get_rank() == 1:
        parts = {**parts, "state": {}}
    with pytest.raises(OptimError, match="nothing has been loaded"):
        sharded.load_state_dict(parts)
    # Not strictly: what is missing keeps its state.
    sharded.load_state_dict(without("cube"), strict=False)
    now = sharded.state_dict(full=True)
    assert torch.equal(now["state"]["cube"]["exp_avg"], before["state"]["cube"]["exp_avg"])


def before_the_first_step():
    model = Scaled()
    sharded = ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, lr=0.1, momentum=0.9)
    state = sharded.state_dict()
    assert state["state"] == {}
    sharded.load_state_dict(state)
    give(model, 0, dist.get_rank())
    sharded.step()


def goes_on_as_before():
    """Saved and loaded between two steps, into pieces of another size."""
    model, sharded, twin, plain = pair(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, bucket_bytes=8192
    )
    for step in range(6):
        if step == 3:
            state = sharded.state_dict()
            sharded = ShardedOptimizer(
                dict(model.named_parameters()), torch.optim.SGD, lr=7.0, momentum=0.1, bucket_bytes=2048
            )
            sharded.load_state_dict(state)
        give(model, step, dist.get_rank())
        give_mean(twin, step, dist.get_world_size())
        sharded.step()
        plain.step()
    assert_same(model, twin)
    assert_same_state(sharded.state_dict(full=True), plain, twin)


@pytest.mark.parametrize(
    "body", [forms, misfits, before_the_first_step, goes_on_as_before], ids=lambda body: body.__name__
)
def test_state(on_ranks, body):
    on_ranks(2, body)


def test_state_on_three_ranks(on_ranks):
    on_ranks(3, goes_on_as_before)
