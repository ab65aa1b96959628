"""Run a script written for torch.distributed's rpc, autograd and optim on farstep, unedited."""

from __future__ import annotations

import os
import runpy
import sys
import types

from farstep.compat import install

USAGE = """\
usage: python -m farstep.compat script.py [args…]
       python -m farstep.compat -m module [args…]
       python -m farstep.compat -c command [args…]
"""


def main() -> None:
    """Install, then run the script as if Python had been called with it."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"{USAGE}\n{__doc__}")
        sys.exit(0 if len(sys.argv) > 1 else 2)
    install()
    _reach_children()
    if sys.argv[1] == "-m" and len(sys.argv) > 2:
        module = sys.argv[2]
        sys.argv = [module, *sys.argv[3:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    if sys.argv[1] == "-c" and len(sys.argv) > 2:
        command = compile(sys.argv[2], "<string>", "exec")
        sys.argv = ["-c", *sys.argv[3:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main_module = types.ModuleType("__main__")
        exec(command, vars(main_module))
        return
    script = sys.argv[1]
    if not os.path.exists(script):
        sys.exit(f"farstep.compat: there is no file {script!r}")
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _reach_children() -> None:
    """Processes that the script starts find `site/sitecustomize.py` first on their path."""
    site = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = site + (os.pathsep + before if before else "")


if __name__ == "__main__":
    main()
