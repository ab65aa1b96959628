"""The layout of what a user has: plain tensors, DTensors, ShardedTensors, and whole models under DDP, FSDP1 and FSDP2.

One file for each kind, and nowhere else does farstep.state look inside torch.
"""

from farstep.state.adapters.modules import named_shards
from farstep.state.adapters.plain import on_rank
from farstep.state.adapters.values import layout_of, like, local_tensors, part_of, shards_of

__all__ = ["layout_of", "like", "local_tensors", "named_shards", "on_rank", "part_of", "shards_of"]
