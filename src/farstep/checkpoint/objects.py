"""Objects that have a state: models, in whatever they are wrapped, and optimizers, whose state goes by the names of a model's parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farstep.errors import CheckpointError
from farstep.state import named_shards, optim_state_dict
from farstep.state.adapters.modules import reshard
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.ranks import Group, size_of

__all__ = ["Optimizer", "Owner", "models_in", "module_state", "optimizer_state", "owner_of"]


def models_in(state: Any, name: str = "", depth: int = 0) -> dict[str, nn.Module]:
    """All models in a state, by where they are."""
    if isinstance(state, nn.Module):
        return {name: state}
    inside: Any = ()
    if isinstance(state, Mapping):
        inside = state.items()
    elif isinstance(state, list | tuple):
        inside = enumerate(state)
    found: dict[str, nn.Module] = {}
    if depth < 10:
        for key, each in inside:
            found |= models_in(each, f"{name}.{key}" if name else str(key), depth + 1)
    return found


def module_state(module: nn.Module, group: Group, alone: bool = False) -> dict[str, Any]:
    """A model's own state dict, by the names of the bare model, each tensor as it is spread. The values are the model's own memory.

    `alone`: there is nobody it could be spread over.
    """
    if _has_flat_parameters(module):  # whose own state_dict would gather them
        passing = {
            clean_name(module, f"{path}.{name}" if path else name)
            for path, each in module.named_modules()
            for name in each._non_persistent_buffers_set
        }
        shards = named_shards(module, group, buffers=True, remove_duplicate=False)
        return {name: each for name, each in shards.items() if name not in passing}
    reshard(module)
    state = module.state_dict()
    found = {clean_name(module, name): value for name, value in state.items()}
    if not alone:  # what lies within DDP is on its ranks, which may not be all
        shards = named_shards(module, group, buffers=True, remove_duplicate=False)
        found |= {name: shards[name] for name in found.keys() & shards.keys() if len(shards[name].spread.ranks) < size_of(group)}  # fmt: skip
    return found


def _has_flat_parameters(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(each, kind) for each in module.modules())


class Owner:
    """The model whose parameters an optimizer steps, and where it is in the state."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model


def owner_of(optimizer: Optimizer, models: Mapping[str, nn.Module], name: str) -> Owner | None:
    """None if no model in the state has any of its parameters; of several that have, all, as one."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    having = {
        where: model for where, model in models.items() if any(id(p) in stepped for p in model.parameters())
    }
    if not having:
        return None
    for where, model in having.items():  # one that has them all, though others may have some of the same
        if stepped <= {id(p) for p in model.parameters()}:
            return Owner(where, model)
    known = {id(p) for model in having.values() for p in model.parameters()}
    if not stepped <= known:
        raise CheckpointError(
            f"{name!r} steps parameters that no model in the state has, and others that {', '.join(map(repr, having))} has: its state goes by their names, "
            f"so give all its models"
        )
    return Owner("", nn.ModuleDict({where.replace(".", "_"): model for where, model in having.items()}))


def optimizer_state(
    optimizer: Optimizer, models: Mapping[str, nn.Module], group: Group, name: str
) -> dict[str, Any]:
    """By the names of parameters where their model is in the state too; else the optimizer's own state dict."""
    owner = owner_of(optimizer, models, name)
    if owner is None:
        state: dict[str, Any] = optimizer.state_dict()
    else:
        state = optim_state_dict(owner.model, optimizer, group=group)
    return {key: value for key, value in state.items() if key != "rank"}
