"""Real processes: an owner that dies, a trainer that dies, and messages counted."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from support.workers import eventually, multiprocess
from torch import nn, optim

from farstep import autograd, rpc
from farstep.errors import StepError, WorkerLost
from farstep.optim import DistributedOptimizer, parameter_rrefs
from farstep.optim.local import _all as local_optimizers

kept: dict[str, object] = {}
"""What a worker process keeps between the functions that it is told to run."""


def layer(seed):
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def forward(module, x):
    return module.local_value()(x)


def optimizer_over(workers, **options):
    modules = [rpc.remote(worker, layer, args=(seed,)) for seed, worker in enumerate(workers)]
    named = [p for i, m in enumerate(modules) for p in parameter_rrefs(m, f"layer{i}")]
    return modules, DistributedOptimizer(optim.Adam, named, lr=0.1, **options)


def loss_of(modules, x):
    for module in modules:
        x = torch.tanh(rpc.rpc_sync(module.owner(), forward, args=(module, x)))
    return x.sum()


def train_once(modules, optimizer):
    with autograd.context() as context_id:
        autograd.backward(context_id, [loss_of(modules, torch.ones(2, 3))])
        optimizer.step(context_id, close=True)


# -- an owner dies between backward and step


def begin_and_save():
    modules, optimizer = optimizer_over(["worker0", "worker1", "worker2"])
    train_once(modules, optimizer)
    kept["state"] = optimizer.state_dict()
    kept["weights"] = [{n: p.to_here().detach().clone() for n, p in parameter_rrefs(m)} for m in modules]
    kept["modules"], kept["optimizer"] = modules, optimizer
    kept["context"] = autograd.context()
    kept["id"] = kept["context"].__enter__()
    autograd.backward(kept["id"], [loss_of(modules, torch.ones(2, 3))])


def step_without_the_dead():
    with pytest.raises(StepError) as caught:
        kept["optimizer"].step(kept["id"])
    kept["context"].__exit__(None, None, None)
    error = caught.value
    assert sorted(error.stepped) == ["worker0", "worker2"]
    assert list(error.failed) == ["worker1"]
    assert isinstance(error.failed["worker1"], WorkerLost)
    assert "worker 'worker1' is lost" in str(error)
    with pytest.raises(WorkerLost, match="worker1"):
        kept["optimizer"].state_dict()


def go_on_with_the_survivors():
    modules, optimizer = optimizer_over(["worker0", "worker2", "worker0"])
    for module, weights in zip(modules, kept["weights"], strict=True):
        rpc.rpc_sync(module.owner(), load_weights, args=(module, weights))
    optimizer.load_state_dict(kept["state"])
    train_once(modules, optimizer)
    ordinary = [layer(seed) for seed in range(3)]
    local = optim.Adam([p for module in ordinary for p in module.parameters()], lr=0.1)
    for _ in range(2):
        x = torch.ones(2, 3)
        for module in ordinary:
            x = torch.tanh(module(x))
        local.zero_grad()
        x.sum().backward()
        local.step()
    for module, reference in zip(modules, ordinary, strict=True):
        for name, rref in parameter_rrefs(module):
            torch.testing.assert_close(rref.to_here(), reference.get_parameter(name))


def load_weights(module, weights):
    module.local_value().load_state_dict(weights)


@pytest.mark.slow
def test_an_owner_killed_between_backward_and_step_is_named_and_the_survivors_go_on(workers):
    group = workers(3)
    group[0].run(begin_and_save)
    group[1].kill()
    group[0].run(step_without_the_dead)
    group[0].run(go_on_with_the_survivors)


# -- a trainer dies


def begin_on_worker1():
    kept["all"] = optimizer_over(["worker1"])
    train_once(*kept["all"])


def how_many():
    gc.collect()
    return len(local_optimizers)


@pytest.mark.slow
def test_when_a_trainer_dies_its_optimizer_goes_from_the_owners(workers):
    group = workers(3)
    group[0].run(begin_on_worker1)
    group[2].run(begin_on_worker1)
    assert group[1].run(how_many) == 2
    group[0].kill()
    eventually(lambda: group[1].run(how_many) == 1)


# -- messages


@pytest.mark.slow
@multiprocess(3)
def test_a_step_is_one_message_to_each_owner(rank):
    if rank == 0:
        modules, optimizer = optimizer_over(["worker0", "worker1", "worker2"])
        train_once(modules, optimizer)
        tally = rpc.api.current_agent().tally
        with autograd.context() as context_id:
            autograd.backward(context_id, [loss_of(modules, torch.ones(2, 3))])
            before = tally.sent
            optimizer.step(context_id, close=True)
            assert tally.sent == before + 2
        assert tally.sent == before + 2  # the end of the context cost none
    rpc.barrier()


# -- the first calls to arrive import what they need, several at once

IMPORTS = """
import sys, threading
import farstep.rpc
from farstep.rpc.trust import Trust

def user():
    import farstep.autograd, farstep.optim

def call(module, name):
    Trust(None).find(module, name)

def run(function, *args):
    together.wait()
    try:
        function(*args)
    except Exception as exc:
        print(repr(exc))

sys.setswitchinterval(1e-6)
together = threading.Barrier(3)
jobs = [(user,), (call, "farstep.optim.parameters", "_named_parameters"), (call, "farstep.optim.calls", "_step")]
threads = [threading.Thread(target=run, args=job) for job in jobs]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_imports_at_once_do_not_meet_half_made_modules():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("", 0), done.stdout + done.stderr
