"""Swap modules: whoever imports torch's RPC afterwards, or has imported it already, gets farstep's."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed.rpc

from farstep import autograd
from farstep.compat import rpc
from farstep.rpc import futures

__all__ = ["install"]

_REPLACED: Final = {
    "torch.distributed.autograd": "farstep.autograd",
    "torch.distributed.rpc": "farstep.compat.rpc",
    "torch.distributed.rpc._utils": "farstep.compat.utils",
    "torch.distributed.rpc.api": "farstep.compat.api",
    "torch.distributed.rpc.backend_registry": "farstep.compat.backend_registry",
    "torch.distributed.rpc.constants": "farstep.compat.constants",
    "torch.distributed.rpc.functions": "farstep.compat.functions",
    "torch.distributed.rpc.internal": "farstep.compat.internal",
    "torch.distributed.rpc.options": "farstep.compat.options",
    "torch.distributed.rpc.rref_proxy": "farstep.compat.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": "farstep.compat.server_process_global_profiler",
    "torch.distributed.nn.api.remote_module": "farstep.compat.remote_module",
    "torch.distributed.optim.optimizer": "farstep.compat.optimizer",
}
"""torch's modules, and ours. Those that torch has not imported when we install wait until somebody does."""

KEPT: Final = {
    "torch.distributed.rpc": ("_set_profiler_node_id",),
    "torch.distributed.rpc.backend_registry": (
        "_create_device_list",
        "_create_reverse_mapping",
        "_init_process_group",
        "_tensorpipe_exchange_and_check_all_device_maps",
        "_tensorpipe_validate_devices",
        "_validate_device_maps",
    ),
    "torch.distributed.rpc.options": ("DeviceType", "_to_device", "_to_device_list", "_to_device_map"),
}
"""torch's own functions that have nothing to do with its agent: they work beside farstep's as they are."""


def install() -> None:
    """Replace torch's RPC in this process. Calling it again changes nothing."""
    if sys.modules["torch.distributed.rpc"] is rpc:
        return
    theirs = {name: sys.modules[name] for name in _REPLACED if name in sys.modules}
    ours = {name: importlib.import_module(_REPLACED[name]) for name in theirs}
    swap: dict[int, Any] = {}
    for name, module in theirs.items():
        swap[id(module)] = ours[name]
        _keep(name, module, ours[name])
        for attribute, value in vars(module).items():
            if attribute in vars(ours[name]) and _is_their_own(value) and not attribute.startswith("__"):
                swap[id(value)] = vars(ours[name])[attribute]
    for name, module in ours.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(ours.get(parent) or sys.modules[parent], child, module)
    sys.meta_path.insert(0, _Later())
    # Torch's own can only learn of a failed Python call when every other call has ended; its RPC could at once.
    swap[id(torch.futures.collect_all)] = futures.collect_all
    swap[id(torch.futures.wait_all)] = futures.wait_all
    _rebind(swap, ours)


def _keep(name: str, theirs: types.ModuleType, ours: types.ModuleType) -> None:
    """Let our module have what of theirs is not about RPC: functions in `KEPT`, and what they imported themselves."""
    for attribute in KEPT.get(name, ()):
        if hasattr(theirs, attribute):
            setattr(ours, attribute, getattr(theirs, attribute))
    if ours is autograd:
        return  # not a module of compat's: it stays as it is
    for attribute, value in vars(theirs).items():
        is_imported = isinstance(value, types.ModuleType | types.FunctionType | type) or hasattr(
            value, "__origin__"
        )
        if is_imported and not _is_their_own(value) and not hasattr(ours, attribute):
            setattr(ours, attribute, value)


class _Later:
    """Finds ours in the place of a module of torch's that nobody had imported when we were installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name not in _REPLACED:
            return None
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_REPLACED[module.__name__])


def _is_their_own(value: Any) -> bool:
    """Only what torch's RPC defines is replaced, not what it happens to import."""
    if isinstance(value, types.ModuleType):
        return value.__name__ in _REPLACED
    home = getattr(value, "__module__", None) or ""
    return isinstance(home, str) and (
        home.startswith("torch.distributed.rpc")
        or home in _REPLACED
        or "_distributed_rpc" in home
        or "_distributed_autograd" in home
    )


def _rebind(swap: dict[int, Any], ours: dict[str, types.ModuleType]) -> None:
    """Names that modules have already imported: `from torch.distributed.rpc import RRef` and the like."""
    our_ids = {id(module) for module in ours.values()}
    for module in list(sys.modules.values()):
        if module is None or id(module) in our_ids or not isinstance(module, types.ModuleType):
            continue
        if module.__name__.startswith("torch.distributed.rpc"):
            continue
        for attribute, value in list(vars(module).items()):
            replacement = swap.get(id(value))
            if replacement is not None:
                setattr(module, attribute, replacement)
