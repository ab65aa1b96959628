"""torch.distributed.optim.optimizer."""

from __future__ import annotations

import logging
import threading
from typing import Any

from farstep import autograd as dist_autograd
from farstep.compat import rpc
from farstep.compat.unsupported import TORCHSCRIPT, unsupported, unsupported_class
from farstep.optim import DistributedOptimizer
from farstep.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]

logger = logging.getLogger("farstep.optim")

_ScriptLocalOptimizer = unsupported_class("_ScriptLocalOptimizer", TORCHSCRIPT)
_ScriptLocalOptimizerInterface = unsupported_class("_ScriptLocalOptimizerInterface", TORCHSCRIPT)
_new_script_local_optimizer = unsupported("_new_script_local_optimizer", TORCHSCRIPT)
_script_local_optimizer_step = unsupported("_script_local_optimizer_step", TORCHSCRIPT)


class _LocalOptimizer:
    """An optimizer over parameters that live here, which steps with the gradients of a context.

    DistributedOptimizer does not use it; it is here for code that makes one by itself.
    """

    global_lock = threading.Lock()

    def __init__(self, optim_cls: Any, local_params_rref: Any, *args: Any, **kwargs: Any) -> None:
        self._local_params = [rref.local_value() for rref in local_params_rref]
        self.optim = optim_cls(self._local_params, *args, **kwargs)

    def step(self, autograd_ctx_id: int) -> None:
        gradients = dist_autograd.get_gradients(autograd_ctx_id)
        with _LocalOptimizer.global_lock:
            for parameter in self._local_params:
                parameter.grad = gradients.get(parameter)
            self.optim.step()


def _new_local_optimizer(optim_cls: Any, local_params_rref: Any, *args: Any, **kwargs: Any) -> RRef[Any]:
    return rpc.RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: RRef[Any], autograd_ctx_id: int) -> None:
    local_optim_rref.local_value().step(autograd_ctx_id)


def _wait_for_all(rpc_futs: Any) -> list[Any]:
    """Wait until all have ended, then raise the first error or return the results."""
    results: list[Any] = []
    errors: list[BaseException] = []
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except BaseException as exc:
            errors.append(exc)
    if errors:
        raise errors[0]
    return results


def __getattr__(name: str) -> Any:
    """torch's table of functional optimizers: importing it takes long, and is left until it is wanted."""
    if name == "functional_optim_map":
        from torch.distributed.optim.utils import functional_optim_map

        return functional_optim_map
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
