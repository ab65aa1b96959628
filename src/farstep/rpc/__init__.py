"""Calls between workers: torch.distributed.rpc's names and meanings, and more."""

from farstep.errors import (
    AuthenticationError,
    DuplicateName,
    InitTimeout,
    InsecureTransport,
    NotInitialized,
    PayloadError,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    RRefError,
    ShutdownTimeout,
    UnknownWorker,
    Untrusted,
    WorkerLost,
)
from farstep.rpc import functions
from farstep.rpc.agent import Agent
from farstep.rpc.api import (
    all_gather,
    barrier,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_initialized,
    on_worker_lost,
    remote,
    rpc_async,
    rpc_sync,
    set_rpc_timeout,
    shutdown,
    wait_all_calls,
)
from farstep.rpc.futures import collect_all, wait_all
from farstep.rpc.group import join_group, leave_group, local_agents
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.options import RpcOptions
from farstep.rpc.remote_module import RemoteModule
from farstep.rpc.rref import RRef
from farstep.rpc.torch_options import (
    BackendType,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    is_available,
)

__all__ = [
    "Agent",
    "AuthenticationError",
    "BackendType",
    "DuplicateName",
    "InitTimeout",
    "InsecureTransport",
    "NotInitialized",
    "PayloadError",
    "ProtocolError",
    "RRef",
    "RRefError",
    "RemoteError",
    "RemoteModule",
    "RpcBackendOptions",
    "RpcError",
    "RpcOptions",
    "RpcTimeout",
    "ShutdownTimeout",
    "TensorPipeRpcBackendOptions",
    "UnknownWorker",
    "Untrusted",
    "WorkerInfo",
    "WorkerLost",
    "all_gather",
    "barrier",
    "collect_all",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "is_initialized",
    "join_group",
    "leave_group",
    "local_agents",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "set_rpc_timeout",
    "shutdown",
    "wait_all",
    "wait_all_calls",
]
