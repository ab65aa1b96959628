"""farstep: PyTorch models whose parts live in different processes and machines."""

from farstep._version import __version__

__all__ = ["__version__"]
