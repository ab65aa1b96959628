"""The demo's acts, as its first worker directs them: train, write, save, compare, lose a worker, go on without it.

Each act ends with whether it was right and one line about what it found. The others only answer calls.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from farstep import rpc
from farstep.demo.events import Began, Ended, Event, Kill, Stepped, Workers, WorkerState, Wrote
from farstep.demo.model import PARTS
from farstep.demo.text import Corpus
from farstep.demo.training import OneProcess, Plan, Spread, compare, write
from farstep.errors import StepError, WorkerLost
from farstep.launch.local import tell
from farstep.rpc.current import current_agent

__all__ = ["ACTS", "NAMES", "SPREAD", "STATE_FILE", "Director", "judge", "play"]

NAMES: Final = ("ada", "bob", "cyd")
SPREAD: Final = dict(zip(PARTS, NAMES, strict=True))
VICTIM: Final = "cyd"
SURVIVORS: Final = dict(zip(PARTS, ("bob", "ada", "bob"), strict=True))
"""Where the parts go when the victim is gone: none is where it was."""

ACTS: Final = {
    "train": "train on three workers",
    "save": "save weights and optimizer",
    "write": "let it write",
    "alone": "the same in one process",
    "loss": f"{VICTIM} is killed (SIGKILL)",
    "resume": "load on two, train on",
}
STATE_FILE: Final = "state.pt"
MORE_STEPS: Final = 20
LETTERS: Final = 240
TOLERANCE: Final = 1e-3
"""Largest difference of a weight that passes for rounding. The sums of the gradients' norm are added in another order here and
there, and training lets that grow: to 1e-5 in 1200 steps on the machine where this was measured, with weights up to 1.5."""
GIVE_UP_S: Final = 20.0
TELL_EVERY_S: Final = 0.2


def play(rank: int, plan: Plan, folder: str) -> None:
    """The life of a demo worker."""
    logging.getLogger("farstep").setLevel(logging.CRITICAL)  # the one death here is on purpose
    if rank == 0:
        Director(plan, Path(folder)).run()


class Director:
    """Runs the acts in turn, on the first worker."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._corpus = Corpus()
        self._spread = Spread(plan, self._corpus, SPREAD)
        self._alone = OneProcess(plan, self._corpus)
        self._numels = {part: sum(p.numel() for p in self._alone.model[part].parameters()) for part in PARTS}
        self._told_at = 0.0

    def run(self) -> None:
        self._train()
        self._save()
        self._write()
        self._compare()
        self._lose_one()
        self._resume()

    def _train(self) -> None:
        losses = self._steps("train", self._spread, 0, self._plan.steps)
        few = max(1, len(losses) // 50)
        last = sum(losses[-few:]) / few
        _end("train", last <= losses[0], f"loss {losses[0]:.2f} at first, {last:.2f} at the end")

    def _save(self) -> None:
        """Beside its place first, so that the file is whole or not there."""
        _tell(Began("save"))
        path = self._folder / STATE_FILE
        torch.save(self._spread.state_dict(), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        _end("save", True, f"{path.stat().st_size / 2**20:.1f} MiB in {path.name}")

    def _write(self) -> None:
        _tell(Began("write"))
        start = "Anna "
        begin = time.monotonic()
        text = write(self._spread, self._corpus, start, LETTERS, self._plan.size.length)
        took_s = time.monotonic() - begin
        _tell(Wrote(start, text))
        _end(
            "write", len(text) == len(start) + LETTERS, f"{LETTERS} letters, {LETTERS / took_s:,.0f} a second"
        )

    def _compare(self) -> None:
        self._steps("alone", self._alone, 0, self._plan.steps)
        _end("alone", *judge(self._spread.weights(), self._alone.weights()))

    def _lose_one(self) -> None:
        """Go on training while a worker is killed. What these steps do is thrown away with the model."""
        _tell(Began("loss"))
        _tell(Kill(VICTIM))
        number, deadline = self._plan.steps, time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            try:
                self._spread.step(number)
            except (WorkerLost, StepError) as exc:
                lost = _lost(exc)
                _end("loss", lost == VICTIM, f"WorkerLost names {lost}")
                return
            number += 1
        _end("loss", False, f"no step failed within {GIVE_UP_S:g} s")

    def _resume(self) -> None:
        spread = self._spread = Spread(self._plan, self._corpus, SURVIVORS)
        spread.load_state_dict(torch.load(self._folder / STATE_FILE, weights_only=True))
        self._steps("resume", spread, self._plan.steps, MORE_STEPS)
        for number in range(self._plan.steps, self._plan.steps + MORE_STEPS):
            self._alone.step(number)
        _end("resume", *judge(spread.weights(), self._alone.weights()))

    def _steps(self, act: str, model: Spread | OneProcess, first: int, count: int) -> list[float]:
        _tell(Began(act, count))
        begin, losses = time.monotonic(), []
        for number in range(first, first + count):
            step = model.step(number)
            losses.append(step.loss)
            _tell(Stepped(act, number, step, time.monotonic() - begin))
            if isinstance(model, Spread) and time.monotonic() - self._told_at > TELL_EVERY_S:
                self._tell_workers(model)
        if isinstance(model, Spread):
            self._tell_workers(model)
        return losses

    def _tell_workers(self, spread: Spread) -> None:
        self._told_at = time.monotonic()
        where = {part: str(module.on) for part, module in spread.parts.items()}
        names = sorted({NAMES[0], *where.values()})
        traffic = {name: rpc.rpc_async(name, bytes_of_this_worker) for name in names}
        states = {}
        for name in names:
            parts = tuple(part for part in PARTS if where[part] == name)
            states[name] = WorkerState(
                parts, sum(self._numels[part] for part in parts), *traffic[name].wait()
            )
        _tell(Workers(states))


def judge(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[bool, str]:
    """Whether two sets of weights are the same but for rounding, and a line that says so."""
    found = compare(ours, theirs)
    said = f"largest difference of a weight {found.size:.1e}"
    if found.size <= TOLERANCE:
        return True, said
    return False, f"{said}, in {found.name}; {TOLERANCE:.0e} is allowed"


def _lost(error: WorkerLost | StepError) -> str:
    """The worker that the error names. A step asks all owners, and tells of each that failed."""
    errors = error.failed.values() if isinstance(error, StepError) else [error]
    return ", ".join(each.worker for each in errors if isinstance(each, WorkerLost)) or "none"


def bytes_of_this_worker() -> tuple[int, int]:
    """Written to sockets, and read from them."""
    info = current_agent().get_debug_info()
    return info["agent.bytes_sent"], info["agent.bytes_received"]


def _tell(event: Event) -> None:
    tell(event)


def _end(act: str, right: bool, said: str) -> None:
    tell(Ended(act, right, said, time.monotonic()))
