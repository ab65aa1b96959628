"""torch.distributed.rpc.internal: what its users and its tests reach for."""

from __future__ import annotations

import sys
import traceback
from enum import Enum
from typing import Any, NamedTuple

import torch

from farstep.compat.unsupported import PROFILER, unsupported
from farstep.errors import PayloadError
from farstep.rpc.current import current_agent as _get_current_rpc_agent
from farstep.rpc.payload import pack, unpack
from farstep.rpc.trust import Trust

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_start_record_function = unsupported("_start_record_function", PROFILER)


class RPCExecMode(Enum):
    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    msg: str
    exception_type: type[BaseException]


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

    def _register_reducer(self, obj_class: type, reducer: Any) -> None:
        raise NotImplementedError(
            f"farstep sends objects as Python's pickle does: give {obj_class.__name__} a __reduce__ method, "
            f"or call copyreg.pickle({obj_class.__name__}, reducer)"
        )


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


def _run_function(python_udf: PythonUDF) -> Any:
    """Run a call here. What it raises is returned as a `RemoteException`, for `_handle_exception`."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as exc:
        text = f"On {_get_current_rpc_agent().get_worker_info()}:\n{exc!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)
        return RemoteException(text, type(exc))


def _handle_exception(result: Any) -> None:
    """Raise what `_run_function` has caught; do nothing with any other result."""
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except Exception as exc:
        raise RuntimeError(
            f"a {result.exception_type.__name__} cannot be made from its message alone ({exc}). {result.msg}"
        ) from exc
    raise error
