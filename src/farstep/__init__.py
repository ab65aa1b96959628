"""farstep: training in several processes, on top of PyTorch."""

from farstep._version import __version__

__all__ = ["__version__"]
