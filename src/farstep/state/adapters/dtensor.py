"""DTensor: FSDP2's parameters, tensor parallel ones, both at once, and replicated ones, on a device mesh of any dimensions.

Where every rank's part lies follows from the mesh, the placements and the shape, so nothing is communicated. A dimension that is cut
by one mesh dimension after another is followed as intervals, for all coordinates at once. A strided placement can leave a rank several
intervals, that is, several boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from farstep.errors import LayoutError
from farstep.state.adapters.plain import check_readable
from farstep.state.adapters.ranks import Group, numbers_within, own_rank, ranks_within
from farstep.state.box import Box
from farstep.state.layout import Spread
from farstep.state.shards import Part, Shards
from farstep.state.sweep import Ints

__all__ = ["everywhere", "like", "local_tensors", "part", "shards"]

# One cut of a tensor dimension: the mesh dimension that cuts it, and into how many parts it is cut beforehand (1 but for _StridedShard).
Cut = tuple[int, int]
Cuts = tuple[tuple[Cut, ...], ...]  # those of each tensor dimension, in order


class _Mesh(NamedTuple):
    """A device mesh: its shape, its ranks one by one, and a row of ranks for it and each of its siblings in the mesh it was sliced from."""

    shape: tuple[int, ...]
    ranks: Ints
    siblings: Ints
    spreads: dict[tuple[tuple[int, ...], torch.dtype, Cuts], Spread]
    """Of tensors on it, seen from the whole job: a model has many of a few shapes."""


_MOST_SPREADS = 4096

# Kept, because torch takes longer to tell than all the rest together.
_MESHES: WeakKeyDictionary[DeviceMesh, _Mesh] = WeakKeyDictionary()


def shards(value: DTensor, group: Group, name: str) -> Shards:
    """Its ranks are those of its mesh; where that is a slice of a larger one, its siblings have the same, as far as the group reaches.

    So FSDP2 has it with a parameter that is not tensor parallel in a model that is: there is one DTensor for each slice, all alike.
    """
    mesh = _mesh_of(value)
    ranks = ranks_within(group, mesh.ranks, name, "device mesh")
    siblings = numbers_within(group, mesh.siblings, name) if len(mesh.siblings) > 1 else ranks[None]
    key = tuple(value.shape), value.dtype, _cuts(value, name)
    is_known = ranks is mesh.ranks and (siblings is mesh.siblings or len(siblings) == 1)
    spread = mesh.spreads.get(key) if is_known else None
    if spread is None:
        spread = _spread(mesh.shape, siblings, *key)
        if is_known and len(mesh.spreads) < _MOST_SPREADS:
            mesh.spreads[key] = spread
    (local,) = local_tensors(value)
    check_readable(local, name)
    return Shards(spread, _views(local, spread.boxes(own_rank(group)), value, name))


def _spread(mesh_shape: tuple[int, ...], siblings: Ints, shape: tuple[int, ...], dtype: torch.dtype, cuts: Cuts) -> Spread:  # fmt: skip
    """`siblings` has -1 for ranks that do not count."""
    coordinates, offsets, sizes = _boxes(mesh_shape, cuts, shape)
    ranks = siblings[:, coordinates].reshape(-1)
    held = ranks >= 0
    offsets, sizes = (np.tile(each, (len(siblings), 1))[held] for each in (offsets, sizes))
    return Spread(shape, dtype, ranks[held], offsets, sizes)


def part(value: DTensor, name: str) -> Part:
    """The mesh knows at which of its coordinates it was made, and keeps that when it is pickled."""
    shape, mesh_shape = tuple(value.shape), _mesh_shape(value)
    at = value.device_mesh.get_coordinate()
    boxes: list[Box] = []
    if at is not None:
        coordinates, offsets, sizes = _boxes(mesh_shape, _cuts(value, name), shape)
        number = np.ravel_multi_index(tuple(at), mesh_shape) if mesh_shape else 0
        (rows,) = np.nonzero(coordinates == number)
        boxes = [Box(tuple(offsets[row].tolist()), tuple(sizes[row].tolist())) for row in rows]
    return Part(shape, value.dtype, boxes, _views(local_tensors(value)[0], boxes, value, name))


def local_tensors(value: DTensor) -> list[Tensor]:
    """The one local tensor. A rank outside the mesh has one without elements."""
    with torch.no_grad():
        return [value.to_local().detach()]


def like(value: DTensor, tensors: Sequence[Tensor], dtype: torch.dtype) -> DTensor:
    """With the mesh and the placements of `value`, and this local tensor."""
    (local,) = tensors
    made = DTensor.from_local(
        local.detach(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    if _cuts(made, "the new tensor") != _cuts(value, "the tensor"):
        raise LayoutError(
            f"{value.placements} are applied in an order of their own, which DTensor.from_local cannot express: redistribute the "
            f"tensor to plain Shard and Replicate placements first"
        )
    return made


def everywhere(value: DTensor, tensor: Tensor) -> DTensor:
    """A tensor of another shape, whole on each rank of the mesh of `value`."""
    mesh = value.device_mesh
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _mesh_of(value: DTensor) -> _Mesh:
    return _known(value.device_mesh)


def _known(mesh: DeviceMesh) -> _Mesh:
    known = _MESHES.get(mesh)
    if known is None:
        known = _MESHES[mesh] = _look_at(mesh)
    return known


def sibling_ranks(mesh: DeviceMesh) -> Ints:
    """A row of ranks for the mesh and for each of its siblings in the mesh that it was sliced from."""
    return _known(mesh).siblings


def _mesh_shape(value: DTensor) -> tuple[int, ...]:
    """All that can be asked of a mesh from another job."""
    known = _MESHES.get(value.device_mesh)
    return tuple(value.device_mesh.shape) if known is None else known.shape


def _look_at(mesh: DeviceMesh) -> _Mesh:
    ranks = mesh.mesh
    shape = tuple(ranks.shape)
    own: Ints = ranks.reshape(-1).numpy().astype(np.int64)
    whole: Ints = _root(mesh).mesh.numpy().astype(np.int64)
    # The mesh varies along some dimensions of its root. Its siblings are at the other coordinates of the rest.
    at = np.stack([np.argwhere(whole == rank)[0] for rank in own]) if np.isin(own, whole).all() else None
    if at is None:
        return _Mesh(shape, own, own[None], {})
    varies = [d for d in range(whole.ndim) if len(np.unique(at[:, d])) > 1]
    if math.prod(whole.shape[d] for d in varies) != len(own):
        return _Mesh(shape, own, own[None], {})
    rest = [range(1) if d in varies else range(whole.shape[d]) for d in range(whole.ndim)]
    siblings = []
    for coordinate in itertools.product(*rest):
        where = [at[:, d] if d in varies else np.full(len(own), coordinate[d]) for d in range(whole.ndim)]
        siblings.append(whole[tuple(where)])
    return _Mesh(shape, own, np.stack(siblings), {})


def _root(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):  # torch >= 2.9
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def _cuts(value: DTensor, name: str) -> Cuts:
    """Which mesh dimensions cut each dimension of the tensor, in which order."""
    mesh_shape = _mesh_shape(value)
    cuts: list[list[Cut]] = [[] for _ in value.shape]
    is_strided = False
    for mesh_dim, placement in enumerate(value.placements):
        if isinstance(placement, _StridedShard):
            is_strided = True
            cuts[placement.dim].append((mesh_dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts[placement.dim].append((mesh_dim, 1))
        elif placement.is_partial():
            raise LayoutError(
                f"{name!r} is {placement} over mesh dimension {mesh_dim}: its ranks hold terms of a sum that has not been made, not parts "
                f"of a tensor. Call .redistribute(placements=...) with Replicate() or Shard(dim) there first"
            )
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"{name!r} has the placement {placement!r}, which is none of Shard, Replicate and _StridedShard: redistribute it first"
            )
    spec = value._spec
    if is_strided:
        # A strided cut stands for an order other than that of the mesh, unless the DTensor came of a view (torch >= 2.8 says which).
        if getattr(spec, "use_strided_shard_as_shard_order", None) is not False:
            cuts = [_ordered(each, mesh_shape) for each in cuts]
    elif (order := getattr(spec, "shard_order", None)) is not None:
        for entry in order:
            cuts[entry.tensor_dim] = [(mesh_dim, 1) for mesh_dim in entry.mesh_dims]
    return tuple(tuple(each) for each in cuts)


def _ordered(cuts: list[Cut], mesh_shape: Sequence[int]) -> list[Cut]:
    """Cuts whose parts are those that mesh dimensions further right make, as plain cuts after those; others as they are.

    FSDP2 over tensor parallelism cuts what is cut already, but its mesh dimension stands first. Its placement says so by the number of parts.
    """
    order: list[Cut] = []
    for mesh_dim, parts in reversed(cuts):
        made = list(itertools.accumulate((mesh_shape[d] for d, _ in order), lambda a, b: a * b, initial=1))
        if parts not in made:
            return cuts
        order.insert(made.index(parts), (mesh_dim, 1))
    return order


@lru_cache(maxsize=4096)
def _boxes(mesh_shape: tuple[int, ...], cuts: Cuts, shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """The boxes of all ranks as columns: number in the mesh, offsets, sizes. A rank without elements has no box."""
    count = math.prod(mesh_shape)
    numbers = np.arange(count)
    intervals = [_intervals(mesh_shape, each, size) for each, size in zip(cuts, shape, strict=True)]
    if all(starts.shape[1] == 1 for starts, _ in intervals):
        columns = np.zeros((2, count, len(shape)), dtype=np.int64)
        for d, (starts, lengths) in enumerate(intervals):
            columns[0, :, d], columns[1, :, d] = starts[:, 0], lengths[:, 0]
        held = (columns[1] > 0).all(axis=1)
        return numbers[held], columns[0, held], columns[1, held]
    rows, boxes = [], []
    for number in range(count):
        per_dim = [_merged(s[number].tolist(), n[number].tolist()) for s, n in intervals]
        for box in itertools.product(*per_dim):
            rows.append(number)
            boxes.append(box)
    columns = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)
    return np.array(rows, dtype=np.int64), columns[:, :, 0], columns[:, :, 1]


@lru_cache(maxsize=4096)
def _intervals(mesh_shape: tuple[int, ...], cuts: tuple[Cut, ...], size: int) -> tuple[Ints, Ints]:
    """What the ranks have of one dimension: begin and length of their intervals, a row for each rank, in the order of its local tensor."""
    count = math.prod(mesh_shape)
    coordinates = np.unravel_index(np.arange(count), mesh_shape) if mesh_shape else ()
    starts = np.zeros((count, 1), dtype=np.int64)
    lengths = np.full((count, 1), size, dtype=np.int64)
    for mesh_dim, parts in cuts:
        total = lengths.sum(axis=1)
        part = -(-total // parts)
        pieces = []
        for i in range(parts):
            begin = np.minimum(i * part, total)
            length = np.minimum(begin + part, total) - begin
            chunk = -(-length // mesh_shape[mesh_dim])
            first = np.minimum(coordinates[mesh_dim] * chunk, length)
            last = np.minimum(first + chunk, length)
            pieces.append(_narrow(starts, lengths, begin + first, begin + last))
        starts = np.concatenate([s for s, _ in pieces], axis=1)
        lengths = np.concatenate([n for _, n in pieces], axis=1)
    return starts, lengths


def _narrow(starts: Ints, lengths: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """From `first` to `last` of intervals that are laid end to end."""
    before = np.cumsum(lengths, axis=1) - lengths
    low = np.clip(first[:, None] - before, 0, lengths)
    high = np.clip(last[:, None] - before, 0, lengths)
    return starts + low, high - low


def _merged(starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Without those that are empty; those that touch are one."""
    merged: list[tuple[int, int]] = []
    for start, length in zip(starts, lengths, strict=True):
        if length == 0:
            continue
        if merged and sum(merged[-1]) == start:
            start, length = merged[-1][0], merged.pop()[1] + length
        merged.append((start, length))
    return merged


def _views(local: Tensor, boxes: Sequence[Box], value: DTensor, name: str) -> list[Tensor]:
    """The boxes as views of the local tensor, in which each dimension's intervals lie end to end."""
    if not boxes:
        expected: tuple[int, ...] | None = None
        fits = local.numel() == 0
    else:
        places: list[
            dict[int, int]
        ] = []  # of each dimension: where an interval begins in the tensor -> in the local tensor
        extents = []
        for d in range(local.dim()):
            intervals = sorted({(box.offsets[d], box.sizes[d]) for box in boxes})
            ends = list(itertools.accumulate((n for _, n in intervals), initial=0))
            places.append({start: end for (start, _), end in zip(intervals, ends, strict=False)})
            extents.append(ends[-1])
        expected = tuple(extents)
        fits = tuple(local.shape) == expected
    if not fits:
        raise LayoutError(
            f"the local tensor of {name!r} has the shape {tuple(local.shape)}, and {value.placements} of {tuple(value.shape)} on a mesh of "
            f"{_mesh_shape(value)} give this rank {expected or 'no elements'}: make it with distribute_tensor, or give "
            f"DTensor.from_local the shape and stride of the whole"
        )
    if len(boxes) <= 1:
        return [local] * len(boxes)
    views = []
    for box in boxes:
        begin = [place[o] for place, o in zip(places, box.offsets, strict=True)]
        views.append(local[tuple(slice(b, b + n) for b, n in zip(begin, box.sizes, strict=True))])
    return views
