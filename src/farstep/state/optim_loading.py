"""A state, however it was spread when it was saved, put into an optimizer as that has its parameters now; or nothing is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.adapters import like, local_tensors
from farstep.state.adapters.ranks import Group, own_rank, size_of
from farstep.state.adapters.values import replicated
from farstep.state.council import agree
from farstep.state.fresh import FreshObjects
from farstep.state.known import is_extra, is_torchs
from farstep.state.layout import Spread
from farstep.state.optim_adopting import as_its_class_has_it, dtype_for, number_for
from farstep.state.optim_elsewhere import complete
from farstep.state.optim_entries import Number, copied, label, union
from farstep.state.optim_forms import MATCHED_BY_ORDER, are_numbers, numbers_named
from farstep.state.optim_given import Entry, Given, Owned, Whole, given_to
from farstep.state.optim_misfits import check_kind, known_entries, odd_classes
from farstep.state.optim_moving import Options, moved
from farstep.state.optim_names import Rename, Translation
from farstep.state.optim_options import check_names, options_for, stepper_of
from farstep.state.optim_pieces import ADVICE_FOR_EXTRA, KeyCheck
from farstep.state.optim_profile import Profile
from farstep.state.optim_roster import Optimizers, Roster, Seated, SeatGroup, roster_of
from farstep.state.optim_seats import Seat, retyped
from farstep.state.optim_selection import EVERYTHING, Selection
from farstep.state.shards import Shards
from farstep.state.stateful import Load, has_stateful, loads_into

__all__ = ["Loading", "load"]


def load(
    model: nn.Module,
    optim: Optimizers,
    state: Any,
    *,
    strict: bool,
    broadcast_from_rank0: bool,
    options: Options,
    rename: Rename = None,
    error: Exception | None = None,
    selection: Selection = EVERYTHING,
    is_complete: bool = False,
    with_empty: bool = False,
) -> bool:
    """Returns whether the state has groups. `error` is what keeps this rank from it: then all raise.

    `is_complete`: in a state without groups, parameters that are not there had no state.
    `with_empty` is that of `Loading`.
    """
    doing = "loading the optimizer's state"
    error = error or options.mistake()
    profile = Profile(options.profile if error is None else None)
    roster, by_order = Roster([], {}, set()), False
    with profile.phase("plan"):
        if error is None:
            try:
                roster = roster_of(model, optim, options.group)
                selection.narrow(model, roster)
                if own_rank(options.group) == 0 or not broadcast_from_rank0:
                    named = numbers_named(state, roster.order, roster.check_is_whole)
                    by_order, state = are_numbers(state, named), named
            except Exception as exc:
                error = exc
        settings = {"strict": strict, "budget_bytes": options.budget_bytes}
        complete(
            roster, error, options.group, doing, {"broadcast_from_rank0": broadcast_from_rank0, **settings}
        )
        names = Translation(roster, rename)
        given = given_to(
            state,
            names,
            broadcast_from_rank0,
            None,
            options.group,
            doing,
            is_known=names.is_known,
            settings=settings,
        )
        loading = Loading(roster, given, options.group, with_empty=with_empty, by_order=by_order)
        try:
            loading.prepare(strict, is_complete=is_complete)
        except Exception as exc:
            error = exc
    error = moved(loading.sources, loading.targets, error, options, profile, doing, cast=loading.cast)
    with profile.phase("copy"):
        if error is None:
            try:
                loading.finish()
            except Exception as exc:
                error = exc
        agree(error, options.group, doing)
        loading.commit()
    return given.groups is not None


@dataclass
class _Slot:
    """A key of the optimizer's state, and the parameters that lie in it: several in a flat parameter, else one."""

    key: Tensor
    group: SeatGroup
    members: list[tuple[Seat, int]]
    """Each with the number that the key has among the seat's."""
    is_kept: bool = False
    leaves_meta: bool = True
    """Whether state on the meta device stays there; else it is made anew, beside the parameter."""
    state: dict[str, Any] = field(default_factory=dict)
    """What it gets."""

    @property
    def old(self) -> Mapping[str, Any]:
        state = self.group.optimizer.state.get(self.key) or {}
        if self.leaves_meta:
            return state
        return {key: v for key, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}

    @property
    def stepper(self) -> Optimizer:
        return stepper_of(self.group.optimizer)

    @property
    def names(self) -> str:
        return ", ".join(repr(seat.name) for seat, _ in self.members)


class Loading:
    def __init__(
        self,
        roster: Roster,
        given: Given,
        group: Group,
        *,
        in_place: bool = False,
        with_empty: bool = False,
        by_order: bool = False,
    ) -> None:
        """`in_place`: into the memory of the state that the optimizer has now, where that is
        alike and has memory. It does not survive a failure then.

        `with_empty`: also make state for empty tensors that get no gradients, as an optimizer
        does that makes all of its state at once.

        `by_order`: the state had numbers, and got its names by the order of the parameters.
        """
        self._roster, self._given, self._in_place = roster, given, in_place
        self._with_empty, self._by_order = with_empty, by_order
        self._rank, self._ranks = own_rank(group), size_of(group)
        self._slots = list(_slots(roster))
        for slot in self._slots:
            slot.leaves_meta = not in_place
        self._options: list[dict[str, Any]] = []
        self.left_out: dict[str, None] = {}
        """Pieces of state and options that are not loaded, if not strict: `state.0.weight.ema`,
        `param_groups.1.betas`. Parameters that the optimizer lacks are not among them.
        """
        self.cast: set[str] = set()
        """Targets that have another dtype than what is to come."""
        self._pieces: dict[tuple[str, str], dict[int, Tensor]] = {}
        """Of a parameter that has several keys: new memory for each."""
        self.sources: dict[str, Shards] = {}
        self.targets: dict[str, Shards] = {}
        self._ready: list[tuple[Optimizer, dict[Tensor, Any], list[dict[str, Any]]]] = []
        self._objects: dict[int, FreshObjects] = {}
        self._loads: list[Load] = []
        """Of objects in the state that load themselves."""

    # -- before anything moves ----------------------------------------------------------------------------

    def prepare(self, strict: bool, *, is_complete: bool = False) -> None:
        saved = self._given.groups
        for name in self._roster.left_out:
            self._given.state.pop(name, None)
        home = {name: n for n, group in enumerate(saved or ()) for name in group["params"]}
        present = {**home, **self._given.state}
        if saved is None and is_complete:
            present |= dict.fromkeys(self._roster.seats)
        with_state = {name for name, state in self._given.state.items() if state}
        check_names(self._roster, present, with_state, strict)
        options = [
            options_for(number, group, saved or (), home, strict)
            for number, group in enumerate(self._roster.groups)
        ]
        self._options = [taken for taken, _ in options]
        if not strict:
            for _, left_out in options:
                self.left_out |= dict.fromkeys(f"param_groups.{n}.{key}" for n, key in left_out)
        checks = {
            id(group): KeyCheck(stepper_of(group.optimizer), {**group.options, **options})
            for group, options in zip(self._roster.groups, self._options, strict=True)
        }
        for slot in self._slots:
            if all(seat.name not in present for seat, _ in slot.members):
                slot.is_kept = True
            else:
                self._fill(slot, checks[id(slot.group)], strict)
                if not self._has_state(slot):
                    slot.state = {k: v for k, v in slot.old.items() if is_extra(slot.stepper, k)}
        for seat in self._roster.seats.values():
            entries = self._given.state.get(seat.name)
            if entries and not seat.keys:
                # Its group is on the ranks that have something of it. Groups of one optimizer mostly have the same pieces.
                check = next(iter(checks.values()), None)
                if check is not None and not strict:
                    parameter = torch.empty([1] * len(seat.shape), dtype=seat.spread.dtype)
                    entries = self._known(check, seat, parameter, entries, {})
                for key, entry in entries.items():
                    self._let_pass(seat, key, entry)

    def _has_state(self, slot: _Slot) -> bool:
        """Whether the optimizer keeps state under a key, once it has stepped. What it never steps
        would stay as loaded, and go stale.
        """
        return self._with_empty or any(seat.gets_gradients for seat, _ in slot.members)

    def _let_pass(self, seat: Seat, key: str, entry: Entry) -> None:
        """This rank has nothing of a parameter. It may have been given some of its state, which others want."""
        if isinstance(entry, Owned):
            for rank, source in entry.tensors.items():
                target = Shards.empty(_returned(source, rank), self._rank, None)
                self._send(label(seat.name, key, rank), source, target)
        elif isinstance(entry, Whole):
            source = entry.spread
            if source.shape == seat.shape:
                target = Shards(retyped(seat.spread, source.dtype), [])
                steppers = [stepper_of(optimizer) for optimizer in self._roster.optimizers]
                own = seat.spread.dtype
                if any(dtype_for(each, key, own, source.dtype) != source.dtype for each in steppers):
                    self.cast.add(label(seat.name, key))
            else:
                target = self._everywhere(source, None)
            self._send(label(seat.name, key), source, target)

    def _fill(self, slot: _Slot, check: KeyCheck, strict: bool) -> None:
        states = [self._given.state.get(seat.name) or {} for seat, _ in slot.members]
        keys = union(states)
        if not keys:
            return
        if strict:
            # A rank without state does not know of extra pieces. Those that have some do.
            old = slot.old.keys() if self._has_state(slot) else keys
            check(slot.members[0][0].name, slot.key, dict.fromkeys(keys), old)
        else:
            states = [
                self._known(check, seat, slot.key, state, slot.old) if state else state
                for (seat, _), state in zip(slot.members, states, strict=True)
            ]
            left_out = [key for key in keys if is_extra(slot.stepper, key) and key in slot.old]
            keys = union(states)
            slot.is_kept = not keys  # of another class's state nothing is left
            slot.state = {key: slot.old[key] for key in left_out if key not in keys}
        without = [seat.name for (seat, _), state in zip(slot.members, states, strict=True) if not state]
        if without and strict:
            raise StateMismatch(
                f"{', '.join(map(repr, without))} has no state in what was given, and lies in one flat parameter with others that have; nothing "
                f"has been loaded. Wrap the model with use_orig_params=True; or strict=False keeps what is there of it, else zeros"
            )
        for key in keys:
            entries = [state.get(key) for state in states]
            for (seat, _), state, entry in zip(slot.members, states, entries, strict=True):
                if state and entry is None:
                    raise StateMismatch(
                        f"parameter {seat.name!r} has no state {key!r}, and others in its flat parameter have; nothing has been loaded"
                    )
            for (seat, _), entry in zip(slot.members, entries, strict=True):
                if entry is not None:
                    check_kind(slot.stepper, slot.key, seat, key, entry)
            slot.state[key] = self._value(slot, key, entries)

    def _known(
        self,
        check: KeyCheck,
        seat: Seat,
        parameter: Tensor,
        entries: Mapping[str, Entry],
        old: Mapping[str, Any],
    ) -> dict[str, Entry]:
        """The entries that can be loaded. Ranks that exchange them must agree on which, so `old` counts only `in_place`."""
        known = known_entries(check, seat, parameter, entries, old if self._in_place else {})
        left_out = [key for key in entries if key not in known]
        self.left_out |= dict.fromkeys(f"state.{seat.name}.{key}" for key in left_out)
        return known

    def _value(self, slot: _Slot, key: str, entries: Sequence[Entry | None]) -> Any:
        known = [entry for entry in entries if entry is not None]
        kinds = {
            self._kind(seat, e) for (seat, _), e in zip(slot.members, entries, strict=True) if e is not None
        }
        first = known[0]
        if len(kinds) > 1:
            raise StateMismatch(
                f"the state {key!r} of {slot.names}, which lie in one flat parameter, is a number or of another shape for some only; nothing has "
                f"been loaded"
            )
        if kinds == {"shaped"}:
            return self._shaped(slot, key, entries)
        if isinstance(first, Number):
            for (seat, _), entry in zip(slot.members, entries, strict=True):
                if entry is not None and entry != first:
                    raise StateMismatch(
                        f"the state {key!r} is {entry} for {seat.name!r} and {first} for others in its flat parameter, which has one for all; "
                        f"nothing has been loaded. use_orig_params=True keeps them apart"
                    )
            old = slot.old.get(key)
            objects = old if slot.old else self._fresh(slot, {key: first.value}).get(key)
            if has_stateful(objects):
                value, loads = loads_into(objects, first.value, f"the state {key!r} of {slot.names}")
                self._loads += loads
                return value
            return number_for(slot.key, slot.members[0][0], slot.group.options, old, key, first)
        if isinstance(first, Owned):
            return self._owned(slot, key, [entry for entry in entries if isinstance(entry, Owned)])
        assert isinstance(first, Whole)
        return self._odd(slot, key, first)

    def _fresh(self, slot: _Slot, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Objects that load themselves, of a parameter that has no state yet."""
        optimizer = slot.group.optimizer
        if isinstance(optimizer, Seated):
            return {}
        return self._objects.setdefault(id(optimizer), FreshObjects(optimizer)).of(slot.key, saved)

    def _kind(self, seat: Seat, entry: Entry) -> str:
        if isinstance(entry, Whole):
            return "shaped" if entry.spread.shape == seat.shape else f"odd {entry.spread.shape}"
        return type(entry).__name__

    def _shaped(self, slot: _Slot, key: str, entries: Sequence[Entry | None]) -> Tensor:
        spreads = [entry.spread for entry in entries if isinstance(entry, Whole)]
        dtype = spreads[0].dtype
        if any(spread.dtype != dtype for spread in spreads):
            raise StateMismatch(
                f"the state {key!r} of {slot.names} has several dtypes, and they lie in one flat parameter; nothing has been loaded"
            )
        old = slot.old.get(key)
        device = old.device if isinstance(old, Tensor) else None
        seat, number = slot.members[0]
        wanted = dtype_for(stepper_of(slot.group.optimizer), key, slot.key.dtype, dtype)
        if self._in_place and isinstance(old, Tensor) and old.dtype == wanted and seat.is_like(number, old):
            made = old
        else:
            made = seat.fresh(number, wanted, device)
        for (seat, number), entry in zip(slot.members, entries, strict=True):
            if isinstance(entry, Whole):
                pieces = self._pieces.setdefault((seat.name, key), {})
                pieces[number] = made
                if len(pieces) == len(seat.keys):
                    target = seat.shards([pieces[n] for n in range(len(pieces))], dtype)
                    self._send(label(seat.name, key), entry.spread, target)
                    if wanted != dtype:
                        self.cast.add(label(seat.name, key))
            elif isinstance(old, Tensor) and seat.is_like(number, old):
                for view, before in zip(seat.views([made]), seat.views([old]), strict=True):
                    view.copy_(before)
        return made

    def _odd(self, slot: _Slot, key: str, entry: Whole) -> Tensor:
        """The same on every rank, as it was saved."""
        seat, _ = slot.members[0]
        shape, old = entry.spread.shape, slot.old.get(key)
        self._check_odd(slot, seat, key, shape, old)
        device = old.device if isinstance(old, Tensor) else slot.key.device
        target = self._everywhere(entry.spread, device)
        self._send(label(seat.name, key), entry.spread, target)
        (made,) = target.tensors
        if isinstance(old, Tensor) and hasattr(old, "placements"):
            return like(old, [made])  # type: ignore[no-any-return]
        if hasattr(slot.key, "placements") and is_torchs(stepper_of(slot.group.optimizer)):
            return replicated(slot.key, made)
        return made

    def _everywhere(self, source: Spread, device: torch.device | None) -> Shards:
        spread = Spread.whole(source.shape, source.dtype, range(self._ranks))
        return Shards.empty(spread, self._rank, device)

    def _check_odd(self, slot: _Slot, seat: Seat, key: str, shape: tuple[int, ...], old: Any) -> None:
        stepper = stepper_of(slot.group.optimizer)
        if isinstance(old, Tensor):
            fits = tuple(old.shape) == shape or (
                hasattr(old, "to_local") and tuple(old.to_local().shape) == shape
            )
        elif is_extra(stepper, key):
            fits = not self._has_state(slot)  # then the ranks that step it decide
        elif is_torchs(stepper) and not isinstance(stepper, odd_classes()):
            fits = False
        else:
            # A sibling of the parameter's shape shows that it was this parameter; so does what broadcasts to it, if that is here whole.
            state = self._given.state[seat.name].values()
            siblings = [e for e in state if isinstance(e, Whole) and e.spread.shape == seat.shape]
            rows = len(shape) == len(seat.shape) and all(
                a in (1, b) for a, b in zip(shape, seat.shape, strict=True)
            )
            # Other classes may keep only blocks or tables of any length; not what has as many dimensions and other sizes.
            blocks = not is_torchs(stepper) and not 1 < len(shape) == len(seat.shape)
            fits = bool(siblings) or rows or blocks or isinstance(stepper, torch.optim.LBFGS)
            if is_torchs(stepper) and fits:
                fits = tuple(slot.members[0][0].local_shapes[0]) == seat.shape
        if not fits:
            raise StateMismatch(
                f"the state {key!r} of parameter {seat.name!r} has shape {shape}, which does not fit the parameter's, {seat.shape}"
                + (f", nor what the optimizer has now, {tuple(old.shape)}" if isinstance(old, Tensor) else "")
                + "; nothing has been loaded"
                + (ADVICE_FOR_EXTRA.format(key=key) if old is None and is_extra(stepper, key) else "")
                + (MATCHED_BY_ORDER if self._by_order else "")
            )

    def _owned(self, slot: _Slot, key: str, entries: Sequence[Owned]) -> Tensor:
        """Only where the parameter is spread as it was: nobody knows how such a state is cut."""
        for (seat, _), entry in zip(slot.members, entries, strict=True):
            if retyped(entry.spread, seat.spread.dtype) != seat.spread:
                raise StateMismatch(
                    f"the state {key!r} of parameter {seat.name!r} is not shaped like it and differs between the ranks that saved it, so it belongs to "
                    f"their parts of the parameter: it loads only where the parameter is spread as it was, {entry.spread!r}, and here it is "
                    f"{seat.spread!r}; nothing has been loaded"
                )
        (seat, _), entry = slot.members[0], entries[0]
        made = torch.empty(0)
        for rank in sorted({*seat.spread.ranks.tolist(), *entry.tensors}):
            if rank not in entry.tensors:
                raise StateMismatch(
                    f"nobody was given {label(seat.name, key, rank)}; nothing has been loaded. Give every rank the part that it saved"
                )
            source = entry.tensors[rank]
            here = []
            if rank == self._rank:
                made = torch.empty(source.shape, dtype=source.dtype, device=slot.key.device)
                here = [made]
            self._send(label(seat.name, key, rank), source, Shards(_returned(source, rank), here))
        old = slot.old.get(key)
        if isinstance(old, Tensor) and hasattr(old, "placements"):
            (local,) = local_tensors(old)
            if local.shape != made.shape:
                raise StateMismatch(
                    f"{label(seat.name, key)} has shape {tuple(made.shape)} for this rank, and the optimizer has {tuple(local.shape)}; nothing has been "
                    f"loaded"
                )
            return like(old, [made], dtype=made.dtype)  # type: ignore[no-any-return]
        return made

    def _send(self, text: str, source: Spread, target: Shards) -> None:
        self.sources[text] = Shards(source, self._given.tensors.get(text, []))
        self.targets[text] = target

    # -- after --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What can fail when all tensors are there."""
        groups = iter(zip(self._roster.groups, self._options, strict=True))
        by_group: dict[int, list[_Slot]] = defaultdict(list)
        for slot in self._slots:
            by_group[id(slot.group)].append(slot)
        for optimizer in self._roster.optimizers:
            state: dict[Tensor, Any] = {}
            param_groups = []
            for _ in optimizer.param_groups:
                group, options = next(groups)
                slots = by_group[id(group)]
                for slot in slots:
                    state[slot.key] = dict(slot.old) if slot.is_kept else slot.state
                new = {key: copied(value) for key, value in options.items()}
                param_groups.append({**group.options, **new, "params": [slot.key for slot in slots]})
            self._ready.append((optimizer, *as_its_class_has_it(optimizer, state, param_groups)))

    def commit(self) -> None:
        """Nothing here fails."""
        for load_object in self._loads:
            load_object()
        for optimizer, state, groups in self._ready:
            for slot in self._slots:
                if slot.group.optimizer is optimizer and not slot.is_kept:
                    optimizer.state.pop(slot.key, None)
                    if state.get(slot.key):
                        optimizer.state[slot.key] = state[slot.key]
            for group, new in zip(optimizer.param_groups, groups, strict=True):
                group.update(
                    {key: value for key, value in new.items() if key not in ("params", "param_names")}
                )
            if isinstance(optimizer, Seated):
                optimizer.optim_state_loaded()


def _slots(roster: Roster) -> Iterator[_Slot]:
    for group in roster.groups:
        found: dict[int, _Slot] = {}
        for seat in group.seats:
            for number, key in enumerate(seat.keys):
                found.setdefault(id(key), _Slot(key, group, [])).members.append((seat, number))
        yield from found.values()


def _returned(source: Spread, rank: int) -> Spread:
    """A tensor that goes to the rank it was saved by."""
    return Spread.whole(source.shape, source.dtype, [rank])
