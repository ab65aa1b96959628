"""Clipping over all owners gives what it gives in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import optim

from farstep import autograd
from farstep.optim import CombinedOptimizer, DistributedOptimizer, NamedOptimizer, clip_grad_norm_

from .spread import Spread


def gradients(spread, context_id):
    """All agents are in this process: each parameter's gradient, from its owner's part of the context."""
    found = []
    for where, p in zip(spread.where, spread.remote, strict=True):
        agent = spread.agents[where]
        found.append(agent.extension.get(context_id).gradients.snapshot()[p])
    return found


@pytest.fixture
def spread(three):
    spread = Spread([0, 1, 2, 1])
    spread.agents = {agent.info.name: agent for agent in three}
    return spread


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.0, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_norm_and_the_gradients_are_those_of_one_process(spread, norm_type, max_norm):
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        norm = optimizer.clip_grad_norm_(context_id, max_norm, norm_type)
        clipped = gradients(spread, context_id)
    spread.backward_here(spread.inputs(0))
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(spread.local, max_norm, norm_type))
    torch.testing.assert_close(clipped, [p.grad for p in spread.local], check_stride=False)


def test_only_the_optimizers_own_parameters_count(spread):
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs[:2], lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        norm = optimizer.clip_grad_norm_(context_id, 0.5)
        clipped = gradients(spread, context_id)
    spread.backward_here(spread.inputs(0))
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(spread.local[:2], 0.5))
    torch.testing.assert_close(clipped, [p.grad for p in spread.local], check_stride=False)


def test_values(spread):
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        optimizer.clip_grad_value_(context_id, 0.1)
        clipped = gradients(spread, context_id)
    spread.backward_here(spread.inputs(0))
    torch.nn.utils.clip_grad_value_(spread.local, 0.1)
    torch.testing.assert_close(clipped, [p.grad for p in spread.local], check_stride=False)


def test_sparse_gradients(three):
    """Torch cannot clip these; a dense gradient of the same numbers says what should come out."""
    spread = Spread([1, 2], [(6, 3)] * 2)
    spread.agents = {agent.info.name: agent for agent in three}
    rows = [torch.tensor([1, 1, 4]), torch.tensor([0, 5])]
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    for value in (None, 0.2):
        with autograd.context() as context_id:
            spread.backward(context_id, rows)
            if value is None:
                norm = optimizer.clip_grad_norm_(context_id, 0.5)
            else:
                optimizer.clip_grad_value_(context_id, value)
            clipped = gradients(spread, context_id)
        spread.backward_here(rows)
        for p in spread.local:
            p.grad = p.grad.to_dense()
        if value is None:
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(spread.local, 0.5))
        else:
            torch.nn.utils.clip_grad_value_(spread.local, value)
        assert all(g.is_sparse for g in clipped)
        torch.testing.assert_close([g.to_dense() for g in clipped], [p.grad for p in spread.local])


def test_a_norm_that_is_not_finite(spread):
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        inputs = spread.inputs(0)
        inputs[1][0] = math.nan
        spread.backward(context_id, inputs)
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        assert bool(gradients(spread, context_id)[0].isfinite().all())  # nothing was scaled
        assert bool(optimizer.clip_grad_norm_(context_id, 1.0).isnan())


def test_no_gradients_at_all(spread):
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        assert optimizer.clip_grad_norm_(context_id, 1.0) == 0


def test_clipping_changes_nobody_elses_memory(three):
    """Two parameters may share one gradient's memory, and so may a hook that kept it: each clips its own."""
    spread = Spread([1, 1], [(4,), (4,)])
    seen = []
    spread.remote[0].register_hook(seen.append)
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs[:1], lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0))
        before = [gradient.clone() for gradient in seen]
        optimizer.clip_grad_norm_(context_id, 0.01)
        torch.testing.assert_close(seen, before)


@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_several_optimizers_by_one_norm(three, norm_type, max_norm):
    """A sparse table, dense parameters elsewhere, and a model here: as if all were one
    process's."""
    spread = Spread([1, 2, 1], [(6, 3), (3, 4), (4,)])
    spread.agents = {agent.info.name: agent for agent in three}
    inputs = [torch.tensor([1, 1, 4]), *spread.inputs(0)[1:]]
    sparse = DistributedOptimizer(optim.SGD, spread.rrefs[:1], lr=0.1)
    dense = DistributedOptimizer(optim.Adam, spread.rrefs[1:], lr=0.1)
    without = Spread([1])  # has no gradient in the context
    idle = DistributedOptimizer(optim.SGD, without.rrefs, lr=0.1)
    here = torch.nn.Linear(2, 2, bias=False).double()
    here(torch.ones(2, dtype=torch.float64)).sum().backward()
    twin = here.weight.detach().clone().requires_grad_()
    twin.grad = here.weight.grad.clone()
    plain = optim.SGD(here.parameters(), lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, inputs)
        with pytest.raises(TypeError, match="context_id=context_id"):
            clip_grad_norm_([sparse, dense], max_norm)
        with pytest.raises(ValueError, match="count twice"):
            clip_grad_norm_([sparse, sparse], max_norm, context_id=context_id)
        norm = clip_grad_norm_([sparse, idle, dense, plain], max_norm, norm_type, context_id=context_id)
        clipped = gradients(spread, context_id)
    spread.backward_here(inputs)
    spread.local[0].grad = spread.local[0].grad.to_dense()
    expected = torch.nn.utils.clip_grad_norm_([*spread.local, twin], max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    assert clipped[0].is_sparse
    found = [clipped[0].to_dense(), *clipped[1:], here.weight.grad]
    torch.testing.assert_close(found, [p.grad for p in [*spread.local, twin]], check_stride=False)


def test_several_parts_of_one_by_one_norm():
    torch.manual_seed(0)
    table, linear = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2)
    parts = [
        ("t", NamedOptimizer(table.named_parameters(), optim.SparseAdam, lr=0.1)),
        ("l", NamedOptimizer(linear.named_parameters(), optim.SGD, lr=0.1)),
    ]
    both = CombinedOptimizer(parts)
    linear(table(torch.tensor([1, 1, 2]))).sum().backward()
    twins = [p.detach().clone().requires_grad_() for p in (*table.parameters(), *linear.parameters())]
    for twin, p in zip(twins, (*table.parameters(), *linear.parameters()), strict=True):
        twin.grad = p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()
    torch.testing.assert_close(both.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(twins, 0.5))
    assert table.weight.grad.is_sparse
    found = [table.weight.grad.to_dense(), *(p.grad for p in linear.parameters())]
    torch.testing.assert_close(found, [p.grad for p in twins])
    with pytest.raises(TypeError, match="takes optimizers"):
        clip_grad_norm_(linear.parameters(), 1.0)
    with pytest.raises(TypeError, match=r"\(optimizers, max_norm, context_id=context_id\)"):
        clip_grad_norm_(7, parts, 1.0)  # as the method of a DistributedOptimizer has them
