"""NamedOptimizer: any optimizer, with state and groups by the names of parameters. Torch's arguments, and what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farstep.optim.names import group_of, without_ties
from farstep.optim.wrapper import KeyedOptimizerWrapper

__all__ = ["NamedOptimizer"]


class NamedOptimizer(KeyedOptimizerWrapper):
    """An optimizer whose state and groups are saved and loaded by the names of its parameters.

    Args:
        named_parameters: name -> parameter, or pairs, as `module.named_parameters()` gives.
        optimizer_class: any `torch.optim.Optimizer` class, or a function that makes one of a list of parameters or groups.
        param_groups: dicts with "params" and options; the parameters are given by name or themselves, and need not be all.
        module: where parameters have several names, as tied ones do, the others are found in it.
        args, kwargs: for `optimizer_class`.

    It trains as the optimizer itself would. State that was saved by another, with other groups, names or a part of the parameters, loads
    or is refused by name (see `load_state_dict`).
    """

    def __init__(
        self,
        named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]],
        optimizer_class: Callable[..., Optimizer],
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        module: nn.Module | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        params = _named(named_parameters)
        if module is not None:
            known = {id(p) for p in params.values()}
            for name, p in module.named_parameters(remove_duplicate=False):
                if id(p) in known:
                    params.setdefault(name, p)
        self.module = module
        own, aliases = without_ties(params)
        groups = (
            None if param_groups is None else [group_of(group, own, aliases)[0] for group in param_groups]
        )
        super().__init__(
            params, lambda every: optimizer_class(every if groups is None else groups, *args, **kwargs)
        )
        self.save_param_groups(True)

    @property
    def named_parameters(self) -> Mapping[str, Any]:
        return self.params

    @property
    def ordered_param_keys(self) -> list[str]:
        """The names in the order of the groups: that of the numbers in an ordinary optimizer's state."""
        return [name for group in self._named_groups() for name in group["param_names"]]


def _named(given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    if isinstance(given, nn.Module):
        raise TypeError(
            "named_parameters is a mapping or pairs, not a module: give module.named_parameters()"
        )
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    named: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(
                "named_parameters is a mapping of names to parameters, or pairs, as module.named_parameters() gives"
            )
        name, parameter = pair
        if named.setdefault(name, parameter) is not parameter:
            raise ValueError(
                f"two parameters have the name {name!r}. Names must differ, since the state is saved by name"
            )
    return named
