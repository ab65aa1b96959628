"""Optimizer state of FSDP models, with the names and arguments that torch gives its own functions for it.

They work alike on FullyShardedDataParallel, on `fully_shard`, on DDP and on plain models, and warn of nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.optim import Optimizer

from farstep.errors import StateMismatch
from farstep.state.rekey import OptimInput, parameter_groups, to_names, to_numbers

__all__ = ["OptimStateKeyType", "rekey_optim_state_dict"]


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """A state dict by names (`PARAM_NAME`) or by numbers (`PARAM_ID`), from the other of the two. The same object if it is so already.

    `optim`, or `optim_input`, says which parameter has which number; without them all of `model.parameters()` have, in their order. With one of
    them, groups by number are those of the optimizer, whatever the order in which they were saved.
    Nothing is communicated, and the tensors are those that were given.
    """
    wanted = {OptimStateKeyType.PARAM_NAME: str, OptimStateKeyType.PARAM_ID: int}.get(optim_state_key_type)
    if wanted is None:
        raise ValueError(
            f"optim_state_key_type is OptimStateKeyType.PARAM_NAME or PARAM_ID, not {optim_state_key_type!r}"
        )
    if "state" not in optim_state_dict:
        raise StateMismatch(
            'an optimizer\'s state dict has "state" and "param_groups", and this has no "state"'
        )
    keys = [*optim_state_dict["state"]]
    keys += [key for group in optim_state_dict.get("param_groups", ()) for key in group["params"]]
    kinds = {type(key) for key in keys}
    if not kinds <= {str} and not kinds <= {int}:
        odd = [next(key for key in keys if type(key) is kind) for kind in kinds]
        raise StateMismatch(
            f"parameters have names or numbers in a state dict, and this has both: {', '.join(map(repr, odd))}"
        )
    if kinds <= {wanted}:
        return optim_state_dict
    groups = parameter_groups(model, optim_input, optim)
    if wanted is str:
        return to_names(optim_state_dict, model, groups)
    return to_numbers(optim_state_dict, model, groups, regroup=optim is not None or optim_input is not None)
