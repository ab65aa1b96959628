"""The entries of a state's dicts, and the state dicts of its objects, in one order for all ranks.

[Note: one order for all ranks] An object's `state_dict` and `load_state_dict` may communicate, and ranks may have built
their dicts in different orders. So objects are called in the order of their names, on every rank and for every act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farstep.checkpoint.elsewhere import reference_in, spread_optimizer
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.tree import MOST_DEPTH, PerRank, joined, plain_key
from farstep.errors import CheckpointError
from farstep.state import RankOwned, Shards

__all__ = ["entries_of", "is_object", "nested_too_deep", "states_of_objects"]

_LEAVES = (Tensor, Shards, np.ndarray, str, bytes, int, float, complex, type(None), torch.Size)
_NO_OBJECTS = (*_LEAVES, Mapping, list, tuple, PerRank, RankOwned, type)


def entries_of(mapping: Mapping[Any, Any], ranks: Ranks | None = None) -> list[tuple[Any, Any]]:
    """List what is saved of a dict: containers and objects sorted by key, then tensors and plain values in the dict's order.

    A process that is alone has them all in the dict's order. The `rank` of an optimizer's sharded state (`optim_state_dict`)
    is left out: a checkpoint has the parts of all ranks.
    """
    items = list(mapping.items())
    if ranks is not None and _is_part(mapping, ranks.rank):
        items = [item for item in items if item[0] != "rank"]
    if ranks is not None and ranks.alone:
        return items
    inner = [item for item in items if not isinstance(item[1], _LEAVES)]
    inner.sort(key=lambda item: (str(plain_key(item[0])), type(item[0]).__name__))
    return inner + [item for item in items if isinstance(item[1], _LEAVES)]


def _is_part(mapping: Mapping[Any, Any], rank: int) -> bool:
    """True for what this rank has of an optimizer's state."""
    return (
        mapping.keys() == {"state", "param_groups", "rank"}
        and type(mapping["rank"]) is int
        and mapping["rank"] == rank
        and isinstance(mapping["state"], Mapping)
        and isinstance(mapping["param_groups"], list)
    )


def nested_too_deep(name: str) -> CheckpointError:
    return CheckpointError(f"{name[:200]!r} is nested too deep, or has itself inside")


def is_object(value: Any) -> bool:
    """True for a model, an optimizer, or anything else with a `state_dict`."""
    if isinstance(value, nn.Module | Optimizer):
        return True
    return not isinstance(value, _NO_OBJECTS) and callable(getattr(value, "state_dict", None))


def states_of_objects(
    state: Any, ranks: Ranks, state_of: Callable[[Any, str], Any]
) -> dict[tuple[str, int], Any]:
    """Call `state_of(object, name)` for every object in a state, in one order; return the results by name and id.

    What an object gives may have objects inside; they are asked too. See [Note: one order for all ranks].
    """
    found: dict[tuple[str, int], Any] = {}

    def visit(value: Any, name: str, depth: int) -> None:
        if isinstance(value, _LEAVES):
            return
        if depth > MOST_DEPTH:
            raise nested_too_deep(name)
        if reference_in(value) is not None or spread_optimizer(value) is not None:
            return  # one process alone has these
        if is_object(value):
            found[name, id(value)] = inner = state_of(value, name)
            visit(inner, name, depth + 1)
        elif isinstance(value, PerRank):
            visit(value.value, joined(name, f"rank{ranks.rank}"), depth + 1)
        elif isinstance(value, Mapping):
            for key, each in entries_of(value, ranks):
                visit(each, joined(name, key), depth + 1)
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                visit(each, joined(name, number), depth + 1)

    visit(state, "", 0)
    return found
