"""torch's option classes, for code that builds them: mutable, and turned into an `RpcOptions` at init_rpc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from farstep.rpc.options import DEFAULT_RPC_TIMEOUT_S

__all__ = ["BackendType", "RpcBackendOptions", "TensorPipeRpcBackendOptions", "is_available"]

Device = int | str | torch.device


class BackendType(Enum):
    """torch's name for its one backend; init_rpc accepts it."""

    TENSORPIPE = "TENSORPIPE"


def is_available() -> bool:
    return True


class RpcBackendOptions:
    """What every backend's options have."""

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_S, init_method: str = "env://") -> None:
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's constructor and methods. The name is torch's too; there is no TensorPipe behind it."""

    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_S,
        init_method: str = "env://",
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Any = None,
        _channels: Any = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = [torch.device(d) for d in devices or ()]
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Say where tensors of this worker's devices go on worker `to`. One to one."""
        merged = dict(self.device_maps.get(to, {}))
        for here, there in device_map.items():
            source, target = torch.device(here), torch.device(there)
            if merged.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and {merged[source]}"
                )
            merged[source] = target
        if len(set(merged.values())) != len(merged):
            raise ValueError(f"`device_map` only supports 1-to-1 mapping, two devices go to one: {merged}")
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[Device]) -> None:
        self.devices = [torch.device(d) for d in devices]
