"""Which of the saved names and options belong to which group here. Groups may have been made otherwise, or stand in another order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.known import OF_SCHEDULES, is_torchs, options_of_torchs
from farstep.state.optim_entries import union
from farstep.state.optim_roster import Roster, Seated, SeatGroup
from farstep.state.optim_schema import options_of
from farstep.state.same import same

__all__ = ["check_names", "options_for", "stepper_of"]


def stepper_of(optimizer: Optimizer) -> Optimizer:
    """Whose class it is that steps."""
    return optimizer.optim_stepper() if isinstance(optimizer, Seated) else optimizer


def check_names(roster: Roster, saved: Collection[str], with_state: Collection[str], strict: bool) -> None:
    """Raise StateMismatch, which lists them, where a name is in one and not in the other. Frozen parameters may be missing on either side.

    If not `strict`, some names are to be in both.
    """
    if not strict:
        if saved and roster.seats and not any(name in roster.seats for name in saved):
            raise StateMismatch(
                f"no name of the state is one of the optimizer's parameters, so that nothing would be loaded: the state has {_some(saved)}, and the optimizer "
                f"{_some(roster.seats)}. rename= says how they correspond"
            )
        return
    missing = [name for name in roster.homes if name not in saved and roster.seats[name].requires_grad]
    unexpected = [
        name
        for name in saved
        if name not in roster.seats and not (name in roster.known and name not in with_state)
    ]
    if missing or unexpected:
        lines = ["the state does not fit the optimizer's parameters, and nothing has been loaded."]
        if missing:
            lines.append(f"Missing in the state: {', '.join(missing)}.")
        if unexpected:
            lines.append(f"Unexpected in the state: {', '.join(unexpected)}.")
        raise StateMismatch(
            " ".join(
                [
                    *lines,
                    "strict=False loads what fits; rename= gives parameters the names that they have here",
                ]
            )
        )


def _some(names: Collection[str]) -> str:
    return ", ".join(map(repr, list(names)[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def options_for(
    number: int, group: SeatGroup, saved: Sequence[Mapping[str, Any]], home: Mapping[str, int], strict: bool
) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """The saved options of a group's parameters, which may have been in several groups as long as these agree.

    Also returns those that are left out, each with the number of its saved group.

    Labels that users put into groups of torch's own classes need not agree; where they do not, the group keeps its own. So it is with
    all options if not `strict`.
    """
    sources: dict[int, str] = {}
    for name in group.names:
        if name in home:
            sources.setdefault(home[name], name)
    if not sources:
        return {}, []
    stepper = stepper_of(group.optimizer)
    first, *others = sources
    options = options_of(saved[first])
    unsettled: list[str] = []
    for other in others:
        theirs = options_of(saved[other])
        differing = [
            key
            for key in union([options, theirs])
            if key not in options or key not in theirs or not same(options[key], theirs[key])
        ]
        refused = [key for key in differing if strict and not _is_label(stepper, key)]
        if refused:
            raise StateMismatch(
                f"group {number} has {sources[first]!r} and {sources[other]!r}, which were saved in groups with different "
                f"{', '.join(refused)}; nothing has been loaded. Put them in groups of their own, or make the options in the state agree; "
                f"strict=False keeps those that the group has"
            )
        unsettled += differing
    foreign: list[str] = []
    options = {key: value for key, value in options.items() if key not in unsettled}
    if is_torchs(stepper):
        known = {*stepper.defaults, *group.options, *OF_SCHEDULES}
        foreign = [key for key in options if key not in known and not _is_label(stepper, key)]
        if foreign and strict:
            raise StateMismatch(
                f"the state has the options {', '.join(foreign)}, which {type(stepper).__name__} does not have: it was saved by another "
                f"optimizer class, or another version of it. Nothing has been loaded. strict=False leaves them out"
            )
        options = {key: value for key, value in options.items() if key not in foreign}
    left_out = {*unsettled, *foreign}
    return options, [(n, key) for n in sources for key in options_of(saved[n]) if key in left_out]


def _is_label(optimizer: Optimizer, key: str) -> bool:
    return is_torchs(optimizer) and key not in {*optimizer.defaults, *OF_SCHEDULES, *options_of_torchs()}
