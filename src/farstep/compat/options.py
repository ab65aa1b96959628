"""torch.distributed.rpc.options. What it says of devices is torch's own: see `_install.KEPT`."""

from farstep.compat import constants as rpc_contants
from farstep.rpc.torch_options import TensorPipeRpcBackendOptions

__all__ = ["TensorPipeRpcBackendOptions", "rpc_contants"]

_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
_is_tensorpipe_available = True
