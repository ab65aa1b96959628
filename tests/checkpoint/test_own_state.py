"""Models and optimizers that say themselves what their state is: nothing of it is lost without a word."""

import pytest
import torch
from support.ranks import Ranks
from torch import nn

from farstep import checkpoint


class Remembering(nn.Linear):
    """Its state has a tensor and a number that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen, self.count = torch.zeros(4), 0

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "seen": self.seen.clone(), "count": self.count}

    def load_state_dict(self, state, strict=True, assign=False):
        state = dict(state)
        self.seen, self.count = state.pop("seen", self.seen), state.pop("count", self.count)
        return super().load_state_dict(state, strict, assign)


class Counting(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state):
        state = dict(state)
        self.count = state.pop("count")
        super().load_state_dict(state)


class Wrapping(torch.optim.Optimizer):
    """The state is in the optimizer that it steps."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.count += 1
        return self.inner.step(closure)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.count = state["count"]


def stepped(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    return optimizer


def test_a_module_with_values_of_its_own(tmp_path):
    one, other = Remembering(), Remembering()
    one.seen, one.count = torch.rand(4), 7
    checkpoint.save({"model": one}, tmp_path)
    assert not checkpoint.load({"model": other}, tmp_path)
    assert torch.equal(other.weight, one.weight)
    assert torch.equal(other.seen, one.seen)
    assert other.count == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Counting(params, lr=0.1, momentum=0.9),
        lambda params: Wrapping(torch.optim.Adam(params, lr=0.1)),
    ],
    ids=["more", "wrapping"],
)
def test_an_optimizer_with_a_state_of_its_own(tmp_path, make):
    model, new_model = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, new = stepped(model, make(model.parameters())), make(new_model.parameters())
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path)
    assert not checkpoint.load({"model": new_model, "optim": new}, tmp_path)
    assert new.count == 2
    stepped(model, optimizer)
    stepped(new_model, new)
    assert torch.equal(new_model.weight, model.weight)


def _redundant(path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = stepped(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1))
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        checkpoint.save({"model": model, "optim": optimizer}, path)


def test_zero_redundancy_optimizer_is_not_saved_empty(tmp_path, two: Ranks):
    two.run(_redundant, str(tmp_path / "c"))
