"""Which of the saved names and options belong to which group here. Groups may have been made otherwise, or stand in another order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.known import OF_SCHEDULES, is_torchs
from farstep.state.optim_entries import union, unlike
from farstep.state.optim_roster import Roster, Seated, SeatGroup
from farstep.state.optim_schema import options_of

__all__ = ["check_names", "options_for", "stepper_of"]


def stepper_of(optimizer: Optimizer) -> Optimizer:
    """Whose class it is that steps."""
    return optimizer.optim_stepper() if isinstance(optimizer, Seated) else optimizer


def check_names(roster: Roster, saved: Collection[str], with_state: Collection[str]) -> None:
    """Raise StateMismatch, which lists them, where a name is in one and not in the other. Frozen parameters may be missing on either side."""
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
        raise StateMismatch(" ".join([*lines, "strict=False loads what fits"]))


def options_for(
    number: int, group: SeatGroup, saved: Sequence[Mapping[str, Any]], home: Mapping[str, int], strict: bool
) -> dict[str, Any]:
    """The saved options of a group's parameters, which may have been in several groups as long as these agree."""
    sources: dict[int, str] = {}
    for name in group.names:
        if name in home:
            sources.setdefault(home[name], name)
    if not sources:
        return {}
    first, *others = sources
    options = options_of(saved[first])
    for other in others:
        theirs = options_of(saved[other])
        differing = [
            key
            for key in union([options, theirs])
            if key not in options or key not in theirs or unlike(options[key], theirs[key])
        ]
        if differing:
            raise StateMismatch(
                f"group {number} has {sources[first]!r} and {sources[other]!r}, which were saved in groups with different "
                f"{', '.join(differing)}; nothing has been loaded. Put them in groups of their own, or make the options in the state agree"
            )
    stepper = stepper_of(group.optimizer)
    if is_torchs(stepper):
        known = {*stepper.defaults, *group.options, *OF_SCHEDULES}
        foreign = [key for key in options if key not in known]
        if foreign and strict:
            raise StateMismatch(
                f"the state has the options {', '.join(foreign)}, which {type(stepper).__name__} does not have: it was saved by another "
                f"optimizer class, or another version of it. Nothing has been loaded. strict=False leaves them out"
            )
        options = {key: value for key, value in options.items() if key not in foreign}
    return options
