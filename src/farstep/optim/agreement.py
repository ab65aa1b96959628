"""Whether all ranks of a group were given the same, found out once, before anything is done together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import OptimError
from farstep.state.council import everyones
from farstep.state.optim_entries import ranks_named

__all__ = ["check_same", "values_of"]


def check_same(group: dist.ProcessGroup | None, what: str, facts: Mapping[str, str], help: str) -> None:
    """Raise OptimError on every rank unless all have the same facts in the same order. They are sent only if they differ."""
    ranks = everyones(dict(facts), None, group, "comparing what the ranks were given", kind=OptimError)
    if ranks is None or all(list(each.items()) == list(facts.items()) for each in ranks):
        return
    names = dict.fromkeys(name for each in ranks for name in each)
    for name in names:
        said: dict[str, list[int]] = {}
        for rank, each in enumerate(ranks):
            said.setdefault(each.get(name, "absent"), []).append(rank)
        if len(said) > 1:
            words = "; ".join(f"{fact} on {ranks_named(which)}" for fact, which in said.items())
            raise OptimError(f"{what}: {name!r} is {words}. {help}")
    raise OptimError(
        f"{what}: the parameters come in another order on {ranks_named(_unlike([list(r) for r in ranks]))}. {help}"
    )


def _unlike(orders: Sequence[list[str]]) -> list[int]:
    return [rank for rank, order in enumerate(orders) if order != orders[0]]


CHUNK = 1 << 20
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def values_of(tensor: Tensor) -> str:
    """A number that is the same for the same bits, and hardly ever for others."""
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().view(-1).view(INTEGERS[value.element_size()])
    total = 0
    for number in range(-(-bits.numel() // CHUNK)):
        chunk = bits[number * CHUNK : (number + 1) * CHUNK]
        # An odd factor for every place, so that the same values in another order are others.
        places = torch.arange(chunk.numel(), dtype=torch.int64, device=chunk.device).mul_(2).add_(1)
        total = (total * 1_000_003 + number + int(places.mul_(chunk).sum().item())) & 0xFFFFFFFFFFFFFFFF
    return f"values with the checksum {total:016x}"
