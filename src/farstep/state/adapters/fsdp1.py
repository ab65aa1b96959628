"""FullyShardedDataParallel (FSDP1): flat parameters, and the original ones that lie in them.

Each FSDP module lays its parameters end to end in one flat parameter, and each rank keeps one shard of that. Where a parameter's
elements are on every rank follows from the flat parameter's metadata, so nothing is communicated. The same holds for whatever is shaped
like the shard: gradients, and the state of an optimizer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from farstep.errors import LayoutError
from farstep.state.adapters.dtensor import sibling_ranks
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.ranks import Group, numbers_within, own_rank, ranks_within
from farstep.state.flat import FlatLayout
from farstep.state.optim_seats import Seat
from farstep.state.shards import Shards
from farstep.state.sweep import Ints

__all__ = ["FlatParameter", "flat_parameters"]


class FlatParameter:
    """One flat parameter of a model, as this rank has it.

    `layout` says which elements of which original parameter are in which shard, `shard` which of the shards is here, `holders[i]` which
    ranks of the group have shard i, and `aliases` under which other names tied parameters go.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        layout: FlatLayout,
        shard: int,
        holders: Sequence[Sequence[int]],
        aliases: dict[str, str],
        originals: dict[str, nn.Parameter],
    ) -> None:
        self.parameter = parameter
        self.layout = layout
        self.shard = shard
        self.holders = holders
        self.aliases = aliases
        self.originals = originals
        """Name -> the original parameter, where the model was wrapped with use_orig_params=True; else empty."""

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard, filled up to the common length. It stays the same tensor while FSDP gathers and frees the whole."""
        # FSDP keeps the shard aside from its first forward on, because the parameter's data is the whole during computation.
        kept = getattr(self.parameter, "_local_shard", None)
        return self.parameter.data if kept is None else kept.detach()

    def views(self, tensor: Tensor | None = None) -> dict[str, Shards]:
        """Every original parameter by its name, as views of the local shard, or of a tensor shaped like it (`exp_avg` and such)."""
        tensor = self.local_shard if tensor is None else tensor.detach()
        return {
            name: Shards(
                self.layout.spread(name, tensor.dtype, self.holders),
                self.layout.views(name, tensor, self.shard),
            )
            for name in self.layout.names
        }

    def view(self, name: str, piece: Tensor) -> Shards:
        """The same for one parameter, from a tensor that has its local elements alone: its state where use_orig_params=True.

        With NO_SHARD such a tensor has the parameter's own shape.
        """
        return Shards(self.layout.spread(name, piece.dtype, self.holders), self._piece_views(name, [piece]))

    def seats(self) -> list[Seat]:
        """Every original parameter, as an optimizer has it that steps the flat parameter."""
        return [
            Seat(
                name,
                [self.parameter],
                self.layout.spread(name, self.parameter.dtype, self.holders),
                [self.local_shard.shape],
                functools.partial(self._views, name),
                requires_grad=self.parameter.requires_grad,
                is_flat=True,
            )
            for name in self.layout.names
        ]

    def seat(self, name: str) -> Seat:
        """One original parameter, as an optimizer has it that steps the original ones."""
        original = self.originals[name]
        first, last = self.layout.range(name, self.shard)
        # With NO_SHARD it keeps its shape; else the optimizer sees the elements that are here, end to end.
        shape = tuple(original.shape) if self.layout.shard_count == 1 else (last - first,)
        return Seat(
            name,
            [original],
            self.layout.spread(name, original.dtype, self.holders),
            [shape],
            functools.partial(self._piece_views, name),
            requires_grad=original.requires_grad,
            is_line=self.layout.shard_count > 1,
            gets_gradients=self.layout.shard_count == 1 or last > first,
            fresh=lambda _, dtype, device: (
                torch.empty(shape, dtype=dtype, device=device)
                if self.layout.shard_count > 1
                else torch.empty_like(original, dtype=dtype, device=device, requires_grad=False)
            ),
        )

    def _views(self, name: str, values: Sequence[Tensor]) -> list[Tensor]:
        return [view for value in values for view in self.layout.views(name, value.detach(), self.shard)]

    def _piece_views(self, name: str, values: Sequence[Tensor]) -> list[Tensor]:
        return [
            view
            for value in values
            for view in self.layout.piece_views(name, self._end_to_end(name, value.detach()), self.shard)
        ]

    def _end_to_end(self, name: str, piece: Tensor) -> Tensor:
        if piece.dim() == 1 or tuple(piece.shape) != self.layout.shape(name):
            return piece
        piece = piece.permute(self.layout.order(name))
        if not piece.is_contiguous():
            raise LayoutError(
                f"the tensor given for {name!r} does not lie in memory as its parameter does: give one made by torch.empty_like"
            )
        return piece.view(-1)

    def __repr__(self) -> str:
        return (
            f"FlatParameter({', '.join(self.layout.names)}; shard {self.shard} of {self.layout.shard_count})"
        )


def flat_parameters(module: nn.Module, group: Group = None) -> list[FlatParameter]:
    """Those of all FSDP modules within, outermost first. Names are as seen from `module`, without those of wrappers."""
    found = []
    for path, each in module.named_modules():
        if not isinstance(each, FullyShardedDataParallel):
            continue
        handle: Any = each._handle
        if handle is not None:  # a module without parameters of its own has none
            found.append(_flat_parameter(module, path, each, handle, group))
    return found


def _flat_parameter(
    root: nn.Module, path: str, fsdp: FullyShardedDataParallel, handle: Any, group: Group
) -> FlatParameter:
    flat = handle.flat_param
    inside = ".".join(filter(None, [path, "_fsdp_wrapped_module"]))

    def name_of(module_name: str, parameter_name: str) -> str:
        return clean_name(root, ".".join(filter(None, [inside, module_name, parameter_name])))

    names = [name_of(each.module_name, each.param_name) for each in flat._param_infos]
    for name, extension in zip(names, flat._param_extensions, strict=True):
        if extension is not None:
            raise LayoutError(
                f"{name!r} is a DTensor inside FullyShardedDataParallel, whose flat parameter has its local part only: use fully_shard "
                f"(FSDP2) together with tensor parallelism"
            )
    aliases = {
        name_of(each.module_name, each.param_name): name_of(each.prim_module_name, each.prim_param_name)
        for each in flat._shared_param_infos
    }
    count = handle.world_size if handle.uses_sharded_strategy else 1
    ranks = _ranks(fsdp, names[0], group)
    if not handle.uses_sharded_strategy:
        ranks = ranks.reshape(-1, 1)
    holders = [[rank for rank in column if rank >= 0] for column in ranks.T.tolist()]
    own_rank(group)  # raises on a rank that is not in the group
    ends = list(itertools.accumulate(flat._numels_with_padding, initial=0))
    total = ends.pop()
    originals = dict(zip(names, flat._params, strict=True)) if flat._params is not None else {}
    layout = FlatLayout(
        tuple(names),
        tuple(tuple(shape) for shape in flat._shapes),
        tuple(start for start, is_gap in zip(ends, flat._is_padding_mask, strict=True) if not is_gap),
        -(-total // count),
        count,
        {
            name: _memory_order(name, shape, stride)
            for name, shape, stride, contiguous in zip(
                names, flat._shapes, flat._strides, flat._contiguities, strict=True
            )
            if not contiguous
        },
        aliases,
        frozenset(name for name, each in originals.items() if not each.requires_grad)
        if originals
        else frozenset(() if flat.requires_grad else names),
    )
    return FlatParameter(
        flat, layout, handle.rank if handle.uses_sharded_strategy else 0, holders, aliases, originals
    )


def _ranks(fsdp: FullyShardedDataParallel, name: str, group: Group) -> Ints:
    """Rows of ranks of the group, as `_grid` has those of the job; -1 for those that are not in the group.

    Where the device mesh is a slice of a larger one, its siblings have the same, as far as the group reaches.
    """
    grid = np.array(_grid(fsdp, name), dtype=np.int64)
    own = ranks_within(group, grid, name, "FSDP process group")
    mesh = getattr(fsdp, "_device_mesh", None)
    siblings = None if mesh is None else sibling_ranks(mesh)
    if siblings is None or len(siblings) == 1:
        return own
    return numbers_within(group, siblings, name).reshape(-1, grid.shape[1])


def _grid(fsdp: FullyShardedDataParallel, name: str) -> list[list[int]]:
    """Rows of ranks of the job: column i has the ranks that hold shard i. There is one row, unless the strategy is hybrid."""
    sharding: Any = fsdp.process_group
    shard_ranks = dist.get_process_group_ranks(sharding)
    replicating = getattr(fsdp, "_inter_node_pg", None)
    if replicating is None:
        return [shard_ranks]
    mesh = getattr(fsdp, "_device_mesh", None)
    if mesh is not None:
        grid: list[list[int]] = mesh.mesh.tolist()
        return grid
    # Of the other rows only the ranks in this column are known here. Groups made for hybrid sharding differ by a constant step.
    here = dist.get_rank()
    rows = [
        [first + each - here for each in shard_ranks] for first in dist.get_process_group_ranks(replicating)
    ]
    ranks = sorted(itertools.chain(*rows))
    if len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= dist.get_world_size():
        raise LayoutError(
            f"which ranks hold {name!r} cannot be told from the two process groups of hybrid sharding, {shard_ranks} and "
            f"{dist.get_process_group_ranks(replicating)}: give FullyShardedDataParallel a device_mesh instead"
        )
    return rows


def _memory_order(name: str, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest, of a tensor that lies densely but not row by row (channels_last)."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
    for i, d in enumerate(order):
        if shape[d] > 1 and stride[d] != math.prod(shape[e] for e in order[i + 1 :]):
            raise LayoutError(
                f"{name!r} has the strides {tuple(stride)}, with which its elements do not lie densely: make it contiguous before "
                f"wrapping the model"
            )
    return order
