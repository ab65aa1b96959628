"""Keys, values and tensors that are not quite what they seem: kept as they are, or refused with their place before anything is written."""

import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from farstep import checkpoint
from farstep.checkpoint import saving
from farstep.errors import CheckpointError
from farstep.state.same import same


class Kind(int, enum.Enum):
    A = 1


class Word(str, enum.Enum):  # noqa: UP042  # whose text is "Word.A"
    A = "a"


class Shown(str):
    def __str__(self):
        return "other"


@pytest.mark.parametrize(
    "key", [Kind.A, Word.A, Shown("k"), np.float32(0.1), np.int64(3), b"x", None, 1j, True, 2.5]
)
def test_a_key_whose_text_is_another(tmp_path, key):
    checkpoint.save({"d": {key: torch.ones(2), "n": 1}}, tmp_path)
    found = checkpoint.read(tmp_path)["d"]
    assert torch.equal(found[key], torch.ones(2))
    state = {"d": {key: torch.zeros(2), "n": 0}}
    checkpoint.load(state, tmp_path)
    assert torch.equal(state["d"][key], torch.ones(2))
    assert state["d"]["n"] == 1


@pytest.mark.parametrize("value", [Kind.A, Word.A, Shown("k"), np.float32(0.1)])
def test_a_value_whose_text_is_another(tmp_path, value):
    checkpoint.save({"v": value}, tmp_path)
    found = checkpoint.read(tmp_path)["v"]
    assert found == value
    assert type(found) in (int, str, float)


def _nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _lazy():
    return nn.LazyLinear(3)


REFUSED = {
    "a key that is a tuple": lambda: {"x": {(1, 2): torch.ones(2)}},
    "an array of objects": lambda: {"x": np.array([None], dtype=object)},
    "an array of strings": lambda: {"x": np.array(["a"])},
    "a number that Python does not read": lambda: {"x": 10**5000},
    "70 dimensions": lambda: {"x": torch.ones([1] * 70)},
    "a dtype of half bytes": lambda: {"x": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    "bits": lambda: {"x": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)},
    "quantized": lambda: {"x": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)},
    "sparse": lambda: {"x": torch.eye(3).to_sparse()},
    "meta": lambda: {"x": torch.empty(3, device="meta")},
    "nested": lambda: {"x": _nested()},
    "jagged": lambda: {"x": _nested(torch.jagged)},
    "a lazy parameter": lambda: {"x": nn.UninitializedParameter()},
    "a model on meta": lambda: {"x": nn.Linear(2, 2, device="meta")},
    "a lazy model": lambda: {"x": _lazy()},
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_is_named_and_nothing_is_written(tmp_path, what, alone):
    place = tmp_path / "saved"
    for begin in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(CheckpointError, match=r"'x(.weight)?'.*Nothing has been saved"):
            begin(REFUSED[what](), place, no_dist=alone)
    assert not place.exists()


@pytest.mark.parametrize("array", [np.arange(3, dtype=">f4"), np.arange(6.0)[::-2]])
def test_arrays_in_another_order(tmp_path, array):
    checkpoint.save({"x": array}, tmp_path)
    assert checkpoint.read(tmp_path)["x"].tolist() == array.tolist()


def test_what_could_not_be_read_again_does_not_replace_what_can(tmp_path, monkeypatch):
    checkpoint.save({"x": torch.ones(2)}, tmp_path)
    before = sorted(each.name for each in tmp_path.iterdir())
    drafted = saving.drafted

    def wrong(*args):
        draft = drafted(*args)
        draft.tree = {"dict": {"y": {"tensor": None}}}
        return draft

    monkeypatch.setattr(saving, "drafted", wrong)
    with pytest.raises(
        CheckpointError, match=r"could not be loaded again.*no tensor 'y'.*Nothing has been saved"
    ):
        checkpoint.save({"x": torch.zeros(2)}, tmp_path)
    monkeypatch.setattr(saving, "drafted", drafted)
    monkeypatch.setattr(saving, "MOST_READ_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"more than 100 is not read.*Nothing has been saved"):
        checkpoint.save({"x": torch.zeros(2)}, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    assert torch.equal(checkpoint.read(tmp_path)["x"], torch.ones(2))


# -- classes of dicts


def _trained(steps, into=None):
    """A schedule that has a Counter deep inside, and the rates it goes through; saved or loaded after two steps."""
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    parts = [LinearLR(optimizer, 0.5, total_iters=3), MultiStepLR(optimizer, [1, 1, 2, 4], gamma=0.5)]
    scheduler = SequentialLR(optimizer, parts, [2])
    if into is not None:
        checkpoint.load({"o": optimizer, "s": scheduler}, into)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return {"o": optimizer, "s": scheduler}, rates


@pytest.mark.filterwarnings("ignore")
def test_schedules_go_on(tmp_path):
    state, first = _trained(1)
    checkpoint.save(state, tmp_path)
    _, rest = _trained(7, tmp_path)
    assert first + rest == _trained(8)[1]


Pair = namedtuple("Pair", "a b")


class Keeper:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_gets_the_classes_that_it_has(tmp_path):
    kept = {"counter": Counter("aab"), "ordered": OrderedDict(z=1, a=torch.ones(2)), "lists": defaultdict(list, x=[1]), "pair": Pair(1, 2)}  # fmt: skip
    checkpoint.save({"k": Keeper(kept)}, tmp_path)
    keeper = Keeper(
        {"counter": Counter(), "ordered": OrderedDict(), "lists": defaultdict(list), "pair": Pair(0, 0)}
    )
    checkpoint.load({"k": keeper}, tmp_path)
    found = keeper.state
    assert sorted(found["counter"].elements()) == ["a", "a", "b"]
    assert list(found["ordered"]) == ["z", "a"]
    assert found["lists"]["new"] == []
    assert found["pair"] == Pair(1, 2)
    assert [type(each) for each in found.values()] == [Counter, OrderedDict, defaultdict, Pair]
    assert type(checkpoint.read(tmp_path)["k"]["counter"]) is dict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
def test_one_element_with_a_stride_of_its_own(tmp_path, dtype):
    """A slice of a larger tensor. It counts as contiguous, and its bytes lie in a row, but its stride is not 1."""
    taken = torch.arange(6).to(dtype)[::3][1:]
    assert taken.is_contiguous()
    assert taken.stride() == (3,)
    state = {"a": taken, "n": torch.full((6,), float("nan"))[::3][1:], "b": taken.reshape(1, 1)}
    checkpoint.save(state, tmp_path)
    found = {
        "a": torch.zeros(6, dtype=dtype)[::3][1:],
        "n": torch.zeros(1),
        "b": torch.zeros(1, 1, dtype=dtype),
    }
    checkpoint.load(found, tmp_path)
    assert torch.equal(found["a"], taken)
    assert torch.equal(found["b"], taken.reshape(1, 1))
    assert same(state["n"], found["n"])
