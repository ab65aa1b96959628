"""NamedOptimizer: any optimizer, with state and groups by the names of parameters. Torch's arguments, and what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farstep.optim import fast
from farstep.optim.names import group_of, named, without_ties
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
        _check(named_parameters, optimizer_class, param_groups)
        params = named(named_parameters, "named_parameters")
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


def _check(named_parameters: Any, optimizer_class: Any, param_groups: Any) -> None:
    """Arguments that stand in another's place."""
    if isinstance(named_parameters, type):
        raise TypeError(
            f"parameters first, then the class: NamedOptimizer(module.named_parameters(), {named_parameters.__name__}, ...)"
        )
    if isinstance(optimizer_class, Optimizer):
        kind = type(optimizer_class)
        name = f"torch.optim.{kind.__name__}" if fast.is_torchs(optimizer_class) else kind.__name__
        raise TypeError(f"this is an optimizer already: give the class, {name}, and its arguments")
    if not callable(optimizer_class):
        raise TypeError(
            f"the second argument is a class of optimizers, as torch.optim.AdamW, not a {type(optimizer_class).__name__}"
        )
    if param_groups is not None and (
        not isinstance(param_groups, Iterable) or isinstance(param_groups, str | Mapping | torch.Tensor)
    ):
        raise TypeError(
            f"the third argument is param_groups, a list of dicts, not a {type(param_groups).__name__}; "
            f"options are given by name: lr=0.1"
        )
