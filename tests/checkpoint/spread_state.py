"""A state that three ranks save, cut in several ways, and the same in full."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from farstep import checkpoint

__all__ = ["full_state", "save_spread"]

LAYERS = 4


def full_state() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(5)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    model = {"embed.weight": some(700, 600)}  # of more than one block
    for i in range(LAYERS):
        model[f"layers.{i}.weight"] = some(40, 30)
        model[f"layers.{i}.bias"] = some(40)
    model["head.weight"] = some(30, 41, dtype=torch.bfloat16)
    optimizer = {
        "state": {name: {"step": torch.tensor(3.0), "exp_avg": some(*t.shape)} for name, t in model.items()},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}],
    }
    return {"model": model, "optimizer": optimizer, "epoch": 7, "note": "a run"}


def save_spread(path: str) -> None:
    """On every rank: some tensors by rows, some by columns, some whole on all, and one for each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    number = 0

    def spread(value: Any) -> Any:
        nonlocal number
        if isinstance(value, dict):
            return {key: spread(each) for key, each in value.items()}
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        number += 1
        ways = [Shard(0), Shard(value.dim() - 1), Replicate()]
        return distribute_tensor(value, mesh, [ways[number % 3]])

    own = torch.full((5,), float(dist.get_rank()))
    checkpoint.save({**spread(full_state()), "random": checkpoint.PerRank(own)}, path)
