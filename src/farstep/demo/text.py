"""What the demo learns from: a short tale of our own, as numbers, in batches that depend on nothing but the step."""

from __future__ import annotations

from importlib import resources

import torch

__all__ = ["Corpus"]


class Corpus:
    """A text as a tensor of character numbers. Every process that makes one has the same."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text or resources.files("farstep.demo").joinpath("tale.txt").read_text("utf-8")
        self.letters = sorted(set(self.text))
        self._numbers = {letter: number for number, letter in enumerate(self.letters)}
        self.data = self.encode(self.text)

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self._numbers[letter] for letter in text])

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.letters[number] for number in numbers)

    def batch(self, step: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` pieces of the text, and the same one letter further on, which is what is to be guessed."""
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - length, (count, 1), generator=random)
        at = starts + torch.arange(length)
        return self.data[at], self.data[at + 1]
