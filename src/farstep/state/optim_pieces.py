"""Which pieces of state the class of an optimizer has, and whether what was saved can be one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.first_step import State, needed_keys
from farstep.state.known import NUMBERS, PIECES, is_extra, is_torchs

__all__ = ["ADVICE_FOR_EXTRA", "KeyCheck", "is_known", "misfit_of_kind", "refuse_keys"]


ADVICE_FOR_EXTRA = (
    ". If {key!r} is a piece of your own beside those of the class, make it before the load: "
    "optimizer.state[p][{key!r}] = ..."
)


class KeyCheck:
    """Whether the pieces of state are those which the class of a group's optimizer has. Asks the
    class once for each kind of parameter.

    A user may keep extra pieces beside those of torch's classes (`optimizer.state[p]["ema"]`).
    They load into an optimizer that has them; and into one that has
    not, if the class's own pieces are there too and none of torch's classes has a piece of that
    name: else the state is another class's.
    """

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self._options = options
        self._needed: dict[Any, frozenset[str] | None] = {}

    def __call__(self, name: str, parameter: torch.Tensor, state: State, old: Collection[str] = ()) -> None:
        """Raise StateMismatch for pieces that are missing or another class's. `old` are those
        that the optimizer has of the parameter now.
        """
        known = self._known_of(parameter)
        if known is not None:
            needed, more = known
            never_stepped = state.keys() == set(old) and not needed & state.keys()
            refuse_keys(
                name,
                () if never_stepped else needed - state.keys(),
                state.keys() - needed - more - set(old) - self._extra(state, needed | more),
                may_be_extra=True,
            )

    def known(self, name: str, parameter: torch.Tensor, state: State) -> State:
        """The pieces that the class knows, and extra ones. Those that it cannot step without must
        be there all the same.

        It does not matter what the optimizer has now: ranks that hold none of a parameter come to
        the same result.
        """
        known = self._known_of(parameter)
        if known is None:
            return state
        needed, more = known
        refuse_keys(name, needed - state.keys(), ())
        kept = needed | more | self._extra(state, needed | more)
        return {key: value for key, value in state.items() if key in kept}

    @staticmethod
    def _extra(state: State, own: frozenset[str]) -> frozenset[str]:
        return frozenset(state.keys() - PIECES) if own & state.keys() else frozenset()

    def _known_of(self, parameter: torch.Tensor) -> tuple[frozenset[str], frozenset[str]] | None:
        """What it cannot step without, and what it may have beside that. None where nobody knows."""
        if type(self.optimizer) is torch.optim.SGD:
            return frozenset(), frozenset(
                {"momentum_buffer"}
            )  # made late, and kept when it is no longer used
        needed = self._needed_by(parameter)
        return None if needed is None else (needed, frozenset())

    def _needed_by(self, parameter: torch.Tensor) -> frozenset[str] | None:
        kind = parameter.dim(), parameter.dtype, parameter.device
        if kind not in self._needed:
            self._needed[kind] = needed_keys(self.optimizer, self._options, parameter)
        return self._needed[kind]


def refuse_keys(
    name: str, missing: Iterable[str], unexpected: Collection[str], *, may_be_extra: bool = False
) -> None:
    """Raise StateMismatch if there are any. `may_be_extra`: where the optimizer has unexpected
    ones already, it would take them.
    """
    found = {"lacks": sorted(missing), "has unexpected": sorted(unexpected)}
    said = [f"{what} {', '.join(map(repr, keys))}" for what, keys in found.items() if keys]
    if said:
        raise StateMismatch(
            f"the state of parameter {name!r} {' and '.join(said)}: it was saved by another optimizer class, or with other options; "
            f"nothing has been loaded"
            + (ADVICE_FOR_EXTRA.format(key=min(unexpected)) if may_be_extra and unexpected else "")
        )


def is_known(optimizer: Optimizer) -> bool:
    """Whether its class's state is known: numbers, and tensors that are shaped like the parameter or its rows."""
    return is_torchs(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def misfit_of_kind(optimizer: Optimizer, key: str, value: Any) -> str | None:
    """What is wrong with a piece of state whatever the parameter is: a number where a tensor is wanted, or the other way."""
    if not is_known(optimizer) or is_extra(optimizer, key):
        return None
    is_tensor = isinstance(value, torch.Tensor)
    if key in NUMBERS:
        is_number = value.numel() == 1 if is_tensor else isinstance(value, Number)
        return None if is_number else f"has shape {tuple(value.shape)}" if is_tensor else f"is {value!r}"
    is_unused = value is None and isinstance(optimizer, torch.optim.SGD)
    return None if is_tensor or is_unused else f"is {value!r}"
