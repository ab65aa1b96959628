"""Which of the parameters that an optimizer steps are read or loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from farstep.state.adapters.names import clean_name
from farstep.state.optim_roster import Roster
from farstep.state.optim_seats import Seat

__all__ = ["EVERYTHING", "Selection"]


@dataclass(frozen=True, slots=True)
class Selection:
    """`submodules`: only parameters inside these modules of the model; None for all. `ignore_frozen_params`: only trained ones."""

    submodules: Collection[nn.Module] | None = None
    ignore_frozen_params: bool = False

    def narrow(self, model: nn.Module, roster: Roster) -> None:
        """Drop the other parameters. Raises TypeError or ValueError where a submodule is not one of the model's."""
        if self.submodules is None and not self.ignore_frozen_params:
            return
        prefixes = None if self.submodules is None else _prefixes(model, self.submodules)

        def is_selected(seat: Seat) -> bool:
            if self.ignore_frozen_params and not seat.requires_grad:
                return False
            names = [seat.name, *(alias for alias, name in roster.aliases.items() if name == seat.name)]
            return prefixes is None or any(name.startswith(tuple(prefixes)) for name in names)

        roster.narrow(is_selected)


EVERYTHING = Selection()


def _prefixes(model: nn.Module, submodules: Collection[nn.Module]) -> list[str]:
    """What the names of their parameters begin with."""
    if isinstance(submodules, nn.Module) or not all(isinstance(each, nn.Module) for each in submodules):
        raise TypeError("submodules is a set or list of modules of the model")
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # The name of something inside, so that a wrapper's own part goes too.
        inside = f"{path}.0" if path else "0"
        paths.setdefault(id(module), []).append(clean_name(model, inside)[:-1])
    for each in submodules:
        if id(each) not in paths:
            raise ValueError(
                f"submodules has a {type(each).__name__} that is not a module of this model: give modules that the model has now, "
                f"after it was wrapped"
            )
    return [prefix for each in submodules for prefix in paths[id(each)]]
