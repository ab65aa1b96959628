"""torch.distributed.nn.api.remote_module."""

from __future__ import annotations

import collections
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device

from farstep.compat import rpc
from farstep.compat.internal import _internal_rpc_pickler
from farstep.compat.unsupported import TORCHSCRIPT, unsupported
from farstep.rpc.remote_module import (
    PICKLED_ATTRIBUTES,
    RemoteModule,
    _create_module,
    _rebuild_remote_module,
)
from farstep.rpc.remote_module import _parameter_rrefs as _param_rrefs

__all__ = ["RemoteModule"]

_RE_EXPORTED: Final = (_create_module, _internal_rpc_pickler, _param_rrefs, _remote_device)
T = TypeVar("T", bound=nn.Module)
_grad_t = tuple[torch.Tensor, ...] | torch.Tensor
_RemoteModule = RemoteModule
_REMOTE_MODULE_PICKLED_ATTRIBUTES = PICKLED_ATTRIBUTES
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = (*vars(nn.Module()), "forward_async", "forward")
_SerializedRemoteModule = collections.namedtuple("_SerializedRemoteModule", PICKLED_ATTRIBUTES)  # type: ignore[misc]

_instantiate_template = unsupported("_instantiate_template", TORCHSCRIPT)
_recursive_script_module_receiver = unsupported("_recursive_script_module_receiver", TORCHSCRIPT)
_recursive_script_module_reducer = unsupported("_recursive_script_module_reducer", TORCHSCRIPT)


def _create_module_with_interface(
    module_cls: Any, args: Any, kwargs: Any, device: Any, module_interface_cls: Any = None
) -> Any:
    if module_interface_cls is not None:
        raise NotImplementedError(f"farstep has no module interfaces: {TORCHSCRIPT}")
    return rpc.RRef(_create_module(module_cls, args, kwargs, device))


def _remote_module_reducer(remote_module: RemoteModule) -> tuple[Any, tuple[Any, ...]]:
    """How a call takes a RemoteModule apart: a function, and what it is called with on the other side."""
    return _remote_module_receiver, tuple(vars(remote_module)[name] for name in PICKLED_ATTRIBUTES)


def _remote_module_receiver(*remote_module_pickled_attrs: Any) -> RemoteModule:
    return _rebuild_remote_module(*remote_module_pickled_attrs)


def _raise_not_supported(name: str) -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule")
