"""Swap modules: whoever imports torch's RPC afterwards, or has imported it already, gets farstep's."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.nn.api.remote_module
import torch.distributed.rpc

from farstep import autograd
from farstep.compat import (
    api,
    backend_registry,
    constants,
    functions,
    internal,
    optimizer,
    options,
    remote_module,
    rpc,
)
from farstep.rpc import futures

__all__ = ["install"]

_REPLACED: dict[str, types.ModuleType] = {
    "torch.distributed.autograd": autograd,
    "torch.distributed.rpc": rpc,
    "torch.distributed.rpc.api": api,
    "torch.distributed.rpc.backend_registry": backend_registry,
    "torch.distributed.rpc.constants": constants,
    "torch.distributed.rpc.functions": functions,
    "torch.distributed.rpc.internal": internal,
    "torch.distributed.rpc.options": options,
    "torch.distributed.nn.api.remote_module": remote_module,
    "torch.distributed.optim.optimizer": optimizer,
}


def install() -> None:
    """Replace torch's RPC in this process. Calling it again changes nothing."""
    if sys.modules["torch.distributed.rpc"] is rpc:
        return
    swap: dict[int, Any] = {}
    for name, ours in _REPLACED.items():
        theirs = sys.modules.get(name)
        if theirs is not None:
            swap[id(theirs)] = ours
            for attribute, value in vars(theirs).items():
                if attribute in vars(ours) and _is_their_own(value) and not attribute.startswith("__"):
                    swap[id(value)] = vars(ours)[attribute]
    keep = [sys.modules.get(name) for name in _REPLACED]  # their ids must stay taken while we look for them
    for name, ours in _REPLACED.items():
        sys.modules[name] = ours
        parent, _, child = name.rpartition(".")
        home = _REPLACED.get(parent) or sys.modules.get(parent)
        # torch.distributed.optim takes long to import; whoever does so later finds ours in sys.modules.
        if home is not None:
            setattr(home, child, ours)
    # Torch's own can only learn of a failed Python call when every other call has ended; its RPC could at once.
    swap[id(torch.futures.collect_all)] = futures.collect_all
    swap[id(torch.futures.wait_all)] = futures.wait_all
    _rebind(swap)
    del keep


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


def _rebind(swap: dict[int, Any]) -> None:
    """Names that modules have already imported: `from torch.distributed.rpc import RRef` and the like."""
    ours = {id(module) for module in _REPLACED.values()}
    for module in list(sys.modules.values()):
        if module is None or id(module) in ours or not isinstance(module, types.ModuleType):
            continue
        if module.__name__.startswith("torch.distributed.rpc"):
            continue
        for attribute, value in list(vars(module).items()):
            replacement = swap.get(id(value))
            if replacement is not None:
                setattr(module, attribute, replacement)
