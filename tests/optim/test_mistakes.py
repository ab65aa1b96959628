"""Mistakes that users make, and what they are told."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn, optim

from farstep import autograd, rpc
from farstep.errors import PayloadError, UnknownContext
from farstep.optim import DistributedOptimizer

from .spread import Spread

# -- nothing trains


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "farstep.optim"]


@pytest.mark.parametrize("where", [[0], [1, 2], [0, 1]], ids=str)
@pytest.mark.parametrize("close", [False, True])
def test_a_step_without_any_gradient_is_told_once(three, caplog, where, close):
    spread = Spread(where)
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    for _ in range(2):
        with autograd.context() as context_id:
            optimizer.step(context_id, close=close)
        assert warnings_of(caplog)[1:] == []
    (text,) = warnings_of(caplog)
    assert text.startswith("no parameter of this optimizer has a gradient in context ")
    assert text.endswith("was the forward pass inside the `with`, and did backward run?")
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_forward_pass_outside_the_context(three, caplog):
    module = rpc.RemoteModule("worker1", nn.Linear, args=(2, 1))
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=0.1)
    head = torch.ones(1, requires_grad=True)
    loss = (module(torch.ones(1, 2)) * head).sum()
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert str(context_id) in warnings_of(caplog)[0]


def test_one_gradient_is_enough(three, caplog):
    spread = Spread([0, 1, 2])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    with autograd.context() as context_id:
        spread.backward(context_id, spread.inputs(0), of=[2])
        sent = three[0].tally.sent
        optimizer.step(context_id)
        assert three[0].tally.sent == sent + 2  # no message for this
    assert warnings_of(caplog) == []


# -- what is given as a class


def test_what_is_no_class(three):
    spread = Spread([1])
    made = optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"is an optimizer made of one: give SGD itself"):
        DistributedOptimizer(made, spread.rrefs, lr=0.1)
    with pytest.raises(TypeError, match=r"such as torch\.optim\.SGD, not 'SGD': give the class itself"):
        DistributedOptimizer("SGD", spread.rrefs, lr=0.1)
    with pytest.raises(TypeError, match=r"such as torch\.optim\.SGD, not None"):
        DistributedOptimizer(None, spread.rrefs, lr=0.1)


@pytest.mark.parametrize("where", [0, 1])
def test_a_class_that_has_no_name_elsewhere(three, where):
    class Inner(optim.SGD):
        pass

    rrefs = Spread([where]).rrefs
    for given in (Inner, lambda params, lr: optim.SGD(params, lr)):
        with pytest.raises(PayloadError, match=r"defined inside a function.*define it at module level"):
            DistributedOptimizer(given, rrefs, lr=0.1)


# -- what is given as parameters


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda: nn.Linear(1, 1), r"not one Linear: parameter_rrefs\(module\)"),
        (
            lambda: rpc.RemoteModule("worker1", nn.Linear, args=(1, 1)),
            r"not one RemoteModule: parameter_rrefs\(module\)",
        ),
        (lambda: nn.Parameter(torch.ones(1)), r"not one Parameter: \[rpc\.RRef\(parameter\)\]"),
        (lambda: 7, r"not one int: parameter_rrefs\(module\)"),
    ],
    ids=["module", "remote module", "parameter", "number"],
)
def test_what_is_no_list_of_parameters(three, given, text):
    with pytest.raises(TypeError, match=text):
        DistributedOptimizer(optim.SGD, given(), lr=0.1)
    with pytest.raises(TypeError, match=text):
        DistributedOptimizer(optim.SGD, [{"params": given()}], lr=0.1)


def test_one_reference_alone(three):
    (rref,) = Spread([1]).rrefs
    with pytest.raises(TypeError, match=r"not one RRef: \[rref\].*parameter_rrefs\(rref\)"):
        DistributedOptimizer(optim.SGD, rref, lr=0.1)


def test_several_owners_that_fail_alike_are_named(three):
    with pytest.raises(ValueError, match="Invalid learning rate: -1") as caught:
        DistributedOptimizer(optim.SGD, Spread([1, 2]).rrefs, lr=-1.0)
    assert caught.value.__notes__ == [
        "worker 'worker1' could not make its part",
        "worker 'worker2' could not make its part",
    ]


# -- what is given as a context

USES = {
    "step": lambda optimizer, context_id: optimizer.step(context_id),
    "clip_grad_norm_": lambda optimizer, context_id: optimizer.clip_grad_norm_(context_id, 1.0),
    "clip_grad_value_": lambda optimizer, context_id: optimizer.clip_grad_value_(context_id, 1.0),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_no_context(three, name):
    optimizer = DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=0.1)
    wanted = rf"{name} takes a context id, as in `with autograd\.context\(\) as context_id`, not "
    for given, text in ((None, "None"), (lambda: 0.0, "a function: there are no closures"), (True, "a bool")):
        with pytest.raises(TypeError, match=wanted + text):
            USES[name](optimizer, given)


@pytest.mark.parametrize("name", USES)
def test_a_context_that_has_ended(three, name):
    optimizer = DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=0.1)
    with autograd.context() as context_id:
        pass
    with pytest.raises(UnknownContext, match=rf"id: {context_id}\..*; {name} belongs inside `with") as caught:
        USES[name](optimizer, context_id)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.context_id) == (str(caught.value), context_id)


# -- what cannot be copied


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_an_optimizer_is_not_copied(three, copying):
    optimizer = DistributedOptimizer(optim.SGD, Spread([1]).rrefs, lr=0.1)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*Save its state_dict\(\)"):
        copying(optimizer)
