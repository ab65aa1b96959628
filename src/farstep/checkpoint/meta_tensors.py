"""Tensors on the meta device that a load gives memory; if the load fails they are as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farstep.errors import CheckpointMismatch, StateError
from farstep.state.adapters.meta import device_of, give_memory, refresh
from farstep.state.adapters.modules import named_tensors
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.values import kind_of

__all__ = ["MetaTensors", "is_meta", "meta_tensors_in"]


def is_meta(value: Any) -> bool:
    """True for a tensor or DTensor that a load can give memory."""
    return isinstance(value, Tensor) and kind_of(value) != "ShardedTensor" and value.is_meta


def meta_tensors_in(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """A model's parameters and buffers on the meta device, each with all its names in the bare model."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for raw, tensor in named_tensors(module, buffers=True, remove_duplicate=False):
        if is_meta(tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(clean_name(module, raw))
    return list(found.values())


class MetaTensors:
    """What has been given memory. A DTensor gets it on its mesh's device type, a plain tensor where the tensors around it are.

    `device` overrides both. Without it, and without others around, a plain tensor gets main memory.
    """

    def __init__(self, device: torch.device | None, is_elsewhere: bool = False) -> None:
        """`is_elsewhere`: this process loads for another, which could not have the memory taken back; so it is refused."""
        self._device, self._is_elsewhere = device, is_elsewhere
        self._take_back: list[Callable[[], None]] = []

    def give(self, tensor: Tensor, name: str, around: Iterable[Tensor]) -> None:
        """Raises CheckpointMismatch, which names the tensor and says what to do."""
        if self._is_elsewhere:
            raise CheckpointMismatch(
                f"{name!r} is on the meta device: give it memory on the worker that owns it (module.to_empty) before "
                f"it is loaded. Nothing has been changed"
            )
        device = self._device or device_of(tensor) or _common_device(around, name)
        try:
            self._take_back.append(give_memory(tensor, device))
        except StateError as exc:
            raise CheckpointMismatch(
                f"{name!r} is on the meta device and cannot be given memory in place: {exc}. Give it memory first "
                f'(module.to_empty(device="{device}")). Nothing has been changed'
            ) from exc

    def settle(self, module: nn.Module) -> None:
        """All parameters of a module that get memory have it."""
        if self._take_back:
            refresh(module)

    def keep(self) -> None:
        """From now on they stay as they are."""
        self._take_back.clear()

    def take_back(self) -> None:
        while self._take_back:
            self._take_back.pop()()


def _common_device(around: Iterable[Tensor], name: str) -> torch.device:
    devices = {device for each in around if (device := device_of(each)) is not None}
    if len(devices) > 1:
        raise CheckpointMismatch(
            f"{name!r} is on the meta device, and the tensors beside it are on {', '.join(sorted(map(str, devices)))}: "
            f"device= says where it is to be. Nothing has been changed"
        )
    return devices.pop() if devices else torch.device("cpu")
