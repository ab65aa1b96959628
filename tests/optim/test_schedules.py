"""Options: groups, changes by hand and by every scheduler of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as lrs

from farstep import autograd
from farstep.errors import OptimError
from farstep.optim import DistributedOptimizer

from .spread import Spread, train

SCHEDULES = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda e: 0.9**e, lambda e: 0.5**e]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.8),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.2, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.2, 1.0, 4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.1, 9), lrs.ExponentialLR(o, 0.9)], [3]
    ),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.StepLR(o, 2), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 5, 2.0),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


def groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.05, "momentum": 0.5}]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_drives_it(three, name):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.SGD, groups(spread.rrefs), lr=0.1, momentum=0.9)
    ordinary = optim.SGD(groups(spread.local), lr=0.1, momentum=0.9)
    train(spread, optimizer, ordinary, 7, schedule=SCHEDULES[name])
    spread.assert_same()
    for ours, theirs in zip(optimizer.param_groups, ordinary.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k not in ("params", "param_names")} == {
            k: v for k, v in theirs.items() if k != "params"
        }


def test_every_scheduler_of_torch_is_tried():
    listed = {name for name in lrs.__all__ if isinstance(getattr(lrs, name), type)}
    assert listed - set(SCHEDULES) <= {"LRScheduler"}


def test_options_set_by_hand_go_along_with_the_next_step(three):
    spread = Spread([0, 1, 2, 1])
    options = {"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "fused": True}
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs, **options)
    ordinary = optim.Adam(spread.local, **{**options, "lr": options["lr"].clone()})
    for each in (optimizer, ordinary):
        assert torch.equal(each.param_groups[0]["lr"], torch.tensor(0.1))
    for step in range(4):
        for each in (optimizer, ordinary):
            each.param_groups[0]["lr"].mul_(0.5)  # in place
            each.param_groups[0]["betas"] = (0.5 + step / 10, 0.9)
        train(spread, optimizer, ordinary, 1)
    spread.assert_same()


def test_changes_in_place_reach_all_owners_alike(three):
    """The worker that calls owns parameters too; what it changes in place is not seen there earlier than elsewhere."""
    spread = Spread([0, 1])
    given = torch.tensor(0.1)
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=given)
    ordinary = optim.SGD(spread.local, lr=0.1)
    given.fill_(9.0)  # not the optimizer's any more
    train(spread, optimizer, ordinary, 1)
    for rate in (0.2, 0.3):
        optimizer.param_groups[0]["lr"].fill_(rate)
        ordinary.param_groups[0]["lr"] = rate
        train(spread, optimizer, ordinary, 2)
    spread.assert_same()


def test_an_owner_that_missed_a_change_gets_it_with_its_next_step(three):
    spread = Spread([1, 2])
    optimizer = DistributedOptimizer(Moody, spread.rrefs, lr=1.0)
    ordinary = Moody(spread.local, lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["fails"] = True
    with autograd.context() as context_id, pytest.raises(RuntimeError, match="not in the mood"):
        optimizer.step(context_id)
    optimizer.param_groups[0]["fails"] = False
    for each in (optimizer, ordinary):
        each.param_groups[0]["lr"] = 0.25
    train(spread, optimizer, ordinary, 1)
    spread.assert_same()


class Moody(optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)

    def step(self, closure=None):
        if self.param_groups[0].get("fails"):
            raise RuntimeError("not in the mood")
        super().step()


def test_groups_come_later_too_on_old_owners_and_new_ones(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs[:2], lr=0.1)
    ordinary = optim.Adam(spread.local[:2], lr=0.1)
    train(spread, optimizer, ordinary, 2)
    optimizer.add_param_group({"params": spread.rrefs[2:], "lr": 0.5, "weight_decay": 0.1})
    ordinary.add_param_group({"params": spread.local[2:], "lr": 0.5, "weight_decay": 0.1})
    assert [group["param_names"] for group in optimizer.param_groups] == [["0", "1"], ["2", "3"]]
    train(spread, optimizer, ordinary, 3, schedule=SCHEDULES["ExponentialLR"])
    spread.assert_same()


def test_a_group_that_one_owner_refuses_is_taken_by_none(three):
    spread = Spread([0, 1, 2, 1])
    optimizer = DistributedOptimizer(optim.Adam, spread.rrefs[:3], lr=0.1)
    ordinary = optim.Adam(spread.local[:3], lr=0.1)
    again = Spread([1]).rrefs
    with pytest.raises(ValueError, match="can't optimize a non-leaf") as caught:
        optimizer.add_param_group({"params": [*again, computed_on("worker2")]})
    assert "'worker2' did not take the group" in caught.value.__notes__[0]
    assert len(optimizer.param_groups) == 1
    train(spread, optimizer, ordinary, 2)
    optimizer.add_param_group({"params": [spread.rrefs[3]]})
    ordinary.add_param_group({"params": [spread.local[3]]})
    train(spread, optimizer, ordinary, 2)
    spread.assert_same()


def computed_on(worker):
    from farstep import rpc

    return rpc.remote(worker, computed)


def computed():
    return torch.ones(2, requires_grad=True) * 2


def test_groups_cannot_be_taken_away(three):
    spread = Spread([1, 2])
    optimizer = DistributedOptimizer(optim.SGD, [{"params": [r]} for r in spread.rrefs], lr=0.1)
    optimizer.param_groups.pop()
    with autograd.context() as context_id, pytest.raises(OptimError, match="make a new DistributedOptimizer"):
        optimizer.step(context_id)


def test_step_hooks_are_run(three):
    spread = Spread([1])
    optimizer = DistributedOptimizer(optim.SGD, spread.rrefs, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", kwargs)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", kwargs)))
    spread.step(optimizer, close=True)
    assert seen == [("before", {"close": True}), ("after", {"close": True})]
