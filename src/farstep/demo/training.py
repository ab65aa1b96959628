"""The same training twice: `OneProcess` with nothing but torch, `Spread` over workers with farstep.

Both take the same batches, the same optimizer, schedule and clipping. What differs between them is what farstep asks of its
users: a context around the pass, and where each part of the model is to live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from farstep import autograd, rpc
from farstep.demo.model import PARTS, Size, make_part
from farstep.demo.text import Corpus
from farstep.optim import DistributedOptimizer, parameter_rrefs

__all__ = ["Difference", "OneProcess", "Plan", "Spread", "Step", "compare", "write"]

WARM_UP: Final = 0.03
FLOOR: Final = 0.05
"""The part of the steps until the learning rate is full, and the part of it that is left at the end."""


@dataclass(frozen=True)
class Plan:
    """What is trained, and how. Picklable, since it goes to the workers."""

    size: Size
    steps: int
    batch: int = 16
    rate: float = 4e-3
    max_norm: float = 1.0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.size.length


@dataclass(frozen=True)
class Step:
    """What a step found."""

    loss: float
    norm: float
    rate: float


def share_of_rate(step: int, steps: int) -> float:
    """Warm-up, then half a cosine, then the floor."""
    done = min(1.0, step / steps)
    return min(1.0, (step + 1) / max(1.0, WARM_UP * steps)) * (
        FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2
    )


def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())


class OneProcess:
    """The model, its optimizer and its schedule in this process."""

    def __init__(self, plan: Plan, corpus: Corpus) -> None:
        self._plan, self._corpus = plan, corpus
        self.model = nn.ModuleDict({part: make_part(part, plan.size) for part in PARTS})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.rate)
        self.schedule = LambdaLR(self.optimizer, partial(share_of_rate, steps=plan.steps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for part in PARTS:
            x = self.model[part](x)
        return x

    def step(self, number: int) -> Step:
        letters, wanted = self._corpus.batch(number, self._plan.batch, self._plan.size.length)
        rate = self.schedule.get_last_lr()[0]
        loss = loss_of(self(letters), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._plan.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return Step(loss.item(), float(norm), float(rate))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}


class Spread:
    """The model on the workers that `where` names for each part; the loop here."""

    def __init__(self, plan: Plan, corpus: Corpus, where: Mapping[str, str]) -> None:
        self._plan, self._corpus = plan, corpus
        self.parts = {part: rpc.RemoteModule(where[part], make_part, (part, plan.size)) for part in PARTS}
        self.parameters = [
            named
            for part, module in self.parts.items()
            for named in parameter_rrefs(module.get_module_rref(), prefix=part)
        ]
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, self.parameters, lr=plan.rate)
        self.schedule = LambdaLR(self.optimizer, partial(share_of_rate, steps=plan.steps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for part in PARTS:
            x = self.parts[part](x)
        return x

    def step(self, number: int) -> Step:
        letters, wanted = self._corpus.batch(number, self._plan.batch, self._plan.size.length)
        rate = self.schedule.get_last_lr()[0]
        with autograd.context() as context_id:
            loss = loss_of(self(letters), wanted)
            autograd.backward(context_id, [loss])
            norm = self.optimizer.clip_grad_norm_(context_id, self._plan.max_norm)
            self.optimizer.step(context_id, close=True)
        self.schedule.step()
        return Step(loss.item(), float(norm), float(rate))

    def weights(self) -> dict[str, torch.Tensor]:
        """All of them, brought here."""
        return {
            f"{part}.{name}": weight
            for part, module in self.parts.items()
            for name, weight in _on_owner(module, _weights_here).items()
        }

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, by names that say nothing of where it was."""
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was saved over these or other workers."""
        for part, module in self.parts.items():
            start = part + "."
            _on_owner(
                module,
                _load_here,
                {
                    name.removeprefix(start): w
                    for name, w in state["weights"].items()
                    if name.startswith(start)
                },
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def _on_owner(module: rpc.RemoteModule, function: Callable[..., Any], *args: Any) -> Any:
    rref = module.get_module_rref()
    return rpc.rpc_sync(rref.owner(), function, args=(rref, *args))


def _weights_here(module: rpc.RRef[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.local_value().named_parameters()}


def _load_here(module: rpc.RRef[nn.Module], weights: dict[str, torch.Tensor]) -> None:
    module.local_value().load_state_dict(weights)


# -- what comes of it


@dataclass(frozen=True)
class Difference:
    """Where two sets of weights differ most, and by how much."""

    name: str
    size: float


def compare(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> Difference:
    """The largest difference of a weight. A weight that only one side has, or that is not a number, is infinitely wrong."""
    if odd := sorted(ours.keys() ^ theirs.keys()):
        return Difference(odd[0], math.inf)
    found = Difference("", -1.0)
    for name, weight in ours.items():
        size = (weight - theirs[name]).abs().max().item()
        found = max(found, Difference(name, math.inf if math.isnan(size) else size), key=lambda d: d.size)
    return found


def write(
    model: Callable[[torch.Tensor], torch.Tensor], corpus: Corpus, start: str, count: int, length: int
) -> str:
    """Have the model go on with a text, letter by letter, by its own scores."""
    random = torch.Generator().manual_seed(0)
    numbers = corpus.encode(start).tolist()
    with torch.no_grad():
        for _ in range(count):
            scores = model(torch.tensor([numbers[-length:]]))[0, -1]
            chances = torch.softmax(scores / 0.5, dim=0)
            numbers.append(int(torch.multinomial(chances, 1, generator=random)))
    return corpus.decode(numbers)
