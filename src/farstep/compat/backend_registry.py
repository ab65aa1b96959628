"""torch.distributed.rpc.backend_registry: one backend of farstep's under torch's name, and users' own."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from farstep.compat import constants
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


class BackendValue(NamedTuple):
    construct_rpc_backend_options_handler: Any
    init_backend_handler: Any


def _make(members: dict[str, BackendValue]) -> Any:
    kind: Any = enum.Enum("BackendType", members)  # type: ignore[misc]
    kind.__repr__ = lambda self: "BackendType." + self.name  # type: ignore[method-assign, attr-defined]
    return kind


def _construct(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init(*, store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> Any:
    return native.start(store, name, rank, world_size or None, RpcOptions.from_torch(rpc_backend_options))


BackendType: Any = _make({"TENSORPIPE": BackendValue(_construct, _init)})


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
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)
