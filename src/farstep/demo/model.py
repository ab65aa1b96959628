"""The demo's model: a small transformer over letters, in three parts that can live anywhere.

A part is made from its name and the model's size alone, with a seed of its own. So it has the same weights at first wherever it
is made, and the model in one process is the same as the model on three workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["PARTS", "Size", "make_part"]

PARTS: Final = ("embedding", "first", "second")
"""In the order of the forward pass. `first.blocks.0.norm1.weight` is a parameter's name, wherever the part is."""


@dataclass(frozen=True)
class Size:
    """How large the model is. Picklable, since it goes to the workers."""

    letters: int
    length: int = 32
    """How far back the model looks, in letters."""
    width: int = 64
    heads: int = 4
    blocks: int = 1
    """In each of the two stages."""


def make_part(name: str, size: Size) -> nn.Module:
    """A part of the model, with weights that depend on its name only."""
    with torch.random.fork_rng():
        torch.manual_seed(PARTS.index(name))
        if name == "embedding":
            return Embedding(size)
        return Stage(size) if name == "first" else LastStage(size)


class Embedding(nn.Module):
    """Letters, and where they stand, as vectors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters = nn.Embedding(size.letters, size.width)
        self.places = nn.Embedding(size.length, size.width)
        nn.init.normal_(self.letters.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.letters(numbers) + self.places(torch.arange(numbers.shape[1]))
        return found


class Stage(nn.Module):
    """Some blocks, one after another."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks(x)
        return result


class LastStage(Stage):
    """Some blocks, and a score for each letter that might be next."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.norm = nn.LayerNorm(size.width)
        self.scores = nn.Linear(size.width, size.letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.scores(self.norm(super().forward(x)))
        return result


class Block(nn.Module):
    """Attention to what came before, then two layers for each place by itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        # Without a bias: that of the keys has no effect, so its gradient is rounding, and Adam would make much of it.
        self.attend = nn.Linear(size.width, 3 * size.width, bias=False)
        self.gather = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.think = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = (
            part.view(count, length, self.heads, -1).transpose(1, 2)
            for part in self.attend(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(count, length, width))
        result: torch.Tensor = x + self.think(self.norm2(x))
        return result
