"""Parameters behind RRefs, as DistributedOptimizer is given them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from farstep.optim.groups import Rules
from farstep.rpc.rref import RRef

__all__ = ["RREFS"]


def _refuse_unlisted(given: Any) -> None:
    if isinstance(given, nn.Module):
        help = "parameter_rrefs(module) gives those of a module"
    elif isinstance(given, RRef):
        help = "[rref] is a list of one parameter, parameter_rrefs(rref) gives those of a module"
    elif isinstance(given, torch.Tensor):
        help = "[rpc.RRef(parameter)] is a list of one"
    elif isinstance(given, Iterable) and not isinstance(given, str):
        return
    else:
        help = "parameter_rrefs(module) gives those of a module, rpc.RRef(parameter) makes one"
    raise TypeError(
        f"params_rref is a list of RRefs, of (name, RRef) pairs, or of groups, not one {type(given).__name__}: {help}"
    )


def _check(given: Any) -> None:
    if not isinstance(given, RRef):
        raise TypeError(
            f"optimizer can only optimize parameters behind RRefs, but one of the params is {torch.typename(given)}; "
            f"rpc.RRef(parameter) makes a reference to a local one, parameter_rrefs(module) to all those of a module, here or remote"
        )


RREFS = Rules(
    wanted="a list of RRefs, or of (name, RRef) pairs",
    kind=RRef,
    refuse_unlisted=_refuse_unlisted,
    check=_check,
    identity=lambda rref: rref._id,
    name_of=str,
    help_on_names=": where several modules have parameters of one name, use parameter_rrefs(module_rref, prefix=...)",
)
