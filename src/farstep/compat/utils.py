"""torch.distributed.rpc._utils."""

import logging

from torch.distributed.rpc._utils import _group_membership_management

from farstep.compat.unsupported import unsupported

__all__ = ["_group_membership_management", "_update_group_membership"]

logger = logging.getLogger("farstep.rpc")
_update_group_membership = unsupported(
    "_update_group_membership",
    "its workers notice by themselves who joins and leaves; init_rpc and shutdown are all that is needed",
)
