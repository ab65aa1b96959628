"""Random programs over several workers give the gradients that one process gives."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.workers import bounded
from torch.autograd.graph import get_gradient_edge

from farstep.errors import AutogradError

from .conftest import Agents, nothing_left_on, speaking_for
from .programs import (
    Key,
    Leaf,
    World,
    assert_same,
    distributed,
    forget,
    program_of,
    reference,
    world_of,
)

Passes = Sequence[Sequence[int]]
BLOCK = 20


def blocks(first: int, last: int) -> list[Any]:
    """Seeds as parameters of a test; all but the first block are slow."""
    return [
        pytest.param(
            range(start, start + BLOCK),
            id=f"seeds{start}-{start + BLOCK - 1}",
            marks=[pytest.mark.slow] if start > first else [],
        )
        for start in range(first, last, BLOCK)
    ]


def workers_of(seed: int) -> int:
    return 3 + seed % 4


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    yield
    forget()


@contextlib.contextmanager
def naming(*what: Any) -> Iterator[None]:
    """A failure says which program it was."""
    try:
        yield
    except BaseException as exc:
        exc.add_note("the program: " + " ".join(map(repr, what)))
        raise


def check(agents_of: Agents, key: Key, passes: Passes = ((0,),), mode: str = "smart") -> None:
    agents = agents_of(key.workers)
    with naming(key, passes, mode):
        expected = reference(key, passes)
        with speaking_for(agents[key.root]):
            assert_same(expected, distributed(key, passes, mode))
        assert all(leaf.grad is None for leaf in world_of(key).leaves.values())


def end(agents_of: Agents, seeds: range) -> None:
    for workers in {workers_of(seed) for seed in seeds}:
        nothing_left_on(agents_of(workers))


def test_programs_are_what_they_should_be() -> None:
    """Enough of them use each feature, or the tests below say little."""
    features: Counter[str] = Counter()
    with_gradients = 0
    for seed in range(100):
        key = Key(seed, workers_of(seed))
        program = program_of(key)
        features.update(program.features)
        features["nested"] += any(
            step[0] == "call" for body in program.bodies[1:] for step in body.steps
        )  # fmt: skip
        with_gradients += len(reference(key)[1]) > 1
    assert min(features.values()) >= 20, features
    assert set(features) == {
        "async", "chain", "cut", "hook", "in_place", "nested", "no_grad", "remote", "sync", "then"
    }  # fmt: skip
    assert with_gradients > 70


@pytest.mark.parametrize("seeds", blocks(0, 400))
def test_smart_is_exact(agents_of: Agents, seeds: range) -> None:
    for seed in seeds:
        check(agents_of, Key(seed, workers_of(seed)))
    end(agents_of, seeds)


@pytest.mark.parametrize("seeds", blocks(0, 200))
def test_both_modes_are_exact_where_all_is_used(agents_of: Agents, seeds: range) -> None:
    for seed in seeds:
        for mode in ("smart", "fast"):
            check(agents_of, Key(seed, workers_of(seed), uses_all=True), mode=mode)
    end(agents_of, seeds)


@pytest.mark.parametrize("seeds", blocks(400, 500))
def test_fast_is_exact_or_raises_where_outputs_are_unused(agents_of: Agents, seeds: range) -> None:
    raised = 0
    for seed in seeds:
        try:
            check(agents_of, Key(seed, workers_of(seed)), mode="fast")
        except AutogradError as exc:
            if "not used in the loss" not in str(exc):
                raise
            raised += 1
    assert 0 < raised < len(seeds)
    end(agents_of, seeds)


SEVERAL: list[Passes] = [[[0], [0]], [[0], [1]], [[0, 1]], [[1, 0], [1]], [[0], [1], [0]]]


@pytest.mark.parametrize("seeds", blocks(500, 600))
def test_several_passes_in_a_context_add_up(agents_of: Agents, seeds: range) -> None:
    for seed in seeds:
        check(agents_of, Key(seed, workers_of(seed), losses=2), SEVERAL[seed % len(SEVERAL)])
        fast = Key(seed, workers_of(seed), uses_all=True, losses=2)
        check(agents_of, fast, [[0, 1]] * (1 + seed % 3), mode="fast")
    end(agents_of, seeds)


class Hooks:
    """Hooks on leaves, which bend the gradient, so that they must see all of it at once; and how often each was called."""

    def __init__(self, seed: int, world: World) -> None:
        self._lock = threading.Lock()
        self.calls: Counter[tuple[Leaf, str]] = Counter()
        rng = random.Random(seed)
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        for name, leaf in world.leaves.items():
            if rng.random() < 0.6:
                self._handles.append(leaf.register_hook(self._hook(name, bends=rng.random() < 0.7)))
            if rng.random() < 0.3:
                node = get_gradient_edge(leaf).node
                self._nodes.append(node)  # it must live as long as its hooks are wanted
                self._handles.append(node.register_prehook(self._node_hook(name, "before")))
                self._handles.append(node.register_hook(self._node_hook(name, "after")))

    def _hook(self, name: Leaf, *, bends: bool) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None
            with self._lock:
                self.calls[name, "tensor"] += 1
            return gradient * 2 + gradient.sin() if bends else None

        return hook

    def _node_hook(self, name: Leaf, kind: str) -> Callable[..., None]:
        def hook(*gradients: tuple[torch.Tensor | None, ...]) -> None:
            if gradients[-1][0] is not None:
                with self._lock:
                    self.calls[name, kind] += 1

        return hook

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize("seeds", blocks(600, 700))
def test_hooks_on_leaves_run_once_and_see_the_whole_gradient(agents_of: Agents, seeds: range) -> None:
    called = 0
    for seed in seeds:
        key = Key(seed, workers_of(seed), uses_all=seed % 2 == 0)
        mode = "fast" if seed % 4 == 0 else "smart"
        agents = agents_of(key.workers)
        with naming(key, mode), Hooks(seed, world_of(key)) as hooks:
            expected = reference(key)
            expected_calls = dict(hooks.calls)
            assert set(expected_calls.values()) <= {1}
            hooks.calls.clear()
            with speaking_for(agents[key.root]):
                assert_same(expected, distributed(key, mode=mode))
            assert dict(hooks.calls) == expected_calls
            called += len(expected_calls)
    assert called > len(seeds)
    end(agents_of, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("round", range(6))
def test_contexts_in_several_threads_do_not_mix(agents_of: Agents, round: int) -> None:
    """Many programs at once, on the same parameters, which have hooks."""
    workers, threads, each = 4, 4, 8
    agents = agents_of(workers)
    keys = [
        Key(700 + round * 100 + i, workers, uses_all=i % 2 == 0, world=round) for i in range(threads * each)
    ]
    with Hooks(round, world_of(keys[0])):
        expected = {key: reference(key) for key in keys}
        start = threading.Barrier(threads)

        def run(mine: list[Key]) -> None:
            start.wait(10)
            for key in mine:
                with naming(key), speaking_for(agents[key.root]):
                    assert_same(expected[key], distributed(key))

        failures: list[BaseException] = []

        def guarded(mine: list[Key]) -> None:
            try:
                run(mine)
            except BaseException as exc:
                failures.append(exc)

        running = [threading.Thread(target=guarded, args=(keys[i::threads],)) for i in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            bounded(thread.join, timeout_s=40.0)
        if failures:
            raise failures[0]
    nothing_left_on(agents)
