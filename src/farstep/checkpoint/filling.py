"""A state, filled from a checkpoint: where each of its values comes from, and what is put where when all has been read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farstep.checkpoint.elsewhere import reference_in, spread_optimizer
from farstep.checkpoint.entries import entries_of
from farstep.checkpoint.filling_optimizers import OptimizerFilling
from farstep.checkpoint.filling_values import Later, array_of, as_tensor, settled, tensor_of, tensors_in
from farstep.checkpoint.listing import listed, named
from farstep.checkpoint.manifest import Manifest, TensorInfo
from farstep.checkpoint.meta_tensors import MetaTensors, is_meta, meta_tensors_in
from farstep.checkpoint.objects import (
    Optimizer,
    identities,
    models_in,
    module_state,
    names_of_memory,
    owner_of,
)
from farstep.checkpoint.odd_tensors import told_of_module, told_of_tensor
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import Wanted
from farstep.checkpoint.renaming import Index, Place, Rename
from farstep.checkpoint.report import Report
from farstep.checkpoint.same_content import have_same
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.stored_values import memory_for
from farstep.checkpoint.tree import PerRank, TensorAt, decode, is_container, joined, like
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, LayoutError
from farstep.state import Box, RankOwned, Shards, shards_of
from farstep.state.adapters.modules import named_tensors, reshard
from farstep.state.memory import repeats

__all__ = ["Filling"]


class Filling:
    """`wanted` is what is to be read, and where to. Until `commit` nothing but the memory of tensors has changed.

    Tensors on the meta device have memory from `prepare` on; where the load ends without `commit`, `undo` takes it back.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        ranks: Ranks,
        strict: bool,
        convert_dtype: bool,
        rename: Rename | None,
        verify: bool = True,
        meta: MetaTensors | None = None,
    ) -> None:
        self._storage, self._manifest, self._ranks = storage, manifest, ranks
        self._meta = meta or MetaTensors(None)
        self._seen: set[tuple[str, int]] = set()
        """Modules whose meta tensors have memory, by name and id."""
        self._around: Sequence[Tensor] = ()
        """The tensors beside the one that is being filled."""
        self._strict, self._convert_dtype, self._rename, self._verify = strict, convert_dtype, rename, verify
        self.index = Index(manifest.tree, rename)
        self.references: dict[str, Any] = {}
        """What other workers own, and fill."""
        self.spread_optimizers: dict[str, tuple[Any, Place]] = {}
        self.wanted: Wanted = {}
        self.report = Report()
        self._problems: list[str] = []
        self._dtypes: list[str] = []
        """What would have to be converted."""
        self._impossible: list[str] = []
        """Numbers that could not be converted either."""
        self._memory: dict[Any, tuple[str, str, Any]] = {}
        """What is to be filled so far -> its name in the state, the tensor that comes into it, and what keeps it from being freed."""
        self._made: dict[str, Tensor] = {}
        """New memory, by the tensor that comes into it."""
        self._finish: list[Callable[[], None]] = []
        self._commit: list[Callable[[], None]] = []
        self._models: dict[str, nn.Module] = {}

    # -- before anything is read --------------------------------------------------------------------------

    def prepare(self, state: Any) -> None:
        """Raises CheckpointMismatch, which lists what does not fit."""
        self._models = models_in(state)
        for name, module in self._models.items():
            self._give_memory(module, name)
        if self._fill(state, "") is not state:
            raise CheckpointMismatch(
                f"a {type(state).__name__} cannot be loaded into, as nothing in it can be changed: give a dict or list of what is to be loaded, or an object with "
                f"load_state_dict. Nothing has been changed"
            )
        report, strict = self.report, self._strict
        if strict and report.missing:
            top = list(dict.fromkeys(each.partition(".")[0] for each in self.index.places if each))
            known = any(each.partition(".")[0] in top for each in report.missing)
            self._problems.append(
                f"the checkpoint has no {named(report.missing)}"
                + ("" if known or not top else f" (at its top it has {named(top)})")
            )
        if strict and report.unexpected:
            self._problems.append(f"the state has no {named(report.unexpected)}")
        if strict and report.reshaped:
            self._problems.append(f"shapes differ: {report.shapes}")
        if strict and report.meta:
            self._problems.append(
                f"{named(report.meta)} would stay on the meta device, as the checkpoint has nothing for it: give it memory "
                f"and values first (buffers that are not persistent are in no checkpoint)"
            )
        if self._impossible:
            self._problems.append(f"numbers do not fit: {listed(self._impossible)}")
        if self._dtypes:
            self._problems.append(f"dtypes differ: {listed(self._dtypes)} (convert_dtype=True converts)")
        if self._problems:
            hint = ""
            if strict and (report.missing or report.unexpected or report.reshaped or report.meta):
                hint = ". strict=False leaves those out"
            if strict and (report.missing or report.unexpected):
                hint += "; rename= gives others their names"
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
            found = self._for_this_rank(value.value, name)
            return value if found is value.value else PerRank(found)
        if isinstance(value, RankOwned):
            return self._rank_owned(value, name)
        if isinstance(value, np.ndarray) and (tensor := tensor_of(value)) is not None:
            return self._array(value, tensor, name)
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
        if name and place is None and not self.index.below(name):
            return self._miss(value, name)
        if place is not None and self._has_no_names(value, place, name, "dict"):
            return value
        around = [each for each in value.values() if isinstance(each, Tensor)]
        for key, each in entries_of(value, self._ranks):
            self._around = around
            found = self._fill(each, joined(name, key))
            if found is not each:
                self._set(value, key, found)
        if name:
            self._leave(name)
        return value

    def _has_no_names(self, value: Any, place: Place, name: str, kind: str) -> bool:
        """Whether the checkpoint has a tensor or another value where the state has names: that is reported."""
        if is_container(place.node) and not place.is_per_rank:
            return False
        there = "a tensor" if place.tensor is not None else "a PerRank" if place.is_per_rank else "a value"
        self._differs(value, name, f"is a {kind} in the state and {there} in the checkpoint")
        return True

    def _sequence(self, value: Sequence[Any], name: str) -> Any:
        place = self.index.take(name)
        if place is None:
            return self._miss(value, name)
        inside = place.node.get("list", place.node.get("tuple")) if isinstance(place.node, dict) else None
        if inside is None or len(inside) != len(value):
            if any(isinstance(each, Tensor | Shards | nn.Module) or _has_state(each) for each in value):
                there = "no list" if inside is None else f"{len(inside)} values"
                return self._differs(
                    value, name, f"has {len(value)} values in the state and {there} in the checkpoint"
                )
            return self._value(value, name)
        around = [each for each in value if isinstance(each, Tensor)]
        found = []
        for i, each in enumerate(value):
            self._around = around
            found.append(self._fill(each, joined(name, i)))
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        for i, new in enumerate(found):
            self._set(value, i, new)
        return value

    def _value(self, value: Any, name: str) -> Any:
        """Anything else is taken as it was saved."""
        if (place := self.index.get(name)) is not None and place.is_per_rank:
            return self._for_this_rank(value, name)
        place = self.index.take_all(name)
        if place is None:
            return self._miss(value, name)
        if place.tensor is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return self._number_of(place.tensor, value, name)
        return self._taken(decode(place.node, place.name, self._ranks.rank), None, name)

    def _number_of(self, tensor: str, value: Any, name: str) -> Any:
        shape = self._info(tensor, name).shape
        if shape:
            return self._differs(
                value, name, f"is a number in the state and a tensor of shape {shape} in the checkpoint"
            )
        return Later(self._fresh(tensor, name))

    def _differs(self, value: Any, name: str, how: str) -> Any:
        self.report.reshaped.append(name)
        self.report.differences[name] = how
        return value

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
            container[key] = settled(value)

        self._commit.append(put)

    # -- tensors ------------------------------------------------------------------------------------------

    def _tensor(self, value: Tensor | Shards, name: str) -> Any:
        with told_of_tensor(value, name, "Nothing has been changed"):
            if is_meta(value):
                self._give(value, [name], self._around)  # type: ignore[arg-type]
            return self._filled(value, name)

    def _filled(self, value: Tensor | Shards, name: str) -> Any:
        place = self.index.take(name)
        if place is None:
            return self._miss(value, name)
        if place.tensor is None:
            return self._from_number(value, place, name)
        self._into(value, place.tensor, name)
        return value

    def _from_number(self, value: Tensor | Shards, place: Place, name: str) -> Any:
        number = decode(place.node, place.name, self._ranks.rank)
        shape = tuple(value.shape)
        if not isinstance(value, Tensor) or shape or not isinstance(number, int | float):
            there = "a PerRank in the checkpoint: give a PerRank to load into" if place.is_per_rank else "none in the checkpoint"  # fmt: skip
            return self._differs(value, name, f"is a tensor of shape {shape} in the state and {there}")
        made = as_tensor(number, value.dtype, self._convert_dtype)
        if made is None:
            can_be = as_tensor(number, value.dtype, True) is not None
            (self._dtypes if can_be else self._impossible).append(
                f"{name!r} is {value.dtype} in the state and {number!r} in the checkpoint"
            )
        else:
            self._commit.append(lambda: (value.detach().copy_(made), None)[1])
        return value

    def _array(self, value: np.ndarray[Any, Any], tensor: Tensor, name: str) -> Any:
        """An array of numpy, whose memory is filled; one that is not to be written gets another in its place."""
        if value.flags.writeable:
            self._tensor(tensor, name)
            return value
        place = self.index.get(name)
        made = np.empty(value.shape, value.dtype)
        if place is None or place.is_per_rank:
            return self._value(value, name)
        self._tensor(torch.from_numpy(made), name)
        return value if name in self.report.differences else made

    def _into(self, value: Tensor | Shards, tensor: str, name: str) -> bool:
        """Have a tensor's memory filled; False if it cannot be."""
        info = self._info(tensor, name)
        if tuple(value.shape) != info.shape:
            self._differs(
                value, name, f"is {tuple(value.shape)} in the state and {info.shape} in the checkpoint"
            )
            return False
        if value.dtype != info.dtype and not self._convert_dtype:
            self._dtypes.append(f"{name!r} is {value.dtype} in the state and {info.dtype} in the checkpoint")
            return False
        shards = shards_of(value, self._ranks.group, name=name)
        boxes, tensors = shards.spread.boxes(self._ranks.rank), shards.tensors
        if any(repeats(each) for each in tensors):
            self._problems.append(
                f"{name!r} has elements that share memory (it was expanded), so it cannot be filled: give a clone"
            )
            return False
        before, source, _ = self._memory.setdefault(_memory_of(value), (name, tensor, value))
        if source == tensor and before != name:
            return True  # it comes into that memory already
        if source != tensor and not have_same(
            self._storage, self._manifest, source, tensor, boxes, value.dtype, self._verify
        ):
            self._problems.append(
                f"{before!r} and {name!r} are one memory in the state, and {source!r} and {tensor!r} have different elements in the checkpoint, of which it could only "
                f"have one: rename= the one that is not wanted to a name that the state does not have, or give each its own memory"
            )
            return False
        if source == tensor:
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
        """New memory for it; the same for all names that it goes by."""
        made = self._made.get(tensor)
        if made is None:
            made = self._made[tensor] = memory_for(self._storage, self._manifest, tensor)
            self.wanted[name] = tensor, [Box.whole(made.shape)], [made]
        return made

    # -- tensors on the meta device -----------------------------------------------------------------------

    def _give_memory(self, module: nn.Module, name: str) -> None:
        """Before any optimizer is looked at, whose state goes where its parameters are."""
        if (name, id(module)) in self._seen:
            return
        self._seen.add((name, id(module)))
        reshard(module)
        found = meta_tensors_in(module)
        if not found:
            return
        around = [tensor for _, tensor in named_tensors(module, buffers=True, remove_duplicate=True)]
        for tensor, names in found:
            self._give(tensor, [joined(name, each) for each in names], around)
        self._meta.settle(module)

    def _give(self, tensor: Tensor, names: Sequence[str], around: Sequence[Tensor]) -> None:
        """Memory for a tensor that goes by these names, if the checkpoint has something for it."""
        there = next((name for name in names if self._has_for(tensor, name)), None)
        if there is None:
            self.report.meta.append(names[0])
        else:
            self._meta.give(tensor, there, around)

    def _has_for(self, tensor: Tensor, name: str) -> bool:
        place = self.index.get(name)
        if place is None:
            return False
        if place.tensor is not None:
            return self._info(place.tensor, name).shape == tuple(tensor.shape)
        return not tensor.shape and not isinstance(place.node, dict)

    # -- objects ------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, name: str) -> None:
        # Of a whole model that was saved, this may be a part: then there are names within this one, and not this one.
        place = self.index.take(name) if name else None
        if name and place is None and not self.index.below(name):
            self._miss(module, name)
            return
        if place is not None and self._has_no_names(module, place, name, "module"):
            return
        self._give_memory(module, name)
        others: dict[str, Any] = {}
        with told_of_module(module, name, "Nothing has been changed"):
            state = module_state(module, self._ranks.group)
        same = identities(module, state)
        own = names_of_memory(module)
        there = {same[key] for key in state if self.index.get(joined(name, key)) is not None}
        for key, value in state.items():
            is_tensor = isinstance(value, Tensor | Shards)
            if is_tensor and same[key] in there and self.index.get(joined(name, key)) is None:
                continue  # tied to another that is there, and stored once
            if key in own and is_meta(value):  # there is nothing for it, which has been reported
                self._filled(value, joined(name, key))
                continue
            found = self._fill(value, joined(name, key))
            if not is_tensor or (isinstance(value, Tensor) and key not in own):
                others[key] = found
        if name:
            self._leave(name)
        if others:
            self._later_given(
                module,
                name,
                lambda: module.load_state_dict({k: settled(v) for k, v in others.items()}, strict=False),
            )

    def _optimizer(self, optimizer: Optimizer, owner: Any, name: str) -> Any:
        place = self.index.take_all(name)
        if place is None:
            return self._miss(optimizer, name)
        model = self.index.get(owner.name)
        was = None if model is None else model.name
        filling = OptimizerFilling(optimizer, owner, place, name, self._storage, self._manifest, self._ranks, self._rename, was, self._verify)  # fmt: skip
        try:
            filling.prepare(self._strict, self._convert_dtype)
        except LayoutError as exc:
            raise CheckpointMismatch(
                f"{name!r} of {self._storage} cannot be loaded: {exc}. Nothing has been changed"
            ) from exc
        self.wanted |= filling.wanted
        self.report.missing += filling.missing
        self.report.unexpected += filling.unexpected
        self.report.reshaped += filling.reshaped
        self.report.differences |= filling.reshaped
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
        place = self.index.take_all(name)
        if place is None:
            self._miss(value, name)
            return
        saved = decode(place.node, place.name, self._ranks.rank)
        if isinstance(value, Optimizer):
            _refuse_names(value, saved, name)
            self._refuse_meta(value, name)
        now = value.state_dict()
        saved = self._taken(saved, now, name)
        has_meta = any(is_meta(each) for each in tensors_in(now))

        def give() -> None:
            value.load_state_dict(saved)
            if has_meta and any(is_meta(each) for each in tensors_in(value.state_dict())):
                raise ValueError(
                    "it has tensors on the meta device, and has not given them memory (load_state_dict(..., assign=True) does)"
                )

        self._later_given(value, name, give)

    def _refuse_meta(self, optimizer: Optimizer, name: str) -> None:
        """torch's own load_state_dict moves the state to the device of its parameters."""
        if any(is_meta(p) for group in optimizer.param_groups for p in group["params"]):
            self._problems.append(
                f"{name!r} steps parameters on the meta device, where its state would be lost: give the model in the state "
                f"too, or give it memory first"
            )

    def _later_given(self, value: Any, name: str, give: Callable[[], Any]) -> None:
        def commit() -> None:
            try:
                give()
            except Exception as exc:
                raise CheckpointError(
                    f"load_state_dict of {name!r}, a {type(value).__name__}, raised {type(exc).__name__}: {exc}. All tensors, and objects that come before it, are "
                    f"loaded; later objects are not. Load again before the state is used"
                ) from exc

        self._commit.append(commit)

    def _for_this_rank(self, value: Any, name: str) -> Any:
        """What the rank of this number has saved is looked at as a checkpoint of its own."""
        place = self.index.get(name)
        if place is None or not place.is_per_rank:
            return self._fill(value, name)
        self.index.take(name)
        every, rank = place.node["ranks"], self._ranks.rank
        # A rank that has not had it at all has left nothing; which is also what None leaves, but no object takes that.
        if rank >= len(every) or (
            every[rank] is None and (_has_state(value) or isinstance(value, Tensor | Shards))
        ):
            self.report.unsaved.append(name)
            return value
        outer, self.index = self.index, Index(every[rank], None, joined(place.name, f"rank{rank}"), name)
        try:
            return self._fill(value, name)
        finally:
            self.index = outer

    def _rank_owned(self, value: RankOwned, name: str) -> Any:
        """What belongs to this rank's part of a parameter, which only as many ranks as saved it have."""
        place, tensor = self.index.get(name), value.tensors.get(self._ranks.rank)
        if place is not None and place.is_per_rank and len(place.node["ranks"]) != self._ranks.count:
            self.index.take(name)
            return self._differs(
                value, name, f"belongs to the parts that {len(place.node['ranks'])} ranks had of a parameter"
            )
        if tensor is None:
            self.index.take_all(name)
        else:
            self._for_this_rank(tensor, name)
        return value

    def _taken(self, saved: Any, now: Any, name: str) -> Any:
        """What was saved, its tensors in the memory of those that are there now, where they are alike."""
        if isinstance(saved, TensorAt):
            info = self._info(saved.name, name)
            if isinstance(now, np.ndarray):
                return array_of(self._fresh(saved.name, name))
            if (
                isinstance(now, Tensor | Shards)
                and not is_meta(now)
                and (tuple(now.shape), now.dtype) == (info.shape, info.dtype)
            ):
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
        self._meta.keep()
        for each in self._commit:
            each()

    def undo(self) -> None:
        """Take back the memory of tensors that were on the meta device, unless `commit` has begun."""
        self._meta.take_back()


def _refuse_names(optimizer: Optimizer, saved: Any, name: str) -> None:
    """torch's own load_state_dict goes by the order of parameters, whatever they are called in the state."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict or not isinstance(saved, dict):
        return
    groups = [each for each in saved.get("param_groups") or () if isinstance(each, dict)]
    if any(isinstance(each, str) for group in groups for each in group.get("params") or ()):
        raise CheckpointMismatch(
            f"{name!r} was saved together with its model, by the names of parameters, which an optimizer alone does not have: give the model in the state too, or "
            f"load it with load_optimizer(model, optimizer, path). Nothing has been changed"
        )


def _has_state(value: Any) -> bool:
    has = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has and not isinstance(value, type)


def _memory_of(value: Tensor | Shards) -> Any:
    """The same for tensors that are in one place."""
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and value.numel():
        return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
    return id(value)
