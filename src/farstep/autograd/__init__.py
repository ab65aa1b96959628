"""Gradients across workers: one backward pass over a model whose parts live in different processes.

with autograd.context() as context_id:
    loss = rpc.rpc_sync("worker1", forward, args=(x,)).sum()
    autograd.backward(context_id, [loss])
    gradients = autograd.get_gradients(context_id)      # leaf -> gradient; `.grad` is not touched
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from farstep._lazy import import_when_used as _import_when_used
from farstep.autograd import reduced as _reduced
from farstep.autograd.api import (
    _current_context as _current_context,
)
from farstep.autograd.api import (
    _get_debug_info as _get_debug_info,
)
from farstep.autograd.api import (
    _get_max_id as _get_max_id,
)
from farstep.autograd.api import (
    _init as _init,
)
from farstep.autograd.api import (
    _is_valid_context as _is_valid_context,
)
from farstep.autograd.api import (
    _new_context as _new_context,
)
from farstep.autograd.api import (
    _release_context as _release_context,
)
from farstep.autograd.api import (
    _retrieve_context as _retrieve_context,
)
from farstep.autograd.api import (
    backward,
    backward_async,
    backward_of_reference,
    context,
    get_gradients,
    populate_grad,
)
from farstep.autograd.context import Context as DistAutogradContext  # noqa: F401  torch's name for it
from farstep.autograd.link import Link
from farstep.rpc import extension as _extension
from farstep.rpc import rref as _rref

if _TYPE_CHECKING:
    from farstep.autograd.picture import draw, graph
else:
    _import_when_used(__name__, {"picture": "draw graph"})

__all__ = [
    "backward",
    "backward_async",
    "context",
    "draw",
    "get_gradients",
    "graph",
    "is_available",
    "populate_grad",
]


def is_available() -> bool:
    """As torch has it: always, here."""
    return True


_reduced.expect()
_extension.register(Link)
_rref.context_backward = backward_of_reference
