"""Tools for checkpoints: what `farstep checkpoint` does, as functions."""

from farstep.checkpoint.tools.comparing import Diff, TensorDiff, ValueDiff, diff
from farstep.checkpoint.tools.resharding import reshard
from farstep.checkpoint.tools.verifying import Damage, verify

__all__ = ["Damage", "Diff", "TensorDiff", "ValueDiff", "diff", "reshard", "verify"]
