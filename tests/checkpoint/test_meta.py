"""Loads into tensors on the meta device: they get memory and what was saved, or the load refuses and changes nothing."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farstep import checkpoint
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint


class Net(nn.Module):
    """Parameters, tied ones too, and buffers, of which one is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)
        self.again = nn.Linear(5, 3)
        self.again.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(x)).tanh()
        return self.out(x) + self.again(x)


class Cached(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("cache", torch.arange(4.0), persistent=False)


def on_meta(kind: type[nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return kind()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def same_model(one: nn.Module, other: nn.Module) -> None:
    found, wanted = one.state_dict(), other.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("names", [("model", "optim"), ("z_model", "a_optim")])
def test_a_model_and_the_optimizer_that_was_made_over_it(tmp_path: Path, names: tuple[str, str]) -> None:
    model, optim = names
    torch.manual_seed(0)
    one = Net()
    steps = adam(one)
    train(one, steps, 0, 2)
    checkpoint.save({model: one, optim: steps}, tmp_path / "two")

    two = on_meta()
    two.inner.weight.label = "kept"
    parameters = list(two.parameters())
    other = adam(two)
    assert not checkpoint.load({model: two, optim: other}, tmp_path / "two")
    assert all(new is old for new, old in zip(two.parameters(), parameters, strict=True))
    assert two.inner.weight.label == "kept"
    assert two.again.weight is two.out.weight
    assert all(p.requires_grad and p.is_leaf and type(p) is nn.Parameter for p in two.parameters())
    same_model(two, one)

    train(one, steps, 2, 2)
    train(two, other, 2, 2)
    same_model(two, one)
    checkpoint.save({model: two, optim: other}, tmp_path / "four")
    three = on_meta()
    third = adam(three)
    assert not checkpoint.load({model: three, optim: third}, tmp_path / "four")
    train(one, steps, 4, 1)
    train(three, third, 4, 1)
    same_model(three, one)


def test_an_optimizer_whose_state_is_on_meta_too(tmp_path: Path) -> None:
    one = Net()
    steps = adam(one)
    train(one, steps, 0, 1)
    checkpoint.save({"model": one, "optim": steps}, tmp_path)
    two = on_meta()
    other = adam(two)
    for p in two.parameters():
        p.grad = torch.zeros_like(p)
    other.step()
    assert other.state[two.inner.weight]["exp_avg"].is_meta
    assert not checkpoint.load({"model": two, "optim": other}, tmp_path)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(other.state[q]["exp_avg"], steps.state[p]["exp_avg"])


def test_tensors_in_dicts_lists_and_by_themselves(tmp_path: Path) -> None:
    wanted = {"a": torch.randn(3), "b": [torch.randn(2, 2), torch.tensor(4)], "c": (torch.ones(1),)}
    checkpoint.save(wanted, tmp_path / "dict")
    tied = torch.empty(3, device="meta")
    state = {
        "a": tied,
        "b": [torch.empty(2, 2, device="meta"), torch.tensor(0, device="meta")],
        "c": (torch.empty(1, device="meta"),),
    }
    assert not checkpoint.load(state, tmp_path / "dict")
    assert state["a"] is tied
    assert torch.equal(tied, wanted["a"])
    assert torch.equal(state["b"][0], wanted["b"][0])
    assert state["b"][1] == 4
    assert torch.equal(state["c"][0], wanted["c"][0])
    checkpoint.save(wanted["a"], tmp_path / "bare")
    bare = nn.Parameter(torch.empty(3, device="meta"))
    assert not checkpoint.load(bare, tmp_path / "bare")
    assert torch.equal(bare, wanted["a"])
    assert bare.requires_grad


def test_within_torchs_context_for_meta(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(2), "b": {"c": torch.ones(3)}}, tmp_path)
    with torch.device("meta"):
        state: dict[str, Any] = {"a": torch.empty(2), "b": None}
        assert not checkpoint.load(state, tmp_path)
    assert state["a"].tolist() == [1, 1]
    assert state["b"]["c"].tolist() == [1, 1, 1]


def test_a_state_dict_as_torch_assigns_it(tmp_path: Path) -> None:
    one, two = Net(), on_meta()
    checkpoint.save({"model": one}, tmp_path)
    state = {"model": two.state_dict()}
    assert not checkpoint.load(state, tmp_path)
    two.load_state_dict(state["model"], assign=True)
    same_model(two, one)


def test_what_is_in_no_checkpoint_stays_on_meta_and_is_told(tmp_path: Path) -> None:
    checkpoint.save({"model": Cached()}, tmp_path)
    model = on_meta(Cached)
    with pytest.raises(CheckpointMismatch, match=r"'model.cache' would stay on the meta device") as caught:
        checkpoint.load({"model": model}, tmp_path)
    assert ".)" not in str(caught.value)
    assert "rename=" not in str(caught.value)  # which gives no buffer memory
    assert model.weight.is_meta
    report = checkpoint.load({"model": model}, tmp_path, strict=False)
    assert report
    assert report.meta == ["model.cache"]
    assert "still on the meta device" in str(report)
    assert not model.weight.is_meta
    model = on_meta(Cached)
    model.cache = torch.arange(4.0)
    assert not checkpoint.load({"model": model}, tmp_path)


def test_what_is_missing_or_of_another_shape_stays_on_meta_and_is_told(tmp_path: Path) -> None:
    checkpoint.save({"w": {"a": torch.ones(2), "b": torch.ones(3)}}, tmp_path)
    state = {"w": {key: torch.empty(2, device="meta") for key in "abc"}}
    with pytest.raises(CheckpointMismatch):
        checkpoint.load(state, tmp_path)
    assert all(each.is_meta for each in state["w"].values())
    report = checkpoint.load(state, tmp_path, strict=False)
    assert (report.missing, report.reshaped, report.meta) == (["w.c"], ["w.b"], ["w.b", "w.c"])
    assert state["w"]["a"].tolist() == [1, 1]


def test_a_load_that_fails_leaves_them_on_meta(tmp_path: Path) -> None:
    checkpoint.save({"model": Net(), "more": torch.ones(3)}, tmp_path)
    model = on_meta()
    with pytest.raises(CheckpointMismatch, match="'other'"):
        checkpoint.load({"model": model, "other": torch.ones(2)}, tmp_path)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load({"model": model}, tmp_path, progress=_interrupted)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    (data,) = tmp_path.glob("*.safetensors")
    changed = bytearray(data.read_bytes())
    changed[-2] ^= 1
    data.write_bytes(changed)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.load({"model": model, "more": torch.empty(3)}, tmp_path)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    changed[-2] ^= 1
    data.write_bytes(changed)
    assert not checkpoint.load({"model": model}, tmp_path)


def _interrupted(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_an_optimizer_without_its_model(tmp_path: Path) -> None:
    """torch's own load_state_dict would move its state to the meta device, where it is lost."""
    one = Net()
    steps = adam(one)
    train(one, steps, 0, 1)
    checkpoint.save({"optim": steps}, tmp_path / "alone")
    checkpoint.save({"model": one, "optim": steps}, tmp_path / "both")
    model = on_meta()
    optimizer = adam(model)
    with pytest.raises(
        CheckpointMismatch, match=r"'optim' steps parameters on the meta device.*give the model"
    ):
        checkpoint.load({"optim": optimizer}, tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"on the meta device"):
        checkpoint.load_optimizer(model, optimizer, tmp_path / "both")
    assert not optimizer.state


class App:
    """An object with tensors of its own, which copies into them or takes what it is given."""

    def __init__(self, assign: bool) -> None:
        self.model, self.assign = nn.Linear(3, 2, device="meta"), assign

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], assign=self.assign)


@pytest.mark.filterwarnings("ignore:.*no-op")
def test_an_object_that_keeps_its_tensors_on_meta(tmp_path: Path) -> None:
    saved = nn.Linear(3, 2)
    checkpoint.save({"app": {"model": saved}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"load_state_dict of 'app'.*meta device.*assign=True"):
        checkpoint.load({"app": App(False)}, tmp_path)
    app = App(True)
    assert not checkpoint.load({"app": app}, tmp_path)
    same_model(app.model, saved)


def test_what_cannot_be_given_memory_in_place_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"model": nn.Linear(3, 2)}, tmp_path)
    model = nn.Linear(3, 2, device="meta")
    reference = weakref.ref(model.bias)
    with pytest.raises(CheckpointMismatch, match=r"'model.bias' is on the meta device and cannot.*to_empty"):
        checkpoint.load({"model": model}, tmp_path)
    assert model.weight.is_meta  # it came first
    del reference
    handle = model.bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CheckpointMismatch, match=r"'model.bias'.*hooks"):
        checkpoint.load({"model": model}, tmp_path)
    handle.remove()
    assert not checkpoint.load({"model": model}, tmp_path)


def test_where_they_get_memory(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match="meta"):
        checkpoint.load({"w": torch.empty(2, device="meta")}, tmp_path, device="meta")
    state = {"w": torch.empty(2, device="meta")}
    checkpoint.load(state, tmp_path, device="cpu")
    assert state["w"].device.type == "cpu"
