"""Which optimizer classes can work on a part of a parameter."""

from __future__ import annotations

import torch

__all__ = ["ELEMENTWISE", "NOT_ELEMENTWISE"]

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
"""Classes of torch's that treat every element by itself, so that a part of a parameter can be updated without the rest."""
NOT_ELEMENTWISE = frozenset(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon") if hasattr(torch.optim, name)
)
"""Classes of torch's that cannot: they look at rows, at matrices, or at all parameters together."""
