"""What there is in a state: its values as a tree, and its tensors by name, as this rank holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farstep.checkpoint.dtypes import name_of
from farstep.checkpoint.elsewhere import (
    Elsewhere,
    hidden,
    is_below,
    reference_in,
    sharded_state,
    spread_optimizer,
)
from farstep.checkpoint.entries import entries_of, is_object, nested_too_deep, states_of_objects
from farstep.checkpoint.manifest import MOST_DIMENSIONS
from farstep.checkpoint.objects import Optimizer, models_in, module_state, optimizer_state
from farstep.checkpoint.odd_tensors import told_of_module, told_of_tensor
from farstep.checkpoint.ranks import Ranks
from farstep.checkpoint.tree import MOST_DEPTH, PerRank, encode_mapping, encode_value, joined, plain_key
from farstep.errors import CheckpointError, StateError
from farstep.state import RankOwned, Shards, on_rank, shards_of

__all__ = ["Collected", "collected"]


@dataclass
class Collected:
    tree: Any
    tensors: dict[str, Shards] = field(default_factory=dict)
    references: dict[str, Any] = field(default_factory=dict)
    """What other workers own, by name; in the tree there is an `Elsewhere`."""
    copies: set[str] = field(default_factory=set)
    """Of the references, those of copies that were made for this and that nobody changes."""


def collected(
    state: Any, ranks: Ranks, states: Mapping[str, Any] | None = None, *, for_another: bool = False
) -> Collected:
    """Raises CheckpointError, which names the place, for what a checkpoint cannot keep.

    `states` are those of DistributedOptimizers whose steps have been stopped, by name.
    `for_another` worker saves it: then references of what this one owns are followed.
    """
    collector = _Collector(state, ranks, states or {}, for_another)
    collector.ask_objects(state)
    found = collector.walk(state, "", 0)
    if not for_another:
        collector.check_references()
    return Collected(found, collector.tensors, collector.references, collector.copies)


class _Collector:
    def __init__(self, state: Any, ranks: Ranks, states: Mapping[str, Any], for_another: bool) -> None:
        self._stopped_states, self._for_another = states, for_another
        self._ranks, self._group = ranks, ranks.group
        self._models = models_in(state)
        self.tensors: dict[str, Shards] = {}
        self.references: dict[str, Any] = {}
        self.copies: set[str] = set()
        self._names: dict[Any, str] = {}
        """Of tensors that have been seen, by their memory."""
        self._taken: set[str] = set()
        self._alive: list[Any] = []
        """They are not to be freed before all have been seen, as another would get the same memory then."""
        self._for_this_rank = False
        self._states: dict[tuple[str, int], Any] = {}
        """What objects have given, by name and id."""

    def ask_objects(self, state: Any) -> None:
        """Before anything that may fail on one rank alone, as others may wait for it in a `state_dict` that communicates."""
        self._states = states_of_objects(state, self._ranks, self._state_of)

    def _state_of(self, value: Any, name: str) -> Any:
        with self._named(name):
            if isinstance(value, nn.Module):
                with told_of_module(value, name, "Nothing has been saved"):
                    return module_state(value, self._group)
            if isinstance(value, Optimizer):
                return optimizer_state(value, self._models, self._group, name)
        return value.state_dict()

    def walk(self, value: Any, name: str, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise nested_too_deep(name)
        if isinstance(value, np.ndarray):
            value = _from_numpy(value, name)
        if isinstance(value, Shards | Tensor):
            self._name(name)
            return self._tensor(value, name)
        if (rref := reference_in(value)) is not None:
            self._refuse_on_many(name)
            if self._for_another and rref.is_owner():
                return self.walk(rref.local_value(), name, depth + 1)
            self.references[name] = rref
            return Elsewhere(name)
        if spread_optimizer(value) is not None:
            self._refuse_on_many(name)
            known = set(self.references)
            if self._for_another and name not in self._stopped_states:
                raise hidden(name)
            state = self._stopped_states.get(name) or sharded_state(value, name, self._ranks.rpc_timeout)
            node = self.walk(state, name, depth + 1)
            self.copies |= self.references.keys() - known
            return node
        if is_object(value):
            key = (name, id(value))
            # Objects behind references have not been asked yet; one process alone has these.
            inner = self._states[key] if key in self._states else self._state_of(value, name)
            return self.walk(inner, name, depth + 1)
        if isinstance(value, PerRank):
            return self._per_rank(value.value, name, depth)
        if isinstance(value, RankOwned):
            return self._per_rank(value.tensors.get(self._ranks.rank), name, depth)
        if isinstance(value, Mapping):
            if not name and "" in value:
                raise CheckpointError("a key at the top of a state is '', which is no name: give it another. Nothing has been saved")  # fmt: skip
            nodes = dict.fromkeys(self._key(key, name) for key in value)
            walked = {}
            for key, each in entries_of(value, self._ranks):
                plain = plain_key(key)
                walked[plain] = self.walk(each, joined(name, plain), depth + 1)
            return encode_mapping({key: walked[key] for key in nodes if key in walked})
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.walk(each, joined(name, i), depth + 1) for i, each in enumerate(value)]}
        self._name(name)
        try:
            return encode_value(value)
        except (TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{name!r} is {exc}, which a checkpoint does not keep: it keeps tensors, numbers, strings, bytes, lists, dicts, and objects with state_dict and "
                f"load_state_dict. Nothing has been saved"
            ) from None

    def _key(self, key: Any, name: str) -> Any:
        if type(key) is str:
            return key
        try:
            encode_value(key)
        except (TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{name!r} has the key {str(key)[:80]!r}, {exc}, which a checkpoint does not keep: keys are strings, numbers, bytes or None. Nothing has been saved"
            ) from None
        return plain_key(key)

    def _refuse_on_many(self, name: str) -> None:
        if not name:
            raise CheckpointError("what another worker owns is saved under a name: give a dict of it")
        if not self._ranks.alone:
            raise CheckpointError(
                f"{name!r} is owned by workers of RPC, and is to be saved by {self._ranks.count} ranks: one process saves it for all, with no_dist=True, in a checkpoint of "
                f"its own. Nothing has been saved"
            )

    def check_references(self) -> None:
        for name in (*self._taken, *self.references):
            head = name.rpartition(".")[0] if name in self.references else name
            if self.references and is_below(head, self.references):
                raise CheckpointError(
                    f"{name!r} is called as something within what another worker owns: rename one of them. Nothing has been saved"
                )

    def _name(self, name: str) -> None:
        if name in self._taken:
            raise CheckpointError(
                f"two values are called {name!r}, as a key with a dot in it reads like a key within a key, and 1 like '1': rename one of them. Nothing has "
                f"been saved"
            )
        self._taken.add(name)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """What cannot be laid out over ranks cannot be saved either, and is told with its place."""
        try:
            yield
        except StateError as exc:
            raise CheckpointError(
                f"{name!r} cannot be saved: {exc}{self._ranks.hint}. Nothing has been saved"
            ) from exc

    def _per_rank(self, value: Any, name: str, depth: int) -> Any:
        rank, was = self._ranks.rank, self._for_this_rank
        self._for_this_rank = True
        try:
            node = self.walk(value, joined(name, f"rank{rank}"), depth + 1)
        finally:
            self._for_this_rank = was
        return {"ranks": [node if each == rank else None for each in range(self._ranks.count)]}

    def _tensor(self, value: Tensor | Shards, name: str) -> Any:
        with told_of_tensor(value, name, "Nothing has been saved"):
            return self._kept(value, name)

    def _kept(self, value: Tensor | Shards, name: str) -> Any:
        if isinstance(value, Tensor) and is_lazy(value):
            raise CheckpointError(
                f"{name!r} has no shape yet: run its module once, which gives it one. Nothing has been saved"
            )
        if type(value) in (Tensor, nn.Parameter) and value.is_nested:  # type: ignore[union-attr]
            raise CheckpointError(
                f"{name!r} is a nested tensor: give a list of its tensors. Nothing has been saved"
            )
        self._alive.append(value)
        memory = _memory(value)
        known = None if memory is None else self._names.setdefault(memory, name)
        if known is not None and known != name:
            return {"tensor": known}
        try:
            if self._for_this_rank and isinstance(value, Tensor):
                found = on_rank(value, self._ranks.rank, self._group, name)
            else:
                found = shards_of(value, self._group, name=name)
        except StateError as exc:
            raise CheckpointError(f"{exc}{self._ranks.hint}. Nothing has been saved") from exc
        _check_kept(found, name)
        self.tensors[name] = found
        return {"tensor": None}


def _from_numpy(value: Any, name: str) -> Tensor:
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError):
        pass  # bytes or rows in another order, perhaps
    try:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{name!r} is a numpy array of {value.dtype}, which a checkpoint does not keep: it keeps arrays of numbers. Nothing has been saved"
        ) from None


def _check_kept(found: Shards, name: str) -> None:
    """Raises CheckpointError for a tensor that could not be read again."""
    is_kept = _is_kept(found.dtype)
    if is_kept and len(found.shape) <= MOST_DIMENSIONS:
        return
    what = f"{len(found.shape)} dimensions" if is_kept else str(found.dtype)
    raise CheckpointError(
        f"{name!r} is a tensor of {what}, which a checkpoint does not keep. Nothing has been saved"
    )


@cache
def _is_kept(dtype: torch.dtype) -> bool:
    try:
        name_of(dtype)
    except ValueError:
        return False
    return True


def _memory(value: Tensor | Shards) -> Any:
    """The same for tensors that are the same; None for what cannot be told."""
    if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
        if not value.numel() or value.is_meta:
            return None
        return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()  # fmt: skip
    # Of others a rank may have nothing by which to tell; tied ones come as one object.
    return id(value)
