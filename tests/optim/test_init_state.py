"""init_state: the state of a first step is there, and nothing else has changed: training goes on as it would have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farstep.errors import OptimError
from farstep.optim import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, NamedOptimizer

from .test_classes import Slowing

STEPS = 6


class Lazy(optim.Optimizer):
    """A user's own class that makes its state in its first step, of the parameter's own value too, and counts in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state.update(slow=p.clone(), average=torch.ones_like(p))
                state["step"] += 1
                state["average"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * state["average"] / state["step"])
                state["slow"].lerp_(p, 0.5)
                if state["step"] % 2 == 0:
                    p.copy_(state["slow"])


class AtTheEnd(optim.Optimizer):
    """A user's own class that assigns state when it has been updated, as many short ones do."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    gradient = p.grad + group["weight_decay"] * p
                    before = state.get("momentum")
                    state["momentum"] = gradient if before is None else 0.9 * before + gradient
                    p -= group["lr"] / state["step"] * state["momentum"]


class Noisy(optim.Optimizer):
    """A user's own class that draws random numbers in each step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("average", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(group["lr"] * (state["average"] + 0.01 * torch.randn_like(p)))


class OfAdam(optim.Adam):
    """A class of a user's that is not quite torch's."""


class OfSparseAdam(optim.SparseAdam):
    """Likewise."""


class Asking(optim.Optimizer):
    """A user's own class that cannot do without a closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(group["lr"] * average.mul_(0.5).add_(p.grad))
        return loss


CASES: list[tuple[type[optim.Optimizer], dict[str, Any], set[str]]] = [
    (optim.SGD, {"lr": 0.1}, set()),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"momentum_buffer"}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}, {"momentum_buffer"}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "foreach": True}, {"momentum_buffer"}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, set()),
    (optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, {"step", "exp_avg", "exp_avg_sq"}),
    (optim.Adam, {"lr": 0.1, "amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (optim.Adam, {"lr": 0.1, "fused": True}, {"step", "exp_avg", "exp_avg_sq"}),
    (optim.AdamW, {"lr": torch.tensor(0.1)}, {"step", "exp_avg", "exp_avg_sq"}),
    (optim.AdamW, {"lr": 0.1, "foreach": True}, {"step", "exp_avg", "exp_avg_sq"}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}, {"step", "sum"}),
    (optim.Adadelta, {"weight_decay": 0.1}, {"step", "square_avg", "acc_delta"}),
    (optim.Adamax, {"lr": 0.1}, {"step", "exp_avg", "exp_inf"}),
    (optim.RMSprop, {"lr": 0.02}, {"step", "square_avg"}),
    (
        optim.RMSprop,
        {"lr": 0.02, "momentum": 0.9, "centered": True},
        {"step", "square_avg", "momentum_buffer", "grad_avg"},
    ),
    (optim.Rprop, {"lr": 0.05}, {"step", "prev", "step_size"}),
    (optim.NAdam, {"lr": 0.05, "weight_decay": 0.1}, {"step", "mu_product", "exp_avg", "exp_avg_sq"}),
    (optim.RAdam, {"lr": 0.05}, {"step", "exp_avg", "exp_avg_sq"}),
    (optim.ASGD, {"lr": 0.05, "lambd": 0.1, "t0": 2}, {"step", "eta", "mu", "ax"}),
    (optim.LBFGS, {"lr": 0.5, "max_iter": 4}, {"func_evals", "n_iter"}),
    (Lazy, {}, {"step", "slow", "average"}),
    (AtTheEnd, {}, {"step", "momentum"}),
    (Noisy, {}, {"average"}),
    (OfAdam, {"lr": 0.1}, {"step", "exp_avg", "exp_avg_sq"}),
    (Asking, {}, {"average"}),
]
if hasattr(optim, "Adafactor"):
    CASES.append((optim.Adafactor, {"lr": 0.05}, {"step", "row_var", "col_var"}))
if hasattr(optim, "Muon"):
    CASES.append((optim.Muon, {"lr": 0.05}, {"momentum_buffer"}))
IDS = [f"{k.__name__}-{'-'.join(o)}" for k, o, _ in CASES]


def parameters(kind: Any = None) -> dict[str, nn.Parameter]:
    torch.manual_seed(5)
    shapes = {"weight": (3, 4), "bias": (4, 2) if kind is getattr(optim, "Muon", 0) else (4,)}
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    late = torch.randn(2, 2)
    named["late"] = nn.Parameter(
        late if kind is optim.LBFGS else late.t()
    )  # which takes only what is contiguous
    return named


def inner_of(optimizer: optim.Optimizer) -> optim.Optimizer:
    return getattr(optimizer, "_optimizer", optimizer)


def make(kind: Any, options: dict[str, Any], is_named: bool = True) -> tuple[dict[str, nn.Parameter], Any]:
    params = parameters(kind)
    if is_named:
        return params, NamedOptimizer(params, kind, **copy.deepcopy(options))
    return params, kind(list(params.values()), **copy.deepcopy(options))


def train(params: dict[str, nn.Parameter], optimizer: optim.Optimizer, steps: int = STEPS) -> None:
    torch.manual_seed(9)
    needs_closure = isinstance(inner_of(optimizer), optim.LBFGS | Asking)
    # Torch's fused SGD fails where some parameters have momentum and others none.
    joins_at = 0 if optimizer.param_groups[0].get("fused") else 2
    for step in range(steps):
        targets = [torch.randn(p.shape) for p in params.values()]

        def closure(step: int = step, targets: Any = targets) -> torch.Tensor:
            optimizer.zero_grad()
            used = [
                (p - t).square().sum()
                for (name, p), t in zip(params.items(), targets, strict=True)
                if name != "late" or step >= joins_at
            ]
            loss = torch.stack(used).sum()
            loss.backward()
            return loss

        if needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "options", "keys"), CASES, ids=IDS)
def test_training_is_the_same_bit_for_bit(kind, options, keys):
    params, optimizer = make(kind, options)
    ordinary_params, ordinary = make(kind, options, is_named=False)
    optimizer.init_state()
    assert set(optimizer.state_dict()["state"].get("weight", {})) == keys
    train(params, optimizer)
    train(ordinary_params, ordinary)
    assert_equal(list(params.values()), list(ordinary_params.values()))
    numbered = ordinary.state_dict()["state"]
    named = optimizer.state_dict()["state"]
    assert_equal(
        {name: dict(named[name]) for name in named},
        {name: dict(numbered[i]) for i, name in enumerate(params) if i in numbered},
    )


@pytest.mark.parametrize(("kind", "options", "keys"), CASES, ids=IDS)
def test_nothing_else_is_changed(kind, options, keys):
    params, optimizer = make(kind, options)
    scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.5)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("pre"))
    optimizer.register_step_post_hook(lambda *_: hooked.append("post"))
    for name, p in params.items():
        p.grad = None if name == "late" else torch.randn_like(p)
    before = {
        name: (p.detach().clone(), p.grad, p.grad if p.grad is None else p.grad.clone())
        for name, p in params.items()
    }
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    random = torch.get_rng_state()
    of_all = register_optimizer_step_pre_hook(lambda *_: hooked.append("of all optimizers"))
    try:
        optimizer.init_state()
    finally:
        of_all.remove()
    for name, p in params.items():
        value, grad, grad_value = before[name]
        assert_equal(p.detach(), value)
        assert p.grad is grad
        if grad is not None:
            assert_equal(grad, grad_value)
    assert optimizer.state_dict()["param_groups"] == groups
    assert_equal(torch.get_rng_state(), random)
    assert hooked == []
    assert scheduler.last_epoch == 0
    assert all(float(state["step"]) == 0 for state in optimizer.state.values() if "step" in state)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients():
    def tables() -> dict[str, nn.Parameter]:
        torch.manual_seed(3)
        return {"table": nn.Parameter(torch.randn(6, 2)), "plain": nn.Parameter(torch.randn(3))}

    def steps(params: dict[str, nn.Parameter], optimizer: optim.Optimizer) -> None:
        for step in range(4):
            for name, p in params.items():
                dense = torch.full_like(p, 0.5 + step)
                p.grad = dense.to_sparse() if name == "table" else dense
            if isinstance(inner_of(optimizer), optim.SparseAdam):
                params["plain"].grad = params["plain"].grad.to_sparse()
            optimizer.step()

    for kind in (optim.SparseAdam, optim.Adagrad, optim.SGD, OfSparseAdam):
        params, plain = tables(), tables()
        optimizer = NamedOptimizer(params, kind, lr=0.1)
        optimizer.init_state(params if kind is OfSparseAdam else {"table"})
        ordinary = kind(list(plain.values()), lr=0.1)
        steps(params, optimizer)
        steps(plain, ordinary)
        assert_equal(list(params.values()), list(plain.values()))
    with pytest.raises(ValueError, match="names of no parameter: tabel"):
        optimizer.init_state({"tabel"})


def test_frozen_parameters_get_no_state_and_others_keep_theirs():
    params, optimizer = make(optim.Adam, {"lr": 0.1})
    params["bias"].requires_grad_(False)
    params["weight"].grad = torch.ones(3, 4)
    optimizer.step()
    kept = optimizer.state[params["weight"]]["exp_avg"].clone()
    optimizer.init_state()
    assert set(optimizer.state_dict()["state"]) == {"weight", "late"}
    assert_equal(optimizer.state[params["weight"]]["exp_avg"], kept)
    assert optimizer.state[params["weight"]]["step"] == 1
    assert optimizer.state[params["late"]]["step"] == 0


def test_state_has_the_layout_of_the_parameter():
    params, optimizer = make(optim.Adam, {"lr": 0.1})
    optimizer.init_state()
    assert optimizer.state[params["late"]]["exp_avg"].stride() == params["late"].stride()


def test_a_class_whose_first_state_cannot_be_foreseen_is_refused():
    params, optimizer = make(Slowing, {"lr": 0.1})
    before = copy.deepcopy(params)
    with pytest.raises(OptimError, match="Slowing makes its state in a way that init_state cannot foresee"):
        optimizer.init_state()
    assert optimizer.state_dict()["state"] == {}
    assert_equal(list(params.values()), list(before.values()))


def test_a_class_that_cannot_be_copied_is_refused():
    _, optimizer = make(Lazy, {})
    optimizer._optimizer.stream = (x for x in ())
    with pytest.raises(OptimError, match="Lazy, and it cannot be copied"):
        optimizer.init_state()


class Own(KeyedOptimizer):
    """A user's own KeyedOptimizer, which steps itself."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__(params, {}, [{"params": list(params.values()), "lr": 0.1}])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {})
                    if not state:
                        state["average"] = torch.zeros_like(p)
                    p.sub_(group["lr"] * state["average"].mul_(0.5).add_(p.grad))


def test_a_keyed_optimizer_with_a_step_of_its_own():
    params, plain = parameters(), parameters()
    optimizer, without = Own(params), Own(plain)
    optimizer.init_state()
    found = optimizer.state_dict()["state"]
    assert [(name, list(state)) for name, state in found.items()] == [(name, ["average"]) for name in params]
    train(params, optimizer)
    train(plain, without)
    assert_equal(list(params.values()), list(plain.values()))


def test_all_parts_of_a_combined_optimizer():
    dense, table = parameters(), {"table": nn.Parameter(torch.randn(4, 2))}
    combined = CombinedOptimizer(
        [
            ("dense", KeyedOptimizerWrapper(dense, optim.Adam)),
            ("sparse", KeyedOptimizerWrapper(table, lambda p: optim.Adagrad(p, lr=0.1))),
        ]
    )
    combined.init_state({"sparse.table"})
    assert set(combined.state_dict()["state"]) == {"dense.weight", "dense.bias", "dense.late", "sparse.table"}
