"""What a state has after it was saved and loaded is what it had before, in one process."""

import json
import math
import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from farstep import checkpoint
from farstep.checkpoint import PerRank
from farstep.checkpoint.tools import verify
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, NoCheckpoint

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.uint32,
    torch.bool,
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.complex_numbers(),
)
keys = st.one_of(
    st.text(st.characters(exclude_characters=".", exclude_categories=["Nd"]), min_size=1), st.integers()
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    data = draw(st.binary(min_size=(n := math.prod(shape) * dtype.itemsize), max_size=n))
    if dtype == torch.bool:
        data = bytes(b & 1 for b in data)
    flat = torch.frombuffer(bytearray(data or b"\0" * 16), dtype=torch.uint8)[:n]
    tensor = flat.clone().view(dtype).reshape(shape)
    return tensor.mT.contiguous().mT if draw(st.booleans()) and tensor.dim() > 1 else tensor


states = st.recursive(
    st.one_of(scalars, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return bytes_of(a) == bytes_of(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or str(a) == str(b))


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(keys, states, min_size=1, max_size=5))
def test_any_state_is_read_as_it_was(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("any")
    checkpoint.save(state, path)
    assert same(checkpoint.read(path), state)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(st.sampled_from("abc"), states, min_size=1), data=st.data())
def test_any_state_is_loaded_into_one_like_it(state, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any")
    checkpoint.save(state, path)
    blank = blanked(state)
    kept = list(tensors_in(blank))
    assert not checkpoint.load(blank, path)
    assert same(blank, state)
    assert all(a is b for a, b in zip(kept, tensors_in(blank), strict=True))  # filled in place


def blanked(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=torch.uint8).to(value.dtype)
    if isinstance(value, dict):
        return {key: blanked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blanked(each) for each in value)
    return None


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


# -- objects ----------------------------------------------------------------------------------------------


def trained(seed: int = 0, steps: int = 3, lr: float = 0.1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, scheduler, steps)
    return {"model": model, "optim": optimizer, "sched": scheduler, "step": steps}


def train(model, optimizer, scheduler, steps: int) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    state, other = trained(0), trained(1, lr=0.5, steps=1)
    checkpoint.save(state, tmp_path)
    checkpoint.load(other, tmp_path)
    assert other["step"] == 3
    for each in (state, other):
        train(each["model"], each["optim"], each["sched"], 4)
    assert same(dict(other["model"].state_dict()), dict(state["model"].state_dict()))
    assert same(other["optim"].state_dict(), state["optim"].state_dict())
    assert other["sched"].state_dict() == state["sched"].state_dict()


def test_an_optimizer_that_has_not_stepped_gets_its_state(tmp_path):
    state, other = trained(0), trained(1, steps=0)
    checkpoint.save(state, tmp_path)
    checkpoint.load(other, tmp_path)
    assert same(other["optim"].state_dict(), state["optim"].state_dict())


def test_an_optimizer_without_its_model(tmp_path):
    state, other = trained(0), trained(1, steps=0)
    checkpoint.save({"optim": state["optim"]}, tmp_path)
    checkpoint.load({"optim": other["optim"]}, tmp_path)
    assert same(other["optim"].state_dict(), state["optim"].state_dict())


def test_two_models_and_one_optimizer_over_both(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        one, other = nn.Linear(2, 3), nn.Linear(3, 2)
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
        other(one(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        return {"a": one, "b": other, "optim": optimizer}

    state, target = made(0), made(1)
    checkpoint.save(state, tmp_path)
    checkpoint.load(target, tmp_path)
    assert same(target["optim"].state_dict()["state"], state["optim"].state_dict()["state"])


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    checkpoint.save({"model": model}, tmp_path)
    stored = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert stored < 2 * model[0].weight.nbytes
    other = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    checkpoint.load({"model": other}, tmp_path)  # untied, it gets both
    assert torch.equal(other[1].weight, model[0].weight)
    assert torch.equal(other[0].weight, model[0].weight)


class Counter:
    """Like a data loader: an object that only has to say what its state is."""

    def __init__(self) -> None:
        self.at, self.history = 0, {}

    def state_dict(self):
        return {"at": self.at, "history": self.history}

    def load_state_dict(self, state):
        self.at, self.history = state["at"], state["history"]


def test_any_object_with_a_state(tmp_path):
    one, other = Counter(), Counter()
    one.at, one.history = 17, {3: torch.arange(4), "last": [1, 2]}
    checkpoint.save({"data": one}, tmp_path)
    checkpoint.load({"data": other}, tmp_path)
    assert other.at == 17
    assert same(other.history, one.history)


def test_extra_state_of_a_module(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    one, other = Extra(2, 2), Extra(2, 2)
    one.calls, other.calls = 9, 0
    checkpoint.save({"m": one}, tmp_path)
    checkpoint.load({"m": other}, tmp_path)
    assert other.calls == 9
    assert torch.equal(one.weight, other.weight)


def test_a_value_of_this_rank_and_arrays_of_numpy(tmp_path):
    checkpoint.save({"a": PerRank([1, torch.ones(2)]), "n": np.arange(3.0), "s": np.float32(0.5)}, tmp_path)
    state = {"a": PerRank(None), "n": None, "s": 0.0}
    checkpoint.load(state, tmp_path)
    assert same(state["a"].value, [1, torch.ones(2)])
    assert same(state["n"], torch.arange(3.0, dtype=torch.float64))
    assert state["s"] == 0.5


def test_a_compiled_and_a_plain_model_have_the_same_names(tmp_path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save({"model": torch.compile(model)}, tmp_path)
    checkpoint.load({"model": other}, tmp_path)
    assert torch.equal(model.weight, other.weight)


# -- parts, names, dtypes ---------------------------------------------------------------------------------


def test_a_part_of_a_checkpoint(tmp_path):
    checkpoint.save(trained(0), tmp_path)
    other = trained(1)
    before = [p.clone() for p in other["model"].parameters()]
    state = {"step": 0}
    assert not checkpoint.load(state, tmp_path)
    assert state == {"step": 3}
    assert all(torch.equal(a, b) for a, b in zip(before, other["model"].parameters(), strict=True))


@pytest.mark.parametrize(
    "rename",
    [
        {"model.0": "model.2", "model.2": "model.0", "opt": "optim"},
        lambda name: (
            {"0": "2", "2": "0"}.get(name.split(".")[1], name.split(".")[1]).join(
                [f"{name.split('.')[0]}.", ""]
            )
            + name[len(".".join(name.split(".")[:2])) :]
            if name.startswith("model.")
            else name.replace("opt", "optim", 1)
            if name.startswith("opt")
            else name
        ),
    ],
    ids=["mapping", "function"],
)
def test_renamed(tmp_path, rename):
    """The second layer was the first; the optimizer's state goes along."""

    def made(seed, turned):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]
        model = nn.Sequential(*(reversed(layers) if turned else layers))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(0, False)
    checkpoint.save({"model": model, "opt": optimizer}, tmp_path)
    other, target = made(1, True)
    checkpoint.load({"model": other, "optim": target}, tmp_path, rename=rename)
    for here, there in ((0, 2), (2, 0)):
        assert torch.equal(other[here].weight, model[there].weight)
        assert same(dict(target.state[other[here].weight]), dict(optimizer.state[model[there].weight]))


def test_what_does_not_fit_is_listed_and_changes_nothing(tmp_path):
    checkpoint.save({"m": {"a": torch.ones(2), "b": torch.ones(3), "old": 1}}, tmp_path)
    state = {"m": {"a": torch.zeros(2), "b": torch.zeros(4), "new": 5}}
    with pytest.raises(
        CheckpointMismatch, match=r"no 'm\.new'.*no 'm\.old'.*shapes differ: 'm\.b'.*strict=False"
    ):
        checkpoint.load(state, tmp_path)
    assert same(state, {"m": {"a": torch.zeros(2), "b": torch.zeros(4), "new": 5}})
    report = checkpoint.load(state, tmp_path, strict=False)
    assert (report.missing, report.unexpected, report.reshaped) == (["m.new"], ["m.old"], ["m.b"])
    assert same(state, {"m": {"a": torch.ones(2), "b": torch.zeros(4), "new": 5}})


def test_a_dtype_is_converted_only_when_asked(tmp_path):
    checkpoint.save({"a": torch.tensor([1.5, 2.5])}, tmp_path)
    state = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    for strict in (True, False):
        with pytest.raises(CheckpointMismatch, match=r"'a' is torch.bfloat16.*torch.float32.*convert_dtype"):
            checkpoint.load(state, tmp_path, strict=strict)
    checkpoint.load(state, tmp_path, convert_dtype=True)
    assert state["a"].tolist() == [1.5, 2.5]


def test_a_view_is_filled_without_touching_what_lies_beside_it(tmp_path):
    checkpoint.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path)
    memory = torch.full((2, 6), -1.0)
    checkpoint.load({"a": memory[:, ::2]}, tmp_path)
    assert memory.tolist() == [[0, -1, 1, -1, 2, -1], [3, -1, 4, -1, 5, -1]]


@pytest.mark.parametrize("shape", [(3_000_000,), (1500, 1100), (3, 700, 901), (1, 5_000_000)])
def test_large_tensors_and_parts_of_them(tmp_path, shape):
    """Several blocks, the last of which is not full; read whole, by rows, by columns and by what lies within."""
    whole = torch.randn(shape)
    checkpoint.save({"w": whole, "t": whole.mT.contiguous().mT if whole.dim() > 1 else whole * 2}, tmp_path)
    state = {"w": torch.zeros(shape), "t": torch.zeros(shape)}
    checkpoint.load(state, tmp_path)
    assert torch.equal(state["w"], whole)
    assert torch.equal(state["t"], whole if whole.dim() > 1 else whole * 2)


# -- what is refused --------------------------------------------------------------------------------------


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpoint, match="nothing of that name"):
        checkpoint.load({"a": 1}, tmp_path / "nothing")


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, torch.zeros(2).to_sparse(), nn.Linear])
def test_what_a_checkpoint_does_not_keep(tmp_path, value):
    with pytest.raises((CheckpointError, ValueError), match=r"a\.b"):
        checkpoint.save({"a": {"b": value}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_values_of_one_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"'a\.b'"):
        checkpoint.save({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'a\.1'"):
        checkpoint.save({"a": {"1": 2, 1: 3}}, tmp_path)


def test_a_state_that_has_itself_inside(tmp_path):
    state: dict = {"a": torch.zeros(1)}
    state["self"] = state
    with pytest.raises(CheckpointError, match="has itself inside"):
        checkpoint.save(state, tmp_path)


# -- files ------------------------------------------------------------------------------------------------


def test_safetensors_reads_the_data(tmp_path):
    state = {"a": torch.randn(3, 4), "deep": {"b": torch.arange(5), "c": torch.ones(2, dtype=torch.bfloat16)}}
    checkpoint.save(state, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    found = safetensors.torch.load_file(file)
    assert same(
        dict(sorted(found.items())),
        {"a": state["a"], "deep.b": state["deep"]["b"], "deep.c": state["deep"]["c"]},
    )
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert all(each["data_offsets"][0] % 2 == 0 for name, each in header.items() if name != "__metadata__")


def test_names_that_mean_something_else_in_the_file(tmp_path):
    state = {"__metadata__": torch.ones(3), "a": torch.zeros(2), "a[0:2]": torch.ones(1)}
    checkpoint.save(state, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert len(safetensors.torch.load_file(file)) == 3
    assert same(checkpoint.read(tmp_path), state)
    assert not verify(tmp_path)


def test_a_new_checkpoint_takes_the_place_of_the_old(tmp_path):
    checkpoint.save({"a": torch.zeros(3), "n": 1}, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "0123456789abcdef.0.safetensors").write_bytes(b"what a killed save left")
    checkpoint.save({"a": torch.ones(3), "n": 2}, tmp_path)
    assert same(checkpoint.read(tmp_path), {"a": torch.ones(3), "n": 2})
    assert len(list(tmp_path.iterdir())) == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_progress_goes_from_nothing_to_everything(tmp_path):
    state = {f"t{i}": torch.randn(100_000) for i in range(20)}
    for act in (checkpoint.save, checkpoint.load):
        calls = []
        act(state, tmp_path, progress=lambda done, total: calls.append((done, total)))  # noqa: B023
        assert calls == sorted(calls)
        assert calls[-1] == (8_000_000, 8_000_000)


def test_an_optimizer_alone_does_not_take_what_goes_by_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    turned = torch.optim.AdamW([*model[1].parameters(), *model[0].parameters()])
    with pytest.raises(
        CheckpointMismatch, match=r"'optim' was saved together with its model.*load_optimizer"
    ):
        checkpoint.load({"optim": turned}, tmp_path)
    assert not turned.state
    checkpoint.load({"model": model, "optim": turned}, tmp_path)
    weight = model[1].weight
    assert torch.equal(turned.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


def test_what_was_saved_once_is_loaded_once(tmp_path: Path) -> None:
    one = torch.ones(3)
    checkpoint.save({"a": {"x": one, "y": one, "z": torch.ones(3)}}, tmp_path)
    state = {"a": None}
    checkpoint.load(state, tmp_path)
    assert state["a"]["x"] is state["a"]["y"]
    assert state["a"]["x"] is not state["a"]["z"]


def test_the_message_tells_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint, match="nothing of that name"):
        checkpoint.load({"a": 1}, tmp_path / "none")
    checkpoint.CheckpointManager(tmp_path / "many").save({"model": torch.ones(1), "optim": 1}, 3)
    with pytest.raises(NoCheckpoint, match="step_000000003, as a CheckpointManager"):
        checkpoint.load({"a": 1}, tmp_path / "many")
    with pytest.raises(CheckpointMismatch, match=r"has no 'modle' .at its top it has 'model', 'optim'"):
        checkpoint.load({"modle": torch.ones(1)}, tmp_path / "many/step_000000003")
    checkpoint.save({"rng": PerRank(torch.ones(3))}, tmp_path / "rng")
    with pytest.raises(CheckpointMismatch, match="give a PerRank to load into"):
        checkpoint.load({"rng": torch.ones(3)}, tmp_path / "rng")


def test_an_error_of_a_state_dict_comes_as_it_is(tmp_path: Path) -> None:
    class Ended:
        def state_dict(self):
            return {"x": next(iter([]))}

    with pytest.raises(StopIteration):
        checkpoint.save({"a": Ended()}, tmp_path)


def test_a_load_while_another_checkpoint_takes_the_place(tmp_path: Path) -> None:
    """It is not damaged, and a manager does not go back to the one before."""

    class Overtaken(checkpoint.LocalDisk):
        def open(self, name: str):
            if name.endswith(".safetensors"):
                checkpoint.save({"a": torch.full((3,), 2.0)}, self.path)
            return super().open(name)

    checkpoint.save({"a": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"saved there meanwhile.*Load again") as caught:
        checkpoint.load({"a": torch.zeros(3)}, Overtaken(tmp_path))
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_what_an_interrupted_save_wrote_is_gone(tmp_path: Path) -> None:
    checkpoint.save({"a": 1}, tmp_path)
    before = sorted(tmp_path.iterdir())

    waiting = [os.getpid()]

    def interrupt(done: int, total: int) -> None:
        if done > total // 2 and waiting:
            os.kill(waiting.pop(), signal.SIGINT)

    large = {name: torch.zeros(10 << 20) for name in "xyz"}
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(large, tmp_path, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, was)
    assert sorted(tmp_path.iterdir()) == before


def test_a_path_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoint.save({"a": 1}, "~/runs/one")
    assert checkpoint.read(tmp_path / "runs" / "one") == {"a": 1}
    for kind, name in (("torch", "two.pt"), ("dcp", "three"), ("farstep", "four")):
        checkpoint.convert("~/runs/one", f"~/{name}", to=kind)
        assert (tmp_path / name).exists()


def test_state_and_path_in_the_wrong_order(tmp_path):
    state = {"w": torch.zeros(2)}
    manager = checkpoint.CheckpointManager(tmp_path / "run")
    for call, wanted in (
        (lambda: checkpoint.save(tmp_path / "x", state), r"save\(state, path\)"),
        (lambda: checkpoint.save("x", state), r"save\(state, path\)"),
        (lambda: checkpoint.async_save(tmp_path / "x", state), r"async_save\(state, path\)"),
        (lambda: checkpoint.load(str(tmp_path / "x"), state), r"load\(state, path\)"),
        (lambda: manager.save(5, state), r"save\(state, step\)"),
        (lambda: manager.async_save(5, state), r"async_save\(state, step\)"),
    ):
        with pytest.raises(TypeError, match=f"state first.*{wanted}"):
            call()
    assert list(tmp_path.iterdir()) == []
