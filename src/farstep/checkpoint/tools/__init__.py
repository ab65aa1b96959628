"""Tools for checkpoints: what `farstep checkpoint` does, as functions."""

from farstep.checkpoint.tools.verifying import Damage, verify

__all__ = ["Damage", "verify"]
