"""Tensors of collectives that are over, and a moment at the end of the process for the threads that still have some.

gloo's threads let go of a collective's tensors a little after the caller has gone on. Where the caller has let go of them by then, it is that thread that frees
what Python has of them; and a thread that wants Python while the process ends aborts it. So the last few are kept, and a process that comes to its end
right after a collective waits for as long as a thread takes to go on.
"""

from __future__ import annotations

import atexit
import time
from collections import deque

from torch import Tensor

__all__ = ["keep"]

_MOMENT_S = 0.05
_last: deque[tuple[Tensor, ...]] = deque(maxlen=16)


def keep(*tensors: Tensor) -> None:
    """Small ones, that a collective is called with."""
    if not _last:
        atexit.register(time.sleep, _MOMENT_S)
    _last.append(tensors)
