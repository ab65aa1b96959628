"""The end of a forked child that has come back from the function in which it was forked.

What its parent does after that function is for the parent alone: it answers a call, reports a worker's result, waits for messages. A child that went
on there would do all that a second time, in the parent's name.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

__all__ = ["end_child"]


def end_child(error: BaseException | None) -> NoReturn:
    """End this process as Python ends: by SystemExit's code, with a traceback and 1 for another exception, with 0 for none."""
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        pass  # it has nobody to tell
    finally:
        os._exit(code & 0xFF)
