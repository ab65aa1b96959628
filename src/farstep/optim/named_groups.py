"""Named parameters, as ShardedOptimizer is given them. And those of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from farstep.optim.groups import Rules
from farstep.optim.members import kind_of

__all__ = ["NAMED", "named_params_with_sharded_tensor"]


def _refuse_unlisted(given: Any) -> None:
    if isinstance(given, nn.Module):
        raise TypeError(
            "named_params is a mapping of names to parameters: dict(model.named_parameters()), not the module"
        )
    if isinstance(given, Tensor):
        raise TypeError('named_params is a mapping of names to parameters: {"weight": parameter}')


def _check(given: Any) -> None:
    kind_of(given)


NAMED = Rules(
    wanted='{"name": parameter, ...} or (name, parameter) pairs, such as dict(model.named_parameters())',
    kind=Tensor,
    refuse_unlisted=_refuse_unlisted,
    check=_check,
    identity=id,
    name_of=None,
    help_on_names="",
)


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Any]]:
    """A module's ShardedTensors, which are plain attributes of modules, and its parameters: names and values, each once.

    As torch's, and `prefix` and `recurse` hold for both.
    """
    seen: set[int] = set()
    for path, each in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and kind_of(value) == "ShardedTensor" and id(value) not in seen:
                seen.add(id(value))
                yield (f"{path}.{name}" if path else name), value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter
