"""Whether all ranks of a group were given the same, found out once, before anything is done together."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farstep.errors import OptimError

__all__ = ["agree", "check_same", "gathered", "values_of"]


def gathered(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's, by rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, value, group)
    except RuntimeError as exc:
        raise OptimError(
            f"rank {dist.get_rank(group)} has waited for the other ranks in vain: {exc}. Making an optimizer, adding a group, state_dict, load_state_dict, "
            f"clip_grad_norm_ and step are called by all ranks of the group at once, and one has died or has not called it"
        ) from exc
    return found


def check_same(group: dist.ProcessGroup | None, what: str, facts: Mapping[str, str], help: str) -> None:
    """Raise OptimError on every rank unless all have the same facts in the same order. They are sent only if their digests differ."""
    digest = hashlib.blake2b(pickle.dumps(list(facts.items())), digest_size=16).digest()
    if len(set(gathered(group, digest))) == 1:
        return
    ranks = gathered(group, dict(facts))
    names = dict.fromkeys(name for each in ranks for name in each)
    for name in names:
        said: dict[str, list[int]] = {}
        for rank, each in enumerate(ranks):
            said.setdefault(each.get(name, "absent"), []).append(rank)
        if len(said) > 1:
            words = "; ".join(f"{fact} on {_ranks(which)}" for fact, which in said.items())
            raise OptimError(f"{what}: {name!r} is {words}. {help}")
    raise OptimError(
        f"{what}: the parameters come in another order on {_ranks(_unlike([list(r) for r in ranks]))}. {help}"
    )


def _unlike(orders: Sequence[list[str]]) -> list[int]:
    return [rank for rank, order in enumerate(orders) if order != orders[0]]


def _ranks(numbers: Sequence[int]) -> str:
    return ("ranks " if len(numbers) > 1 else "rank ") + ", ".join(map(str, numbers))


def agree(group: dist.ProcessGroup | None, error: BaseException | None) -> None:
    """All go on, or all raise: each its own error, or that of the first rank that has one."""
    texts = gathered(group, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise OptimError(f"rank {rank} could not go on, so neither does this one: {text}")


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
