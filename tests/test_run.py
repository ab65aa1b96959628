"""`farstep run` and `farstep compat`: copies of a script, and what becomes of them when one
fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farstep.cli import main
from farstep.launch.script import run_script

SCRIPT = """
import os, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["FARSTEP_RESTART"])
if rank == 1 and restart < int(sys.argv[1]):
    print("about to fail", flush=True)
    sys.exit(3)
if rank == 0 and sys.argv[2] == "wait" and restart < int(sys.argv[1]):
    time.sleep(60)  # until it is stopped
while sys.argv[2] == "stay" and not os.path.exists(__file__ + ".told"):
    time.sleep(0.01)  # until it is told that rank 1 has failed
print("done", restart, flush=True)
"""


class Run:
    def __init__(self, tmp_path: Path, *args: str, world_size: int = 2, **options: object) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        self.told = tmp_path / "script.py.told"
        self.lines: list[str] = []
        self.said: list[str] = []
        self.code = run_script(
            str(script),
            args,
            world_size,
            self.show,
            say=self.said.append,
            **options,  # type: ignore[arg-type]
        )

    def show(self, rank: int, line: str) -> None:
        self.lines.append(f"{rank} {line}")
        if "exited" in line:
            self.told.touch()


STAY = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)  # until it is stopped
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stay.py").write_text(STAY)
    command = [sys.executable, "-m", "farstep", "run", "-n", "2", "--max-restarts", "2", "stay.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(run.stdout.readline().split()[-1]) for _ in range(2)]
        run.send_signal(number)
        assert run.wait(90) == 128 + number
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_all_are_started_again_when_one_fails(tmp_path: Path) -> None:
    run = Run(tmp_path, "2", "wait", max_restarts=3)
    assert run.code == 0
    assert sorted(line for line in run.lines if "done" in line) == ["0 done 2", "1 done 2"]
    assert run.lines.count("1 [exited with code 3; stopping rank 0]") == 2
    assert len(run.said) == 2
    assert "rank 1 exited with code 3. All 2 ranks are started again (restart 2 of 3)" in run.said[1]


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    run = Run(tmp_path, "9", "wait", max_restarts=1)
    assert run.code == 3
    assert run.said[-1] == "rank 1 exited with code 3. Giving up after 1 restart"


def test_others_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "1", "go", keep_going=True)
    assert run.code == 3
    assert "0 done 0" in run.lines
    assert run.said == ["1 of 2 ranks failed: rank 1 exited with code 3"]


def test_ranks_are_listed_in_words(tmp_path: Path) -> None:
    run = Run(tmp_path, "1", "stay", world_size=3, keep_going=True)
    assert run.lines[:2] == ["1 about to fail", "1 [exited with code 3; ranks 0 and 2 go on]"]


@pytest.mark.parametrize("options", [["--keep-going", "--max-restarts", "1"], ["-n", "0"]])
def test_a_mistake_shows_the_usage_of_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(SystemExit):
        main(["run", *options, str(script)])
    assert capsys.readouterr().err.startswith("usage: farstep run ")


def test_without_either_the_others_are_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path, "1", "wait")
    assert (run.code, run.said) == (3, [])
    assert "0 done 0" not in run.lines


@pytest.mark.parametrize("command", [["-m", "farstep", "compat"], ["-m", "farstep.compat"]])
def test_compat_is_the_module(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "old.py").write_text(
        "import sys, torch.distributed.rpc as r; print(r.init_rpc.__module__, sys.argv[1:], __name__)"
    )
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "old.py"), "--help", "-m"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=True,
    )
    assert done.stdout == "farstep.compat.rpc ['--help', '-m'] __main__\n"
