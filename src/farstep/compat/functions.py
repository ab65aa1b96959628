"""torch.distributed.rpc.functions."""

from farstep.rpc.functions import async_execution

__all__ = ["async_execution"]
