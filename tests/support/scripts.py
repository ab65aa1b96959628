"""Runs scripts one after another in a process that has imported torch already, and keeps its fork server, so that each takes a moment.

    python scripts.py LOG      reads paths from its standard input, a line each, and answers each with a line of JSON:
                               null, or what went wrong

What the scripts print goes to LOG.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

__all__ = ["Scripts"]


class Scripts:
    """Such a process, started when it is needed, and anew after a script that did not end in time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, timeout_s: float = 180.0) -> str | None:
        """Run a script as `python script` would. Returns what went wrong."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self._log)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process: Any = self._process
        process.stdin.write(f"{script}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        answer = process.stdout.readline() if ready else ""
        if not answer:
            self.close()
            return f"no answer in {timeout_s:g} s" if not ready else "the process has died"
        wrong: str | None = json.loads(answer)
        return wrong

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for line in sys.stdin:
        print(json.dumps(outcome(line.strip())), file=answers, flush=True)


def outcome(script: str) -> str | None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exc:
        return f"it has ended with {exc.code!r}" if exc.code else None
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    import torch  # noqa: F401

    main()
