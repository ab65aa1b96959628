"""What is known of torch's own optimizer classes."""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["NUMBERS", "OF_SCHEDULES", "is_torchs"]

NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What they keep as a tensor of one number; all else has the parameter's shape."""
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""What torch's schedulers keep in groups."""


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch's own, of which is known what they do."""
    return type(optimizer).__module__.startswith("torch.optim")
