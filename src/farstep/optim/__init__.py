"""Optimizers that step where the parameters live.

optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(stage), lr=1e-3)
with autograd.context() as context_id:
    loss = ...
    autograd.backward(context_id, [loss])
    optimizer.step(context_id)
"""

import farstep.autograd  # noqa: F401  the package before its modules: see `rpc.trust._imported`
from farstep.optim.distributed import DistributedOptimizer
from farstep.optim.parameters import parameter_rrefs

__all__ = ["DistributedOptimizer", "parameter_rrefs"]
