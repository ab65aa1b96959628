"""Objects that have a state: models, in whatever they are wrapped, and optimizers, whose state goes by the names of a model's parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farstep.checkpoint.elsewhere import reference_in
from farstep.checkpoint.entries import entries_of
from farstep.checkpoint.tree import joined
from farstep.errors import CheckpointError
from farstep.state import named_shards, optim_state_dict
from farstep.state.adapters import ddp, plain
from farstep.state.adapters.modules import named_tensors, reshard
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.ranks import Group, size_of
from farstep.state.optim_roster import has_own_state_dict

__all__ = [
    "Optimizer",
    "Owner",
    "identities",
    "models_in",
    "module_state",
    "names_of_memory",
    "optimizer_state",
    "owner_of",
]


def models_in(state: Any, name: str = "", depth: int = 0) -> dict[str, nn.Module]:
    """All models in a state, by where they are."""
    if isinstance(state, nn.Module):
        return {} if reference_in(state) is not None else {name: state}
    inside: Any = ()
    if isinstance(state, Mapping):
        inside = entries_of(state)
    elif isinstance(state, list | tuple):
        inside = enumerate(state)
    found: dict[str, nn.Module] = {}
    if depth < 10:
        for key, each in inside:
            found |= models_in(each, joined(name, key), depth + 1)
    return found


def module_state(module: nn.Module, group: Group) -> dict[str, Any]:
    """A model's own state dict, by the names of the bare model, each tensor as it is spread. The values are the model's own memory."""
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
    first: dict[int, str] = {}
    for raw, tensor in named_tensors(module, buffers=False, remove_duplicate=False):
        name = clean_name(module, raw)
        tied = first.setdefault(id(tensor), name)
        if tied != name and name in found and tied in found:
            found[name] = found[tied]
        elif hasattr(tensor, "local_shards"):  # a plain attribute for torch, which its state_dict leaves out
            found.setdefault(name, tensor)
    # What lies within DDP is on its ranks, which may not be all.
    replicas = ddp.replicas(module, group)
    for raw, tensor in named_tensors(module, buffers=True, remove_duplicate=False):
        holders = replicas.get(id(tensor))
        if (
            holders is not None
            and len(holders) < size_of(group)
            and (name := clean_name(module, raw)) in found
        ):
            found[name] = plain.replicated(tensor, holders, group, name)
    return found


def identities(module: nn.Module, state: Mapping[str, Any]) -> dict[str, int]:
    """For each name of a model's state what is the same for names of one tensor, as tied weights have."""
    found = {key: id(value) for key, value in state.items()}
    for raw, tensor in named_tensors(module, buffers=False, remove_duplicate=False):
        if (name := clean_name(module, raw)) in found:
            found[name] = id(tensor)
    return found


def names_of_memory(module: nn.Module) -> set[str]:
    """What is loaded once its memory is filled. Other values of its state the module is given, by `load_state_dict`."""
    return {clean_name(module, raw) for raw, _ in named_tensors(module, buffers=True, remove_duplicate=False)}


def _has_flat_parameters(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(each, kind) for each in module.modules())


class Owner:
    """The model whose parameters an optimizer steps, and where it is in the state. `several`: where those are that `model` is made of."""

    def __init__(self, name: str, model: nn.Module, several: Sequence[str] = ()) -> None:
        self.name, self.model, self.several = name, model, several

    @classmethod
    def of_several(cls, models: Mapping[str, nn.Module]) -> Owner:
        together = nn.Module()
        for where, model in models.items():
            together.add_module(_child(where), model)
        return cls("", together, list(models))

    def in_state(self, parameter: str) -> str:
        """The name that a parameter of the model has in the state."""
        if self.several:
            head, _, rest = parameter.partition(".")
            return joined(_where(head), rest)
        return joined(self.name, parameter)

    def in_model(self, name: str) -> str:
        """The inverse; a name that is in no model stays."""
        if self.several:
            for where in sorted(self.several, key=len, reverse=True):
                if name.startswith(f"{where}."):
                    return joined(_child(where), name[len(where) + 1 :])
            return name
        return name.removeprefix(f"{self.name}.") if self.name else name


_taken = nn.Module()


def _child(where: str) -> str:
    """A name for a model among others, which no attribute of a module has, and no model that is elsewhere."""
    name = where.replace("~", "~0").replace(".", "~1")
    return f"~2{name}" if hasattr(_taken, name) else name


def _where(child: str) -> str:
    return child.removeprefix("~2").replace("~1", ".").replace("~0", "~")


def owner_of(optimizer: Optimizer, models: Mapping[str, nn.Module], name: str) -> Owner | None:
    """None if no model in the state has any of its parameters, or its class has a `state_dict` of its own; of several models that have some, all, as one."""
    if has_own_state_dict(optimizer):
        return None
    stepped = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    held = {where: _stepped_in(model) for where, model in models.items()}
    # A rank that has no shard of anything gives its optimizer something empty to step.
    wanted = {key for key, p in stepped.items() if p.numel() or any(key in ids for ids in held.values())}
    if not wanted and len(models) == 1:
        ((where, model),) = models.items()
        return Owner(where, model)
    having = {where: models[where] for where, ids in held.items() if wanted & ids}
    if not having:
        return None
    for where, model in having.items():  # one that has them all, though others may have some of the same
        if wanted <= held[where]:
            return Owner(where, model)
    if not wanted <= set().union(*held.values()):
        raise CheckpointError(
            f"{name!r} steps parameters that no model in the state has, and others that {', '.join(map(repr, having))} has: its state goes by their names, "
            f"so give all its models"
        )
    return Owner.of_several(having)


def _stepped_in(model: nn.Module) -> set[int]:
    """What an optimizer may step of a model: its parameters, and the shards of those that are ShardedTensors."""
    found = set()
    for _, tensor in named_tensors(model, buffers=False, remove_duplicate=False):
        found.add(id(tensor))
        if hasattr(tensor, "local_shards"):
            found |= {id(shard.tensor) for shard in tensor.local_shards()}
    return found


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
