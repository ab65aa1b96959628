"""An optimizer's state, read as the optimizer has its parameters now, whatever it was saved under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.objects import Optimizer, Owner
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.reading import read_into, reads_for
from farstep.checkpoint.renaming import Place, Rename, new_name
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.tree import PerRank, TensorAt, decode, joined
from farstep.errors import CheckpointMismatch, StateMismatch
from farstep.state import Box, Spread
from farstep.state.optim_entries import Number, label
from farstep.state.optim_given import Given, Owned, Whole
from farstep.state.optim_loading import Loading
from farstep.state.optim_names import Translation
from farstep.state.optim_roster import roster_of

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
    ) -> None:
        self._optimizer, self._owner, self._place, self._name = optimizer, owner, place, name
        self._storage, self._manifest, self._ranks, self._rename = storage, manifest, ranks, rename
        self._loading: Loading | None = None
        self.wanted: dict[str, tuple[str, Sequence[Box], Sequence[Tensor]]] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._sources: dict[str, str] = {}
        """Label -> tensor of the checkpoint."""

    def prepare(self, strict: bool, convert_dtype: bool) -> None:
        saved = self._renamed(decode(self._place.node, self._place.name, self._ranks.rank))
        roster = roster_of(self._owner.model, self._optimizer, self._ranks.group)
        translate = Translation(roster)
        numbers = self._numbers(saved["state"])
        state: dict[str, dict[str, Any]] = {}
        for old, values in saved["state"].items():
            name = translate(old)
            entries = state.setdefault(name, {})
            for key, value in values.items():
                seat = roster.seats.get(name)
                entries[key] = self._entry(name, key, value, numbers, None if seat is None else seat.spread)
        groups = [
            {**each, "params": [translate(p) for p in each["params"]]} for each in saved["param_groups"]
        ]
        groups = [self._values(each) for each in groups]
        wanted = {name for group in roster.groups for name in group.names}
        given = {name for group in groups for name in group["params"]} | state.keys()
        if not strict:
            self.missing = [joined(self._name, f"state.{n}") for n in sorted(wanted - given)]
            self.unexpected = [joined(self._name, f"state.{n}") for n in sorted(given - wanted)]
        self._loading = Loading(roster, Given(state, groups, {}), self._ranks.group, in_place=True)
        try:
            self._loading.prepare(strict)
        except StateMismatch as exc:
            raise CheckpointMismatch(
                f"{self._name!r} of {self._storage} does not fit the optimizer: {exc}"
            ) from exc
        for text, target in self._loading.targets.items():
            if target.tensors:
                self.wanted[f"{self._name} {text}"] = (
                    self._sources[text],
                    target.spread.boxes(self._ranks.rank),
                    target.tensors,
                )

    def _renamed(self, saved: Any) -> Any:
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointMismatch(
                f"{self._place.name!r} of {self._storage} is not the state of an optimizer; nothing has been changed"
            )
        if any(not isinstance(name, str) for name in saved["state"]):
            raise CheckpointMismatch(
                f"{self._place.name!r} of {self._storage} was saved without its model, by the numbers of parameters: load it into a state "
                f"without the model too. Nothing has been changed"
            )
        if self._rename is None:
            return saved
        return {
            "state": {self._new(name): each for name, each in saved["state"].items()},
            "param_groups": [
                {**group, "params": [self._new(name) for name in group["params"]]}
                for group in saved["param_groups"]
            ],
        }

    def _new(self, name: str) -> str:
        """As the parameter itself is renamed, in the model that is called so in the state."""
        whole = new_name(self._rename, joined(self._owner.name, name))
        return whole.removeprefix(f"{self._owner.name}.") if self._owner.name else whole

    def _numbers(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Tensors of one number, such as `step`, which are read before all else."""
        names = [
            value.name
            for values in state.values()
            for value in values.values()
            if isinstance(value, TensorAt) and not self._manifest.tensors[value.name].shape
        ]
        made = {name: torch.empty((), dtype=self._manifest.tensors[name].dtype) for name in names}
        wanted = {name: (name, [Box((), ())], [tensor]) for name, tensor in made.items()}
        read_into(self._storage, self._manifest, reads_for(self._manifest, wanted))
        return {name: tensor.item() for name, tensor in made.items()}

    def _entry(
        self, name: str, key: str, value: Any, numbers: Mapping[str, Any], spread: Spread | None
    ) -> Any:
        if isinstance(value, TensorAt):
            if value.name in numbers:
                return Number(numbers[value.name], self._manifest.tensors[value.name].dtype)
            info = self._manifest.tensors[value.name]
            self._sources[label(name, key)] = value.name
            return Whole(Spread.whole(info.shape, info.dtype, [0]))
        if isinstance(value, PerRank):
            return self._owned(name, key, value, spread)
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

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options, of which some may be tensors."""
        made: dict[str, Tensor] = {}

        def value_of(value: Any) -> Any:
            if isinstance(value, TensorAt):
                info = self._manifest.tensors[value.name]
                return made.setdefault(value.name, torch.empty(info.shape, dtype=info.dtype))
            if isinstance(value, list | tuple):
                return type(value)(value_of(each) for each in value)
            return value

        found = {key: value_of(value) for key, value in group.items()}
        wanted = {n: (n, [Box.whole(t.shape)], [t]) for n, t in made.items()}
        read_into(self._storage, self._manifest, reads_for(self._manifest, wanted))
        return found

    def finish(self) -> None:
        assert self._loading is not None
        self._loading.finish()

    def commit(self) -> None:
        assert self._loading is not None
        self._loading.commit()
