"""torch.distributed.rpc."""

from __future__ import annotations

import numbers
from typing import Any

from farstep import autograd
from farstep.compat import api, backend_registry, constants, functions, internal, options
from farstep.compat.api import (
    PyRRef,
    RRef,
    WorkerInfo,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farstep.compat.api import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from farstep.compat.api import _thread_local_var as _thread_local_var
from farstep.compat.api import _wait_all as _wait_all
from farstep.compat.backend_registry import BackendType, register_backend
from farstep.errors import RpcError
from farstep.rpc.agent import Agent as RpcAgent
from farstep.rpc.api import next_store
from farstep.rpc.api import set_rpc_timeout as _set_rpc_timeout
from farstep.rpc.options import DEFAULT_RPC_TIMEOUT_S, UNSET_RPC_TIMEOUT, RpcOptions
from farstep.rpc.rendezvous import create_store
from farstep.rpc.stores import Store
from farstep.rpc.torch_options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
_RE_EXPORTED = (_set_rpc_timeout, constants, functions, internal, options)
TensorPipeAgent = RpcAgent
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_S


def is_available() -> bool:
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """torch.distributed.rpc.init_rpc."""
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(
        rpc_backend_options, RpcBackendOptions | RpcOptions
    ):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    timeout_s = rpc_backend_options.rpc_timeout or DEFAULT_RPC_TIMEOUT_S
    store = create_store(
        rpc_backend_options.init_method, rank, world_size, max(timeout_s, DEFAULT_RPC_TIMEOUT_S)
    )
    _init_rpc_backend(backend, next_store(store, world_size), name, rank, world_size, rpc_backend_options)


def _infer_backend(given: Any) -> Any:
    if given is None or isinstance(given, TensorPipeRpcBackendOptions | RpcOptions):
        return backend_registry.BackendType["TENSORPIPE"]
    for candidate in backend_registry.BackendType:
        if isinstance(given, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    for value, kind in (
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, numbers.Integral | None),
        (rpc_backend_options, RpcBackendOptions | RpcOptions),
    ):
        if not isinstance(value, kind):
            raise RpcError(f"Argument {value} must be of type {kind} but got type {type(value)}")
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend or backend_registry.BackendType["TENSORPIPE"],
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _rref_context_get_debug_info() -> dict[str, str]:
    return {key: str(value) for key, value in _get_current_rpc_agent().rrefs.counts().items()}


def _get_debug_info() -> dict[str, str]:
    agent = {key: str(value) for key, value in _get_current_rpc_agent().get_debug_info().items()}
    return {**_rref_context_get_debug_info(), **agent, **autograd._get_debug_info()}
