"""Starts the demo's workers, shows what they tell, and leaves a folder with what came of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from farstep.demo.acts import ACTS, NAMES, STATE_FILE, play
from farstep.demo.display import Display
from farstep.demo.events import Event, Kill
from farstep.demo.model import Size
from farstep.demo.picture import draw_curves
from farstep.demo.text import Corpus
from farstep.demo.training import Plan
from farstep.errors import FarstepError
from farstep.launch.local import LocalWorkers
from farstep.rpc import RpcOptions

__all__ = ["run_demo"]

PICTURE_FILE: Final = "loss.png"
START_S: Final = 60.0
STEP_S: Final = 1.0
"""How long the whole may last: so much, and so much more for each step of each training."""
BY_SOCKET: Final = RpcOptions(shared_memory_min_bytes=1 << 30)
"""Everything by socket, so that the bytes that are shown are all there are."""


def run_demo(steps: int, folder: Path) -> int:
    """Run it, show it, and return the exit code: 0 when every result was right."""
    plan = Plan(Size(letters=len(Corpus().letters)), steps)
    display = Display(NAMES, ACTS, plan.tokens_per_step)
    workers = LocalWorkers(
        play,
        len(NAMES),
        plan,
        str(folder.absolute()),
        names=NAMES,
        options=BY_SOCKET,
        timeout_s=START_S + 2 * STEP_S * steps,
    )

    def on_message(name: str, event: Event) -> None:
        if isinstance(event, Kill):
            display.killed(event.worker, time.monotonic())
            workers.kill(event.worker)
        display.hear(event)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with display, workers:
            workers.wait(on_message)
    except KeyboardInterrupt:
        display.say("interrupted: the three workers have been stopped")
        return 130
    except (FarstepError, OSError, RuntimeError, ValueError, TypeError, LookupError) as exc:
        display.fail(exc)
        return 1
    code = display.finish()
    return _leave(display, folder) or code


def _leave(display: Display, folder: Path) -> int:
    """Draw the picture, and say what is in the folder. Returns 1 where it cannot be written."""
    train, alone = display.acts["train"], display.acts["alone"]
    display.say(f"In {folder}/ are")
    display.say(f"  {STATE_FILE}   weights, optimizer and schedule; load it with torch.load")
    try:
        draw_curves(folder / PICTURE_FILE, train.losses, alone.losses, [s.step.rate for s in train.taken])
    except ImportError:
        display.say(f"  and not {PICTURE_FILE}, for which matplotlib is needed: pip install matplotlib")
    except OSError as exc:
        display.say(f"  and not {PICTURE_FILE}, which cannot be written: {exc}")
        return 1
    else:
        display.say(f"  {PICTURE_FILE}   the loss of both trainings, and the learning rate")
    return 0
