"""Every program in examples/ runs with one command, and what it asserts at its end holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs(program, tmp_path):
    env = {**os.environ, "PYTHONWARNINGS": "error::SyntaxWarning"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=50, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "nothing is wrong, so nothing is warned of"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_says_how_it_is_run_and_checks_what_it_promises(program):
    text = program.read_text()
    assert f"    python examples/{program.name}\n" in text
    assert "\n    assert " in text.split('if __name__ == "__main__":')[1]
