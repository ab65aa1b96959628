"""torch.distributed.nn.api.remote_module."""

from farstep.rpc.remote_module import PICKLED_ATTRIBUTES, RemoteModule

__all__ = ["RemoteModule"]

_RemoteModule = RemoteModule
_REMOTE_MODULE_PICKLED_ATTRIBUTES = PICKLED_ATTRIBUTES
