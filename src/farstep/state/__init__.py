"""Named tensors spread over ranks, and how to respread them.

A `Layout` says which rank holds which boxes of which tensor; `plan` lists the copies from one layout to another; `exchange` makes them.
"""

from typing import TYPE_CHECKING

from farstep._lazy import import_when_used

if TYPE_CHECKING:
    from farstep.state.adapters import layout_of, like, local_tensors, named_shards, on_rank, shards_of
    from farstep.state.box import Box, flat_boxes, missing
    from farstep.state.exchange import exchange, respread
    from farstep.state.flat import FlatLayout
    from farstep.state.flatten import flatten, flatten_shard, flatten_state, unflatten, unflatten_state
    from farstep.state.layout import Layout, Spread
    from farstep.state.optim_entries import RankOwned
    from farstep.state.optim_state import load_optim_state_dict, optim_state_dict
    from farstep.state.reshard import Copy, Plan, plan
    from farstep.state.shards import Shards
else:
    import_when_used(
        __name__,
        {
            "adapters": "layout_of like local_tensors named_shards on_rank shards_of",
            "box": "Box flat_boxes missing",
            "exchange": "exchange respread",
            "flat": "FlatLayout",
            "flatten": "flatten flatten_shard flatten_state unflatten unflatten_state",
            "layout": "Layout Spread",
            "optim_entries": "RankOwned",
            "optim_state": "load_optim_state_dict optim_state_dict",
            "reshard": "Copy Plan plan",
            "shards": "Shards",
        },
    )

__all__ = [
    "Box",
    "Copy",
    "FlatLayout",
    "Layout",
    "Plan",
    "RankOwned",
    "Shards",
    "Spread",
    "exchange",
    "flat_boxes",
    "flatten",
    "flatten_shard",
    "flatten_state",
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
    "unflatten",
    "unflatten_state",
]
