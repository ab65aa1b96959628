"""torch.distributed.rpc.backend_registry: one backend of farstep's under torch's name, and users' own."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from farstep.compat import api
from farstep.compat import constants as rpc_constants
from farstep.compat.unsupported import unsupported
from farstep.compat.utils import _group_membership_management, _update_group_membership
from farstep.rpc import api as native
from farstep.rpc.options import RpcOptions
from farstep.rpc.torch_options import TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]
_RE_EXPORTED = (api, _group_membership_management, _update_group_membership)
_DEVICES = "tensors go by the device_maps of the options that init_rpc was given, which each worker keeps"
_get_device_infos = unsupported("_get_device_infos", _DEVICES)
_set_devices_and_reverse_device_map = unsupported("_set_devices_and_reverse_device_map", _DEVICES)
_backend_type_doc = "The backends there are: TENSORPIPE, which is farstep's, and those of `register_backend`."


class BackendValue(NamedTuple):
    construct_rpc_backend_options_handler: Any
    init_backend_handler: Any


def _backend_type_repr(self: enum.Enum) -> str:
    return "BackendType." + self.name


def _make(members: dict[str, BackendValue]) -> Any:
    kind: Any = enum.Enum("BackendType", members)  # type: ignore[misc]
    kind.__repr__ = _backend_type_repr  # type: ignore[method-assign, assignment]
    kind.__doc__ = _backend_type_doc
    return kind


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float, init_method: str, **kwargs: Any
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> Any:
    return native.start(store, name, rank, world_size or None, RpcOptions.from_torch(rpc_backend_options))


BackendType: Any = _make(
    {
        "TENSORPIPE": BackendValue(
            _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler
        )
    }
)


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str, construct_rpc_backend_options_handler: Any, init_backend_handler: Any
) -> Any:
    """Add a backend. `BackendType` is a new enum afterwards."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make({backend_name: value, **members})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)
