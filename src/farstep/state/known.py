"""What is known of torch's own optimizer classes."""

from __future__ import annotations

import inspect
from functools import lru_cache

import torch
from torch.optim import Optimizer

__all__ = ["NUMBERS", "OF_SCHEDULES", "PIECES", "is_extra", "is_torchs", "options_of_torchs"]

NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What they keep as a tensor of one number; all else has the parameter's shape."""
PIECES = NUMBERS | {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "sum", "acc_delta", "ax", "prev", "step_size", "row_var", "col_var",
    "variance", "func_evals", "n_iter", "d", "t", "old_dirs", "old_stps", "ro", "H_diag",
    "prev_flat_grad", "prev_loss", "al",
}  # fmt: skip
"""The names that they have for all pieces of their state. A piece of another name is one that a
user keeps beside them.
"""
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""What torch's schedulers keep in groups."""


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch's own, of which is known what they do."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_extra(optimizer: Optimizer, key: str) -> bool:
    """Whether a piece of state is a user's own, beside those of one of torch's classes."""
    return is_torchs(optimizer) and key not in PIECES


@lru_cache(maxsize=1)
def options_of_torchs() -> frozenset[str]:
    """The options of all of them. What else stands in a group is a label that some user has put there, and no class looks at it."""
    kinds = [
        each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)
    ]
    named = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(named - {"params", "defaults", "args", "kwargs"} | {"decoupled_weight_decay"})
