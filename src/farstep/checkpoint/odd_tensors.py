"""Tensors of classes that do not do what a tensor does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from farstep.errors import CheckpointError, FarstepError
from farstep.state import Shards
from farstep.state.adapters.modules import named_tensors
from farstep.state.adapters.names import clean_name

__all__ = ["told_of_module", "told_of_tensor"]

_REFUSALS = (NotImplementedError, TypeError, RuntimeError, AttributeError)
"""What an operation raises that a tensor's class does not have."""


@contextmanager
def told_of_tensor(value: Tensor | Shards, name: str, after: str) -> Iterator[None]:
    """Raise what a tensor's class refuses as a CheckpointError that names the place. `after` says what has not happened."""
    try:
        yield
    except FarstepError:
        raise
    except _REFUSALS as exc:
        raise CheckpointError(
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, whose elements cannot be reached ({type(exc).__name__}: "
            f"{_first_line(exc)}): give the plain tensors that it is made of, under names of their own. {after}"
        ) from exc


@contextmanager
def told_of_module(module: nn.Module, name: str, after: str) -> Iterator[None]:
    """The same for a module's tensors, where one of them keeps its `state_dict` from being made. Other errors pass."""
    try:
        yield
    except FarstepError:
        raise
    except _REFUSALS:
        for raw, tensor in named_tensors(module, buffers=True, remove_duplicate=True):
            place = ".".join(filter(None, [name, clean_name(module, raw)]))
            with told_of_tensor(tensor, place, after):
                tensor.detach()
        raise


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0][:200]
