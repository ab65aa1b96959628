"""An optimizer's state, read as the optimizer has its parameters now, whatever it was saved under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.listing import listed, named
from farstep.checkpoint.manifest import Manifest, TensorInfo
from farstep.checkpoint.objects import Optimizer, Owner
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.renaming import Place, Rename, new_name
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.stored_values import read_values
from farstep.checkpoint.tree import PerRank, TensorAt, decode, joined
from farstep.errors import CheckpointMismatch, DamagedCheckpoint, StateMismatch
from farstep.state import Box, Spread
from farstep.state.known import is_extra, is_torchs
from farstep.state.optim_entries import Number, label, put_together, taken_apart
from farstep.state.optim_given import Given, Owned, Whole
from farstep.state.optim_loading import Loading
from farstep.state.optim_names import Translation
from farstep.state.optim_options import stepper_of
from farstep.state.optim_roster import roster_of
from farstep.state.optim_seats import Seat

__all__ = ["OptimizerFilling"]


class OptimizerFilling:
    """Plans the state of one optimizer as `load_optim_state_dict` does; but what it would be sent by other ranks it reads."""

    def __init__(
        self,
        optimizer: Optimizer,
        owner: Owner,
        place: Place,
        name: str,
        storage: Storage,
        manifest: Manifest,
        ranks: Ranks,
        rename: Rename | None,
        was: str | None = None,
        verify: bool = True,
        by_order: bool = False,
    ) -> None:
        """`was` is what the model is called in the checkpoint, if not as in the state. `by_order`
        is that of `Loading`.
        """
        self._by_order = by_order
        self._was, self._verify = owner.name if was is None else was, verify
        self._optimizer, self._owner, self._place, self._name = optimizer, owner, place, name
        self._storage, self._manifest, self._ranks, self._rename = storage, manifest, ranks, rename
        self._loading: Loading | None = None
        self.wanted: dict[str, tuple[str, Sequence[Box], Sequence[Tensor]]] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.reshaped: dict[str, str] = {}
        """The state of parameters of other shapes, and both shapes."""
        self.names: list[str] = []
        """Of the parameters that have a state in the checkpoint, their new ones."""
        self._sources: dict[str, str] = {}
        """Label -> tensor of the checkpoint."""

    def prepare(self, strict: bool, convert_dtype: bool) -> None:
        saved = self._renamed(decode(self._place.node, self._place.name, self._ranks.rank))
        beside = [joined(self._name, key) for key in saved if key not in ("state", "param_groups")]
        if beside and strict:
            raise CheckpointMismatch(
                f"{self._place.name!r} of {self._storage} does not fit the optimizer, which has no "
                f"{named(beside)}. Nothing has been changed. strict=False leaves that out"
            )
        saved = self._read(saved)
        self.names = list(saved["state"])
        roster = roster_of(self._owner.model, self._optimizer, self._ranks.group)
        translate = Translation(roster)
        state: dict[str, dict[str, Any]] = {}
        for old, values in saved["state"].items():
            name = translate(old)
            entries = state.setdefault(name, {})
            seat = roster.seats.get(name)
            for key, value in values.items():
                entries[key] = self._entry(name, key, value, seat)
        groups = [
            {**each, "params": [translate(p) for p in each["params"]]} for each in saved["param_groups"]
        ]
        wanted = {name for group in roster.groups for name in group.names}
        given = {name for group in groups for name in group["params"]} | state.keys()
        if not strict:
            self.missing = [joined(self._name, f"state.{n}") for n in sorted(wanted - given)]
            self.unexpected = [joined(self._name, f"state.{n}") for n in sorted(given - wanted)]
            self.unexpected += beside
            left = {
                name
                for name in wanted & state.keys()
                if self._is_reshaped(name, state[name], roster.seats[name])
            }
            state = {name: each for name, each in state.items() if name not in left}
            groups = [{**each, "params": [n for n in each["params"] if n not in left]} for each in groups]
        self._loading = Loading(
            roster, Given(state, groups, {}), self._ranks.group, in_place=True, by_order=self._by_order
        )
        try:
            self._loading.prepare(strict)
        except StateMismatch as exc:
            raise CheckpointMismatch(
                f"{self._name!r} of {self._storage} does not fit the optimizer: {exc}"
            ) from exc
        self.unexpected += [joined(self._name, each) for each in sorted(self._loading.left_out)]
        if self._loading.cast and not convert_dtype:
            raise CheckpointMismatch(
                f"{self._name!r} of {self._storage} does not fit the optimizer: {listed(self._casts())}; convert_dtype=True converts them. Nothing has been changed"
            )
        for text, target in self._loading.targets.items():
            if target.tensors:
                self.wanted[f"{self._name} {text}"] = (
                    self._sources[text],
                    target.spread.boxes(self._ranks.rank),
                    target.tensors,
                )

    def _is_reshaped(self, name: str, entries: Mapping[str, Any], seat: Seat) -> bool:
        """Whether the parameter was of another shape, as far as its state tells: that is then left as it is."""
        stepper = stepper_of(self._optimizer)
        is_alike = is_torchs(stepper) and not isinstance(stepper, torch.optim.Adafactor | torch.optim.LBFGS)
        for key, entry in entries.items():
            if not isinstance(entry, Whole) or entry.spread.shape == seat.shape or is_extra(stepper, key):
                continue
            shape = entry.spread.shape
            is_cut = 1 < len(shape) == len(seat.shape) and any(
                a not in (1, b) for a, b in zip(shape, seat.shape, strict=True)
            )
            if is_alike or is_cut:
                text = f"has {key!r} of shape {shape} in the checkpoint, and the parameter is {seat.shape}"
                self.reshaped[joined(self._name, f"state.{name}")] = text
                return True
        return False

    def _casts(self) -> list[str]:
        """What would have to be converted."""
        assert self._loading is not None
        found = []
        for text in sorted(self._loading.cast):
            tensors = self._loading.targets[text].tensors
            here = f"{tensors[0].dtype} here" if tensors else "another here"
            saved = self._manifest.tensors[self._sources[text]].dtype
            found.append(f"{text} is {saved} in the checkpoint and {here}")
        return found

    def _renamed(self, saved: Any) -> Any:
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointMismatch(
                f"{self._place.name!r} of {self._storage} is not the state of an optimizer; nothing has been changed"
            )
        if any(not isinstance(name, str) for name in saved["state"]):
            raise CheckpointMismatch(
                f"{self._place.name!r} of {self._storage} was saved without its model, by the numbers of parameters: load it into a state "
                f"without the model too, or with load_optimizer, which goes by their order. Nothing has been changed"
            )
        if self._rename is None:
            return saved
        return {
            **saved,
            "state": {self._new(name): each for name, each in saved["state"].items()},
            "param_groups": [
                {**group, "params": [self._new(name) for name in group["params"]]}
                for group in saved["param_groups"]
            ],
        }

    def _new(self, name: str) -> str:
        """As the parameter itself is renamed, in the model that is called so in the state."""
        was = self._owner.in_state(name) if self._owner.several else joined(self._was, name)
        return self._owner.in_model(new_name(self._rename, was))

    def _read(self, saved: Any) -> Any:
        """The same with all that is read before the rest, into new memory: the options of groups, and of the state what `_is_read_first`."""
        first = {
            "state": {
                name: {key: value for key, value in values.items() if self._is_read_first(value)}
                for name, values in saved["state"].items()
            },
            "param_groups": saved["param_groups"],
        }
        read = read_values(self._storage, self._manifest, first, verify=self._verify)
        return {
            "state": {name: {**values, **read["state"][name]} for name, values in saved["state"].items()},
            "param_groups": read["param_groups"],
        }

    def _is_read_first(self, value: Any) -> bool:
        """Tensors of one number, such as `step`, and lists and dicts that may have tensors in them. They are the same on all ranks."""
        if isinstance(value, TensorAt):
            return not self._info(value).shape
        return isinstance(value, dict | list | tuple)

    def _info(self, tensor: TensorAt) -> TensorInfo:
        info = self._manifest.tensors.get(tensor.name)
        if info is None:
            raise DamagedCheckpoint(f"{self._storage}: the manifest has no tensor {tensor.name!r}")
        return info

    def _entry(self, name: str, key: str, value: Any, seat: Seat | None) -> Any:
        if isinstance(value, Tensor):
            return Number(value.item(), value.dtype)
        if isinstance(value, TensorAt):
            info = self._info(value)
            self._sources[label(name, key)] = value.name
            return Whole(Spread.whole(info.shape, info.dtype, [0]))
        if isinstance(value, PerRank):
            return self._owned(name, key, value, None if seat is None else seat.spread)
        frame, tensors = taken_apart(value)
        if tensors and seat is not None and seat.keys:
            value = put_together(frame, [each.to(seat.keys[0].device) for each in tensors])
        return Number(value)

    def _owned(self, name: str, key: str, value: PerRank, spread: Spread | None) -> Any:
        """What belonged to each rank's part of the parameter."""
        if self._ranks.count != self._manifest.ranks or spread is None:
            raise CheckpointMismatch(
                f"the state {key!r} of parameter {name!r} belongs to the parts that {self._manifest.ranks} ranks had of it, and here are "
                f"{self._ranks.count}; nothing has been changed"
            )
        tensors = {}
        base = value.value.name.rpartition(".rank")[0] if isinstance(value.value, TensorAt) else ""
        for rank in range(self._manifest.ranks):
            info = self._manifest.tensors.get(f"{base}.rank{rank}")
            if info is not None:
                tensors[rank] = Spread.whole(info.shape, info.dtype, [rank])
                self._sources[label(name, key, rank)] = f"{base}.rank{rank}"
        return Owned(spread, tensors)

    def finish(self) -> None:
        assert self._loading is not None
        self._loading.finish()

    def commit(self) -> None:
        assert self._loading is not None
        self._loading.commit()
