"""A named parameter as this rank's optimizer sees it: the tensors it works on, and where these lie in the whole.

A plain tensor is worked on as it is, and so are the local shards of a ShardedTensor. Of a DTensor it is the local tensor: a shadow of it, with the local
part of the gradient, so that updates are torch's own on plain tensors and no operation goes through DTensor's dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farstep.errors import OptimError
from farstep.optim import fast
from farstep.optim.zero import Zero
from farstep.state import Shards, Spread, like, shards_of
from farstep.state.adapters import values

__all__ = ["Local", "Member", "Part", "kind_of", "member_of"]


def kind_of(parameter: Any) -> str:
    """ "DTensor", "ShardedTensor" or "Tensor"."""
    kind = values.kind_of(parameter)
    if kind is None:
        raise TypeError(
            f"a parameter is a Tensor, DTensor or ShardedTensor, not {torch.typename(parameter)}: named_params is dict(model.named_parameters()), "
            f"or a list of groups with such a dict as their params"
        )
    return kind


class Member:
    """A plain tensor, which every rank has all of and steps by itself."""

    owner: int | None = None
    """The one rank that has all of its state, where there is one."""

    def __init__(self, name: str, parameter: Any, group: Any) -> None:
        self.name, self.parameter, self.group = name, parameter, group
        self.shadows: list[Tensor] = self._shadows()
        self._spreads: dict[torch.dtype, Spread] = {}

    def _shadows(self) -> list[Tensor]:
        if not self.parameter.is_leaf:
            raise ValueError("can't optimize a non-leaf Tensor")
        return [self.parameter]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def takes_any_shape(self) -> bool:
        """Whether a rank has the whole parameter, so that a state of another shape can be told where it belongs."""
        return True

    def take_gradients(self) -> bool:
        """Before a step: give the shadows their gradients. Whether this rank has any."""
        return any(shadow.grad is not None for shadow in self.shadows)

    def drop_gradients(self) -> None:
        """After a step."""

    def zero_grad(self, set_to_none: bool) -> None:
        for tensor in self._graded():
            if set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad.detach_().zero_()

    def _graded(self) -> list[Tensor]:
        """The tensors that get the user's gradients."""
        return self.shadows

    def gradients(self) -> list[Tensor]:
        """Those that this rank has, as plain tensors that can be changed in place."""
        return [t.grad for t in self._graded() if t.grad is not None]

    def counts(self) -> bool:
        """Whether this rank speaks for its part, rather than another with a replica of it."""
        return _is_first(shards_of(self.parameter, self.group, name=self.name), self.group)

    @property
    def spread(self) -> Spread:
        """How the parameter lies on the ranks, and every state that has its shape."""
        known = self._spreads.get(self.parameter.dtype)
        if known is not None:
            return known
        return self.shards([shadow.detach() for shadow in self.shadows], self.parameter.dtype).spread

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """A state of the parameter's shape, in the parameter's own form, from what belongs to each shadow."""
        return tensors[0]

    def shards(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Shards:
        """The same, as boxes of the whole. How these lie is worked out once."""
        spread = self._spreads.get(dtype)
        if spread is None:
            shards = shards_of(self.form(tensors, dtype), self.group, name=self.name)
            fits = [t.shape for t in shards.tensors] == [t.shape for t in tensors if t.numel()]
            if fits:
                self._spreads[dtype] = shards.spread
            return shards
        return Shards(spread, [t for t in tensors if t.numel()])


class Local(Member):
    """A plain tensor with elements of which no other rank has any. Where they lie in a whole is not known here."""

    def counts(self) -> bool:
        return True


class _OfDTensor(Member):
    def _shadows(self) -> list[Tensor]:
        self._local = self._to_local(self.parameter)
        return [torch.nn.Parameter(self._local.detach(), requires_grad=self.parameter.requires_grad)]

    @staticmethod
    def _to_local(value: Any) -> Tensor:
        if torch.is_grad_enabled():
            value = value.detach()
        local = value.to_local()
        return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]

    @property
    def takes_any_shape(self) -> bool:
        return False

    def take_gradients(self) -> bool:
        (shadow,) = self.shadows
        local = self._to_local(self.parameter)
        if local.data_ptr() != shadow.data_ptr() or local.shape != shadow.shape:
            shadow.data = local.detach()
        found = self.gradients()
        shadow.grad = fast.fitting(found[0], shadow) if found else None
        return bool(found)

    def drop_gradients(self) -> None:
        self.shadows[0].grad = None

    def _graded(self) -> list[Tensor]:
        return [self.parameter]

    def gradients(self) -> list[Tensor]:
        gradient = self.parameter.grad
        if gradient is None:
            return []
        if gradient.placements != self.parameter.placements:
            self.parameter.grad = gradient = gradient.redistribute(placements=self.parameter.placements)
        return [self._to_local(gradient).detach()]

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        return like(self.parameter, tensors)


class _OfShardedTensor(Member):
    def _shadows(self) -> list[Tensor]:
        return [shard.tensor for shard in self.parameter.local_shards()]

    @property
    def takes_any_shape(self) -> bool:
        return False

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        return like(self.parameter, tensors)


class Part(Member):
    """A replicated parameter whose state is spread over the ranks."""

    def __init__(self, zero: Zero, number: int, group: Any) -> None:
        self._zero, self._number = zero, number
        super().__init__(zero.names[number], zero.parameters[number], group)
        self.owner = zero.owner(number)

    def _shadows(self) -> list[Tensor]:
        return self._zero.own_shadows(self._number)

    @property
    def takes_any_shape(self) -> bool:
        return self.owner is not None

    def _graded(self) -> list[Tensor]:
        return [self.parameter]

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        return self._zero.shards(self._number, tensors, dtype)

    def shards(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Shards:
        return self._zero.shards(self._number, tensors, dtype)


def member_of(name: str, parameter: Any, group: Any, is_local: bool = False) -> Member:
    """`is_local`: whether a plain tensor has other elements on each rank."""
    kind = kind_of(parameter)
    if kind == "DTensor" and any(placement.is_partial() for placement in parameter.placements):
        raise OptimError(
            f"parameter {name!r} has a Partial placement: its ranks hold terms of a sum, and not parts of a parameter. Redistribute it first"
        )
    plain = Local if is_local else Member
    return {"DTensor": _OfDTensor, "ShardedTensor": _OfShardedTensor, "Tensor": plain}[kind](
        name, parameter, group
    )


def _is_first(shards: Shards, group: Any) -> bool:
    """Whether no rank before this one holds the same."""
    rank = torch.distributed.get_rank(group) if torch.distributed.is_initialized() else 0
    spread = shards.spread
    own = spread.boxes(rank)
    return bool(own) and not any(spread.boxes(r) == own for r in set(spread.ranks.tolist()) if r < rank)
