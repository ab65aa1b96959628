"""torch.distributed.rpc.options."""

from farstep.rpc.torch_options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions"]
