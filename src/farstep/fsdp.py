"""Optimizer state of FSDP models, with the names and arguments that torch gives its own functions for it.

They work alike on FullyShardedDataParallel, on `fully_shard`, on DDP and on plain models, and warn of nothing. What makes a state by names of one that
is sharded is `farstep.state.optim_state_dict`; what loads it is `load_optim_state_dict`, in one go. The functions here that end in a dict for
`optim.load_state_dict` are for programs that are written that way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, StateDictType
from torch.optim import Optimizer

from farstep.dist import operation
from farstep.errors import StateMismatch
from farstep.state.adapters.groups import has_mesh, own_group
from farstep.state.adapters.ranks import Group
from farstep.state.council import agree, everyones
from farstep.state.exchange import BUDGET_BYTES, Progress
from farstep.state.optim_direct import holding, own_names
from farstep.state.optim_direct import load_directly as _load_directly
from farstep.state.optim_for_load import for_load
from farstep.state.optim_roster import Optimizers
from farstep.state.optim_state import load_optim_state_dict
from farstep.state.optim_state import optim_state_dict as read_optim_state_dict
from farstep.state.rekey import OptimInput, parameter_groups, to_names, to_numbers
from farstep.state.stateful import saved_state

__all__ = [
    "OptimStateKeyType",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "load_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]

State = dict[str, Any]


@operation("optim_state_dict")
def optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    optim_state_dict: State | None = None,
    group: Group = None,
    *,
    full: bool | None = None,
    rank0_only: bool | None = None,
    cpu_offload: bool | None = None,
    flatten: bool = False,
    submodules: Collection[nn.Module] | None = None,
    ignore_frozen_params: bool = False,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    profile: dict[str, Any] | None = None,
) -> State:
    """The state by parameter name, of the kind that FSDP.set_state_dict_type says, as torch's function of this name gives it. All ranks call it.

    Where nothing is said, and for models without FullyShardedDataParallel, it is torch's default: whole, on every rank, in main memory. FULL_STATE_DICT is
    whole; SHARDED_STATE_DICT and LOCAL_STATE_DICT are each rank's part; of the config, `rank0_only` and `offload_to_cpu` count. What is given here as `full`,
    `rank0_only` and `cpu_offload` counts more. The rest is as with `farstep.state.optim_state_dict`.

    `optim_state_dict` is a state dict of this optimizer's, to be turned into one by names in place of the state that it has now.
    """
    group = _group_of(model, group)
    said = _Said(model)
    full = said.full if full is None else full
    if rank0_only is None:
        rank0_only = full and said.rank0_only
    if optim_state_dict is not None:
        optim = _held_by_all(optim, optim_state_dict, group)
    return read_optim_state_dict(
        model,
        optim,
        full=full,
        rank0_only=rank0_only,
        cpu_offload=said.cpu_offload if cpu_offload is None else cpu_offload,
        flatten=flatten,
        submodules=submodules,
        ignore_frozen_params=ignore_frozen_params,
        group=group,
        budget_bytes=budget_bytes,
        progress=progress,
        profile=profile,
    )


@operation("full_optim_state_dict")
def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: Group = None,
) -> State:
    """The whole state by parameter name, in main memory: on rank 0, and an empty dict on the others, unless `rank0_only` is False.

    All ranks call it. `optim_input` is for programs that still give it; the optimizer knows its groups.
    """
    return read_optim_state_dict(
        model, optim, full=True, rank0_only=rank0_only, cpu_offload=True, group=_group_of(model, group)
    )


@operation("sharded_optim_state_dict")
def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Group = None) -> State:
    """This rank's part of the state by parameter name: a DTensor where the parameter is one, else `Shards`. All ranks call it."""
    return read_optim_state_dict(model, optim, cpu_offload=True, group=_group_of(model, group))


def shard_full_optim_state_dict(
    full_optim_state_dict: State,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    *,
    strict: bool = True,
) -> State:
    """This rank's part of a whole state that it has, as `optim.load_state_dict` takes it. Nothing is communicated.

    `strict=False`: parameters that the state lacks keep what `optim` has of them, and unknown ones are left out. A state without
    "param_groups" gives one without them.
    """
    groups = partial(_groups, model, optim_input, optim)
    with _own_advice():
        found = for_load(model, groups, optim, full_optim_state_dict, alone=True, strict=strict)
    return _as_given(*found)


@operation("scatter_full_optim_state_dict")
def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Group = None,
    *,
    strict: bool = True,
) -> State:
    """The same from a whole state that only rank 0 has; what the others give does not count. No other rank ever holds more than its part.

    All ranks call it.
    """
    groups = partial(_groups, model, optim_input, optim)
    group = _group_of(model, group)
    with _own_advice():
        found = for_load(
            model, groups, optim, full_optim_state_dict, from_rank0=True, strict=strict, group=group
        )
    return _as_given(*found)


@operation("flatten_sharded_optim_state_dict")
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: State, model: nn.Module, optim: Optimizer, *, strict: bool = True
) -> State:
    """The same from what `sharded_optim_state_dict` gave on each rank, of this model or one that was sharded otherwise. All ranks call it."""
    groups = partial(_groups, model, None, optim)
    with _own_advice():
        found = for_load(
            model, groups, optim, sharded_optim_state_dict, strict=strict, group=own_group(model)
        )
    return _as_given(*found)


@operation("optim_state_dict_to_load")
def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Group = None,
    *,
    strict: bool = True,
) -> State:
    """A state by parameter name, whole or sharded, as `optim.load_state_dict` takes it; and loaded into it if `load_directly`. All ranks call it.

    If `is_named_optimizer`, the keys are the names that the optimizer has for its parameters; else numbers. Only rank 0 needs to give a state, where
    FSDP.set_state_dict_type said `rank0_only` for the optimizer, or where all others give None or an empty dict. `strict` and states without
    "param_groups" are as with `shard_full_optim_state_dict`.

    `load_directly` loads on all ranks or on none: if a hook or the optimizer itself raises on one, the others have what they had.
    """
    groups = partial(_groups, model, None, optim)
    group = _group_of(model, group)
    given = optim_state_dict or None
    with _own_advice():
        found, has_groups = for_load(
            model,
            groups,
            optim,
            given,
            from_rank0=_Said(model).rank0_only or _is_on_rank0_alone(given, group),
            strict=strict,
            with_empty=is_named_optimizer,
            group=group,
        )
    if is_named_optimizer:
        found = _by_names_of(optim, found)
    if load_directly:
        _load_directly(optim, found, group)
    return _as_given(found, has_groups)


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> State:
    """A state dict by names (`PARAM_NAME`) or by numbers (`PARAM_ID`), from the other of the two. The same object if it is so already.

    `optim`, or `optim_input`, says which parameter has which number; without them all of `model.parameters()` have, in their order. With one of
    them, groups by number are those of the optimizer, whatever the order in which they were saved.
    Nothing is communicated, and the tensors are those that were given.
    """
    wanted = {OptimStateKeyType.PARAM_NAME: str, OptimStateKeyType.PARAM_ID: int}.get(optim_state_key_type)
    if wanted is None:
        raise ValueError(
            f"optim_state_key_type is OptimStateKeyType.PARAM_NAME or PARAM_ID, not {optim_state_key_type!r}"
        )
    if "state" not in optim_state_dict:
        raise StateMismatch(
            'an optimizer\'s state dict has "state" and "param_groups", and this has no "state"'
        )
    keys = [*optim_state_dict["state"]]
    keys += [key for group in optim_state_dict.get("param_groups", ()) for key in group["params"]]
    kinds = {type(key) for key in keys}
    if not kinds <= {str} and not kinds <= {int}:
        odd = [next(key for key in keys if type(key) is kind) for kind in kinds]
        raise StateMismatch(
            f"parameters have names or numbers in a state dict, and this has both: {', '.join(map(repr, odd))}"
        )
    if kinds <= {wanted}:
        return optim_state_dict
    groups = parameter_groups(model, optim_input, optim)
    if wanted is str:
        return to_names(optim_state_dict, model, groups)
    return to_numbers(optim_state_dict, model, groups, regroup=optim is not None or optim_input is not None)


def _as_given(state: State, has_groups: bool) -> State:
    """Without groups if the state had none, as torch's functions have it."""
    return state if has_groups else {"state": state["state"]}


def _group_of(model: nn.Module, group: Group) -> Group:
    """The given group; else the process group of FullyShardedDataParallel, if all of the model is sharded over one that lacks some ranks.

    A device mesh says which other ranks have the same: then it is all ranks.
    """
    if group is not None or not _has_fsdp1(model) or has_mesh(model):
        return group
    return own_group(model)


def _has_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in model.modules())


def _groups(model: nn.Module, optim_input: OptimInput, optim: Optimizer | None) -> list[dict[str, Any]]:
    """As the optimizer has them that is to load: their parameters, and the options that a state may leave out."""
    if optim is not None:
        return [{**group, "params": list(group["params"])} for group in optim.param_groups]
    given: list[Any] | None = None if optim_input is None else list(optim_input)
    groups = parameter_groups(model, given, None)
    if given is None or not isinstance(given[0], Mapping):
        return [{"params": each} for each in groups]
    return [{**options, "params": each} for options, each in zip(given, groups, strict=True)]


class _Said:
    """What FSDP.set_state_dict_type said, else torch's default. Models without FullyShardedDataParallel have nowhere to say so."""

    def __init__(self, model: nn.Module) -> None:
        self.full, self.rank0_only, self.cpu_offload = True, False, True
        if _has_fsdp1(model):
            said = FullyShardedDataParallel.get_state_dict_type(model)
            self.full = said.state_dict_type == StateDictType.FULL_STATE_DICT
            self.rank0_only = bool(getattr(said.optim_state_dict_config, "rank0_only", False))
            self.cpu_offload = bool(getattr(said.optim_state_dict_config, "offload_to_cpu", True))


def _held_by_all(optim: Any, state: State, group: Group) -> Optimizer:
    """An optimizer with this state, on all ranks or on none."""
    found: Optimizer | None = None
    error: Exception | None = None
    try:
        found = holding(optim, state)
    except Exception as exc:
        error = exc
    agree(error, group, "reading the optimizer's state")
    assert found is not None
    return found


def _is_on_rank0_alone(given: State | None, group: Group) -> bool:
    has = everyones(given is not None, None, group, "loading the optimizer's state")
    return has is not None and has[0] and not any(has[1:])


@contextmanager
def _own_advice() -> Iterator[None]:
    """Errors of loading name arguments that these functions do not have, for torch's do not: say whose they are."""
    try:
        yield
    except StateMismatch as exc:
        text = re.sub(r"\b(broadcast_from_rank0=True|rename=)", r"load_optim_state_dict(..., \1)", str(exc))
        if text == str(exc):
            raise
        raise StateMismatch(text) from exc


def _by_names_of(optim: Optimizer, state: State) -> State:
    """By the names that a named or keyed optimizer has, with groups if it saves any."""
    named = own_names(optim)
    if named is None:
        raise TypeError(
            f"is_named_optimizer is for optimizers that have names for their parameters, as NamedOptimizer and KeyedOptimizer have in `params`, and "
            f"{type(optim).__name__} has none"
        )
    names: dict[int, str] = {}
    for name, parameter in named.items():
        names.setdefault(id(parameter), name)
    order = [names[id(parameter)] for group in optim.param_groups for parameter in group["params"]]
    found: State = {"state": {order[n]: dict(saved_state(each)) for n, each in state["state"].items()}}
    if getattr(optim, "saves_param_groups", True):
        found["param_groups"] = [
            {**group, "params": [order[number] for number in group["params"]]}
            for group in state["param_groups"]
        ]
    return found
