"""Which checkpoints of a training are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept for any of the three reasons; with none of them given, all are."""

    keep_last: int | None = None
    keep_best: int | None = None
    keep_every: int | None = None
    best: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}: give a whole number from 1 on, or None")
        if self.best not in ("min", "max"):
            raise ValueError(
                f'best is {self.best!r}: "min" if the least metric is the best, "max" if the greatest'
            )

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None and self.keep_best is None and self.keep_every is None

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """The steps that have a metric, the best first; of equals the newest. What is not a number is no metric."""
        sign = 1 if self.best == "min" else -1
        known = [
            (sign * value, -step)
            for step, value in metrics.items()
            if value is not None and not math.isnan(value)
        ]
        return [-step for _, step in sorted(known)]

    def kept(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Of all whole checkpoints, step -> metric."""
        if self.keeps_all:
            return set(metrics)
        found = set(sorted(metrics)[-(self.keep_last or 1) :])  # the newest one always
        found |= set(self.ranked(metrics)[: self.keep_best or 0])
        if self.keep_every is not None:
            found |= {step for step in metrics if step % self.keep_every == 0}
        return found
