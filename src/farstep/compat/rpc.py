"""torch.distributed.rpc."""

from __future__ import annotations

import logging
import numbers
from typing import Any

from farstep import autograd
from farstep.compat import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    server_process_global_profiler,
    utils,
)
from farstep.compat.api import (
    AllGatherStates,
    PyRRef,
    RemoteProfilerManager,
    RRef,
    WorkerInfo,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    get_rpc_timeout,
    get_worker_info,
    method_factory,
    new_method,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farstep.compat.api import _cleanup_python_rpc_handler as _cleanup_python_rpc_handler
from farstep.compat.api import (
    _delete_all_user_and_unforked_owner_rrefs as _delete_all_user_and_unforked_owner_rrefs,
)
from farstep.compat.api import _destroy_rref_context as _destroy_rref_context
from farstep.compat.api import _invoke_remote_builtin as _invoke_remote_builtin
from farstep.compat.api import _invoke_remote_python_udf as _invoke_remote_python_udf
from farstep.compat.api import _invoke_remote_torchscript as _invoke_remote_torchscript
from farstep.compat.api import _invoke_rpc_builtin as _invoke_rpc_builtin
from farstep.compat.api import _invoke_rpc_python_udf as _invoke_rpc_python_udf
from farstep.compat.api import _invoke_rpc_torchscript as _invoke_rpc_torchscript
from farstep.compat.api import _reset_current_rpc_agent as _reset_current_rpc_agent
from farstep.compat.api import _set_and_start_rpc_agent as _set_and_start_rpc_agent
from farstep.compat.api import _thread_local_var as _thread_local_var
from farstep.compat.api import _wait_all as _wait_all
from farstep.compat.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farstep.compat.constants import _DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farstep.compat.constants import _DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farstep.compat.options import _is_tensorpipe_available as _is_tensorpipe_available
from farstep.compat.options import _TensorPipeRpcBackendOptionsBase as _TensorPipeRpcBackendOptionsBase
from farstep.compat.server_process_global_profiler import (
    _disable_server_process_global_profiler as _disable_server_process_global_profiler,
)
from farstep.compat.server_process_global_profiler import (
    _enable_server_process_global_profiler as _enable_server_process_global_profiler,
)
from farstep.compat.server_process_global_profiler import (
    _server_process_global_profile as _server_process_global_profile,
)
from farstep.compat.unsupported import TORCHSCRIPT, unsupported
from farstep.errors import RpcError
from farstep.rpc.agent import Agent as RpcAgent
from farstep.rpc.api import next_store
from farstep.rpc.api import set_rpc_timeout as _set_rpc_timeout
from farstep.rpc.options import DEFAULT_RPC_TIMEOUT_S, UNSET_RPC_TIMEOUT, RpcOptions
from farstep.rpc.rendezvous import create_store
from farstep.rpc.stores import Store
from farstep.rpc.torch_options import RpcBackendOptions, TensorPipeRpcBackendOptions

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RemoteProfilerManager",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "method_factory",
    "new_method",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
_RE_EXPORTED = (_set_rpc_timeout, constants, functions, internal, options, server_process_global_profiler)
__path__: list[str] = []
"""Python looks for modules in it, as in torch's package, and `_install` finds them."""
logger = logging.getLogger("farstep.rpc")
_utils = utils
dist_autograd = autograd
TensorPipeAgent = RpcAgent
_UNSET_RPC_TIMEOUT = UNSET_RPC_TIMEOUT
_DEFAULT_RPC_TIMEOUT_SEC = DEFAULT_RPC_TIMEOUT_S

_enable_jit_rref_pickle = unsupported("_enable_jit_rref_pickle", TORCHSCRIPT)
_disable_jit_rref_pickle = unsupported("_disable_jit_rref_pickle", TORCHSCRIPT)
enable_gil_profiling = unsupported(
    "enable_gil_profiling", "see what a worker does with rpc.api._get_current_rpc_agent().get_debug_info()"
)


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


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    for value, kind in (
        (backend, backend_registry.BackendType),
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, numbers.Integral | None),
        (rpc_backend_options, RpcBackendOptions | RpcOptions),
    ):
        if not isinstance(value, kind):
            raise RpcError(f"Argument {value} must be of type {kind} but got type {type(value)}")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: Any = -1,
    world_size: Any = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend or backend_registry.BackendType["TENSORPIPE"]
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
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
