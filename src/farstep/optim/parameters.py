"""The parameters of a module, found in one call where it is remote."""

from __future__ import annotations

from typing import Any

from torch import nn

from farstep.rpc.options import UNSET_RPC_TIMEOUT
from farstep.rpc.remote_module import RemoteModule
from farstep.rpc.rref import RRef, local_value_of

__all__ = ["parameter_rrefs"]


def parameter_rrefs(
    module_rref: RRef[Any] | RemoteModule | nn.Module, prefix: str = "", recurse: bool = True
) -> list[tuple[str, RRef[nn.Parameter]]]:
    """(name, reference) of every parameter of a module: behind an RRef on any worker, a RemoteModule, or one here.

    The names are those of `named_parameters(prefix)`. Give each module a prefix of its own where several go into one optimizer.
    """
    rref = module_rref.module_rref if isinstance(module_rref, RemoteModule) else module_rref
    if isinstance(rref, nn.Module):
        return _references(rref, prefix, recurse)
    if not isinstance(rref, RRef):
        raise TypeError(
            f"parameter_rrefs wants a module, an RRef to one, or a RemoteModule, not {type(rref).__name__}"
        )
    found: list[tuple[str, RRef[nn.Parameter]]] = rref._agent.call_sync(
        rref.owner(), _named_parameters, (rref, prefix, recurse), {}, UNSET_RPC_TIMEOUT
    )
    return found


def _named_parameters(rref: RRef[Any], prefix: str, recurse: bool) -> list[tuple[str, RRef[nn.Parameter]]]:
    module = local_value_of(rref)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"parameter_rrefs wants a reference to a torch.nn.Module, and this one is to a {type(module).__name__}"
        )
    return _references(module, prefix, recurse)


def _references(module: nn.Module, prefix: str, recurse: bool) -> list[tuple[str, RRef[nn.Parameter]]]:
    return [(name, RRef(parameter)) for name, parameter in module.named_parameters(prefix, recurse)]
