"""torch.distributed.rpc.rref_proxy."""

from __future__ import annotations

from functools import partial
from typing import Any

from farstep.compat import functions, rpc
from farstep.compat.constants import UNSET_RPC_TIMEOUT
from farstep.rpc import rref as native
from farstep.rpc.rref import _call_async_method as _local_invoke_async_execution
from farstep.rpc.rref import _call_method as _local_invoke

__all__ = ["RRefProxy", "_invoke_rpc", "_local_invoke", "_local_invoke_async_execution", "functions"]

rpc_async = rpc.rpc_async


def _invoke_rpc(rref: Any, rpc_api: Any, func_name: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a reference's value by `rpc_sync`, `rpc_async` or `remote`."""
    return getattr(native.RRefProxy(rref, rpc_api.__name__, timeout), func_name)(*args, **kwargs)


class RRefProxy:
    """Turns attribute access into a call on a reference's value, made by one of the three functions."""

    def __init__(self, rref: Any, rpc_api: Any, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Any:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)
