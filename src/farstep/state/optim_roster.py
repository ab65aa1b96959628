"""All parameters of a model that optimizers step, in the optimizers' groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farstep.errors import StateError, StateMismatch
from farstep.state.adapters import ddp, like, local_tensors, plain, shards_of
from farstep.state.adapters.modules import named_tensors, reshard
from farstep.state.adapters.names import clean_name
from farstep.state.adapters.ranks import Group, own_rank
from farstep.state.optim_seats import Seat
from farstep.state.shards import Shards
from farstep.state.stateful import saved_state

__all__ = ["Composed", "Optimizers", "Roster", "SeatGroup", "Seated", "has_own_state_dict", "roster_of"]

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[Any, Optimizer]
"""One optimizer, or several, such as one for each parameter that steps during backward."""


@runtime_checkable
class Seated(Protocol):
    """An optimizer that knows itself how its state is spread. `state` and `param_groups` are as with any other."""

    def optim_seats(self, group: Group) -> Mapping[int, Seat]:
        """id of each parameter in `param_groups` -> its seat, with `state`'s keys, and spread over the ranks of `group`.

        Those that are left out are seated as any optimizer's.
        """
        ...

    def optim_stepper(self) -> Optimizer:
        """The optimizer that steps: whose class knows what `state` means."""
        ...

    def optim_state_loaded(self) -> None:
        """A state has been put in place."""
        ...


@runtime_checkable
class Composed(Protocol):
    """An optimizer that has its state from others."""

    def optim_parts(self) -> Iterable[Optimizer]: ...


@dataclass
class SeatGroup:
    """A parameter group of one of the optimizers."""

    optimizer: Optimizer
    options: dict[str, Any]
    """The optimizer's own dict, "params" included."""
    seats: list[Seat] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [seat.name for seat in self.seats]


class Roster:
    """`groups` in the optimizers' order; `seats` by name; `aliases` are other names of tied parameters, with the one that counts."""

    def __init__(self, optimizers: list[Optimizer], aliases: dict[str, str], known: set[str]) -> None:
        self.optimizers = optimizers
        self.groups: list[SeatGroup] = []
        self.seats: dict[str, Seat] = {}
        self.aliases = aliases
        self.known = known
        """All parameters of the model, stepped or not."""
        self.seat_elsewhere: Callable[[str], Seat | None] = lambda name: None
        """That of a parameter of which nothing is here, so that an optimizer may leave it out; None if something is, or it is unknown."""
        self.partial: set[str] = set()
        """Parameters that the models of some ranks do not have."""
        self.left_out: dict[str, Seat] = {}
        """Parameters that the optimizers step and that are neither read nor loaded."""

    def state_of(self, seat: Seat, number: int) -> Mapping[str, Any]:
        """What the optimizer keeps under a key, as it is saved. It is not to be changed."""
        return saved_state(self.homes[seat.name].optimizer.state.get(seat.keys[number]) or {})

    def narrow(self, is_selected: Callable[[Seat], bool]) -> None:
        """Leave out the other parameters."""
        self.left_out |= {name: seat for name, seat in self.seats.items() if not is_selected(seat)}
        self.seats = {name: seat for name, seat in self.seats.items() if name not in self.left_out}
        for group in self.groups:
            group.seats = [seat for seat in group.seats if seat.name not in self.left_out]

    def order(self) -> list[list[str]]:
        """The names in each group, in the order in which the optimizer numbers its parameters. Raises StateMismatch if it numbers others."""
        for group in self.groups:
            if len({id(key) for seat in group.seats for key in seat.keys}) < len(group.seats):
                raise StateMismatch(
                    "this state has numbers where parameters' names are wanted, and the optimizer numbers flat parameters, not those of the "
                    "model; nothing has been loaded. rekey_optim_state_dict, with the model that was never wrapped and its optimizer, puts "
                    "names in their place"
                )
        return [group.names for group in self.groups]

    def check_is_whole(self, name: str, state: Any) -> None:
        """Raise StateMismatch if a state by number is that of one rank's piece of an FSDP parameter, which means nothing on other ranks."""
        seat = self.seats.get(name)
        if seat is None or not seat.is_line or not isinstance(state, Mapping):
            return
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != seat.shape:
                raise StateMismatch(
                    f"this state has numbers where parameters' names are wanted, and {key!r} of parameter {name!r} has shape "
                    f"{tuple(value.shape)}: it is one rank's part of an FSDP optimizer, by number; nothing has been loaded. "
                    f"optim_state_dict(model, optim) reads such a state by name"
                )

    @cached_property
    def homes(self) -> dict[str, SeatGroup]:
        """The group of each parameter. Not to be asked before all are seated."""
        return {seat.name: group for group in self.groups for seat in group.seats}


def roster_of(model: nn.Module, optim: Optimizers, group: Group = None) -> Roster:
    """Raises StateError where an optimizer steps what the model does not have."""
    optimizers = _flat(optim)
    found = _Model(model, group)
    roster = Roster(optimizers, found.aliases, found.known)
    roster.seat_elsewhere = found.seat_elsewhere
    for optimizer in optimizers:
        own = optimizer.optim_seats(group) if isinstance(optimizer, Seated) else {}
        for number, options in enumerate(optimizer.param_groups):
            each = SeatGroup(optimizer, options)
            roster.groups.append(each)
            for position, parameter in enumerate(options["params"]):
                if id(parameter) in own:
                    seats = [_renamed(own[id(parameter)], found.names.get(id(parameter)))]
                else:
                    seats = found.seats(parameter, optimizer, number, position)
                for seat in seats:
                    if roster.seats.setdefault(seat.name, seat) is not seat:
                        raise StateError(f"two optimizers step {seat.name!r}: its state is that of one")
                    each.seats.append(seat)
    for name, seat in found.elsewhere().items():
        roster.seats.setdefault(name, seat)
    return roster


def _flat(optim: Any) -> list[Optimizer]:
    if isinstance(optim, Composed):
        return [each for part in optim.optim_parts() for each in _flat(part)]
    if isinstance(optim, Optimizer):
        _check_state_is_here(optim)
        return [optim]
    if isinstance(optim, Mapping):
        optim = list(optim.values())
    if not isinstance(optim, Sequence) or isinstance(optim, str):
        raise TypeError(
            f"an optimizer, or a list or dict of optimizers, is wanted, not {torch.typename(optim)}"
        )
    return [each for part in optim for each in _flat(part)]


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether its class says itself what its state is, in a way that nothing here knows. With `_state_is_by_parameter` it is all in `state`, whatever that says."""
    if isinstance(optimizer, Seated | Composed) or getattr(optimizer, "_state_is_by_parameter", False):
        return False
    return type(optimizer).state_dict is not Optimizer.state_dict


def _check_state_is_here(optimizer: Optimizer) -> None:
    """An optimizer that wraps another may show its groups and keep the state to itself: then there is nothing to read, and nowhere to put it."""
    if optimizer.state or not has_own_state_dict(optimizer):
        return
    try:
        state = optimizer.state_dict().get("state")
    except Exception as exc:
        raise StateError(
            f"the state of {torch.typename(optimizer)} is not in its `state`, and its own state_dict cannot be had ({type(exc).__name__}: {exc}): give the optimizer "
            f"that it wraps, or farstep.optim.ShardedOptimizer in its place"
        ) from exc
    if state:
        raise StateError(
            f"{torch.typename(optimizer)} keeps its state elsewhere than in its `state`, and has a state_dict of its own: give the optimizer that it wraps"
        )


def _renamed(seat: Seat, name: str | None) -> Seat:
    if name is not None:
        seat.name = name
    return seat


class _Model:
    """The model's parameters, by the id of what an optimizer may step."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        reshard(model)
        self.group = group
        self.aliases: dict[str, str] = {}
        self.known: set[str] = set()
        self.names: dict[int, str] = {}
        """id of a parameter that has a name of its own -> the name."""
        self._flat: dict[int, Any] = {}
        self._local: dict[int, tuple[str, Any]] = {}
        self._whole: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        self._replicas = ddp.replicas(model, group)
        if "torch.distributed.fsdp" in sys.modules:
            self._take_flat(model)
        in_flat = set(
            self.known
        )  # between forward and backward, FSDP1 may show views of the whole under these names
        for raw, tensor in named_tensors(model, False, remove_duplicate=False):
            name = clean_name(model, raw)
            if id(tensor) in self._flat or name in in_flat:
                continue
            self.known.add(name)
            self._tensors.setdefault(name, tensor)
            first = self.names.setdefault(id(tensor), name)
            if first != name:
                self.aliases[name] = first
            if not isinstance(
                tensor, nn.Parameter
            ):  # a ShardedTensor: torch's optimizers step its local shards
                self._whole[first] = tensor
                shards = tensor.local_shards()  # type: ignore[attr-defined]
                self._local.update((id(shard.tensor), (first, tensor)) for shard in shards)

    def _take_flat(self, model: nn.Module) -> None:
        from farstep.state.adapters.fsdp1 import flat_parameters

        for flat in flat_parameters(model, self.group):
            self.known.update(flat.layout.names)
            self.known.update(flat.aliases)
            self.aliases |= flat.aliases
            self._flat[id(flat.parameter)] = flat, None
            for name, original in flat.originals.items():
                self._flat[id(original)] = flat, name

    def seats(self, parameter: Tensor, optimizer: Optimizer, number: int, position: int) -> list[Seat]:
        if id(parameter) in self._flat:
            flat, name = self._flat[id(parameter)]
            return flat.seats() if name is None else [flat.seat(name)]
        name = self.names.get(id(parameter))
        if name is None and id(parameter) in self._local:
            return self._of_sharded_tensor(parameter)
        if name is None:
            raise StateError(
                f"parameter {position} of group {number} of {type(optimizer).__name__}, of shape {tuple(parameter.shape)}, is none of the "
                f"model's: give the model that the optimizer steps. Wrapping a model (fully_shard, FullyShardedDataParallel, moving to another device) may put other "
                f"parameters in their place, so make the optimizer after that"
            )
        holders = self._replicas.get(id(parameter))
        if holders is not None:
            return [_of_tensor(name, parameter, plain.replicated(parameter, holders, self.group, name))]
        if type(parameter) is nn.Parameter or type(parameter.data) is Tensor:
            return [_of_tensor(name, parameter, shards_of(parameter, self.group, name=name))]
        return [_of_dtensor(name, parameter, self.group)]

    def _of_sharded_tensor(self, parameter: Tensor) -> list[Seat]:
        """All local shards make one seat, which comes with the first."""
        name, whole = self._local[id(parameter)]
        return [self._pieces(name, whole)] if whole.local_shards()[0].tensor is parameter else []

    def seat_elsewhere(self, name: str) -> Seat | None:
        seat: Seat | None = None
        for flat, own in self._flat.values():
            if own == name:
                seat = flat.seat(name)
        tensor = self._tensors.get(name)
        if tensor is not None and hasattr(tensor, "placements"):
            seat = _of_dtensor(name, tensor, self.group)
        if seat is None or own_rank(self.group) in seat.spread.ranks:
            return None
        return seat.left_out()

    def elsewhere(self) -> dict[str, Seat]:
        """ShardedTensors of which this rank has nothing: its optimizer does not know them, and others' do."""
        return {
            name: self._pieces(name, whole) for name, whole in self._whole.items() if not whole.local_shards()
        }

    def _pieces(self, name: str, whole: Any) -> Seat:
        shards = [each.tensor for each in whole.local_shards()]
        return Seat(
            name,
            shards,
            shards_of(whole, self.group, name=name).spread,
            [shard.shape for shard in shards],
            lambda values: [value.detach() for value in values if value.numel()],
            requires_grad=True,
        )


def _of_tensor(name: str, parameter: Tensor, shards: Shards) -> Seat:
    """A plain tensor, whole on each rank that has it."""

    def fresh(_: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)

    return Seat(
        name,
        [parameter],
        shards.spread,
        [parameter.shape],
        lambda values: [value.detach() for value in values],
        requires_grad=parameter.requires_grad,
        fresh=fresh,
    )


def _of_dtensor(name: str, parameter: Tensor, group: Group) -> Seat:
    """A DTensor, whose state is DTensors."""
    own = shards_of(parameter, group, name=name)
    placed = _placing(parameter)

    def views(values: Sequence[Tensor]) -> list[Tensor]:
        if len(own.tensors) < 2 and all(_placing(value) == placed for value in values):
            return [local for value in values for local in local_tensors(value)[: len(own.tensors)]]
        return [view for value in values for view in shards_of(value, group, name=name).tensors]

    def fresh(_: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        (local,) = local_tensors(parameter)
        made = torch.empty_like(local, dtype=dtype, device=device)
        return like(parameter, [made], dtype=dtype)  # type: ignore[no-any-return]

    return Seat(
        name,
        [parameter],
        own.spread,
        [parameter.shape],
        views,
        requires_grad=parameter.requires_grad,
        is_dtensor=True,
        form=lambda values, dtype: values[0].detach(),
        fresh=fresh,
    )


def _placing(value: Any) -> tuple[Any, ...]:
    """DTensors that are alike in this have the same boxes."""
    return value.device_mesh, value.placements, value.shape, value.to_local().shape
