"""What CombinedOptimizer asks of its parts beside what all optimizers have, for ShardedOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from farstep.errors import OptimError
from farstep.optim import adapters, sharded_state
from farstep.state.council import agree
from farstep.state.fresh import fresh_states

if TYPE_CHECKING:
    from farstep.optim.sharded import ShardedOptimizer

__all__ = ["ShardedPart", "init_state"]


class ShardedPart(Optimizer):
    """Its ranks do everything together, and come to know of each other's errors themselves."""

    saves_param_groups = True
    aliases: Mapping[str, str] = {}

    @property
    def params(self: Any) -> Mapping[str, Any]:
        """Name -> parameter."""
        named: Mapping[str, Any] = self.named_params
        return named

    def save_param_groups(self, save: bool) -> None:
        if not save:
            raise ValueError("a ShardedOptimizer's groups are always part of its state")

    def _init_state(self: Any, sparse: Collection[str]) -> None:
        init_state(self, sparse)

    def _prepare(self: Any, saved: Mapping[str, Any], strict: bool) -> list[Callable[[], None]]:
        return [sharded_state.prepare(self, saved, strict, False)]

    def _after_load(self) -> None:
        adapters.run_load_state_dict_post_hooks(self)


def init_state(optimizer: ShardedOptimizer, sparse: Collection[str]) -> None:
    """The state before the first step, for parameters that have none. `sparse`: those whose gradients are. All ranks make it, or none does."""
    members = [member for members in optimizer._members for member in members]
    for member in members:
        for shadow in member.shadows:
            if shadow is not member.parameter:
                shadow.requires_grad_(member.parameter.requires_grad)
    ids = frozenset(id(shadow) for member in members if member.name in sparse for shadow in member.shadows)
    error, found = None, {}
    try:
        with optimizer._showing_all():
            found = fresh_states(optimizer._inner, ids)
    except Exception as exc:
        error = exc
    agree(error, optimizer.process_group, "init_state", kind=OptimError)
    for shadow, state in found.items():
        optimizer.state[shadow] = state
    optimizer._settle()
