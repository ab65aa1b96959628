"""The cases with gradients: open a context, forward, backward, close the context.

A model's loss is written once, as a function of `Far`, which runs its calls on other workers or, for the
gradients that must come out, in this process. Every case compares the two before it is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.nn.functional import mse_loss

from bench import models
from bench.cases import Act, Case

HOPS = 10
FAN_OUT = 8
STAGE_NODES = 900
NODES_OFF = 0.06
"""A model may have this part more or fewer nodes than it says."""


class Far(Protocol):
    """Runs a function on a peer, or one call on each of several at once."""

    def call(self, peer: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor: ...

    def calls(
        self, peers: Sequence[str], function: Callable[..., torch.Tensor], args: Sequence[tuple[Any, ...]]
    ) -> list[torch.Tensor]: ...


class There:
    def __init__(self, rpc: ModuleType) -> None:
        self._rpc = rpc

    def call(self, peer: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._rpc.rpc_sync(peer, function, args=args)
        return result

    def calls(
        self, peers: Sequence[str], function: Callable[..., torch.Tensor], args: Sequence[tuple[Any, ...]]
    ) -> list[torch.Tensor]:
        begun = self._rpc.rpc_async
        futures = [begun(peer, function, args=each) for peer, each in zip(peers, args, strict=True)]
        return [future.wait() for future in futures]


class Here:
    def call(self, peer: str, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return function(*args)

    def calls(
        self, peers: Sequence[str], function: Callable[..., torch.Tensor], args: Sequence[tuple[Any, ...]]
    ) -> list[torch.Tensor]:
        return [function(*each) for each in args]


@dataclass(frozen=True)
class Model:
    loss: Callable[[Far], torch.Tensor]
    leaves: Sequence[torch.Tensor] = ()
    """Tensors of the caller's whose gradients are wanted."""
    parts: Sequence[tuple[str, str, int]] = ()
    """(peer, kind, number) of what is run there, which has parameters."""
    nodes: int | None = None
    """How many its graph has."""


Build = Callable[[list[str]], Model]
"""A model whose parts are on these peers."""


def mlp(peers: list[str], number: int = 0) -> Model:
    x, y = torch.rand(32, models.MLP_WIDTH), torch.rand(32, models.MLP_WIDTH)
    return Model(
        lambda far: mse_loss(far.call(peers[0], models.forward, "mlp", number, x), y),
        parts=[(peers[0], "mlp", number)],
    )


def hops(count: int) -> Build:
    """A tensor goes to one peer and back, then to the other and back, and so on."""

    def build(peers: list[str]) -> Model:
        x = torch.rand(64, requires_grad=True)

        def loss(far: Far) -> torch.Tensor:
            y = x
            for number in range(count):
                y = far.call(peers[number % 2], models.hop, y)
            return y.sum()

        return Model(loss, leaves=[x])

    return build


def fan_out(peers: list[str]) -> Model:
    """The same tensor goes to all peers at once."""
    x = torch.rand(8, models.LAYER_WIDTH, requires_grad=True)
    args = [("layer", number, x) for number in range(len(peers))]
    return Model(
        lambda far: torch.stack(far.calls(peers, models.forward, args)).sum(),
        leaves=[x],
        parts=[(peer, "layer", number) for number, peer in enumerate(peers)],
    )


def stage(peers: list[str]) -> Model:
    """A part of a pipeline: activations go there that require gradients, and come back."""
    x = torch.rand(4, 16, models.STAGE_WIDTH, requires_grad=True)
    y = torch.rand(4, 16, models.STAGE_WIDTH)
    return Model(
        lambda far: mse_loss(far.call(peers[0], models.forward, "stage", 0, x), y),
        leaves=[x],
        parts=[(peers[0], "stage", 0)],
        nodes=STAGE_NODES,
    )


def chain(nodes: int) -> Build:
    def build(peers: list[str]) -> Model:
        x = torch.rand(models.CHAIN_WIDTH, requires_grad=True)
        return Model(
            lambda far: far.call(peers[0], models.forward, "chain", nodes, x).sum(),
            leaves=[x],
            parts=[(peers[0], "chain", nodes)],
            nodes=nodes,
        )

    return build


def passes(build: Build, **options: Any) -> Case:
    """Whole passes over a model; the options are those of `backward`."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        autograd, far, model = models.autograd_of(rpc), There(rpc), build(peers)
        context, backward, loss = autograd.context, autograd.backward, model.loss
        check(rpc, autograd, model, options)

        def act() -> None:
            with context() as context_id:
                backward(context_id, [loss(far)], **options)

        yield act

    return case


def check(rpc: ModuleType, autograd: ModuleType, model: Model, options: dict[str, Any]) -> None:
    """Compare the gradients of all leaves with those that one process gets."""
    parameters = [p for _, kind, number in model.parts for p in models.part(kind, number).parameters()]
    root = model.loss(Here())
    nodes = models.count_nodes(root)
    if model.nodes is not None and abs(nodes - model.nodes) > NODES_OFF * model.nodes:
        raise ValueError(f"the graph has {nodes} nodes, not {model.nodes}")
    expected = torch.autograd.grad(root, [*model.leaves, *parameters])
    with autograd.context() as context_id:
        autograd.backward(context_id, [model.loss(There(rpc))], **options)
        here = autograd.get_gradients(context_id)
        found = [here[leaf] for leaf in model.leaves]
        for peer, kind, number in model.parts:
            found += rpc.rpc_sync(peer, models.gradients, args=(kind, number, context_id))
    for one, other in zip(found, expected, strict=True):
        # Sums come in the order in which peers answer, and round by the size of what is added up, also where little is left of it.
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6 * max(1.0, float(other.abs().max()))):
            raise ValueError("the gradients differ from those of one process")


def agents(count: int) -> Case:
    """A fan-out to agents that all live in this process, farstep's own way to have many workers."""

    @contextmanager
    def case(rpc: ModuleType, me: str, peers: list[str]) -> Iterator[Act]:
        from farstep.rpc.current import serving
        from farstep.rpc.group import local_agents

        with contextlib.ExitStack() as stack:
            first, *others = stack.enter_context(local_agents(count + 1))
            stack.callback(serving.reset, serving.set(first))
            names = [agent.info.name for agent in others]
            yield stack.enter_context(passes(fan_out)(rpc, first.info.name, names))

    return case


MODELS: dict[str, Build] = {"mlp": mlp, "hops": hops(HOPS), "fanout": fan_out, "stage": stage}
MODES = ("fast", "smart")
MORE_HOPS = (2, 5, 20, 40)
NODES = (100, 300, 900, 2700)
AGENTS = (8, 32, 64)

CASES: dict[str, Case] = {
    **{key: passes(build) for key, build in MODELS.items()},
    **{f"{key}-{mode}": passes(build, mode=mode) for key, build in MODELS.items() for mode in MODES},
    **{f"hops{count}": passes(hops(count)) for count in MORE_HOPS},
    **{f"nodes{count}": passes(chain(count)) for count in NODES},
    **{f"agents{count}": agents(count) for count in AGENTS},
}
