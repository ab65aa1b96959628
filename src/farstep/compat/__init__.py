"""Puts farstep where torch.distributed.rpc is imported from.

    import farstep.compat
    farstep.compat.install()          # before or after the modules that use torch's RPC are imported

or, for a script that shall not be edited, `python -m farstep.compat script.py args…`.
"""

from farstep.compat._install import install

__all__ = ["install"]
