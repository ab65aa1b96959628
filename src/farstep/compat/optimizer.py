"""torch.distributed.optim.optimizer."""

from farstep.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
