"""Checkpoints of what workers of RPC own: every owner writes its part and reads its part, and all of it is there or none."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.memory import begin_of_peak, peak_bytes
from support.workers import WorkerFailed, speaking_for
from torch import nn

from farstep import autograd, checkpoint, rpc
from farstep.checkpoint import rpc_calls, rpc_saving
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.saving import drafted, written
from farstep.errors import (
    CheckpointError,
    CheckpointMismatch,
    DamagedCheckpoint,
    NoCheckpoint,
    StorageFailed,
)
from farstep.optim import DistributedOptimizer, parameter_rrefs

# -- on the workers


class Stage(nn.Module):
    def __init__(self, seed: int, size: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(size, size)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).tanh()


class Counting:
    """Something with a state that is no tensor."""

    def __init__(self, count: int) -> None:
        self.seen = Counter(a=count)

    def state_dict(self):
        return {"seen": dict(self.seen)}

    def load_state_dict(self, state):
        self.seen = Counter(state["seen"])

    def get(self):
        return dict(self.seen)


class Failing(Counting):
    """Says `what` when its state is wanted."""

    def __init__(self, what: str) -> None:
        self._what = what

    def state_dict(self):
        if self._what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._what == "full":
            raise OSError(28, "No space left on device")
        raise ValueError("no state today")


def tensor_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(rref):
    return {k: v.clone() for k, v in rref.local_value().state_dict().items()}


def held(module):
    return rpc.rpc_sync(module.owner(), tensors_of, args=(module,))


class Training:
    """Two stages, wherever they are, and an optimizer of both."""

    def __init__(self, where, seed=0, names=("a", "b")):
        self.stages = [rpc.remote(w, Stage, args=(seed * 10 + i,)) for i, w in enumerate(where)]
        self.counting = rpc.remote(where[-1], Counting, args=(seed,))
        self.table = rpc.remote(where[0], tensor_of, args=(seed, 3, 5))
        named = [
            (f"{name}.{key}", rref)
            for name, stage in zip(names, self.stages, strict=True)
            for key, rref in parameter_rrefs(stage)
        ]
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, named, lr=0.1)
        self.state = {
            "model": dict(zip(names, self.stages, strict=True)),
            "optim": self.optimizer,
            "counting": self.counting,
            "table": self.table,
            "step": seed,
            "here": torch.full((4,), float(seed)),
        }

    def train(self, steps):
        for step in range(steps):
            with autograd.context() as context_id:
                x = tensor_of(step, 4, 6)
                for stage in self.stages:
                    x = stage.rpc_sync().forward(x)
                autograd.backward(context_id, [x.square().sum()])
                self.optimizer.step(context_id)

    def content(self):
        return {
            "model": {name: held(stage) for name, stage in self.state["model"].items()},
            "optim": self.optimizer.state_dict(),
            "counting": {"seen": self.counting.rpc_sync().get()},
            "table": self.table.to_here(),
            "step": self.state["step"],
            "here": self.state["here"],
        }


def same(a, b, where=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            same(one, other, f"{where}.{i}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def refused(kind, *words):
    return pytest.raises(kind, match="(?s)" + ".*".join(words))


def files_in(path):
    return sorted(p.name for p in Path(path).iterdir()) if Path(path).exists() else []


# -- in the first worker


def _round_trip(path):
    one = Training(["worker1", "worker2"], seed=1)
    one.train(3)
    before = one.content()
    checkpoint.save(one.state, path)
    same(one.content(), before)
    same(checkpoint.read(path), before)  # one process reads it all
    manifest = json.loads((Path(path) / "manifest.json").read_text())["manifest"]
    assert sorted(manifest["files"]["ranks"]) == [0, 1, 2]  # the caller and both owners
    assert len(files_in(path)) == 4
    one.train(2)
    expected = one.content()

    other = Training(["worker2", "worker0"], seed=5)  # elsewhere, and one stage here
    other.train(1)
    report = checkpoint.load(other.state, path)
    assert not report
    same(other.content(), before)
    other.train(2)
    same({**other.content(), "step": 0}, {**expected, "step": 0})

    alone = Training(["worker0", "worker0"], seed=6)
    checkpoint.load(alone.state, path)  # one owner, before any step
    same(alone.content(), before)


def _in_the_background(path):
    """What is saved is what was there when the call returned, on every owner."""
    one = Training(["worker1", "worker0"], seed=1)
    one.train(2)
    for _ in range(2):  # the second time in the memory of the first
        before = one.content()
        handle = checkpoint.async_save(one.state, path)
        one.train(1)
        rpc.rpc_sync("worker1", emptied, args=(one.table,))
        handle.wait(20)
        assert handle.done()
        same(checkpoint.read(path), before)
    other = Training(["worker2", "worker1"], seed=4)
    checkpoint.load(other.state, path)
    same(other.content(), before)
    manager = checkpoint.CheckpointManager(path + "-many", keep_last=1, rpc_timeout=20)
    for step in range(2):
        handle = manager.async_save(other.state, step)
    handle.wait(20)
    assert manager.steps() == [1]
    assert manager.resume(one.state) == 1
    same(one.content(), before)


def emptied(rref):
    rref.local_value().zero_()


def _memory(path):
    """An owner needs room for the state that it reads, beside the one that it has, and for no other copy."""
    size = 16 << 20  # so much memory is given back at once when it is freed
    table = rpc.remote("worker1", torch.zeros, args=(size,), kwargs={"requires_grad": True})
    optimizer = DistributedOptimizer(torch.optim.SGD, [("table", table)], lr=0.1, momentum=0.9)

    def step():
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", total, args=(table,))])
            optimizer.step(context_id)

    step()
    checkpoint.save({"optim": optimizer}, path)
    step()
    checkpoint.load({"optim": optimizer}, path)  # gradients are gone by then
    before = rpc.rpc_sync("worker1", begin_of_peak)
    checkpoint.load({"optim": optimizer}, path)
    taken = rpc.rpc_sync("worker1", peak_bytes) - before
    nbytes = 4 * size
    assert nbytes / 2 < taken < 1.5 * nbytes, taken / nbytes
    assert torch.equal(optimizer.state_dict()["state"]["table"]["momentum_buffer"], torch.ones(size))


def total(rref):
    return rref.local_value().sum()


def _saved_once(path):
    """Two parameters whose states were one memory when they were saved have each their own when they are loaded."""
    one = torch.ones(4, 4)
    state = {"a.linear.weight": {"momentum_buffer": one}, "b.linear.weight": {"momentum_buffer": one}}
    options = {"lr": 0.1, "momentum": 0.5}
    groups = [{**options, "params": [*state]}]
    checkpoint.save({"optim": {"state": state, "param_groups": groups}}, path)
    tables = [rpc.remote("worker1", torch.ones, args=(4, 4), kwargs={"requires_grad": True}) for _ in state]
    optimizer = DistributedOptimizer(torch.optim.SGD, list(zip(state, tables, strict=True)), **options)
    checkpoint.load({"optim": optimizer}, path)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", total, args=(tables[0],))])
        optimizer.step(context_id)
    found = optimizer.state_dict()["state"]
    assert torch.equal(found["a.linear.weight"]["momentum_buffer"], torch.full((4, 4), 1.5))
    assert torch.equal(found["b.linear.weight"]["momentum_buffer"], one)


def _many_names_of_one(path):
    """What is small on the disk is small in an owner's memory."""
    one = torch.ones(1 << 20)
    state = {"table": {"momentum_buffer": one, **{f"k{i}": one for i in range(100)}}}
    groups = [{"lr": 0.1, "momentum": 0.5, "params": ["table"]}]
    checkpoint.save({"optim": {"state": state, "param_groups": groups}}, path)
    table = rpc.remote("worker1", torch.ones, args=(1 << 20,), kwargs={"requires_grad": True})
    optimizer = DistributedOptimizer(torch.optim.SGD, [("table", table)], lr=0.1, momentum=0.5)
    before = rpc.rpc_sync("worker1", begin_of_peak)
    checkpoint.load({"optim": optimizer}, path)
    assert rpc.rpc_sync("worker1", peak_bytes) - before < 10 * one.nbytes


def _staged_twice(path):
    """A copy is written once, and is no other thing that a caller has a reference of."""
    table = rpc.remote("worker1", tensor_of, args=(1, 3, 5))
    staged = rpc.rpc_sync("worker1", rpc_calls.stage, args=([("t", table)], set(), None, 5.0))
    Path(path).mkdir()
    args = ((path, {}), "0" * 16, 1, 2)
    rpc.rpc_sync("worker1", rpc_calls.write_staged, args=(*args, staged, 5.0))
    with refused(CheckpointError, "written already"):
        rpc.rpc_sync("worker1", rpc_calls.write_staged, args=(*args, staged, 5.0))
    with refused(CheckpointError, "a Tensor is no staged"):
        rpc.rpc_sync("worker1", rpc_calls.write_staged, args=(*args, table, 5.0))
    with refused(CheckpointError, "16 hexadecimal digits"):
        rpc.rpc_sync("worker1", rpc_calls.write_staged, args=((path, {}), "../x", 1, 2, staged, 5.0))


def _with_and_without_workers(path):
    """What a DistributedOptimizer saved loads into an ordinary optimizer, and the other way round."""
    one = Training(["worker1", "worker2"], seed=1)
    one.train(2)
    checkpoint.save({"model": one.state["model"], "optim": one.optimizer}, path)
    before = one.content()
    model = nn.ModuleDict({"a": Stage(7), "b": Stage(8)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load({"model": model, "optim": optimizer}, path)
    same(model["a"].state_dict(), before["model"]["a"])
    named = dict(model.named_parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, state in before["optim"]["state"].items():
        same(dict(optimizer.state[named[name]]), state)

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    checkpoint.save({"model": model, "optim": optimizer}, path)
    checkpoint.load({"model": one.state["model"], "optim": one.optimizer}, path)
    saved = one.optimizer.state_dict()["state"]
    for name, parameter in named.items():
        same(saved[name], dict(optimizer.state[parameter]))
    same(held(one.stages[1]), model["b"].state_dict())


def _names(path):
    """Renamed, partly there, of another shape, of another dtype; and a RemoteModule."""
    one = Training(["worker1", "worker2"], seed=1)
    one.train(1)
    checkpoint.save(one.state, path)
    before = one.content()
    other = Training(["worker2", "worker1"], seed=2, names=("x", "b"))
    other.train(1)
    untouched = other.content()
    with refused(CheckpointMismatch, "model.x", "Nothing has been changed"):
        checkpoint.load(other.state, path)
    same(other.content(), untouched)
    rename = {
        "model.a": "model.x",
        **{f"optim.state.a.linear.{k}": f"optim.state.x.linear.{k}" for k in ("weight", "bias")},
    }
    for each in (rename, lambda name: name.replace(".a.", ".x.").replace("model.a", "model.x")):
        checkpoint.load(other.state, path, rename=each)
        same(held(other.stages[0]), before["model"]["a"])
        same(
            other.optimizer.state_dict()["state"]["x.linear.bias"], before["optim"]["state"]["a.linear.bias"]
        )

    small = rpc.remote("worker1", Stage, args=(0, 5))
    was = held(small)
    with refused(CheckpointMismatch, "worker1", "shapes differ: 'model.a.linear.weight'"):
        checkpoint.load({"model": {"a": small, "b": one.stages[1]}}, path)
    report = checkpoint.load({"model": {"a": small}}, path, strict=False)
    assert set(report.reshaped) == {"model.a.linear.weight", "model.a.linear.bias"}
    assert "model.b.linear.weight" in report.unexpected
    assert torch.equal(held(small)["linear.weight"], was["linear.weight"])
    doubled = rpc.remote("worker1", doubled_stage, args=(0,))
    with refused(CheckpointMismatch, "worker1", "float64", "convert_dtype=True"):
        checkpoint.load({"model": {"a": doubled, "b": one.stages[1]}}, path)
    checkpoint.load({"model": {"a": doubled, "b": one.stages[1]}}, path, convert_dtype=True)
    same(held(doubled)["linear.weight"], before["model"]["a"]["linear.weight"].double())

    remote = rpc.RemoteModule("worker2", Stage, args=(9,))
    checkpoint.load({"model": {"a": remote}}, path, strict=False)
    same(held(remote.get_module_rref()), before["model"]["a"])
    checkpoint.save({"remote": remote}, path)
    same(checkpoint.read(path), {"remote": before["model"]["a"]})


def doubled_stage(seed):
    return Stage(seed).double()


def _mistakes(path):
    one = Training(["worker1", "worker2"], seed=1)
    number = rpc.remote("worker1", len, args=("abc",))
    failing = rpc.remote("worker2", Failing, args=("raise",))
    full = rpc.remote("worker2", Failing, args=("full",))
    for state, kind, words in (
        ({"n": number}, CheckpointError, ["worker1", "reference of a int"]),
        ({"model": one.stages[0], "f": failing}, CheckpointError, ["worker2", "ValueError: no state today"]),
        ({"model": one.stages[0], "f": full}, StorageFailed, ["worker2", "No space left"]),
        ({"a": one.table, "a.b": 1}, CheckpointError, ["'a.b'", "rename one of them"]),
        (one.table, CheckpointError, ["give a dict"]),
        ({"x": one.table}, CheckpointError, ["failed"]),
    ):
        with refused(kind, *words):
            checkpoint.save(state, "/proc/nowhere" if words[-1] == "failed" else path)
        assert files_in(path) == [], state
    with pytest.raises(NoCheckpoint):
        checkpoint.load(one.state, path)
    with refused(CheckpointError, "other workers cannot be told of"):
        checkpoint.save(one.state, _Mine(path))
    with refused(CheckpointError, "other workers cannot be told of"):
        checkpoint.async_save(one.state, _Mine(path))
    with refused(CheckpointError, "worker2", "ValueError: no state today", "Nothing has been saved"):
        checkpoint.async_save({"model": one.stages[0], "f": failing}, path)
    handle = checkpoint.async_save(one.state, "/proc/nowhere")
    with refused(CheckpointError, "failed"):
        handle.wait(20)
    assert files_in(path) == []


class _Mine(checkpoint.LocalDisk):
    pass


def _overwritten(path):
    """A save that fails leaves the one before; damage is told of with the worker that met it."""
    one = Training(["worker1", "worker2"], seed=1)
    checkpoint.save(one.state, path)
    before, files = one.content(), files_in(path)
    failing = rpc.remote("worker2", Failing, args=("raise",))
    with refused(CheckpointError, "worker2", "no state today", "what was there before still is"):
        checkpoint.save({**one.state, "f": failing}, path)
    assert files_in(path) == files
    same(checkpoint.read(path), before)
    checkpoint.save({**one.state, "step": 9}, path)
    assert len(files_in(path)) == 4
    assert set(files_in(path)) & set(files) == {"manifest.json"}
    two = [name for name in files_in(path) if name.endswith(".2.safetensors")]
    data = bytearray((Path(path) / two[0]).read_bytes())
    data[-2] ^= 1
    (Path(path) / two[0]).write_bytes(data)
    with refused(DamagedCheckpoint, "worker2", two[0]):
        checkpoint.load(one.state, path)


def _kill(path):
    one = Training(["worker1", "worker2"], seed=1)
    dying = rpc.remote("worker2", Failing, args=("die",))
    checkpoint.save({"model": one.stages[0]}, path)
    files = files_in(path)
    with refused(CheckpointError, "worker2", "Nothing has been saved"):
        checkpoint.save({**one.state, "dying": dying}, path)
    assert files_in(path) == files
    same(checkpoint.read(path), {"model": held(one.stages[0])})
    for act in (checkpoint.save, checkpoint.async_save):
        with refused(CheckpointError, "worker 'worker2'", "Nothing has been"):
            act(one.state, path)
        assert files_in(path) == files


def _kill_before_it_writes(path):
    """An owner that dies between its copy and its writing."""
    one = Training(["worker1", "worker2"], seed=1)
    checkpoint.save({"model": one.stages[0]}, path)
    files = files_in(path)
    draft = drafted(one.state, checkpoint.LocalDisk(path), Ranks(alone=True))
    draft.staged = rpc_saving.staged_by_owners(draft, -1)
    with pytest.raises(rpc.WorkerLost):
        rpc.rpc_sync("worker2", die)
    with refused(CheckpointError, "worker 'worker2'", "Nothing has been saved"):
        written(draft, None)
    assert files_in(path) == files


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(path):
    """Bounded by the timeout given."""
    one = Training(["worker1", "worker2"], seed=1)
    slow = rpc.remote("worker2", Slow)
    with refused(CheckpointError, "worker2", "RpcTimeout"):
        checkpoint.save({"model": one.stages[0], "slow": slow}, path, rpc_timeout=0.3)
    left = files_in(path)
    assert "manifest.json" not in left
    slow.rpc_sync().stop()
    checkpoint.save({"model": one.stages[0]}, path)
    same(checkpoint.read(path), {"model": held(one.stages[0])})


class Slow(Counting):
    def __init__(self):
        import threading

        self._go = threading.Event()

    def state_dict(self):
        self._go.wait(20)
        return {"seen": {}}

    def stop(self):
        self._go.set()


@pytest.mark.parametrize(
    "body",
    [
        _round_trip,
        _in_the_background,
        _staged_twice,
        _memory,
        _saved_once,
        _many_names_of_one,
        _with_and_without_workers,
        _names,
        _mistakes,
        _overwritten,
        _hang,
    ],
    ids=lambda f: f.__name__,
)
def test_rpc(group, tmp_path, body):
    group[0].run(body, str(tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    from support.workers import Group, Worker

    folder = tmp_path_factory.mktemp("workers")
    group = Group([Worker(f"worker{i}", folder / f"{i}.log") for i in range(3)])
    try:
        group.init(f"file://{folder}/rendezvous", rpc_timeout=20)
        yield group
    finally:
        for worker in group:
            worker.close()


@pytest.mark.parametrize("body", [_kill, _kill_before_it_writes], ids=lambda f: f.__name__)
def test_an_owner_that_dies(workers, tmp_path, body):
    group = workers(3, rpc_timeout=60)
    group[0].run(body, str(tmp_path / "checkpoint"))
    with pytest.raises(WorkerFailed):
        group[2].run(len, "")


def test_import_is_light(tmp_path):
    import subprocess
    import sys

    code = "import sys, farstep.checkpoint as c; print([m for m in sys.modules if m.startswith(('farstep.rpc', 'farstep.optim'))])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


# -- what a caller may do, and what an owner may say; agents of one process


def _agents(**options):
    return rpc.local_agents(2, rpc.RpcOptions(rpc_timeout=10, **options))


def test_trust(tmp_path):
    """A worker that trusts some names alone writes no files for others, unless it is told to."""
    with _agents(trusted=("torch", f"{__name__}")) as agents, speaking_for(agents[0]):
        table = rpc.remote("worker1", tensor_of, args=(1, 2))
        with refused(CheckpointError, "worker1", "rpc_calls.look is not among what worker 'worker1' trusts"):
            checkpoint.save({"table": table}, tmp_path)
        assert files_in(tmp_path) == []
    with (
        _agents(trusted=("torch", f"{__name__}", "farstep.checkpoint.rpc_calls")) as agents,
        speaking_for(agents[0]),
    ):
        table = rpc.remote("worker1", tensor_of, args=(1, 2))
        checkpoint.save({"table": table}, tmp_path)
        same(checkpoint.read(tmp_path), {"table": tensor_of(1, 2)})
        other = rpc.remote("worker1", tensor_of, args=(2, 2))
        checkpoint.load({"table": other}, tmp_path)
        same(other.to_here(), tensor_of(1, 2))


@pytest.mark.parametrize(
    ("save", "number", "count"),
    [
        ("../0123456789abcd", 1, 2),
        ("0123456789abcdef\n", 1, 2),
        (b"0123456789abcdef", 1, 2),
        ("0123456789abcdef", 2, 2),
        ("0123456789abcdef", -1, 2),
        ("0123456789abcdef", "/../../x", 2),
        ("0123456789abcdef", 1, 10**9),
    ],
)
def test_a_hostile_caller(tmp_path, save, number, count):
    inside = tmp_path / "inside"
    inside.mkdir()
    with _agents() as agents, speaking_for(agents[0]):
        table = rpc.remote("worker1", tensor_of, args=(1, 2))
        args = ((str(inside), {}), save, number, count, [("table", table)], None, 5.0)
        with pytest.raises(CheckpointError):
            rpc.rpc_sync("worker1", rpc_calls.write, args=args)
    assert files_in(tmp_path) == ["inside"]
    assert files_in(inside) == []


def test_a_link_is_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "0123456789abcdef.1.safetensors").symlink_to(outside)
    with _agents() as agents, speaking_for(agents[0]):
        table = rpc.remote("worker1", tensor_of, args=(1, 2))
        args = ((str(inside), {}), "0123456789abcdef", 1, 2, [("table", table)], None, 5.0)
        with pytest.raises(StorageFailed):
            rpc.rpc_sync("worker1", rpc_calls.write, args=args)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    "lie",
    [
        lambda nodes, tensors, part: (nodes, tensors, ([("../../precious", 5)], *part[1:])),
        lambda nodes, tensors, part: (
            nodes,
            {"here": next(iter(tensors.values()))},
            (part[0], ["here"], *part[2:]),
        ),
        lambda nodes, tensors, part: (nodes, tensors, (*part[:3], part[3] + 1_000_000, *part[4:])),
        lambda nodes, tensors, part: ({**nodes, "more": 5}, tensors, part),
        lambda nodes, tensors, part: ({"table": {"tensor": "nowhere"}}, tensors, part),
        lambda nodes, tensors, part: ({"table": ("elsewhere", "here")}, tensors, part),
        lambda nodes, tensors, part: ({"table": ("elsewhere", "table.x")}, tensors, part),
        lambda nodes, tensors, part: (nodes, tensors, (*part[:6], part[6][:0])),
    ],
)
def test_a_hostile_owner(tmp_path, monkeypatch, lie):
    """Nothing that it says makes a checkpoint that does not load, or removes what is not the save's."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "a" / "b"
    with _agents() as agents, speaking_for(agents[0]):
        table = rpc.remote("worker1", tensor_of, args=(1, 2))
        checkpoint.save({"table": table, "here": torch.ones(2)}, path)
        files = files_in(path)
        ask = rpc_saving.ask_owners

        def asked(*args):
            outcome = ask(*args)
            for owner, result in outcome.results.items():
                outcome.results[owner] = lie(*result)
            return outcome

        monkeypatch.setattr(rpc_saving, "ask_owners", asked)
        with pytest.raises(CheckpointError):
            checkpoint.save({"table": table, "here": torch.zeros(2)}, path)
    assert precious.read_text() == "mine"
    assert files_in(path) == files
    same(checkpoint.read(path), {"table": tensor_of(1, 2), "here": torch.ones(2)})
