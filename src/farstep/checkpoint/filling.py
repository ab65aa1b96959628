"""A state, filled from a checkpoint: where each of its values comes from, and what is put where when all has been read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from farstep.checkpoint.elsewhere import reference_in, spread_optimizer
from farstep.checkpoint.filling_optimizers import OptimizerFilling
from farstep.checkpoint.manifest import Manifest, TensorInfo
from farstep.checkpoint.objects import Optimizer, models_in, module_state, owner_of
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import Wanted
from farstep.checkpoint.renaming import Index, Place, Rename
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import PerRank, TensorAt, decode, joined, like
from farstep.errors import CheckpointMismatch, DamagedCheckpoint
from farstep.state import Box, Shards, shards_of

__all__ = ["Filling", "Report"]

_SHOWN = 10


@dataclass
class Report:
    """What a load with `strict=False` has left as it was."""

    missing: list[str] = field(default_factory=list)
    """In the state, and not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint, and not in the state."""
    reshaped: list[str] = field(default_factory=list)
    """In both, with different shapes, or a tensor in one and none in the other."""

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        return "; ".join(
            f"{what}: {_listed(names)}"
            for what, names in (
                ("missing in the checkpoint", self.missing),
                ("not in the state", self.unexpected),
                ("of another shape", self.reshaped),
            )
            if names
        )


class Filling:
    """`wanted` is what is to be read, and where to. Until `commit` nothing but the memory of tensors has changed."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        ranks: Ranks,
        strict: bool,
        convert_dtype: bool,
        rename: Rename | None,
    ) -> None:
        self._storage, self._manifest, self._ranks = storage, manifest, ranks
        self._strict, self._convert_dtype, self._rename = strict, convert_dtype, rename
        self.index = Index(manifest.tree, rename)
        self.references: dict[str, Any] = {}
        """What other workers own, and fill."""
        self.spread_optimizers: dict[str, tuple[Any, Place]] = {}
        self.wanted: Wanted = {}
        self.report = Report()
        self._problems: list[str] = []
        self._finish: list[Callable[[], None]] = []
        self._commit: list[Callable[[], None]] = []
        self._models: dict[str, nn.Module] = {}

    # -- before anything is read --------------------------------------------------------------------------

    def prepare(self, state: Any) -> None:
        """Raises CheckpointMismatch, which lists what does not fit."""
        if not isinstance(state, Mapping | list | nn.Module) and not _has_state(state):
            raise CheckpointMismatch(
                f"a {type(state).__name__} cannot be loaded into: give a dict of what is to be loaded, or an object with load_state_dict"
            )
        self._models = models_in(state)
        self._fill(state, "")
        report, strict = self.report, self._strict
        if strict and report.missing:
            self._problems.append(f"the checkpoint has no {_listed(report.missing)}")
        if strict and report.unexpected:
            self._problems.append(f"the state has no {_listed(report.unexpected)}")
        if strict and report.reshaped:
            self._problems.append(f"shapes differ: {_listed(report.reshaped)}")
        if self._problems:
            hint = (
                ""
                if not strict or not report
                else ". strict=False leaves those out; rename= gives others their names"
            )
            raise CheckpointMismatch(
                f"{self._storage} does not fit the state: {'; '.join(self._problems)}. Nothing has been changed{hint}"
            )

    def _fill(self, value: Any, name: str) -> Any:
        """What comes in the place of a value: the same object if its memory is filled."""
        if isinstance(value, Tensor | Shards):
            return self._tensor(value, name)
        if reference_in(value) is not None or spread_optimizer(value) is not None:
            return self._elsewhere(value, name)
        if isinstance(value, nn.Module):
            self._module(value, name)
            return value
        if isinstance(value, Optimizer):
            owner = owner_of(value, self._models, name)
            if owner is not None:
                return self._optimizer(value, owner, name)
        if isinstance(value, PerRank):
            return PerRank(self._for_this_rank(value, name))
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return self._sequence(value, name)
        if _has_state(value):
            self._object(value, name)
            return value
        return self._value(value, name)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        place = self.index.take(name) if name else None
        if name and place is None:
            return self._miss(value, name)
        for key, each in value.items():
            found = self._fill(each, joined(name, key))
            if found is not each:
                self._set(value, key, found)
        if name:
            self._leave(name)
        return value

    def _sequence(self, value: Sequence[Any], name: str) -> Any:
        place = self.index.take(name)
        if place is None:
            return self._miss(value, name)
        inside = place.node.get("list", place.node.get("tuple")) if isinstance(place.node, dict) else None
        if inside is None or len(inside) != len(value):
            if any(isinstance(each, Tensor | Shards | nn.Module) or _has_state(each) for each in value):
                self.report.reshaped.append(name)
                return value
            return self._value(value, name)
        found = [self._fill(each, joined(name, i)) for i, each in enumerate(value)]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        for i, new in enumerate(found):
            self._set(value, i, new)
        return value

    def _value(self, value: Any, name: str) -> Any:
        """Anything else is taken as it was saved."""
        place = self.index.take_all(name)
        if place is None:
            return self._miss(value, name)
        if place.tensor is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return self._number_of(place.tensor, value, name)
        return self._taken(decode(place.node, place.name, self._ranks.rank), None, name)

    def _number_of(self, tensor: str, value: Any, name: str) -> Any:
        if self._manifest.tensors[tensor].shape:
            self.report.reshaped.append(name)
            return value
        made = self._fresh(tensor, name)
        return _Later(made)

    def _miss(self, value: Any, name: str) -> Any:
        self.report.missing.append(name)
        return value

    def _leave(self, name: str) -> None:
        """What is left within something that the state has."""
        left = self.index.below(name)
        self.report.unexpected += left
        for each in left:
            del self.index.left[each]

    def _set(self, container: Any, key: Any, value: Any) -> None:
        if not isinstance(container, MutableMapping | list):
            raise CheckpointMismatch(
                f"a {type(container).__name__} cannot be changed, so {key!r} in it cannot be loaded: give a dict"
            )

        def put() -> None:
            container[key] = value.tensor.item() if isinstance(value, _Later) else value

        self._commit.append(put)

    # -- tensors ------------------------------------------------------------------------------------------

    def _tensor(self, value: Tensor | Shards, name: str) -> Any:
        place = self.index.take(name)
        if place is None:
            return self._miss(value, name)
        if place.tensor is None:
            return self._from_number(value, place, name)
        self._into(value, place.tensor, name)
        return value

    def _from_number(self, value: Tensor | Shards, place: Place, name: str) -> Any:
        number = decode(place.node, place.name, self._ranks.rank)
        if isinstance(value, Tensor) and value.dim() == 0 and isinstance(number, int | float):
            self._commit.append(lambda: (value.detach().fill_(number), None)[1])
        else:
            self.report.reshaped.append(name)
        return value

    def _into(self, value: Tensor | Shards, tensor: str, name: str) -> bool:
        """Have a tensor's memory filled; False if it cannot be."""
        info = self._info(tensor, name)
        if tuple(value.shape) != info.shape:
            self.report.reshaped.append(name)
            return False
        if value.dtype != info.dtype and not self._convert_dtype:
            self._problems.append(
                f"{name!r} is {value.dtype} in the state and {info.dtype} in the checkpoint (convert_dtype=True converts)"
            )
            return False
        if self._ranks.is_cut_off and isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
            boxes, tensors = [Box.whole(info.shape)], [value.detach()]
        else:
            shards = shards_of(value, self._ranks.group, name=name)
            boxes, tensors = shards.spread.boxes(self._ranks.rank), shards.tensors
        self.wanted[name] = tensor, boxes, tensors
        return True

    def _info(self, tensor: str, name: str) -> TensorInfo:
        info = self._manifest.tensors.get(tensor)
        if info is None:
            raise DamagedCheckpoint(
                f"{self._storage}: the manifest has no tensor {tensor!r}, which {name!r} is said to be"
            )
        return info

    def _fresh(self, tensor: str, name: str) -> Tensor:
        info = self._info(tensor, name)
        made = torch.empty(info.shape, dtype=info.dtype)
        self.wanted[name] = tensor, [Box.whole(info.shape)], [made]
        return made

    # -- objects ------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, name: str) -> None:
        # Of a whole model that was saved, this may be a part: then there are names within this one, and not this one.
        if name and self.index.take(name) is None and not self.index.below(name):
            self._miss(module, name)
            return
        others: dict[str, Any] = {}
        for key, value in module_state(module, self._ranks.group, self._ranks.is_cut_off).items():
            found = self._fill(value, joined(name, key))
            if not isinstance(value, Tensor | Shards):
                others[key] = found
        self._leave(name)
        if others:
            self._commit.append(lambda: (module.load_state_dict(others, strict=False), None)[1])

    def _optimizer(self, optimizer: Optimizer, owner: Any, name: str) -> Any:
        place = self.index.take_all(name)
        if place is None:
            return self._miss(optimizer, name)
        filling = OptimizerFilling(optimizer, owner, place, name, self._storage, self._manifest, self._ranks, self._rename)  # fmt: skip
        filling.prepare(self._strict, self._convert_dtype)
        self.wanted |= filling.wanted
        self.report.missing += filling.missing
        self.report.unexpected += filling.unexpected
        self._finish.append(filling.finish)
        self._commit.append(filling.commit)
        return optimizer

    def _elsewhere(self, value: Any, name: str) -> Any:
        if not self._ranks.alone or not name:
            raise CheckpointMismatch(
                f"{name!r} is owned by workers of RPC: one process loads it for all, with no_dist=True, in a dict. Nothing has been changed"
            )
        rref = reference_in(value)
        has_parts = bool(self.index.below(name))
        place = self.index.take_all(name)
        if rref is not None and (place is not None or has_parts):
            self.references[name] = rref
        elif rref is None and place is not None:
            self.spread_optimizers[name] = value, place
        else:
            self._miss(value, name)
        return value

    def _object(self, value: Any, name: str) -> None:
        """What has `load_state_dict` knows itself what its state is: it gets all that was saved of it."""
        place = self.index.take_all(name) if name else Place(self._manifest.tree, "")
        if place is None:
            self._miss(value, name)
            return
        saved = self._taken(decode(place.node, place.name, self._ranks.rank), value.state_dict(), name)
        self._commit.append(lambda: value.load_state_dict(saved))

    def _for_this_rank(self, value: PerRank, name: str) -> Any:
        place = self.index.take_all(name)
        if place is None:
            return self._miss(value.value, name)
        saved = decode(place.node, place.name, self._ranks.rank)
        if not isinstance(saved, PerRank):
            return self._taken(saved, value.value, name)
        if len(place.node["ranks"]) <= self._ranks.rank:
            self.report.missing.append(f"{name} of rank {self._ranks.rank}")
            return value.value
        return self._taken(saved.value, value.value, name)

    def _taken(self, saved: Any, now: Any, name: str) -> Any:
        """What was saved, its tensors in the memory of those that are there now, where they are alike."""
        if isinstance(saved, TensorAt):
            info = self._info(saved.name, name)
            if isinstance(now, Tensor | Shards) and (tuple(now.shape), now.dtype) == (info.shape, info.dtype):
                self._into(now, saved.name, name)
                return now
            return self._fresh(saved.name, name)
        if isinstance(saved, PerRank):
            return self._taken(saved.value, now, name)
        if isinstance(saved, dict):
            inside = now if isinstance(now, Mapping) else {}
            return like(now, {key: self._taken(each, inside.get(key), joined(name, key)) for key, each in saved.items()})  # fmt: skip
        if isinstance(saved, list | tuple):
            there = now if isinstance(now, list | tuple) and len(now) == len(saved) else [None] * len(saved)
            return like(now, type(saved)(self._taken(each, there[i], joined(name, i)) for i, each in enumerate(saved)))  # fmt: skip
        return saved

    # -- after --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What can fail when all has been read."""
        for each in self._finish:
            each()

    def commit(self) -> None:
        for each in self._commit:
            each()


class _Later:
    """A number that is not read yet."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _has_state(value: Any) -> bool:
    has = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has and not isinstance(value, type)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
