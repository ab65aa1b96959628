"""CombinedOptimizer: several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from farstep.dist import operation
from farstep.errors import OptimError
from farstep.optim import adapters
from farstep.optim.keyed import KeyedOptimizer
from farstep.optim.sharded import ShardedOptimizer
from farstep.state.council import agree

__all__ = ["CombinedOptimizer"]

Part = KeyedOptimizer | ShardedOptimizer
Parts = list[tuple[str, Part]]


OF_A_RANK = ("rank",)
"""What a state dict has beside state and groups, if it is one rank's."""
AFTER = "what comes after a load"


class CombinedOptimizer(KeyedOptimizer):
    """Several optimizers as one: it steps, saves and loads them together, and a scheduler drives them all.

    Args:
        optims: KeyedOptimizers, such as NamedOptimizers, and ShardedOptimizers, or (prefix, optimizer). The names of a part's parameters get
            "prefix." in front.

    `param_groups` lists the parts' own groups: what is changed in them is changed there. A load changes all parts or none. With a ShardedOptimizer among them
    all of its ranks do everything together, and what fails on one fails on all.
    """

    def __init__(self, optims: Iterable[Part | tuple[str, Part]]) -> None:
        parts = _parts(optims)
        self._begin({}, _Together(parts), {})
        self._parts: Parts = parts
        _check(parts)
        if len({part.process_group for part in self._sharded()}) > 1:
            raise ValueError(
                "these ShardedOptimizers have several process groups, so that no one group has all ranks that step together: combine those of one group"
            )

    @property
    def optimizers(self) -> Parts:
        return self._parts

    @property
    def params(self) -> Mapping[str, Any]:
        return {_prefixed(prefix, name): p for prefix, part in self._parts for name, p in part.params.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        return {
            _prefixed(prefix, alias): _prefixed(prefix, name)
            for prefix, part in self._parts
            for alias, name in part.aliases.items()
        }

    @property
    def saves_param_groups(self) -> bool:
        return all(part.saves_param_groups for _, part in self._parts)

    def save_param_groups(self, save: bool) -> None:
        for _, part in self._parts:
            part.save_param_groups(save)

    def add_param_group(self, param_group: Any) -> NoReturn:
        raise NotImplementedError(
            "which of the optimizers is the group for? Add it to that one: optimizers[i][1].add_param_group(...)"
        )

    def optim_parts(self) -> list[Part]:
        """For farstep.state: whose state it is."""
        return [part for _, part in self._parts]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, part in self._parts:
            part.zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parts by one norm: see `farstep.optim.clip_grad_norm_`."""
        from farstep.optim.clip_together import clip_grad_norm_

        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite)

    @operation("CombinedOptimizer.step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each. The closure is evaluated once for all, and again for those that ask for more, and those after them.

        Returns the first loss.
        """
        loss, shared = None, None
        if closure is not None:
            with self._together("the closure"), torch.enable_grad():
                loss = closure()
            shared = _Shared(closure, loss)
        for _, part in self._parts:
            with self._together_with(part, "the step"):
                if shared is None:
                    part.step()
                else:
                    shared.begin()
                    part.step(shared)
        return loss

    def _init_state(self, sparse: Collection[str]) -> None:
        for prefix, part in self._parts:
            with self._together_with(part, "init_state"):
                part._init_state([name for name in part.params if _prefixed(prefix, name) in sparse])

    def _read(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for prefix, part in self._parts:
            with self._together_with(part, "saving the optimizer's state"):
                saved = part.state_dict()
            state |= {_prefixed(prefix, name): each for name, each in saved["state"].items()}
            for group in saved.get("param_groups", []):
                groups.append({**group, "params": [_prefixed(prefix, name) for name in group["params"]]})
            found |= {key: saved[key] for key in OF_A_RANK if key in saved}
        return found

    def _prepare(self, saved: Mapping[str, Any], strict: bool) -> list[Callable[[], None]]:
        commits: list[Callable[[], None]] = []
        for prefix, part in self._parts:
            with self._together("loading the optimizer's state"):
                share = adapters.run_load_state_dict_pre_hooks(part, _share(saved, prefix, part))
            with self._together_with(part, "loading the optimizer's state"):
                commits += part._prepare(share, strict)
        return commits

    def _after_load(self) -> None:
        for _, part in self._parts:
            with (
                self._together_with(part, AFTER)
                if isinstance(part, CombinedOptimizer)
                else self._together(AFTER)
            ):
                part._after_load()
        with self._together(AFTER):
            super()._after_load()

    # -- with others' ranks -------------------------------------------------------------------------------

    def _sharded(self) -> list[ShardedOptimizer]:
        """Parts of which every rank has a share, and parts' parts."""
        found: list[ShardedOptimizer] = []
        for _, part in self._parts:
            if isinstance(part, ShardedOptimizer):
                found.append(part)
            elif isinstance(part, CombinedOptimizer):
                found += part._sharded()
        return found

    @contextmanager
    def _together(self, doing: str) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as exc:
            if not self._sharded():
                raise
            error = exc
        for part in self._sharded()[:1]:
            agree(error, part.process_group, doing, kind=OptimError)

    def _together_with(self, part: Part, doing: str) -> AbstractContextManager[None]:
        """The same for what a part does, unless it sees to that itself."""
        is_own = isinstance(part, ShardedOptimizer) or (
            isinstance(part, CombinedOptimizer) and part._sharded()
        )
        return nullcontext() if is_own else self._together(doing)

    def __repr__(self) -> str:
        return f"CombinedOptimizer of {', '.join(f'{prefix!r}: {part!r}' for prefix, part in self._parts)}"


class _Together:
    """The state and the groups of all parts, as they are now."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def state(self) -> dict[Any, Any]:
        return {p: state for _, part in self._parts for p, state in part.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for _, part in self._parts for group in part.param_groups]


class _Shared:
    """A closure whose loss and gradients are at hand. An optimizer that calls it again has it evaluated."""

    def __init__(self, closure: Callable[[], Any], loss: Any) -> None:
        self._closure = closure
        self._loss = loss
        self._is_current = True
        self._is_at_hand = True

    def begin(self) -> None:
        """Another optimizer's turn. The gradients are still those at the point where all began, unless one has evaluated elsewhere."""
        self._is_at_hand = self._is_current

    def __call__(self) -> Any:
        if self._is_at_hand:
            self._is_at_hand = False
            return self._loss
        self._is_current = False
        return self._closure()


def _share(saved: Mapping[str, Any], prefix: str, part: Part) -> dict[str, Any]:
    """What a part is to load, by its own names."""
    own = {_prefixed(prefix, name): name for name in part.params}
    groups = [
        {**group, "params": [own[name] for name in group["params"] if name in own]}
        for group in saved["param_groups"]
    ]
    return {
        "state": {own[name]: state for name, state in saved["state"].items() if name in own},
        "param_groups": [group for group in groups if group["params"]],
        **{key: saved[key] for key in OF_A_RANK if key in saved},
    }


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _parts(optims: Any) -> Parts:
    """(prefix, optimizer) of each. What kind of optimizer it is, is checked later."""
    is_list = isinstance(optims, Iterable) and not isinstance(optims, str | Mapping)
    parts: list[Any] = (
        [("", each) if isinstance(each, Optimizer) else each for each in optims] if is_list else [optims]
    )
    for each in parts:
        if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[0], str):
            raise TypeError(
                f"CombinedOptimizer takes a list of optimizers or (prefix, optimizer) pairs, not {_described(each)}"
            )
    return [(prefix, part) for prefix, part in parts]


def _described(given: Any) -> str:
    if isinstance(given, tuple | list):
        return f"({', '.join(type(each).__name__ for each in given)})"
    return f"a {type(given).__name__}"


def _check(parts: Parts) -> None:
    names: set[str] = set()
    owners: dict[int, str] = {}
    for prefix, part in parts:
        if not isinstance(part, KeyedOptimizer | ShardedOptimizer):
            raise TypeError(
                f"CombinedOptimizer takes KeyedOptimizers and ShardedOptimizers, and this is a {type(part).__name__}: "
                f"NamedOptimizer(module.named_parameters(), {type(part).__name__}, ...) makes one"
            )
        for name in [*part.params, *part.aliases]:
            full = _prefixed(prefix, name)
            if full in names:
                raise ValueError(
                    f"two parameters have the name {full!r}: give the optimizers prefixes, as in ('encoder', optimizer)"
                )
            names.add(full)
        for group in part.param_groups:
            for p in group["params"]:
                full = next(_prefixed(prefix, name) for name, each in part.params.items() if each is p)
                if id(p) in owners:
                    raise ValueError(
                        f"{owners[id(p)]!r} and {full!r} are the same parameter, in two optimizers"
                    )
                owners[id(p)] = full
    if len({part.saves_param_groups for _, part in parts}) > 1:
        raise ValueError(
            "some of the optimizers save their groups, and others do not: call save_param_groups(True), or False, on each"
        )
