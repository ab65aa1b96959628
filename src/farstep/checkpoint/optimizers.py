"""An optimizer's state out of a checkpoint that may have much else: found, put into the form that loads, and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farstep.checkpoint.filling_optimizers import OptimizerFilling
from farstep.checkpoint.loading import carry_out, check_alike
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.objects import Owner
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.renaming import Place, Rename
from farstep.checkpoint.report import Report
from farstep.checkpoint.sources import opened_by_all
from farstep.checkpoint.storage import Storage, storage_of
from farstep.checkpoint.tree import children, decode, is_container, joined
from farstep.checkpoint.writing import Progress
from farstep.dist import operation
from farstep.errors import CheckpointMismatch
from farstep.state.adapters.ranks import Group
from farstep.state.optim_roster import Roster, roster_of

__all__ = ["load_optimizer"]

_DEEPEST = 4


@operation("checkpoint.load_optimizer")
def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | os.PathLike[str] | Storage,
    *,
    key: str | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    convert_dtype: bool = False,
    verify: bool = True,
    group: Group = None,
    no_dist: bool = False,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Report:
    """Load an optimizer's state from a checkpoint, ours or DCP's, whatever parallelism either was or is under. All ranks of the group call it.

    `key` is the name of the state in the checkpoint, such as "optim" or "app.optim"; it need not be given if there is but one. The state goes by
    the names of the model's parameters. One by numbers, as `optimizer.state_dict()` has it, is taken by the order of the parameters, where groups have as
    many as they had. `rename` gives the names that parameters have in the checkpoint their names in the model. Each rank
    reads what it holds. `strict`, `convert_dtype`, `verify` and `progress` are those of `load`.

    CheckpointMismatch, and anything else that is found before reading, changes nothing.
    """
    ranks = Ranks(group, no_dist)
    storage, manifest = opened_by_all(storage_of(path, storage_options), ranks, verify)
    doing = f"loading the optimizer's state from {storage}"
    filling: OptimizerFilling | None = None
    error: Exception | None = None
    mark = f"{key} {strict} {convert_dtype} {verify} "
    try:
        found = _place(manifest, storage, key)
        by_order = _has_numbers(found)
        place = Place(_by_names(found, lambda: roster_of(model, optimizer, ranks.group)), found.name)
        filling = OptimizerFilling(optimizer, Owner("", model), place, place.name, storage, manifest, ranks, rename, verify=verify, by_order=by_order)  # fmt: skip
        filling.prepare(strict, convert_dtype)
        if rename is not None:
            mark += repr(filling.names)
    except Exception as exc:
        error = exc
    check_alike(ranks, error, doing, mark)
    assert filling is not None
    carry_out(filling, storage, manifest, ranks, doing, verify, progress)
    return Report(filling.missing, filling.unexpected, list(filling.reshaped), differences=filling.reshaped)


# -- where it is ------------------------------------------------------------------------------------------


def _place(manifest: Manifest, storage: Storage, key: str | None) -> Place:
    places = list(_optimizers(manifest.tree, "", 0))
    if key is None and len(places) == 1:
        return places[0]
    for place in places:
        if place.name == key:
            return place
    there = ", ".join(repr(each.name) for each in places) or "none"
    if key is None:
        raise CheckpointMismatch(
            f"{storage} has the state of {len(places)} optimizers ({there}): key= says which is wanted; nothing has been changed"
            if places
            else f"{storage} has no state of an optimizer; nothing has been changed"
        )
    raise CheckpointMismatch(
        f"{storage} has no state of an optimizer that is called {key!r}; it has {there}. Nothing has been changed"
    )


def _optimizers(node: Any, name: str, depth: int) -> Iterator[Place]:
    if not is_container(node):
        return
    if "dict" in node:
        keys = node["dict"].keys()
        if {"state", "param_groups"} <= keys or _is_flattened(keys):
            yield Place(node, name)
            return
    if depth < _DEEPEST:
        for key, each in children(node):
            yield from _optimizers(each, joined(name, key), depth + 1)


def _is_flattened(keys: Any) -> bool:
    """As DCP's StateDictOptions(flatten_optimizer_state_dict=True) makes it."""
    heads = {key.partition(".")[0] for key in keys if "." in key}
    return bool(keys) and heads <= {"state", "param_groups"} and all("." in key for key in keys)


# -- by names ---------------------------------------------------------------------------------------------


def _by_names(place: Place, roster: Callable[[], Roster]) -> Any:
    """The node, of the form that states by names have: `state` by parameters, `param_groups` with their names."""
    inside = place.node["dict"]
    if _is_flattened(inside.keys()):
        return _unflattened(place)
    if not _has_numbers(place):
        return place.node
    groups = _groups(place)
    names = _numbered(place, [each["params"] for each in groups], [each.names for each in roster().groups])
    state = {
        names[number]: _with_names(each, joined(place.name, f"state.{number}"))
        for number, each in children(inside["state"])
    }
    named = [
        {"dict": {**_named_dict(node, joined(place.name, f"param_groups.{i}")), "params": {"list": [names[n] for n in each["params"]]}}}
        for i, (node, each) in enumerate(zip(inside["param_groups"]["list"], groups, strict=True))
    ]  # fmt: skip
    return {
        "dict": {
            **_named_dict(place.node, place.name),
            "state": {"dict": state},
            "param_groups": {"list": named},
        }
    }


def _groups(place: Place) -> list[Any]:
    nodes = place.node["dict"]["param_groups"].get("list", ())
    return [decode(each, joined(place.name, f"param_groups.{i}")) for i, each in enumerate(nodes)]


def _has_numbers(place: Place) -> bool:
    """Whether the state is by the numbers of parameters, as `optimizer.state_dict()` has it."""
    if _is_flattened(place.node["dict"].keys()):
        return False
    return any(type(number) is int for each in _groups(place) for number in each.get("params", ()))


def _numbered(place: Place, saved: Sequence[Sequence[int]], here: Sequence[Sequence[str]]) -> dict[int, str]:
    if [len(each) for each in saved] != [len(each) for each in here]:
        raise CheckpointMismatch(
            f"{place.name!r} has parameters by numbers, in groups of {[len(each) for each in saved]}, and the optimizer has groups of "
            f"{[len(each) for each in here]}: by their order they cannot be told. Nothing has been changed"
        )
    return {number: name for numbers, names in zip(saved, here, strict=True) for number, name in zip(numbers, names, strict=True)}  # fmt: skip


def _unflattened(place: Place) -> Any:
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, node in place.node["dict"].items():
        head, _, rest = key.partition(".")
        parameter, _, what = rest.rpartition(".")
        if not parameter:
            raise CheckpointMismatch(
                f"{joined(place.name, key)!r} names no parameter; nothing has been changed"
            )
        into = state if head == "state" else options
        into.setdefault(parameter, {})[what] = _with_names(node, joined(place.name, key))
    groups: dict[str, dict[str, Any]] = {}
    for parameter, each in options.items():
        each.pop("params", None)
        alike = groups.setdefault(repr(each), {**each, "params": {"list": []}})
        alike["params"]["list"].append(parameter)
    return {
        "dict": {
            "state": {"dict": {name: {"dict": each} for name, each in state.items()}},
            "param_groups": {"list": [{"dict": each} for each in groups.values()]},
        }
    }


def _named_dict(node: Any, name: str) -> dict[str, Any]:
    return {key: _with_names(each, joined(name, key)) for key, each in node["dict"].items()}


def _with_names(node: Any, name: str) -> Any:
    """A node that is put elsewhere: its tensors go by the names that they have where they were."""
    if isinstance(node, dict) and "tensor" in node:
        return {"tensor": name if node["tensor"] is None else node["tensor"]}
    if isinstance(node, dict) and "dict" in node:
        return {"dict": _named_dict(node, name)}
    if isinstance(node, dict) and ("list" in node or "tuple" in node):
        ((kind, inside),) = node.items()
        return {kind: [_with_names(each, joined(name, i)) for i, each in enumerate(inside)]}
    return node
