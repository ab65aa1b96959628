"""Optimizers that step where the parameters live.

optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(stage), lr=1e-3)
with autograd.context() as context_id:
    loss = ...
    autograd.backward(context_id, [loss])
    optimizer.step(context_id)
"""

from typing import TYPE_CHECKING

import farstep.autograd  # noqa: F401  the package before its modules: see `rpc.trust._imported`
from farstep._lazy import import_when_used
from farstep.optim.distributed import DistributedOptimizer
from farstep.optim.parameters import parameter_rrefs

if TYPE_CHECKING:
    from farstep.optim.clip_together import clip_grad_norm_
    from farstep.optim.combined import CombinedOptimizer
    from farstep.optim.initial_state import init_state
    from farstep.optim.keyed import KeyedOptimizer
    from farstep.optim.named import NamedOptimizer
    from farstep.optim.named_groups import named_params_with_sharded_tensor
    from farstep.optim.sharded import ShardedOptimizer
    from farstep.optim.state_dicts import rekey
    from farstep.optim.wrapper import KeyedOptimizerWrapper
else:
    import_when_used(
        __name__,
        {
            "clip_together": "clip_grad_norm_",
            "combined": "CombinedOptimizer",
            "initial_state": "init_state",
            "keyed": "KeyedOptimizer",
            "named": "NamedOptimizer",
            "named_groups": "named_params_with_sharded_tensor",
            "sharded": "ShardedOptimizer",
            "state_dicts": "rekey",
            "wrapper": "KeyedOptimizerWrapper",
        },
    )

__all__ = [
    "CombinedOptimizer",
    "DistributedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "NamedOptimizer",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "init_state",
    "named_params_with_sharded_tensor",
    "parameter_rrefs",
    "rekey",
]
