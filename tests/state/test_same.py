"""What counts as the same, wherever ranks or groups are compared."""

import copy

import numpy as np
import pytest
import torch

from farstep.state.layout import Spread
from farstep.state.optim_entries import Number, RankOwned
from farstep.state.same import differing, same
from farstep.state.shards import Shards

NAN = float("nan")


class Plain:
    """Has no `==` of its own."""

    def __init__(self, **values):
        vars(self).update(values)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def _table(at=None):
    table = torch.zeros(5000)
    if at is not None:
        table[at] = 1
    return table


def _ring(value):
    ring = [value]
    ring.append(ring)
    return ring


def _shards(offset):
    return Shards(Spread.whole((2,), torch.float32, [0, 1]), [torch.ones(2) * offset])


ALIKE = [
    (1, 1.0),
    (NAN, NAN),
    ((0.9, 0.99), [0.9, 0.99]),
    ("adam", "adam"),
    (None, None),
    (_table(), _table()),
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (np.arange(3), np.arange(3)),
    (np.float64(0.5), 0.5),
    ({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}),
    (Plain(a=torch.ones(2)), Plain(a=torch.ones(2))),
    (Slotted(_table()), Slotted(_table())),
    (_ring(1), _ring(1)),
    (_shards(1), _shards(1)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
]
UNLIKE = [
    (1, 2),
    (1, "1"),
    (0.1, torch.tensor(0.1)),
    (torch.tensor(0.99991), torch.tensor(0.99994)),  # alike when printed
    (_table(), _table(2500)),  # elided when printed
    (_table(), _table().double()),
    (torch.ones(2, 3), torch.ones(3, 2)),
    (np.zeros(5000), np.eye(1, 5000, 2500)[0]),
    ((torch.tensor(0.9), torch.tensor(0.99991)), (torch.tensor(0.9), torch.tensor(0.99994))),
    ({"a": 1}, {"b": 1}),
    ([1], [1, 2]),
    (Plain(a=_table()), Plain(a=_table(2500))),
    (Slotted(_table()), Slotted(_table(2500))),
    (_ring(1), _ring(2)),
    (_shards(1), _shards(2)),
    (RankOwned(_shards(1).spread, {0: _table()}), RankOwned(_shards(1).spread, {0: _table(1)})),
    (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    (torch.eye(2).to_sparse(), torch.eye(2)),
]


@pytest.mark.parametrize(("a", "b"), ALIKE, ids=lambda each: type(each).__name__)
def test_what_is_the_same(a, b):
    assert same(a, b)
    assert same(b, a)
    assert same(a, copy.deepcopy(a))
    assert Number(a) == Number(b)
    assert hash(Number(a)) == hash(Number(b))


@pytest.mark.parametrize(("a", "b"), UNLIKE, ids=lambda each: type(each).__name__)
def test_what_is_not(a, b):
    assert not same(a, b)
    assert not same(b, a)
    assert Number(a) != Number(b)


def test_keys_that_differ():
    assert differing({"a": 1, "b": _table()}, {"c": 2, "a": 1.0, "b": _table(7)}) == ["b", "c"]
