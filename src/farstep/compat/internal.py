"""torch.distributed.rpc.internal: what its users and its tests reach for."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch

from farstep.errors import PayloadError
from farstep.rpc.payload import pack, unpack
from farstep.rpc.trust import Trust

__all__ = ["PythonUDF", "RPCExecMode", "deserialize", "serialize"]


class RPCExecMode(Enum):
    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    func: Any
    args: Any
    kwargs: Any


class _InternalRPCPickler:
    """Objects <-> (bytes, tensors), as a message carries them. References need a message, and do not go this way."""

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        packed = pack((obj,), None, _ALWAYS_PICKLED)
        if packed.refs:
            raise PayloadError("an RRef travels only inside a call, which knows where it goes")
        return packed.body, packed.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        _, args, _ = unpack(binary_data, (), tensor_table, (), Trust(None))
        return args[0]


_ALWAYS_PICKLED = True
"""Stands where a call has its function, so that even plain values become bytes."""

_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
