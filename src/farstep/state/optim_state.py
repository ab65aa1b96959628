"""Optimizer state by the names of parameters, read under any parallelism and loaded under any other.

A state is `{"state": {name: {key: value}}, "param_groups": [{option: value, "params": [names]}]}`. What is read is planned as copies from how
the optimizer has it to how it is wanted, and loading is the same the other way round.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from farstep.dist import operation
from farstep.state.adapters.ranks import Group
from farstep.state.exchange import BUDGET_BYTES, Progress
from farstep.state.optim_forms import flattened
from farstep.state.optim_loading import load
from farstep.state.optim_moving import Options
from farstep.state.optim_names import Rename
from farstep.state.optim_reading import read
from farstep.state.optim_roster import Optimizers
from farstep.state.optim_selection import Selection

__all__ = ["load_optim_state_dict", "optim_state_dict"]


@operation("optim_state_dict")
@torch.no_grad()
def optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    *,
    full: bool = False,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    flatten: bool = False,
    submodules: Collection[nn.Module] | None = None,
    ignore_frozen_params: bool = False,
    group: Group = None,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    profile: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a model's optimizer, or of several, by the parameters' own names. All ranks of `group` call it. It changes nothing.

    The model may be plain, or hold DDP, FSDP1, FSDP2, tensor parallel and other DTensor parameters or ShardedTensors, nested as they may be.
    By default each rank gets what it has, without copies: DTensors of DTensor parameters, `Shards` of others; one process gets plain tensors. With `full` they are whole plain
    tensors, in memory of their own, on every rank or, with `rank0_only`, on the first; the others get an empty dict and hold no more
    than `budget_bytes` of it at a time. `cpu_offload` has them in main memory.

    A state that is not shaped like its parameter is taken as it is if all ranks have the same, else it becomes a `RankOwned`, which loads only
    where the parameter is spread alike. An optimizer that has not stepped has no state.

    `flatten` gives one dict, `{"state.<name>.<key>": ..., "param_groups.<name>.<option>": ...}`, as torch's `flatten_optimizer_state_dict`
    does. With `submodules` only parameters inside these modules are read, and with `ignore_frozen_params` only those that are trained.

    `progress(bytes_done, bytes_total)` is called as tensors arrive. `profile`, a dict, is filled with `{"plan": {"time_s": ..., "bytes": ...}, "gather":
    ..., "copy": ..., "offload": ...}`. Raises StateError where ranks have different states, before anything moves.
    """
    if rank0_only and not full:
        raise ValueError(
            "rank0_only is for a whole state: say full=True too. Without it each rank has its own part"
        )
    options = Options(group, budget_bytes, progress, profile)
    state = read(
        model,
        optim,
        full=full,
        rank0_only=rank0_only,
        cpu_offload=cpu_offload,
        options=options,
        selection=Selection(submodules, ignore_frozen_params),
    )
    return flattened(state) if flatten and state else state


@operation("load_optim_state_dict")
@torch.no_grad()
def load_optim_state_dict(
    model: nn.Module,
    optim: Optimizers,
    state: Any,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
    rename: Rename = None,
    ignore_frozen_params: bool = False,
    group: Group = None,
    budget_bytes: int = BUDGET_BYTES,
    progress: Progress | None = None,
    profile: dict[str, Any] | None = None,
) -> None:
    """Load what `optim_state_dict` gave, under this or any other parallelism, number of ranks, wrapping or grouping. All ranks call it.

    Each rank gives what it has: a full state, its own part, a list of the parts that several ranks saved, or nothing (`[]`); together they have
    everything. Also torch's forms by name, flattened or not, and `optimizer.state_dict()` of a model that is not sharded: one by numbers goes by
    the order of this optimizer's parameters, where its groups have as many. With `broadcast_from_rank0` only the first rank gives one, and others hold no more of it than their own shards and `budget_bytes`.

    `strict`: the names are those of the optimizer's parameters, but for frozen ones; else those that are missing keep their state and
    unknown ones are left out, and so are pieces of state and options that the optimizer's class does not have. `rename`, a dict or a function, says which names
    parameters have here that were saved under others. `ignore_frozen_params` leaves frozen parameters as they are. A parameter that is named in the saved groups and has no state there has none afterwards.

    StateMismatch and StateError name the parameter, the state and the ranks; then nothing has been changed on any rank.
    """
    options = Options(group, budget_bytes, progress, profile)
    load(
        model,
        optim,
        state,
        strict=strict,
        broadcast_from_rank0=broadcast_from_rank0,
        options=options,
        rename=rename,
        selection=Selection(ignore_frozen_params=ignore_frozen_params),
    )
