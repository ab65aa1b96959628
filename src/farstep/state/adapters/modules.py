"""A whole model, whatever it is wrapped in: its parameters by their own names."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farstep.errors import LayoutError
from farstep.state.adapters import ddp, plain
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.ranks import Group
from farstep.state.adapters.values import shards_of
from farstep.state.shards import Shards

__all__ = ["named_shards", "named_tensors", "reshard"]


def named_shards(
    module: nn.Module, group: Group = None, *, buffers: bool = False, remove_duplicate: bool = True
) -> dict[str, Shards]:
    """Every parameter, and every buffer if asked, by the name it has in the bare model.

    The model may hold FSDP1 and FSDP2 modules, tensor parallel and other DTensor parameters, ShardedTensors, DDP, torch.compile and activation
    checkpointing. Plain tensors count as replicated: over DDP's group within DDP, elsewhere over all of `group`. A tied parameter
    appears once, under its first name, unless `remove_duplicate` is False.
    """
    reshard(module)
    found: dict[str, Shards] = {}
    flat: set[int] = set()
    if "torch.distributed.fsdp" in sys.modules:
        from farstep.state.adapters.fsdp1 import flat_parameters

        for each in flat_parameters(module, group):
            flat |= {id(each.parameter), *map(id, each.originals.values())}
            views = each.views()
            found |= views
            if not remove_duplicate:
                found |= {alias: views[name] for alias, name in each.aliases.items()}
    replicas = ddp.replicas(module, group)
    for raw, tensor in named_tensors(module, buffers, remove_duplicate):
        name = clean_name(module, raw)
        if id(tensor) in flat or name in found:
            continue
        if is_lazy(tensor):
            raise LayoutError(
                f"{name!r} has no shape yet: run the model once, so that its lazy modules are made"
            )
        holders = replicas.get(id(tensor))
        if holders is None:
            found[name] = shards_of(tensor, group, name=name)
        else:
            found[name] = plain.replicated(tensor, holders, group, name)
    return _in_model_order(module, found)


def _in_model_order(module: nn.Module, found: dict[str, Shards]) -> dict[str, Shards]:
    """By module, as the bare model lists them; flat parameters come in an order of their own."""
    place: dict[str, int] = {}
    for path, _ in module.named_modules(remove_duplicate=False):
        place.setdefault(clean_name(module, path), len(place))
    return dict(sorted(found.items(), key=lambda item: place[item[0].rpartition(".")[0]]))


def named_tensors(module: nn.Module, buffers: bool, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    # ShardedTensor is no Parameter: torch's older sharding puts it where the parameter was, as a plain attribute.
    if "torch.distributed._shard.sharded_tensor" in sys.modules:
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor

        for path, each in module.named_modules():
            for name, value in vars(each).items():
                if isinstance(value, ShardedTensor):
                    yield f"{path}.{name}" if path else name, value
    if buffers:
        yield from module.named_buffers(remove_duplicate=remove_duplicate)


def reshard(module: nn.Module) -> None:
    """After a forward without backward, FSDP2 still shows the whole parameters of some modules in place of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None:
        for each in module.modules():
            if isinstance(each, kind):
                each.reshard()
