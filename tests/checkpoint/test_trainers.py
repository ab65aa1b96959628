"""Several trainers with optimizers of their own over the same tables: one checkpoint of all, at
one step."""

import os
import signal
import threading

import pytest
import torch
from support.workers import Group, Worker, WorkerFailed, eventually
from torch import nn

from farstep import autograd, checkpoint, rpc
from farstep.errors import CheckpointError, CheckpointMismatch
from farstep.optim import DistributedOptimizer, parameter_rrefs

from .test_rpc import files_in, held, refused, same, tensor_of

TRAINERS = ("trainer0", "trainer1")


def make(part: int) -> nn.Module:
    torch.manual_seed(part)
    return nn.Linear(4, 4, bias=part == 0)


class Trainer:
    """An optimizer of its own, made where this is, over modules that others have."""

    def __init__(self, modules, lr):
        self.modules = modules
        named = [
            (f"{i}.{key}", rref) for i, module in enumerate(modules) for key, rref in parameter_rrefs(module)
        ]
        self.optimizer = DistributedOptimizer(torch.optim.Adam, named, lr=lr)
        self.mine = {"optim": self.optimizer, "seen": torch.zeros(()), "log": [0]}

    def rref(self):
        return rpc.RRef(self.optimizer)

    def all_rref(self):
        return rpc.RRef(self.mine)

    def seen(self):
        return self.mine["seen"].item(), self.mine["log"]

    def state(self):
        return self.optimizer.state_dict()

    def step(self, seed):
        with autograd.context() as context_id:
            x = tensor_of(seed, 3, 4)
            for module in self.modules:
                x = module.rpc_sync().forward(x).tanh()
            autograd.backward(context_id, [x.square().sum()])
            self.optimizer.step(context_id)
        self.mine["seen"] += 1
        self.mine["log"][0] += 1


class Training:
    """Modules on `servers`, and a trainer on each of `trainers`; steps are taken in turn."""

    def __init__(self, servers, trainers, lrs=(0.1, 0.01)):
        self.modules = [rpc.remote(server, make, args=(i,)) for i, server in enumerate(servers)]
        self.trainers = [
            rpc.remote(where, Trainer, args=(self.modules, lr))
            for where, lr in zip(trainers, lrs, strict=True)
        ]
        self.state = {
            "model": {str(i): module for i, module in enumerate(self.modules)},
            **{f"opt{i}": each.rpc_sync().rref() for i, each in enumerate(self.trainers)},
        }

    def train(self, steps):
        for step in steps:
            self.trainers[step % 2].rpc_sync().step(step)

    def content(self):
        return {
            "model": {str(i): held(module) for i, module in enumerate(self.modules)},
            **{f"opt{i}": each.rpc_sync().state() for i, each in enumerate(self.trainers)},
        }


class InOneProcess:
    """The same training without RPC, with two of torch's optimizers over one model."""

    def __init__(self, lrs=(0.1, 0.01)):
        self.model = nn.Sequential(make(0), make(1))
        self.optimizers = [torch.optim.Adam(self.model.named_parameters(), lr=lr) for lr in lrs]

    def train(self, steps):
        for step in steps:
            x = tensor_of(step, 3, 4)
            for module in self.model:
                x = module(x).tanh()
            self.optimizers[step % 2].zero_grad()
            x.square().sum().backward()
            self.optimizers[step % 2].step()

    def check(self, content):
        for i, module in enumerate(self.model):
            torch.testing.assert_close(content["model"][str(i)], dict(module.state_dict()))
        for i, optimizer in enumerate(self.optimizers):
            for name, parameter in self.model.named_parameters():
                found = content[f"opt{i}"]["state"][name]
                for key, value in optimizer.state[parameter].items():
                    torch.testing.assert_close(found[key], value)


def step_in(path, step):
    return f"{path}/step_{step:09}"


# -- in the first worker


def _one_call(path):
    """Saved, trained on, loaded elsewhere, trained on, saved and loaded again: as one process
    that trained through."""
    plain = InOneProcess()
    one = Training(["server0", "server1"], TRAINERS)
    one.train(range(5))
    plain.train(range(5))
    before = one.content()
    plain.check(before)
    checkpoint.save(one.state, path)
    same(one.content(), before)
    same(checkpoint.read(path), before)

    other = Training(["server1", "trainer0"], ["trainer1", "server0"], (0.5, 0.5))
    other.train([8, 9])
    assert not checkpoint.load(other.state, path)
    same(other.content(), before)
    for _ in range(2):
        other.train(range(5, 8))
        plain.train(range(5, 8))
        plain.check(other.content())
        checkpoint.save(other.state, path)
        before = other.content()
        other.train([11, 12])
        checkpoint.load(other.state, path)
        same(other.content(), before)
    checkpoint.load(one.state, path)
    same(one.content(), before)

    model = InOneProcess().model
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    checkpoint.load({"model": model, "opt1": optimizer}, path)  # what one process wants of it
    assert optimizer.param_groups[0]["lr"] == 0.01
    saved = dict(zip(dict(model.named_parameters()), optimizer.state.values(), strict=True))
    same(saved, before["opt1"]["state"])


def _background_and_manager(path):
    one = Training(["server0", "server1"], TRAINERS)
    one.train(range(3))
    manager = checkpoint.CheckpointManager(path, keep_last=2)
    contents = []
    for step in range(3):
        contents.append(one.content())
        if step == 1:
            manager.save(one.state, step)
        else:
            handle = manager.async_save(one.state, step)
        one.train([3, 4])  # meanwhile
        handle.wait(20)
    assert manager.steps() == [1, 2]
    assert manager.resume(one.state) == 2
    same(one.content(), contents[2])
    same(checkpoint.read(step_in(path, 1)), contents[1])


def _in_a_dict(path):
    """What a trainer has beside its optimizer, in one reference; and an optimizer of the one who
    saves."""
    one = Training(["server0", "server0"], TRAINERS)
    here = Trainer(one.modules, 0.2)
    dicts = [each.rpc_sync().all_rref() for each in one.trainers]
    state = {"model": one.state["model"], "trainers": dicts, "here": here.optimizer}
    one.train(range(3))
    here.step(1)
    before, own = one.content(), here.state()
    for save in (checkpoint.save, lambda *args: checkpoint.async_save(*args).wait(20)):
        save(state, path)
        found = checkpoint.read(path)
        same(found["here"], own)
        same(found["trainers"][1]["optim"], before["opt1"])
        assert [each["log"] for each in found["trainers"]] == [[2], [1]]
        one.train(range(3))
        here.step(2)
        checkpoint.load(state, path)
        same(one.content(), before)
        same(here.state(), own)
        assert [each.rpc_sync().seen() for each in one.trainers] == [(2.0, [2]), (1.0, [1])]

    nested = rpc.remote("server1", dict, args=({"inner": one.modules[0], "one": 1},))
    again = rpc.remote("server0", dict, args=({"nested": nested},))
    checkpoint.save({"again": again}, path)
    same(checkpoint.read(path), {"again": {"nested": {"inner": before["model"]["0"], "one": 1}}})
    one.train(range(3))
    checkpoint.load({"again": again}, path)
    same(held(one.modules[0]), before["model"]["0"])


def _mistakes(path):
    one = Training(["server0", "server1"], TRAINERS)
    one.train(range(2))
    before = one.content()
    checkpoint.save(one.state, path)
    files = files_in(path)
    failing = rpc.remote("server1", Failing)
    with refused(CheckpointError, "server1", "no state today", "Nothing has been saved"):
        checkpoint.save({**one.state, "failing": failing}, path)
    assert files_in(path) == files
    hidden = rpc.remote("trainer0", Hiding, args=(one.modules,))
    with refused(CheckpointError, "trainer0", "'hidden.optim'", "beside the object"):
        checkpoint.save({**one.state, "hidden": hidden}, path)
    other = Training(["server0", "server0"], TRAINERS)
    other.train(range(2))
    untouched = other.content()
    wrong = {**other.state, "opt1": other.trainers[1].rpc_sync().all_rref()}
    with refused(CheckpointMismatch, "trainer1", "opt1", "Nothing has been changed"):
        checkpoint.load(wrong, path)
    same(other.content(), untouched)
    other.train(range(2))  # nobody is held up
    checkpoint.load(other.state, path)
    same(other.content(), before)


class Failing:
    def state_dict(self):
        raise ValueError("no state today")


class Hiding(Trainer):
    def __init__(self, modules):
        super().__init__(modules, 0.1)

    def state_dict(self):
        return {"optim": self.optimizer}


class Counter:
    """Its steps can be told from what they leave: momentum after n steps is n, and the weight
    has lost 1 + 2 + ... + n."""

    def __init__(self, tables):
        self.tables = tables
        named = [(str(i), table) for i, table in enumerate(tables)]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, named, lr=1.0, momentum=1.0)
        self.go_on = True
        self.steps = 0
        self.thread = threading.Thread(target=self.run)

    def rref(self):
        self.thread.start()
        return rpc.RRef(self.optimizer)

    def run(self):
        while self.go_on:
            with autograd.context() as context_id:
                found = [rpc.rpc_sync(table.owner(), total, args=(table,)) for table in self.tables]
                autograd.backward(context_id, found)
                self.optimizer.step(context_id)
            self.steps += 1

    def stop(self):
        self.go_on = False
        self.thread.join(20)
        return self.steps


def total(rref):
    return rref.local_value().sum()


def table():
    return torch.zeros(3, dtype=torch.float64, requires_grad=True)


def check_one_step(state):
    lost = 0.0
    for name in ("opt0", "opt1"):
        steps = [each["momentum_buffer"][0].item() for each in state[name]["state"].values()]
        count = steps[0] if steps else 0
        assert steps == [count] * len(steps), steps  # no step that one server has taken and the other not
        lost += count * (count + 1) / 2
    for each in state["tables"]:
        assert torch.equal(each, torch.full_like(each, -lost)), (each, lost)
    return lost


def _while_they_train(path):
    """Trainers that step all the while: every checkpoint is of one step, of all servers and
    optimizers."""
    tables = [rpc.remote(server, table) for server in ("server0", "server1")]
    counters = [rpc.remote(where, Counter, args=(tables,)) for where in TRAINERS]
    state = {"tables": tables, **{f"opt{i}": each.rpc_sync().rref() for i, each in enumerate(counters)}}
    manager = checkpoint.CheckpointManager(path, keep_last=10)
    for step in range(6):
        if step % 2:
            manager.save(state, step)
        else:
            manager.async_save(state, step).wait(20)
    counts = [each.rpc_sync().stop() for each in counters]
    lost = [check_one_step(checkpoint.read(step_in(path, step))) for step in range(6)]
    assert lost == sorted(lost)
    assert lost[-1] <= sum(n * (n + 1) / 2 for n in counts)


def _steps_wait(path):
    """A stopped optimizer takes no step until the one that stopped it says so, or is lost, or
    has taken too long."""
    one = Training(["server0", "server1"], TRAINERS)
    one.train(range(2))
    slow = rpc.remote("server0", Slow)
    saving = threading.Thread(target=checkpoint.save, args=({**one.state, "slow": slow}, path))
    saving.start()
    slow.rpc_sync().asked()
    step = one.trainers[0].rpc_async().step(2)
    before = held(one.modules[0])
    assert not step.done()
    same(held(one.modules[0]), before)
    slow.rpc_sync().stop()
    saving.join(20)
    step.wait()
    same(checkpoint.read(path)["model"]["0"], before)

    slow = rpc.remote("server1", Slow)
    found = []

    def save():
        try:
            checkpoint.save({**one.state, "slow": slow}, path, rpc_timeout=1)
        except CheckpointError as exc:
            found.append(str(exc))

    saving = threading.Thread(target=save)
    saving.start()
    slow.rpc_sync().asked()
    saving.join(20)
    assert "RpcTimeout" in found[0]
    slow.rpc_sync().stop()
    one.trainers[0].rpc_sync().step(2)  # goes on after a save that failed


class Slow:
    def __init__(self):
        self._go, self._asked = threading.Event(), threading.Event()

    def state_dict(self):
        self._asked.set()
        self._go.wait(20)
        return {}

    def asked(self):
        assert self._asked.wait(20)

    def stop(self):
        self._go.set()


@pytest.mark.parametrize(
    "body",
    [_one_call, _background_and_manager, _in_a_dict, _mistakes, _while_they_train, _steps_wait],
    ids=lambda f: f.__name__,
)
def test_trainers(group, tmp_path, body):
    group[0].run(body, str(tmp_path / "checkpoint"))


# -- a worker that saves, and is lost meanwhile

_here = {}


def keep():
    _here["trainer"] = Trainer([rpc.RRef(make(0))], 0.1)
    _here["slow"] = Slow()
    return _here["trainer"].rref(), rpc.RRef(_here["slow"])


def save_for_ever(path):
    optimizer, slow = rpc.rpc_sync("worker0", keep)
    checkpoint.save({"opt": optimizer, "slow": slow}, path, rpc_timeout=0)


def asked():
    """The save has come to this worker, and no step is taken while it lasts."""
    eventually(lambda: "slow" in _here)
    _here["slow"].asked()
    _here["step"] = threading.Thread(target=_here["trainer"].step, args=(1,))
    _here["step"].start()
    assert _here["trainer"].seen() == (0.0, [0])


def stepped():
    _here["slow"].stop()  # what it still did for the one that was lost ends
    _here["step"].join(20)
    return _here["trainer"].seen()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_saver_that_dies(workers, tmp_path):
    group = workers(2, rpc_timeout=20)
    group[1].start(save_for_ever, str(tmp_path / "checkpoint"))
    begun = group[0].start(asked)
    begun.result()
    step = group[0].start(stepped)
    with pytest.raises(WorkerFailed):
        group[1].run(die)
    assert step.result() == (1.0, [1])
    assert not (tmp_path / "checkpoint" / "manifest.json").exists()


NAMES = ("server0", "server1", *TRAINERS)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    group = Group([Worker(name, folder / f"{name}.log") for name in NAMES])
    try:
        group.init(f"file://{folder}/rendezvous", rpc_timeout=20)
        yield group
    finally:
        for worker in group:
            worker.close()
