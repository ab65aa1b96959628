"""Random programs that run in two ways: over several workers, and as plain function calls in one process.

A program is a list of bodies. A body has inputs, steps and outputs; a step computes something or calls a later body on some
worker. What runs the steps is the same in both ways; only `Place` differs: `Workers` makes calls, `OneProcess` copies what
would have crossed. Everything follows from the `Key`, so that each worker process makes the same program for itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from farstep import autograd, rpc
from farstep.rpc import Agent
from farstep.rpc.current import current_agent, serving

__all__ = [
    "Key",
    "Leaf",
    "OneProcess",
    "Program",
    "Workers",
    "World",
    "assert_same",
    "distributed",
    "forget",
    "forward",
    "found_on",
    "program_of",
    "reference",
    "world_of",
]

SIZE = 4
PARAMETERS = 4
CALLS = 24
"""At most this many calls in a program."""
Leaf = tuple[int, int]
"""(worker, number of its parameter), or (-1, number of an input)."""
Step = tuple[Any, ...]


class Key(NamedTuple):
    """Names a program and the parameters that it runs on."""

    seed: int
    workers: int
    uses_all: bool = False
    """Nothing that crosses workers is left unused."""
    losses: int = 1
    world: int | None = None
    """The parameters; None: of the program's own."""
    ranks: tuple[int, ...] | None = None
    """The ranks of the workers; None: 0, 1 and so on."""

    @property
    def root(self) -> int:
        return self.seed % self.workers

    def name(self, worker: int) -> str:
        return f"worker{self.ranks[worker] if self.ranks else worker}"

    def here(self) -> int:
        """Which of the program's workers this is."""
        rank = rpc.get_worker_info().id
        return self.ranks.index(rank) if self.ranks else rank


@dataclass
class Box:
    """An object with tensors in it."""

    first: Any
    rest: list[Any]


# -- making programs


@dataclass
class Body:
    inputs: int
    steps: list[Step] = field(default_factory=list)
    outputs: Any = None
    """A structure of numbers of values."""
    calls: int = 0
    """How many calls one run of it makes."""

    @property
    def width(self) -> int:
        return len(flatten(self.outputs))


@dataclass
class Program:
    key: Key
    bodies: list[Body]
    features: set[str]
    """What kinds of steps are in it."""


UNARY = (
    "tanh", "sin", "neg", "double", "transpose", "row", "column", "sum", "expand", "cat", "stack", "clone",
    "reshape", "select", "cube", "checkpoint", "stripes",
)  # fmt: skip
BINARY = ("add", "mul", "sub", "matmul", "where", "join")
IN_PLACE = ("add_", "mul_", "sub_", "slice_", "view_mul_")
HOWS = ("sync", "sync", "async", "async", "then", "remote", "remote", "chain")
HOOKS = ("double", "bend", "watch")


class Maker:
    """Makes one body."""

    def __init__(self, rng: random.Random, key: Key, later: Sequence[tuple[int, Body]], inputs: int) -> None:
        self._rng = rng
        self._key = key
        self._later = later
        self.body = Body(inputs)
        self._count = inputs
        self._unused = set(range(inputs))
        self._depth = 0
        """Of parts without gradient."""
        self.features: set[str] = set()

    def make(self, is_root: bool) -> Body:
        rng = self._rng
        for i in range(self.body.inputs if not is_root else 0):
            if rng.random() < 0.2:
                self.body.steps.append(("in_place", rng.choice(IN_PLACE), i, rng.randrange(PARAMETERS + 1)))
                self.features.add("in_place")
        calls = rng.randint(2, 5) if is_root else rng.choice((0, 1, 1, 2))
        kinds = ["op"] * rng.randint(2, 7) + ["call"] * (calls if self._later else 0)
        rng.shuffle(kinds)
        for kind in kinds:
            self._step(kind)
        self._end(is_root)
        return self.body

    def _step(self, kind: str) -> None:
        rng = self._rng
        if kind == "call":
            self._call()
            return
        dice = rng.random()
        if dice < 0.22:
            self._push(("param", rng.randrange(PARAMETERS)))
        elif dice < 0.25:
            self._push(("const", rng.randrange(1000)))
        elif dice < 0.5:
            self._push(("unary", rng.choice(UNARY), self._pick()))
        elif dice < 0.75:
            self._push(("binary", rng.choice(BINARY), self._pick(), self._pick()))
        elif dice < 0.82:
            self._push(("hook", rng.choice(HOOKS), self._pick()))
            self.features.add("hook")
        elif dice < 0.88:
            self._push(("two", self._pick(), self._pick()), 2)
        elif dice < 0.93 and not self._depth:
            self._no_grad()
        elif not self._key.uses_all:
            self._push((rng.choice(("detach", "half")), self._pick(), self._pick()))
            self.features.add("cut")

    def _no_grad(self) -> None:
        rng = self._rng
        self._depth += 1
        steps, self.body.steps = self.body.steps, []
        for _ in range(rng.randint(1, 3)):
            self._step("call" if self._later and rng.random() < 0.4 else "op")
        inner, self.body.steps = self.body.steps, steps
        self.body.steps.append(("no_grad", inner))
        self._depth -= 1
        self.features.add("no_grad")

    def _call(self) -> None:
        rng = self._rng
        which, callee = rng.choice(self._later)
        how = rng.choice(HOWS)
        cost = callee.calls + 1 + (how == "chain")
        if self.body.calls + cost > CALLS:
            return
        self.body.calls += cost
        args = self._structure([self._pick() for _ in range(callee.inputs)])
        to, via = (rng.randrange(self._key.workers) for _ in range(2))
        self._push(("call", how, to, which, args, via, callee.width), 1 if how == "remote" else callee.width)
        self.features.add(how)

    def _push(self, step: Step, values: int = 1) -> None:
        self.body.steps.append(step)
        self._unused.update(range(self._count, self._count + values))
        self._count += values

    def _pick(self) -> int:
        """The number of a value, rather a late one, rather one that nobody has used yet."""
        rng = self._rng
        choice = max(rng.randrange(self._count), rng.randrange(self._count))
        if self._unused and rng.random() < 0.4:
            choice = rng.choice(sorted(self._unused))
        if not self._depth:
            self._unused.discard(choice)
        return choice

    def _structure(self, items: list[Any]) -> Any:
        rng = self._rng
        shape = rng.randrange(6)
        if shape == 0:
            return items
        if shape == 1:
            return {f"key{i}": item for i, item in enumerate(items)}
        if shape == 2:
            return {"first": [items[0]], "rest": (tuple(items[1:]), 3.5, "text")}
        if shape == 3:
            return Box(items[0], items[1:])
        return items[0] if len(items) == 1 and shape == 4 else tuple(items)

    def _end(self, is_root: bool) -> None:
        rng = self._rng
        first = self._pick()
        more = rng.choice((1, 2, 3, 4)) if is_root else rng.choice((0, 0, 1, 1, 2, 3))
        outputs = [self._pick() for _ in range(more)]
        if self._key.uses_all:
            self._unused.discard(first)
            self._push(("fold", [first, *sorted(self._unused)]))
            first = self._count - 1
        self.body.outputs = self._structure([first, *outputs])


@functools.lru_cache(maxsize=64)
def program_of(key: Key) -> Program:
    rng = random.Random(f"{key.seed} {key.workers} {key.uses_all}")
    count = rng.randint(2, 6)
    bodies: list[Body] = []
    features: set[str] = set()
    for index in reversed(range(count)):
        later = [(index + 1 + i, body) for i, body in enumerate(bodies)]
        maker = Maker(rng, key, later, 2 if index == 0 else rng.randint(1, 3))
        bodies.insert(0, maker.make(is_root=index == 0))
        features |= maker.features
    return Program(key, bodies, features)


# -- what they run on


class World:
    """The parameters of each worker, and the inputs."""

    def __init__(self, seed: int, workers: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def leaf() -> torch.Tensor:
            return torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator).requires_grad_()

        self.leaves: dict[Leaf, torch.Tensor] = {
            (worker, number): leaf() for worker in range(workers) for number in range(PARAMETERS)
        }
        for worker in range(workers):
            self.leaves[worker, 1] = torch.nn.Parameter(self.leaves[worker, 1].detach())
        self.inputs = [leaf(), leaf()]
        for number, tensor in enumerate(self.inputs):
            self.leaves[-1, number] = tensor
        self.names = {id(tensor): name for name, tensor in self.leaves.items()}


_worlds: dict[tuple[int, int], World] = {}
_lock = threading.Lock()


def world_of(key: Key) -> World:
    name = (key.seed if key.world is None else key.world, key.workers)
    with _lock:
        if name not in _worlds:
            _worlds[name] = World(*name)
        return _worlds[name]


def forget() -> None:
    """Programs and parameters that were made for keys so far."""
    with _lock:
        _worlds.clear()
    program_of.cache_clear()


# -- running them


class OneProcess:
    """Calls are function calls; what would cross is copied, because the callee may change it."""

    def __init__(self, key: Key, worker: int) -> None:
        self.key = key
        self.worker = worker

    def call(self, how: str, to: int, which: int, args: Any, via: int) -> Callable[[], Any] | Ref:
        if how == "chain":
            middle = _cross(args)
            result = [*flatten(_cross(OneProcess(self.key, via).run(which, _cross(middle))))]
            crossed = _cross(_finish_chain(self.key, to, result))
            return lambda: crossed
        value = OneProcess(self.key, to).run(which, _cross(args))
        if how == "remote":
            return Ref(to, value)
        crossed = _cross(value)
        if how == "then":
            crossed = _then(crossed)
        return lambda: crossed

    def run(self, which: int, args: Any) -> Any:
        return run_body(self, which, args)

    def to_here(self, ref: Ref) -> Any:
        return ref.value if ref.owner == self.worker else _cross(ref.value)


class Ref(NamedTuple):
    """A remote reference in one process."""

    owner: int
    value: Any


class Workers:
    """Calls are calls."""

    def __init__(self, key: Key, worker: int) -> None:
        self.key = key
        self.worker = worker

    def call(self, how: str, to: int, which: int, args: Any, via: int) -> Any:
        name = self.key.name(to)
        if how == "sync":
            value = rpc.rpc_sync(name, _serve, args=(self.key, which, args))
            return lambda: value
        if how == "remote":
            return rpc.remote(name, _serve, args=(self.key, which, args))
        if how == "chain":
            return rpc.rpc_async(name, _serve_chain, args=(self.key, which, args, via)).wait
        future = rpc.rpc_async(name, _serve, args=(self.key, which), kwargs={"args": args})
        return future.then(lambda done: _then(done.value())).wait if how == "then" else future.wait

    def to_here(self, ref: Any) -> Any:
        return ref.to_here()


def _serve(key: Key, which: int, args: Any) -> Any:
    return run_body(Workers(key, key.here()), which, args)


@rpc.functions.async_execution
def _serve_chain(key: Key, which: int, args: Any, via: int) -> torch.futures.Future[Any]:
    me = key.here()
    future = rpc.rpc_async(key.name(via), _serve, args=(key, which, args))
    return future.then(lambda done: _finish_chain(key, me, flatten(done.value())))


def _finish_chain(key: Key, worker: int, result: list[Any]) -> list[Any]:
    parameter = world_of(key).leaves[worker, 0]
    return [item * parameter if isinstance(item, torch.Tensor) else item for item in result]


def _then(value: Any) -> list[Any]:
    return [item * 1.5 if isinstance(item, torch.Tensor) else item for item in flatten(value)]


def flatten(value: Any) -> list[Any]:
    """What is in a structure: tensors, references, numbers of values."""
    if isinstance(value, dict):
        return [item for inner in value.values() for item in flatten(inner)]
    if isinstance(value, Box):
        return flatten([value.first, value.rest])
    if isinstance(value, list | tuple) and not isinstance(value, Ref):
        return [item for inner in value for item in flatten(inner)]
    return [] if isinstance(value, str | float) else [value]


def _rebuild(structure: Any, replace: Callable[[Any], Any]) -> Any:
    if isinstance(structure, dict):
        return {name: _rebuild(inner, replace) for name, inner in structure.items()}
    if isinstance(structure, Box):
        return Box(_rebuild(structure.first, replace), _rebuild(structure.rest, replace))
    if isinstance(structure, list | tuple) and not isinstance(structure, Ref):
        return type(structure)(_rebuild(inner, replace) for inner in structure)
    return structure if isinstance(structure, str | float) else replace(structure)


def _cross(value: Any) -> Any:
    """A copy of everything; one tensor that is there twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in copies:
            copies[id(item)] = item.clone()
        return copies[id(item)]

    return _rebuild(value, copy)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x**3 / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return None if gradient is None else gradient * x**2 * 0.75


class Two(torch.autograd.Function):
    """Two inputs, two outputs; gradients that are not there stay away."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return x * 2 - y, x + y * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:  # type: ignore[override]
        zero = torch.zeros(())
        of_x = (
            None
            if first is None and second is None
            else (2 * first if first is not None else zero) + (second if second is not None else zero)
        )
        of_y = (
            None
            if first is None and second is None
            else (-first if first is not None else zero) + (3 * second if second is not None else zero)
        )
        return of_x, of_y


class Half(torch.autograd.Function):
    """The second of its inputs gets no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return x + torch.tanh(y)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def _full(x: torch.Tensor) -> torch.Tensor:
    return x.expand(SIZE, SIZE)


def _unary(op: str, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    match op:
        case "tanh":
            return x.tanh()
        case "sin":
            return x.sin()
        case "neg":
            return -x
        case "double":
            return x * 2
        case "transpose":
            return x.t()
        case "row":
            return x.narrow(0, x.shape[0] // 2, x.shape[0] - x.shape[0] // 2)[:1]
        case "column":
            return x.narrow(1, x.shape[1] - 1, 1)
        case "sum":
            return x.sum(0, keepdim=True) / 3
        case "expand":
            return _full(x)
        case "cat":
            return torch.cat([_full(x)[2:], _full(x)[:2]])
        case "stack":
            return torch.stack(_full(x).unbind(1))
        case "clone":
            return x.clone()
        case "reshape":
            return _full(x).reshape(-1)[: SIZE * SIZE].view(SIZE, SIZE)
        case "select":
            return _full(x).index_select(0, torch.tensor([0, 0, 3, 2]))
        case "cube":
            return Cube.apply(x.tanh())  # type: ignore[no-any-return]
        case "checkpoint":
            return checkpoint(lambda a: torch.tanh(_full(a) @ parameter), x, use_reentrant=False)  # type: ignore[no-any-return]
        case "stripes":
            return _full(x).contiguous()[::2, 1:].repeat(2, 2)[:, :SIZE]
    raise AssertionError(op)


def _binary(op: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    match op:
        case "add":
            return x + y
        case "mul":
            return x.tanh() * y
        case "sub":
            return x - 0.5 * y
        case "matmul":
            return torch.tanh(_full(x) @ _full(y))
        case "where":
            return torch.where(_full(x) > 0, _full(x), _full(y))
        case "join":
            return torch.cat([_full(x), _full(y)])[1 : SIZE + 1]
    raise AssertionError(op)


def _in_place(op: str, x: torch.Tensor, y: torch.Tensor) -> None:
    # narrow, not y[:1]: indexing a leaf keeps the GIL while it takes the leaf's mutex, and torch 2.13 can take them in the
    # other order in a thread that computes with the same leaf, which freezes the process.
    y = y if x.shape == (SIZE, SIZE) else y.narrow(0, 0, 1).narrow(1, 0, 1)
    match op:
        case "add_":
            x.add_(y)
        case "mul_":
            x.mul_(torch.tanh(y))
        case "sub_":
            x.sub_(y, alpha=0.5)
        case "slice_":
            x[:1] = y.narrow(0, 0, 1) * 0.5
        case "view_mul_":
            x[:, :1].mul_(2.0)


def _hook(kind: str) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or kind == "watch":
            return None
        return gradient * 2 if kind == "double" else gradient + 0.3 * gradient.sin()

    return hook


class _Run:
    """One run of a body."""

    def __init__(self, place: Any, inputs: list[Any]) -> None:
        self._place = place
        self._values: list[Callable[[], Any]] = [functools.partial(_same, item) for item in inputs]
        self._leaves = world_of(place.key).leaves
        self._uses_all = place.key.uses_all

    def value(self, number: int) -> Any:
        """A tensor or a reference."""
        return self._values[number]()

    def tensor(self, number: int) -> torch.Tensor:
        return self._fetch(self.value(number))

    def _fetch(self, item: Any) -> torch.Tensor:
        if isinstance(item, torch.Tensor):
            return item
        found = flatten(self._place.to_here(item))
        result = self._fetch(found[0])
        for other in found[1:] if self._uses_all else ():
            result = result + self._fetch(other)
        return result

    def _push(self, *values: Any) -> None:
        self._values.extend(functools.partial(_same, value) for value in values)

    def _parameter(self, number: int) -> torch.Tensor:
        if number == PARAMETERS:
            return torch.full((SIZE, SIZE), 0.7, dtype=torch.float64)
        return self._leaves[self._place.worker, number]

    def step(self, kind: str, *what: Any) -> None:
        getattr(self, f"_do_{kind}")(*what)

    def _do_param(self, number: int) -> None:
        self._push(self._parameter(number))

    def _do_const(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._push(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator))

    def _do_unary(self, op: str, x: int) -> None:
        self._push(_unary(op, self.tensor(x), self._parameter(2)))

    def _do_binary(self, op: str, x: int, y: int) -> None:
        self._push(_binary(op, self.tensor(x), self.tensor(y)))

    def _do_two(self, x: int, y: int) -> None:
        self._push(*Two.apply(_full(self.tensor(x)), _full(self.tensor(y))))

    def _do_half(self, x: int, y: int) -> None:
        self._push(Half.apply(_full(self.tensor(x)), _full(self.tensor(y))))

    def _do_detach(self, x: int, _: int) -> None:
        self._push(self.tensor(x).detach())

    def _do_fold(self, numbers: list[int]) -> None:
        total = torch.zeros(SIZE, SIZE, dtype=torch.float64)
        for number in numbers:
            total = total + self.tensor(number)
        self._push(total)

    def _do_in_place(self, op: str, x: int, parameter: int) -> None:
        value = self.value(x)
        if isinstance(value, torch.Tensor):
            if 0 in value.stride():
                value = value.clone()
            _in_place(op, value, self._parameter(parameter))
            self._values[x] = functools.partial(_same, value)

    def _do_hook(self, kind: str, x: int) -> None:
        raw = self.value(x)
        tensor = self._fetch(raw)
        if tensor is not raw or tensor.is_leaf:
            tensor = tensor * 1.0  # a reference's value and a parameter are other runs' too
        if tensor.requires_grad:
            tensor.register_hook(_hook(kind))
        self._push(tensor)

    def _do_no_grad(self, steps: list[Step]) -> None:
        with torch.no_grad():
            for step in steps:
                self.step(*step)

    def _do_call(self, how: str, to: int, which: int, args: Any, via: int, width: int) -> None:
        answer = self._place.call(how, to, which, _rebuild(args, self.value), via)
        if how == "remote":
            self._push(answer)
            return
        flat = functools.cache(lambda: flatten(answer()))
        self._values.extend(functools.partial(_item, flat, i) for i in range(width))


def _same(value: Any) -> Any:
    return value


def _item(flat: Callable[[], list[Any]], i: int) -> Any:
    return flat()[i]


def run_body(place: Any, which: int, args: Any) -> Any:
    body = program_of(place.key).bodies[which]
    run = _Run(place, flatten(args))
    for step in body.steps:
        run.step(*step)
    return _rebuild(body.outputs, run.value)


def forward(place: Any) -> list[torch.Tensor]:
    """Run a program from its root; its losses."""
    key: Key = place.key
    world = world_of(key)
    outputs = flatten(run_body(place, 0, list(world.inputs)))
    run = _Run(place, outputs)
    tensors = [run.tensor(number) for number in range(len(outputs))]
    losses = []
    for number in range(key.losses):
        loss = (world.inputs[0] * 0.1).sum() if number else torch.zeros((), dtype=torch.float64)
        for i, tensor in enumerate(tensors if key.losses == 1 else tensors[number :: key.losses]):
            loss = loss + (_full(tensor) * (0.5 + i)).sum()
        losses.append(loss if loss.requires_grad else loss + world.inputs[1].sum())
    return losses


def found_on(key: Key, context_id: int) -> dict[Leaf, torch.Tensor]:
    """The gradients that a context holds on this worker. A tensor that is not a leaf of the program is an error."""
    if not autograd._is_valid_context(context_id):
        return {}
    names = world_of(key).names
    return {names[id(leaf)]: gradient for leaf, gradient in autograd.get_gradients(context_id).items()}


@contextlib.contextmanager
def without_grad(world: World) -> Iterator[None]:
    """`.grad` is empty before and after."""
    for leaf in world.leaves.values():
        leaf.grad = None
    try:
        yield
    finally:
        for leaf in world.leaves.values():
            leaf.grad = None


def reference(
    key: Key, passes: Sequence[Sequence[int]] = ((0,),)
) -> tuple[list[float], dict[Leaf, torch.Tensor]]:
    """Losses and gradients by one-process autograd. `passes`: the losses of each backward."""
    world = world_of(key)
    with without_grad(world):
        losses = forward(OneProcess(key, key.root))
        for chosen in passes:
            torch.autograd.backward([losses[i] for i in chosen], retain_graph=True)
        found = {name: leaf.grad for name, leaf in world.leaves.items() if leaf.grad is not None}
        return [loss.item() for loss in losses], found


def _collect(agent: Agent, key: Key, context_id: int) -> dict[Leaf, torch.Tensor]:
    serving.set(agent)
    found: dict[Leaf, torch.Tensor] = {}
    for worker in range(key.workers):
        for leaf, gradient in rpc.rpc_sync(key.name(worker), found_on, args=(key, context_id)).items():
            assert leaf[0] == worker or (leaf[0] == -1 and worker == key.root), f"{leaf} on {worker}"
            found[leaf] = gradient
    return found


def distributed(
    key: Key, passes: Sequence[Sequence[int]] = ((0,),), mode: str = "smart", timeout_s: float = 20.0
) -> tuple[list[float], dict[Leaf, torch.Tensor]]:
    """The same over workers. On the program's root."""
    with autograd.context() as context_id:
        losses = forward(Workers(key, key.root))
        for i, chosen in enumerate(passes):
            autograd.backward(
                context_id,
                [losses[i] for i in chosen],
                retain_graph=i + 1 < len(passes),
                mode=mode,
                timeout=timeout_s,
            )
        # Outside the context, or it would get to know workers that the program has not taken it to.
        found = contextvars.Context().run(_collect, current_agent(), key, context_id)
        return [loss.item() for loss in losses], found


def assert_same(
    expected: tuple[list[float], dict[Leaf, torch.Tensor]],
    actual: tuple[list[float], dict[Leaf, torch.Tensor]],
) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-9, atol=1e-9)
    assert actual[1].keys() == expected[1].keys(), (
        f"without gradient: {sorted(expected[1].keys() - actual[1].keys())}, "
        f"with one that should have none: {sorted(actual[1].keys() - expected[1].keys())}"
    )
    for leaf, gradient in expected[1].items():
        torch.testing.assert_close(
            actual[1][leaf], gradient, rtol=1e-9, atol=1e-9, msg=lambda m, leaf=leaf: f"{leaf}: {m}"
        )
