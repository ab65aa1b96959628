"""Modules in DistributedDataParallel: noticing those that run inside a context.

Their reducer works by hooks on the nodes that accumulate into `.grad`, so in a context these nodes must really run: see leaves.py. A module
is noticed when it is called, or when the module that it wraps is, for some call its `forward` directly.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from farstep.rpc.current import find_agent

__all__ = ["expect", "is_reduced", "watch"]

_lock = threading.Lock()
_is_watching = False
_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""A module -> the DistributedDataParallel around it, weakly."""
_reduced: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""By id: the parameters that were ever noticed in a context."""


def is_reduced(leaf: torch.Tensor) -> bool:
    """Whether some context knows it as a parameter of DistributedDataParallel."""
    return _reduced.get(id(leaf)) is leaf


def expect() -> None:
    """Note every module that is wrapped from now on. Called once."""
    register_module_module_registration_hook(_note)


def watch() -> None:
    """Watch every module's forward from now on, once there is a process group that a reducer could use."""
    global _is_watching
    if _is_watching or not torch.distributed.is_initialized():
        return
    with _lock:
        if not _is_watching:
            register_module_forward_pre_hook(_notice)
            _is_watching = True


def _note(module: torch.nn.Module, name: str, inner: torch.nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and inner is not None:
        _wrapped[inner] = weakref.ref(module)


def _notice(module: torch.nn.Module, args: Any) -> None:
    if isinstance(module, DistributedDataParallel) or (module in _wrapped and _wrapped[module]() is not None):
        from farstep.autograd.link import current_id, link_of

        agent = find_agent()
        if current_id.get() is not None and agent is not None:
            context = link_of(agent).current()
            if context is not None:
                with context.lock:
                    for parameter in module.parameters():
                        if parameter.requires_grad:
                            _reduced[id(parameter)] = parameter
                            context.reduced.setdefault(parameter, len(context.reduced))
