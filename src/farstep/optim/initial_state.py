"""init_state: the state that an optimizer's first step would make, for any optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.optim.distributed import DistributedOptimizer
from farstep.optim.keyed import KeyedOptimizer
from farstep.optim.sharded import ShardedOptimizer
from farstep.state.fresh import fresh_states

__all__ = ["init_state"]


def init_state(optimizer: Optimizer, sparse_grad_parameters: Collection[torch.Tensor] = ()) -> None:
    """Make the state that the first step would make, for parameters that have none, so that it can be loaded in place.

    Parameters, gradients, options and counters stay as they are, and training goes on as it would have without. Frozen parameters
    get no state, nor do those of which this rank has no elements. `sparse_grad_parameters` are those whose gradients are sparse. Some
    classes take the learning rate into their state: make schedulers before.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"init_state wants an optimizer, not {torch.typename(optimizer)}")
    if isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            "init_state is for optimizers of this process: a DistributedOptimizer has its state on other workers"
        )
    sparse = frozenset(id(each) for each in sparse_grad_parameters)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not sparse <= stepped:
        raise ValueError("sparse_grad_parameters has a tensor that the optimizer does not step")
    if isinstance(optimizer, KeyedOptimizer | ShardedOptimizer):
        named: dict[str, Any] = dict(optimizer.params)
        optimizer.init_state({name for name, p in named.items() if id(p) in sparse})
        return
    for parameter, state in fresh_states(optimizer, sparse, with_empty=False).items():
        optimizer.state[parameter] = state
