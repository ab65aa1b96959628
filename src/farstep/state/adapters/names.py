"""The names of a model's tensors without those of what it is wrapped in."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["clean_name"]

# FullyShardedDataParallel, torch.compile and checkpoint_wrapper put the model under these. Nobody else has names like them.
_WRAPPED = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}


def clean_name(root: nn.Module, name: str) -> str:
    """`name` as the bare model has it. DistributedDataParallel's `module` goes only where it is that of a wrapper."""
    if "module" not in name and "_orig_mod" not in name:
        return name
    kept = []
    at: object = root
    for part in name.split("."):
        if part not in _WRAPPED and not (part == "module" and isinstance(at, DistributedDataParallel)):
            kept.append(part)
        at = getattr(at, part, None)
    return ".".join(kept)
