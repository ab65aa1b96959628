"""What is not one replicated parameter with state of its shape: each case read, loaded elsewhere, and trained on."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from farstep.errors import LayoutError, StateMismatch
from farstep.optim import CombinedOptimizer, NamedOptimizer, ShardedOptimizer
from farstep.state import RankOwned, load_optim_state_dict, optim_state_dict
from state.holdings import Net
from state.training import Flat, FlatOriginal, Fsdp2, Plain, Zero, bits_of, gradient

CPU = torch.device("cpu")


def step(*optimizers, skip=()):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None if id(p) in skip else gradient(p.detach())
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    """Two full states."""
    assert list(a["state"]) == list(b["state"])
    assert a["param_groups"] == b["param_groups"]
    for name, state in a["state"].items():
        assert list(state) == list(b["state"][name]), name
        for key, value in state.items():
            torch.testing.assert_close(value, b["state"][name][key], rtol=1e-6, atol=1e-7)


def full(model, optimizer):
    return optim_state_dict(model, optimizer, full=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


# -- one process ------------------------------------------------------------------------------------------


def test_an_optimizer_that_never_stepped_has_no_state_and_still_has_none():
    """torch's getter steps a fresh optimizer with gradients of zero, and returns nothing where gradients exist."""
    model = Net(0)
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = bits_of(optimizer)
    for whole in (False, True):
        state = optim_state_dict(model, optimizer, full=whole)
        assert state["state"] == {}
        assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert bits_of(optimizer) == before
    assert len(optimizer.state) == 0
    fresh = torch.optim.Adam(model.parameters())
    step(fresh)
    load_optim_state_dict(model, fresh, state)
    assert len(fresh.state) == 0  # as saved


def test_a_full_state_loads_into_torch_by_names():
    model = Net(0)
    optimizer = torch.optim.Adam(model.parameters())
    step(optimizer)
    state = full(model, optimizer)
    plain = optimizer.state_dict()
    for number, (name, _) in enumerate(model.named_parameters()):
        for key, value in plain["state"][number].items():
            assert torch.equal(state["state"][name][key], value)
            assert state["state"][name][key] is not value


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.ASGD]
)
def test_other_classes(make):
    model, other = Net(0), Net(0)
    optimizer, fresh = (make(m.parameters(), lr=0.01) for m in (model, other))

    def go(m, o):
        def closure():
            o.zero_grad()
            loss = m(torch.linspace(0, 1, 10).view(2, 5)).square().sum()
            loss.backward()
            return loss

        o.step(closure)

    go(model, optimizer)
    load_optim_state_dict(other, fresh, full(model, optimizer))
    other.load_state_dict(model.state_dict())
    go(model, optimizer)
    go(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_step_as_a_number_or_a_tensor():
    model = Net(0)
    optimizer = torch.optim.Adam(model.parameters())
    step(optimizer)
    state = full(model, optimizer)
    numbers = copy.deepcopy(state)
    for values in numbers["state"].values():
        values["step"] = values["step"].item()
    fresh = torch.optim.Adam(model.parameters())
    load_optim_state_dict(model, fresh, numbers)  # the class wants tensors
    same(full(model, fresh), state)
    counting = Counting(model.parameters())
    step(counting)
    tensors = full(model, counting)
    assert [v["count"] for v in tensors["state"].values()] == [1] * 6
    for values in tensors["state"].values():
        values["count"] = torch.tensor(5.0)
    load_optim_state_dict(model, counting, tensors)  # this one has numbers
    assert [state["count"] for state in counting.state.values()] == [5] * 6
    assert all(type(state["count"]) is int for state in counting.state.values())


class Counting(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["nothing"] = None
                p.sub_(p.grad, alpha=group["lr"] / state["count"])


def test_groups_in_another_order_and_other_groups():
    def grouped(model, *parts):
        named = dict(model.named_parameters())
        return torch.optim.Adam([{"params": [named[n] for n in part], "lr": lr} for lr, part in parts])

    model = Net(0)
    names = list(dict(model.named_parameters()))
    optimizer = grouped(model, (0.1, names[:2]), (0.2, names[2:]))
    step(optimizer)
    state = full(model, optimizer)
    turned = grouped(model, (0.7, names[:1:-1]), (0.8, names[1::-1]))
    load_optim_state_dict(model, turned, state)
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]
    finer = grouped(model, (9, names[:1]), (9, names[1:2]), (9, names[2:]))
    load_optim_state_dict(model, finer, state)
    assert [group["lr"] for group in finer.param_groups] == [0.1, 0.1, 0.2]
    for other in (turned, finer):
        for p in model.parameters():
            assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    one = grouped(model, (9, names))
    before = bits_of(one)
    with pytest.raises(StateMismatch, match="were saved in groups with different lr"):
        load_optim_state_dict(model, one, state)
    assert bits_of(one) == before


def test_an_optimizer_for_each_parameter():
    """Optimizers that step during backward: a dict or a list of them counts as one."""
    model = Net(0)
    whole = torch.optim.Adam(model.parameters(), lr=0.1)
    step(whole)
    state = full(model, whole)
    other = Net(0)
    each = {p: torch.optim.Adam([p], lr=9) for p in other.parameters()}

    def step_now(p):
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(step_now)
    load_optim_state_dict(other, each, state)
    assert all(o.param_groups[0]["lr"] == 0.1 for o in each.values())
    back = full(other, each)
    assert len(back["param_groups"]) == 6
    fresh = torch.optim.Adam(model.parameters(), lr=9)
    load_optim_state_dict(model, fresh, back)
    same(full(model, fresh), state)
    other.load_state_dict(model.state_dict())
    other(torch.ones(2, 5)).sum().backward()  # steps
    model(torch.ones(2, 5)).sum().backward()
    fresh.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_named_and_combined_optimizers():
    model = Net(0)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    step(plain)
    state = full(model, plain)
    named = dict(model.named_parameters())
    parts = [
        NamedOptimizer(
            {n: p for n, p in named.items() if n.startswith("inner") is inner}, torch.optim.Adam, lr=9
        )
        for inner in (False, True)
    ]
    combined = CombinedOptimizer(parts)
    load_optim_state_dict(model, combined, state)
    assert [group["lr"] for group in combined.param_groups] == [0.1, 0.1]
    assert all(
        torch.equal(part.state[p]["exp_avg"], plain.state[p]["exp_avg"]) for part in parts for p in part.state
    )
    assert set(full(model, combined)["state"]) == set(named)


def test_names_of_wrappers():
    bare = Net(0)
    optimizer = torch.optim.Adam(bare.parameters())
    step(optimizer)
    state = full(bare, optimizer)
    wrapped = Net(0)
    wrapped.inner = checkpoint_wrapper(wrapped.inner)
    wrapped = torch.compile(wrapped, backend="eager")
    other = torch.optim.Adam(wrapped.parameters())
    load_optim_state_dict(wrapped, other, state)
    same(full(wrapped, other), state)
    named = dict(wrapped.named_parameters())
    assert any("_orig_mod" in name and "_checkpoint_wrapped_module" in name for name in named)
    prefixed = {
        "state": {f"module.{n}": optimizer.state[p] for n, p in zip(named, bare.parameters(), strict=True)},
        "param_groups": [{**state["param_groups"][0], "params": [f"module.{n}" for n in named]}],
    }
    fresh = torch.optim.Adam(bare.parameters())
    load_optim_state_dict(bare, fresh, prefixed)
    same(full(bare, fresh), state)


def test_several_dtypes_and_states_of_another_dtype_than_the_parameter():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    optimizer = torch.optim.Adam(model.parameters())
    step(optimizer)
    state = full(model, optimizer)
    assert {v["exp_avg"].dtype for v in state["state"].values()} == {torch.float32, torch.float64}
    half = copy.deepcopy(model).bfloat16()
    fresh = torch.optim.Adam(half.parameters())
    load_optim_state_dict(half, fresh, state)
    step(fresh)  # torch's class wants its state in the parameter's dtype
    kept = Rounding(half.parameters())
    step(kept)
    mixed = full(half, kept)
    assert mixed["state"]["0.weight"]["average"].dtype == torch.float32
    load_optim_state_dict(half, kept, mixed)  # another class keeps it as it is
    same(full(half, kept), mixed)


class Rounding(torch.optim.Optimizer):
    """Like an 8-bit optimizer: codes of the parameter's shape, a scale for each block of what is here, and one table."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if isinstance(p, DTensor) else p
                g = p.grad.to_local() if isinstance(p, DTensor) else p.grad
                state = self.state[p]
                if not state:
                    average = torch.zeros_like(p, dtype=torch.float32)
                    state.update(average=average, codes=torch.zeros_like(p, dtype=torch.uint8))
                    state.update(table=torch.linspace(-1, 1, 16), scales=torch.ones(-(-local.numel() // 8)))
                average, codes = state["average"], state["codes"]
                if isinstance(p, DTensor):
                    average, codes = average.to_local(), codes.to_local()
                average.mul_(0.5).add_(g.float())
                codes.add_(g != 0)
                if local.numel():
                    blocks = nn.functional.pad(average.reshape(-1), (0, -local.numel() % 8)).view(-1, 8)
                    state["scales"].copy_(blocks.abs().amax(1))
                local.sub_(average.to(local.dtype), alpha=group["lr"])


# -- two ranks --------------------------------------------------------------------------------------------


def tied():
    bare = Tied()
    optimizer = torch.optim.Adam(bare.parameters())
    step(optimizer)
    state = full(bare, optimizer)
    assert list(state["state"]) == ["embed.weight", "body.weight", "body.bias"]
    for use_orig_params in (False, True):
        flat = FullyShardedDataParallel(Tied(), use_orig_params=use_orig_params, device_id=CPU)
        other = torch.optim.Adam(flat.parameters())
        load_optim_state_dict(flat, other, state)
        same(full(flat, other), state)
    sharded = fully_shard(Tied())
    other = torch.optim.Adam(sharded.parameters())
    aliased = {
        "state": {n.replace("embed", "head"): v for n, v in state["state"].items()},
        "param_groups": [
            {**g, "params": [n.replace("embed", "head") for n in g["params"]]} for g in state["param_groups"]
        ],
    }
    load_optim_state_dict(sharded, other, aliased)  # saved under its other name
    same(full(sharded, other), state)


def test_tied_parameters(two):
    two.run(tied)


def frozen():
    bare = Net(0)
    bare.first.requires_grad_(False)
    trainable = torch.optim.Adam([p for p in bare.parameters() if p.requires_grad])
    step(trainable)
    state = full(bare, trainable)
    everything = torch.optim.Adam(bare.parameters())
    load_optim_state_dict(bare, everything, state)  # it lists frozen ones too
    assert full(bare, everything)["state"].keys() == state["state"].keys()
    listed = full(bare, everything)
    load_optim_state_dict(bare, trainable, listed)  # and the other way round
    same(full(bare, trainable), state)
    model = Net(0)
    model.first.requires_grad_(False)
    flat = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    other = torch.optim.Adam([p for p in flat.parameters() if p.requires_grad])
    load_optim_state_dict(flat, other, state)
    same(full(flat, other), state)


def test_frozen_parameters(two):
    two.run(frozen)


def without_gradients():
    """Of a parameter without gradient there is no state, which is no error; but a flat parameter cannot have half of one."""
    source = Fsdp2()
    skip = {id(source.model.scale), id(source.model.first.bias)}
    step(source.optimizer, skip=skip)
    state = full(source.model, source.optimizer)
    assert "scale" not in state["state"]
    assert "scale" in state["param_groups"][0]["params"]
    for kind in (Plain, FlatOriginal, Zero):
        target = kind()
        target.train(1)
        load_optim_state_dict(target.model, target.optimizer, state)
        same(full(target.model, target.optimizer), state)
    flat = Flat()
    before = bits_of(flat.optimizer)
    with pytest.raises(StateMismatch, match=r"'scale', 'first.bias' has no state in what was given"):
        load_optim_state_dict(flat.model, flat.optimizer, state)
    assert bits_of(flat.optimizer) == before
    flat.train(1)
    old = full(flat.model, flat.optimizer)
    load_optim_state_dict(flat.model, flat.optimizer, state, strict=False)
    new = full(flat.model, flat.optimizer)
    for name, values in new["state"].items():
        wanted = state["state"].get(name) or old["state"][name]
        assert torch.equal(values["exp_avg"], wanted["exp_avg"]), name


def test_parameters_that_got_no_gradient_yet(two):
    two.run(without_gradients)


def odd():
    """State that is not shaped like its parameter, as 8-bit optimizers have it."""
    for kind in (Flat, FlatOriginal, Fsdp2):
        source = kind(lambda p, **_: Rounding(p))
        source.train(2)
        for whole in (False, True):
            state = optim_state_dict(source.model, source.optimizer, full=whole)
            values = state["state"]["first.weight"]
            assert isinstance(values["scales"], RankOwned)
            assert not isinstance(values["table"], RankOwned)
            target = kind(lambda p, **_: Rounding(p), seed=1)
            load_optim_state_dict(target.model, target.optimizer, state)
            target.take_parameters(source)
            again = kind(lambda p, **_: Rounding(p))
            again.train(3)
            target.train(1)
            for mine, wanted in zip(target.keys(), again.keys(), strict=True):
                if mine.numel() == 0:  # nothing of it is here, and its state means nothing
                    continue
                for key, value in target.optimizer.state[mine].items():
                    other = again.optimizer.state[wanted][key]
                    if isinstance(value, DTensor):
                        value, other = value.to_local(), other.to_local()
                    assert torch.equal(value, other), (kind, key)
        elsewhere = Plain(lambda p, **_: Rounding(p))
        before = bits_of(elsewhere.optimizer)
        with pytest.raises(
            StateMismatch,
            match=r"'scales' of parameter '(scale|first.weight)' is not shaped like it and differs",
        ) as info:
            load_optim_state_dict(elsewhere.model, elsewhere.optimizer, state)
        assert "nothing has been loaded" in str(info.value)
        assert bits_of(elsewhere.optimizer) == before


def test_state_that_is_not_shaped_like_its_parameter(two):
    two.run(odd)


def in_pieces():
    """A parameter of which each rank's ShardedOptimizer steps several ranges."""

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Linear(50, 30)
        return model, ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam, bucket_bytes=1024)

    model, optimizer = made(0)
    assert any(len(seat.keys) > 2 for seat in optimizer.optim_seats(None).values())
    step(optimizer)
    state = full(model, optimizer)
    torch.manual_seed(0)
    bare = nn.Linear(50, 30)
    plain = torch.optim.Adam(bare.parameters())
    step(plain)
    wanted = full(bare, plain)
    for name, values in wanted["state"].items():
        torch.testing.assert_close(state["state"][name]["exp_avg"], values["exp_avg"])
    for given in (state, optim_state_dict(model, optimizer)):
        other, fresh = made(1)
        load_optim_state_dict(other, fresh, given)
        same(full(other, fresh), state)


def test_a_parameter_in_several_pieces(two):
    two.run(in_pieces)


def ignored():
    model = Net(0)
    flat = FullyShardedDataParallel(model, ignored_modules=[model.inner], device_id=CPU)
    optimizer = torch.optim.Adam(flat.parameters())
    step(optimizer)
    state = full(flat, optimizer)
    plain = Plain(torch.optim.Adam, lr=1e-3)
    plain.train(1)
    wanted = full(plain.model, plain.optimizer)
    assert state["state"].keys() == wanted["state"].keys()
    load_optim_state_dict(plain.model, plain.optimizer, state)
    found = full(plain.model, plain.optimizer)
    for name, values in wanted["state"].items():
        torch.testing.assert_close(found["state"][name]["exp_avg"], values["exp_avg"], rtol=1e-6, atol=1e-7)


def test_modules_that_fsdp_ignores(two):
    two.run(ignored)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n)) for n in (1, 5, 1))


def empty_shards():
    """Parameters of which some ranks have nothing."""
    bare = Tiny()
    optimizer = torch.optim.Adam(bare.parameters())
    step(optimizer)
    state = full(bare, optimizer)
    for wrap in (
        lambda m: FullyShardedDataParallel(m, use_orig_params=True, device_id=CPU),
        lambda m: FullyShardedDataParallel(m, device_id=CPU),
        fully_shard,
    ):
        model = wrap(Tiny())
        # Those without elements get no gradient here, and so no state.
        other = torch.optim.Adam(model.parameters())
        step(other, skip={id(p) for p in model.parameters() if not isinstance(p, DTensor) and p.numel() == 0})
        same(full(model, other), state)
        fresh = torch.optim.Adam(model.parameters())
        load_optim_state_dict(model, fresh, optim_state_dict(model, other))
        same(full(model, fresh), state)


def test_empty_shards(two):
    two.run(empty_shards)


def test_the_device_of_state_is_honoured():
    """New state is made where the old is, and not where the parameter is. Here that is the meta device, which cannot be filled, and says so."""
    model = Net(0)
    source, target = (torch.optim.Adam(model.parameters()) for _ in range(2))
    step(source)
    step(target)
    for state in target.state.values():
        state["exp_avg"] = state["exp_avg"].to("meta")
    with pytest.raises(LayoutError, match=r"'exp_avg'\].* is on the meta device"):
        load_optim_state_dict(model, target, full(model, source))


def within_a_group():
    """A model on some ranks of the job."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = groups[dist.get_rank()]
    each = Plain(seed=dist.get_rank())
    each.train(1 + dist.get_rank())
    state = optim_state_dict(each.model, each.optimizer, full=True, group=mine)
    assert state["state"]["scale"]["step"].item() == 1 + dist.get_rank()
    load_optim_state_dict(each.model, each.optimizer, state, group=mine)


def test_a_group_of_its_own(two):
    two.run(within_a_group)
