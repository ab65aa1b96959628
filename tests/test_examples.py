"""Every program in examples/ runs with one command, and what it asserts at its end holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.timeout(200)  # a busy machine is slow; only a hang takes this long
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs(program, tmp_path):
    env = {**os.environ, "PYTHONWARNINGS": "error::SyntaxWarning"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=190, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "nothing is wrong, so nothing is warned of"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_says_how_it_is_run_and_checks_what_it_promises(program):
    text = program.read_text()
    assert f"    python examples/{program.name}\n" in text
    assert "\n    assert " in text.split('if __name__ == "__main__":')[1]


def test_readme_lists_every_program():
    readme = (ROOT / "README.md").read_text()
    missing = [p.name for p in PROGRAMS if f"| [{p.name}](examples/{p.name}) |" not in readme]
    assert missing == []


@pytest.mark.parametrize(
    "what", ["ShardedOptimizer(", "fully_shard(", "CheckpointManager(", "checkpoint.save(", "rpc.remote("]
)
def test_some_program_shows(what):
    assert any(what in program.read_text() for program in PROGRAMS)
