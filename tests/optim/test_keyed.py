"""KeyedOptimizer, its wrapper, and several as one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import nn, optim
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

from farstep.errors import StateMismatch
from farstep.optim import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, NamedOptimizer

from .test_init_state import assert_equal
from .test_named import model, snapshot, step


def given_state() -> tuple[dict[str, nn.Parameter], KeyedOptimizer]:
    params = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}
    state = {params["a"]: {"sum": torch.zeros(2), "step": 3}, params["b"]: {"sum": torch.ones(3), "step": 4}}
    return params, KeyedOptimizer(params, state, [{"params": list(params.values()), "lr": 0.1}])


def wrapped(seed: int = 1, steps: int = 0, **options: Any) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    module = model(seed)
    optimizer = KeyedOptimizerWrapper(dict(module.named_parameters()), lambda p: optim.Adam(p, **options))
    for i in range(steps):
        step(module, optimizer, i)
    return module, optimizer


# -- one ------------------------------------------------------------------------------------------------------


def test_state_by_name_without_groups_unless_they_are_asked_for():
    params, optimizer = given_state()
    assert isinstance(optimizer, optim.Optimizer)
    assert optimizer.state_dict() == {
        "state": {"a": optimizer.state[params["a"]], "b": optimizer.state[params["b"]]}
    }
    optimizer.save_param_groups(True)
    assert optimizer.state_dict()["param_groups"] == [{"params": ["a", "b"], "lr": 0.1}]


def test_state_is_loaded_into_the_tensors_that_were_given():
    params, optimizer = given_state()
    mine = optimizer.state[params["a"]]["sum"]
    state = snapshot(optimizer)
    state["state"]["a"]["sum"] += 5
    state["state"]["a"]["step"] = 9
    state["param_groups"] = [{"params": ["a", "b"], "lr": 7.0}]
    optimizer.load_state_dict(state)
    assert_equal(mine, torch.full((2,), 5.0))
    assert optimizer.state[params["a"]]["step"] == 9
    assert optimizer.param_groups[0]["lr"] == 0.1  # groups are no part of this state
    optimizer.save_param_groups(True)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_what_does_not_fit_changes_nothing():
    _, optimizer = given_state()
    before = snapshot(optimizer)

    def lacks_a_parameter(state: Any) -> None:
        del state["b"]

    def has_another(state: Any) -> None:
        state["c"] = state["b"]

    def lacks_a_piece(state: Any) -> None:
        del state["b"]["step"]

    def has_another_piece(state: Any) -> None:
        state["b"]["more"] = 1

    def has_another_shape(state: Any) -> None:
        state["b"]["sum"] = torch.ones(4)

    for change, match in (
        (lacks_a_parameter, "Missing in the state: b"),
        (has_another, "Unexpected in the state: c"),
        (lacks_a_piece, "'b' lacks 'step'"),
        (has_another_piece, "'b' has unexpected 'more'"),
        (has_another_shape, r"'sum' of parameter 'b' has shape \(4,\)"),
    ):
        state = snapshot(optimizer)
        state["state"]["a"]["sum"] += 1
        change(state["state"])
        with pytest.raises(StateMismatch, match=match):
            optimizer.load_state_dict(state)
        assert_equal(optimizer.state_dict(), before)
    optimizer.load_state_dict({"state": {"a": {"sum": torch.ones(2)}}}, strict=False)
    assert_equal(optimizer.state_dict()["state"]["a"], {"sum": torch.ones(2), "step": 3})


def test_mistakes_of_keyed_optimizers():
    params, optimizer = given_state()
    stranger = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="the keys of state must be parameters"):
        KeyedOptimizer(params, {stranger: {}}, [])
    with pytest.raises(ValueError, match="group 0 has a parameter without a name"):
        KeyedOptimizer(params, {}, [{"params": [stranger]}])
    with pytest.raises(NotImplementedError, match="has the groups that it was made with"):
        optimizer.add_param_group({"params": [stranger]})
    with pytest.raises(NotImplementedError):
        optimizer.step()
    with pytest.raises(TypeError, match=r"and not a torch.optim.Optimizer"):
        KeyedOptimizerWrapper(params, list)
    with pytest.raises(TypeError, match=r"params is a mapping or pairs, not a module"):
        KeyedOptimizerWrapper(model(), optim.SGD)


def test_a_wrapper_takes_pairs():
    assert next(iter(KeyedOptimizerWrapper(model().named_parameters(), optim.SGD).params)) == "0.weight"


def test_combined_optimizers_without_a_name_in_common_load_nothing():
    combined = CombinedOptimizer([("a", wrapped(lr=0.1, steps=1)[1]), ("b", wrapped(lr=0.1, steps=1)[1])])
    state = snapshot(combined)
    of_one = {"state": {name: each for name, each in state["state"].items() if name.startswith("a.")}}
    combined.load_state_dict(of_one, strict=False)
    with pytest.raises(StateMismatch, match=r"no name of a parameter in common.*rename="):
        combined.load_state_dict(state, strict=False, rename=lambda name: "module." + name)
    combined.load_state_dict({"state": {}}, strict=False)  # saved before the first step


def test_a_wrapper_takes_state_before_its_first_step_and_after():
    _, saved = wrapped(steps=3, lr=0.1)
    state = snapshot(saved)
    assert set(state) == {"state"}
    for steps in (0, 1):
        _, optimizer = wrapped(steps=steps, lr=0.5)
        optimizer.load_state_dict(state)
        assert_equal(optimizer.state_dict(), state)
        assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(StateMismatch, match=r"'0.weight' lacks 'max_exp_avg_sq'"):
        wrapped(lr=0.1, amsgrad=True)[1].load_state_dict(state)
    module = model()
    other = KeyedOptimizerWrapper(dict(module.named_parameters()), lambda p: optim.RMSprop(p, lr=0.1))
    with pytest.raises(
        StateMismatch, match=r"'0.weight' lacks 'square_avg' and has unexpected 'exp_avg', 'exp_avg_sq'"
    ):
        other.load_state_dict(state)


class Listening(KeyedOptimizerWrapper):
    loads = 0

    def post_load_state_dict(self) -> None:
        self.loads += 1


def test_a_subclass_is_told_of_loads():
    params = dict(model().named_parameters())
    alone, part = Listening(params, optim.Adam), Listening(dict(model().named_parameters()), optim.Adam)
    alone.load_state_dict(alone.state_dict())
    combined = CombinedOptimizer([("x", part)])
    combined.load_state_dict(combined.state_dict())
    assert (alone.loads, part.loads) == (1, 1)


# -- several as one -------------------------------------------------------------------------------------------


def two(steps: int = 0) -> tuple[nn.Module, nn.Module, CombinedOptimizer]:
    encoder, decoder = model(1), model(2)
    combined = CombinedOptimizer(
        [
            ("encoder", NamedOptimizer(encoder.named_parameters(), optim.Adam, lr=0.1)),
            ("decoder", NamedOptimizer(decoder.named_parameters(), optim.SGD, lr=0.2, momentum=0.9)),
        ]
    )
    for i in range(steps):
        combined.zero_grad()
        x = torch.full((1, 3), float(i + 1))
        (encoder(x) * decoder(x)).sum().backward()
        combined.step()
    return encoder, decoder, combined


def test_several_step_save_and_load_as_one():
    encoder, decoder, combined = two(steps=2)
    state = snapshot(combined)
    assert set(state["state"]) == {
        f"{part}.{name}" for part in ("encoder", "decoder") for name, _ in encoder.named_parameters()
    }
    assert [(g["lr"], g["params"][0]) for g in state["param_groups"]] == [
        (0.1, "encoder.0.weight"),
        (0.2, "decoder.0.weight"),
    ]
    assert set(state["state"]["decoder.2.bias"]) == {"momentum_buffer"}
    assert set(combined.params) == set(state["state"])
    again_encoder, again_decoder, again = two()
    again_encoder.load_state_dict(encoder.state_dict())
    again_decoder.load_state_dict(decoder.state_dict())
    again.load_state_dict(state)
    for e, d, c in ((encoder, decoder, combined), (again_encoder, again_decoder, again)):
        c.zero_grad()
        (e(torch.ones(1, 3)) * d(torch.ones(1, 3))).sum().backward()
        c.step()
    assert_equal(list(again_encoder.parameters()), list(encoder.parameters()))
    assert_equal(list(again_decoder.parameters()), list(decoder.parameters()))
    assert_equal(pickle.loads(pickle.dumps(combined)).state_dict()["state"], combined.state_dict()["state"])


def test_a_scheduler_drives_all_and_groups_that_come_later():
    _, _, combined = two()
    schedule = optim.lr_scheduler.MultiplicativeLR(combined, lambda _: 0.5)
    combined.step()
    schedule.step()
    assert [part.param_groups[0]["lr"] for _, part in combined.optimizers] == [0.05, 0.1]
    combined.optimizers[0][1].add_param_group({"params": [("late", nn.Parameter(torch.ones(1)))]})
    assert [g["lr"] for g in combined.param_groups] == [0.05, 0.1, 0.1]
    assert "encoder.late" in combined.params
    with pytest.raises(NotImplementedError, match="which of the optimizers"):
        combined.add_param_group({"params": []})


def test_a_load_that_one_part_refuses_changes_none():
    _, _, combined = two(steps=1)
    before = snapshot(combined)
    for change, match in (
        (
            lambda s: s["state"]["decoder.2.bias"].update(momentum_buffer=torch.ones(9)),
            r"'2.bias' has shape \(9,\)",
        ),
        (lambda s: s["param_groups"][1].update(betas=1), "options betas, which SGD does not have"),
        (lambda s: s["param_groups"].pop(1), "Missing in the state: decoder.0.weight, decoder.0.bias"),
        (lambda s: s["state"].update({"x.weight": {}}), "Unexpected in the state: x.weight"),
    ):
        state = snapshot(combined)
        state["state"]["encoder.0.weight"]["exp_avg"] += 1
        change(state)
        if "decoder.0.weight" in match:
            state["state"] = {n: s for n, s in state["state"].items() if not n.startswith("decoder")}
        with pytest.raises(StateMismatch, match=match):
            combined.load_state_dict(state)
        assert_equal(combined.state_dict()["state"], before["state"])
    combined.load_state_dict(
        {
            **before,
            "state": {n.replace("encoder", "enc"): s for n, s in before["state"].items()},
            "param_groups": [
                {**g, "params": [n.replace("encoder", "enc") for n in g["params"]]}
                for g in before["param_groups"]
            ],
        },
        rename=lambda name: name.replace("enc.", "encoder."),
    )
    assert_equal(combined.state_dict()["state"], before["state"])


def test_one_evaluation_serves_all_and_those_that_want_more_get_more():
    def run(*kinds: Any) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
        params = [nn.Parameter(torch.tensor([2.0])) for _ in kinds]
        parts = [NamedOptimizer({f"p{i}": p}, k) for i, (p, k) in enumerate(zip(params, kinds, strict=True))]
        combined = CombinedOptimizer(parts)
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            combined.zero_grad()
            loss = torch.cat(params).prod() ** 2
            loss.backward()
            return loss

        loss = combined.step(closure)
        return calls, loss.detach(), [p.detach() for p in params]

    calls, loss, found = run(lambda p: optim.SGD(p, lr=0.01), lambda p: optim.SGD(p, lr=0.02))
    assert calls == 1
    assert loss == 16.0
    # Both from the same gradients.
    torch.testing.assert_close(found, [torch.tensor([1.84]), torch.tensor([1.68])])
    calls, _, found = run(lambda p: optim.LBFGS(p, max_iter=3), lambda p: optim.SGD(p, lr=0.02))
    assert calls > 2
    assert found[0].abs() < 2  # and what follows it has gradients of where it went
    torch.testing.assert_close(found[1], 2.0 - 0.02 * 2 * found[0] ** 2 * 2.0)


def test_nested_and_unprefixed_parts_and_their_settings():
    inner = CombinedOptimizer([wrapped(lr=0.1)[1], ("head", wrapped(lr=0.1)[1])])
    outer = CombinedOptimizer([("left", inner), ("right", wrapped(lr=0.1)[1])])
    outer.init_state()
    names = set(outer.state_dict()["state"])
    assert {"left.0.weight", "left.head.0.weight", "right.0.weight"} <= names
    assert "param_groups" not in outer.state_dict()
    outer.save_param_groups(True)
    state = snapshot(outer)
    assert len(state["param_groups"]) == 3
    for each in state["state"].values():
        each["step"] += 4
    outer.load_state_dict(state)
    assert_equal(outer.state_dict()["state"], state["state"])


def test_mistakes_of_combined_optimizers():
    module, one = wrapped(lr=0.1)
    _, other = wrapped(lr=0.1)
    with pytest.raises(
        ValueError, match=r"two parameters have the name '0.weight': give the optimizers prefixes"
    ):
        CombinedOptimizer([one, other])
    same = NamedOptimizer([("x", module[0].weight)], optim.SGD)
    same.save_param_groups(False)
    with pytest.raises(ValueError, match=r"'0.weight' and 'x' are the same parameter, in two optimizers"):
        CombinedOptimizer([one, same])
    with pytest.raises(TypeError, match="takes KeyedOptimizers and ShardedOptimizers, and this is a SGD"):
        CombinedOptimizer([("x", optim.SGD(module.parameters()))])
    with pytest.raises(TypeError, match=r"this is a SGD: NamedOptimizer\(module"):
        CombinedOptimizer([optim.SGD(module.parameters())])
    for given in (one, [(one, "x")], [3], {"x": one}):
        with pytest.raises(TypeError, match=r"a list of optimizers or \(prefix, optimizer\) pairs, not"):
            CombinedOptimizer(given)
    other.save_param_groups(True)
    with pytest.raises(ValueError, match="some of the optimizers save their groups"):
        CombinedOptimizer([("a", one), ("b", other)])


# -- sharded tensors ------------------------------------------------------------------------------------------


def sharded(value: float, rows: int = 2) -> ShardedTensor:
    rank = torch.distributed.get_rank()
    shard = Shard.from_tensor_and_offsets(torch.full((rows, 3), value + rank), [rank * rows, 0], rank)
    return init_from_local_shards([shard], 2 * rows, 3)


def on_sharded_tensors() -> None:
    table = sharded(1.0)
    momentum = sharded(0.0)
    mine = momentum.local_shards()[0].tensor
    optimizer = KeyedOptimizer(
        {"table": table}, {table: {"momentum": momentum}}, [{"params": [table], "lr": 0.1}]
    )
    assert optimizer.state_dict()["state"]["table"]["momentum"] is momentum
    optimizer.load_state_dict({"state": {"table": {"momentum": sharded(5.0)}}})
    assert_equal(mine, torch.full((2, 3), 5.0 + torch.distributed.get_rank()))
    with pytest.raises(StateMismatch, match="has local shards of shapes"):
        optimizer.load_state_dict({"state": {"table": {"momentum": sharded(5.0, rows=3)}}})
    with pytest.raises(StateMismatch, match="is a Tensor in place of a ShardedTensor"):
        optimizer.load_state_dict({"state": {"table": {"momentum": torch.ones(4, 3)}}})


def test_local_shards_of_sharded_tensors():
    with Ranks(2) as ranks:
        ranks.run(on_sharded_tensors)
