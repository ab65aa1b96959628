"""Named tensors spread over ranks, and how to respread them.

A `Layout` says which rank holds which boxes of which tensor; `plan` lists the copies from one layout to another; `exchange` makes them.
"""

from farstep.state.adapters import layout_of, like, local_tensors, named_shards, on_rank, shards_of
from farstep.state.box import Box, flat_boxes, missing
from farstep.state.exchange import exchange, respread
from farstep.state.layout import Layout, Spread
from farstep.state.optim_entries import RankOwned
from farstep.state.optim_state import load_optim_state_dict, optim_state_dict
from farstep.state.reshard import Copy, Plan, plan
from farstep.state.shards import Shards

__all__ = [
    "Box",
    "Copy",
    "Layout",
    "Plan",
    "RankOwned",
    "Shards",
    "Spread",
    "exchange",
    "flat_boxes",
    "layout_of",
    "like",
    "load_optim_state_dict",
    "local_tensors",
    "missing",
    "named_shards",
    "on_rank",
    "optim_state_dict",
    "plan",
    "respread",
    "shards_of",
]
