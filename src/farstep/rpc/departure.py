"""Why a worker leaves its group, as it tells the others.

[Note: the first to end] When a worker fails, the others fail soon after, because of it. Whoever started them all reports the process that
ends first, and that must be the one with the cause. So a process that ends without shutdown tells its peers why and
leaves its connections open: they count it as lost when the kernel closes them, which is when its process is gone. What fails because of that
names the exception.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Final

__all__ = ["ENDED", "Leaving", "why_out_of_time", "why_process_ends", "why_shut_down"]

MAX_CHARS: Final = 2000
ENDED: Final = "its process ended"


class Leaving(IntEnum):
    """How a worker leaves, as its goodbye says."""

    SHUT_DOWN = 0
    PROCESS_ENDS = 1
    """It is lost when its process has ended."""
    OUT_OF_TIME = 2
    """The timeout of its shutdown has passed. It may not have answered all calls."""


def why_shut_down() -> str | None:
    """Why `shutdown` is called now, if that is because of an exception: one that unwinds or is being handled."""
    error = sys.exception()
    return None if error is None else f"it left because of {_brief(error)}"


def why_out_of_time(timeout_s: float) -> str:
    return f"it left when the timeout of its shutdown, {timeout_s:g} s, had passed"


def why_process_ends() -> str:
    """Why this process ends without shutdown, as far as it can be known.

    A child process of multiprocessing asks while the exception that ends it unwinds. In a main process Python has put it into
    `sys.last_value` by then, but not that of `sys.exit`.
    """
    error = sys.exception()
    if error is None and not hasattr(sys, "ps1"):  # at a prompt it may be any earlier one
        error = getattr(sys, "last_value", None)
    code = None
    while isinstance(error, SystemExit):
        code = error.code
        error = error.__context__ if code else None  # torch's spawn calls sys.exit(1) when it has caught one
    if error is not None:
        return f"{ENDED} with {_brief(error)}"
    return f"{ENDED} without shutdown" + (f", by sys.exit({code!r})" if code else "")


def _brief(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails
        text = type(error).__name__
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."
