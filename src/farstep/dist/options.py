"""The one option: how long a rank waits for the others to arrive."""

from __future__ import annotations

import math
import os

__all__ = ["VARIABLE", "rank_timeout_s"]

VARIABLE = "FARSTEP_RANK_TIMEOUT_S"
DEFAULT_S = 60.0


def rank_timeout_s() -> float:
    """Return the seconds that a rank waits for absent ranks; infinity leaves it to the process group's timeout."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"{VARIABLE} is a number of seconds, or 0 for the process group's own timeout, not {text!r}"
        )
    return seconds or math.inf
