"""Workers that trust only a few names let an optimizer of those names work."""

from __future__ import annotations

import pytest
import torch
from autograd.conftest import speaking_for
from torch import nn, optim

from farstep import autograd, rpc
from farstep.errors import Untrusted
from farstep.optim import DistributedOptimizer, parameter_rrefs


class Untold(optim.SGD):
    pass


def test_all_of_it_works_where_trust_is_narrow():
    options = rpc.RpcOptions(rpc_timeout=20, trusted=("torch.nn.modules", "torch.optim"))
    with rpc.local_agents(2, options) as agents, speaking_for(agents[0]):
        module = rpc.RemoteModule("worker1", nn.Linear, args=(2, 2))
        named = parameter_rrefs(module)
        optimizer = DistributedOptimizer(optim.Adam, named[:1], lr=0.1)
        optimizer.add_param_group({"params": named[1:], "lr": 0.2})
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
            optimizer.clip_grad_norm_(context_id, 0.1)
            optimizer.clip_grad_value_(context_id, 0.1)
            optimizer.step(context_id, close=True)
        for sharded in (False, True):
            optimizer.load_state_dict(optimizer.state_dict(sharded=sharded))
        with pytest.raises(Untrusted, match="Untold"):
            DistributedOptimizer(Untold, named, lr=0.1)
