"""Named tensors spread over ranks, and how to respread them.

A `Layout` says which rank holds which boxes of which tensor; `plan` lists the copies from one layout to another; `exchange` makes them.
"""

from farstep.state.box import Box, flat_boxes
from farstep.state.layout import Layout, Spread

__all__ = ["Box", "Layout", "Spread", "flat_boxes"]
