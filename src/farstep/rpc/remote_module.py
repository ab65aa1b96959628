"""A module that lives on another worker and is called as if it were here."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from farstep.errors import NotInitialized
from farstep.rpc.current import current_agent, find_agent
from farstep.rpc.options import UNSET_RPC_TIMEOUT
from farstep.rpc.payload import Packer, Reduction, register_reducer
from farstep.rpc.rref import RRef, local_value_of

__all__ = ["RemoteModule"]

PICKLED_ATTRIBUTES: Final = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
"""What of a RemoteModule travels: where it is, and how to reach it."""


def forward_async(self: RemoteModule, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
    """Run the remote module's forward and return a future of its result."""
    call = (self.module_rref, self.device, self.is_device_map_set, args, kwargs)
    return self.module_rref._agent.call_async(
        self.module_rref.owner(), _run_forward, call, {}, UNSET_RPC_TIMEOUT
    )


def forward(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
    """Run the remote module's forward and return its result."""
    call = (self.module_rref, self.device, self.is_device_map_set, args, kwargs)
    return self.module_rref._agent.call_sync(
        self.module_rref.owner(), _run_forward, call, {}, UNSET_RPC_TIMEOUT
    )


class RemoteModule(nn.Module):
    """`module_cls(*args, **kwargs)`, made on another worker.

    `remote_device` says where: "worker1", "worker1/cuda:0", or "rank:1/cpu". Calling it runs `forward` there;
    `forward_async` returns a future. It may be sent to other workers, where it means the same module.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._place(remote_device)
        self.module_rref = current_agent().remote(
            self.on,
            _create_module,
            (module_cls, tuple(args or ()), kwargs or {}, self.device),
            {},
            UNSET_RPC_TIMEOUT,
        )
        self._install_methods()

    def _place(self, remote_device: str) -> None:
        if find_agent() is None:
            raise NotInitialized("RemoteModule only works in RPC: call init_rpc first")
        self.on, self.device = _parse_remote_device(remote_device)
        agent = current_agent()
        self.is_device_map_set = bool(agent.options.device_maps.get(agent.peer(self.on).name))
        self.is_scriptable = False
        self.generated_methods = (forward_async, forward)

    def _install_methods(self) -> None:
        for method in self.generated_methods:
            self.__dict__[method.__name__] = MethodType(method, self)

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
        """Another handle on a module that a reference points to. Calls go to the reference's owner."""
        module = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(module)
        module._place(remote_device)
        module.module_rref = module_rref
        module._install_methods()
        return module

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the remote module's parameters, in one call."""
        rref = self.module_rref
        found: list[RRef[nn.Parameter]] = rref._agent.call_sync(
            rref.owner(), _parameter_rrefs, (rref, recurse), {}, UNSET_RPC_TIMEOUT
        )
        return found

    def get_module_rref(self) -> RRef[nn.Module]:
        return self.module_rref

    def train(self, mode: bool = True) -> RemoteModule:
        """Set the remote module's training flag."""
        rref = self.module_rref
        rref._agent.call_sync(rref.owner(), _set_training, (rref, mode), {}, UNSET_RPC_TIMEOUT)
        return self

    def eval(self) -> RemoteModule:
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Any:
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )


_UNSUPPORTED: Final = [
    "register_buffer",
    "register_parameter",
    "add_module",
    "apply",
    "cuda",
    "ipu",
    "xpu",
    "cpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "register_backward_hook",
    "register_forward_pre_hook",
    "register_forward_hook",
    "state_dict",
    "load_state_dict",
    "named_parameters",
    "buffers",
    "named_buffers",
    "children",
    "named_children",
    "modules",
    "named_modules",
    "requires_grad_",
    "zero_grad",
    "share_memory",
    "extra_repr",
]


def _unsupported(name: str) -> Callable[..., Any]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule")

    method.__name__ = name
    return method


for _name in _UNSUPPORTED:
    setattr(RemoteModule, _name, _unsupported(_name))


def _parse_remote_device(text: str) -> tuple[str | int, str]:
    """'worker1/cuda:0' -> ('worker1', 'cuda:0'); the device is the CPU where it is not said."""
    where, _, device = text.partition("/")
    if not where:
        raise ValueError(
            f"remote_device must look like 'worker1', 'worker1/cuda:0' or 'rank:1/cpu', not {text!r}"
        )
    device = str(torch.device(device or "cpu"))
    kind, _, rank = where.partition(":")
    return (int(rank) if kind == "rank" and rank.isdigit() else where), device


def _create_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    current_agent().trust.check_callable(module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


def _run_forward(
    rref: RRef[nn.Module], device: str, is_device_map_set: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = local_value_of(rref)
    if torch.device(device).type == "cpu":
        return module(*args, **kwargs)
    moved = tuple(_moved(a, device) for a in args)
    result = module(*moved, **{k: _moved(v, device) for k, v in kwargs.items()})
    if is_device_map_set:
        return result
    return tuple(_moved(r, "cpu") for r in result) if isinstance(result, tuple) else _moved(result, "cpu")


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _parameter_rrefs(rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in local_value_of(rref).parameters(recurse)]


def _set_training(rref: RRef[nn.Module], mode: bool) -> None:
    local_value_of(rref).train(mode)


def _reduce_remote_module(packer: Packer, module: RemoteModule) -> Reduction:
    return _rebuild_remote_module, tuple(module.__dict__[name] for name in PICKLED_ATTRIBUTES)


def _rebuild_remote_module(*values: Any) -> RemoteModule:
    module = RemoteModule.__new__(RemoteModule)
    module.__dict__.update(zip(PICKLED_ATTRIBUTES, values, strict=True))
    module._install_methods()
    return module


register_reducer(RemoteModule, _reduce_remote_module)
