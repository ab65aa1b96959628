"""`farstep demo`: runs to its end in a pipe, leaves what it says, and notices when something is wrong."""

import io
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from farstep import rpc
from farstep.demo import run_demo, show
from farstep.demo.acts import ACTS, NAMES, SPREAD, TOLERANCE, judge
from farstep.demo.display import Display
from farstep.demo.events import Began, Ended, Stepped, Workers, WorkerState, Wrote
from farstep.demo.model import Size
from farstep.demo.plot import plot
from farstep.demo.text import Corpus
from farstep.demo.training import OneProcess, Plan, Spread, Step
from farstep.launch import run_local

PNG = b"\x89PNG\r\n\x1a\n"
COMMAND = [sys.executable, "-m", "farstep", "demo"]


# -- the whole


@pytest.mark.slow
def test_it_runs_to_its_end_in_a_pipe(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--steps", "30", "--out", str(tmp_path)], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for title in ACTS.values():
        assert f"[ok] {title}: " in done.stdout
    assert "\x1b" not in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= max(80, len(str(tmp_path)) + 10)
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert saved["weights"].keys() == saved["optimizer"]["state"].keys()
    assert saved["schedule"]["last_epoch"] == 30


@pytest.mark.slow
def test_control_c_ends_it_and_its_workers(tmp_path):
    demo = subprocess.Popen(
        [*COMMAND, "--steps", "100", "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = ""
        for line in demo.stdout:
            said += line
            if "loss" in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        said += demo.communicate(timeout=30)[0]
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 130, said
    assert said.endswith("interrupted: the three workers have been stopped\n")
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_made_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_demo(1, tmp_path / "file") == 1
    assert "the demo failed: FileExistsError" in capsys.readouterr().out


# -- is it right?


def weights():
    corpus = Corpus()
    return OneProcess(Plan(Size(letters=len(corpus.letters)), steps=1), corpus).weights()


def test_equal_weights_are_equal():
    assert judge(weights(), weights()) == (True, "largest difference of a weight 0.0e+00")


@pytest.mark.parametrize("by", [2 * TOLERANCE, math.inf, math.nan])
def test_one_tampered_weight_is_found_and_named(by):
    ours, theirs = weights(), weights()
    ours["second.norm.weight"][3] += by
    right, said = judge(ours, theirs)
    assert not right
    assert "second.norm.weight" in said


def train_and_tamper(rank, plan):
    """On a worker: the verdict on a step of both trainings, and the verdict when a weight on cyd has been changed."""
    if rank != 0:
        return None
    corpus = Corpus()
    spread, alone = Spread(plan, corpus, SPREAD), OneProcess(plan, corpus)
    spread.step(0)
    alone.step(0)
    before = judge(spread.weights(), alone.weights())
    rpc.rpc_sync("cyd", tamper, args=(spread.parts["second"].get_module_rref(),))
    return before, judge(spread.weights(), alone.weights())


def tamper(module):
    with torch.no_grad():
        module.local_value().scores.bias[0] += 2 * TOLERANCE


@pytest.mark.slow
def test_a_weight_that_is_changed_on_its_worker_is_found_and_named():
    plan = Plan(Size(letters=len(Corpus().letters)), steps=1)
    before, after = run_local(train_and_tamper, 3, plan, names=NAMES, timeout_s=40)[0]
    assert before[0], before
    assert not after[0]
    assert "second.scores.bias" in after[1]


def test_a_missing_weight_is_found_and_named():
    ours, theirs = weights(), weights()
    del theirs["embedding.places.weight"]
    right, said = judge(ours, theirs)
    assert not right
    assert "embedding.places.weight" in said


def test_batches_depend_on_the_step_alone():
    (a, b), (c, d) = Corpus().batch(5, 4, 8), Corpus().batch(5, 4, 8)
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert torch.equal(a[:, 1:], b[:, :-1]), "what is wanted is the text one letter on"
    assert not torch.equal(a, Corpus().batch(6, 4, 8)[0])


# -- what is shown


def shown(*, width=80, wrong=None, terminal=True):
    """The display after a whole demo with made-up figures, and what it printed."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        height=24,
        force_terminal=terminal,
        highlight=False,
        markup=False,
        color_system=None,
    )
    display = Display(NAMES, ACTS, 512, console)
    with display:
        for act in ACTS:
            display.hear(Began(act, 40 if act in ("train", "alone", "resume") else 0))
            for number in range(display.acts[act].steps):
                display.hear(Stepped(act, number, Step(4 - number / 20, 123.45, 1.2e-3), number / 30))
            display.hear(Workers({n: WorkerState(("first", "second"), 10**8, 10**10, 10**10) for n in NAMES}))
            if act == "loss":
                display.killed("cyd", 10.0)
            said = "WorkerLost names cyd" if act == "loss" else "largest difference of a weight 1.0e-06"
            display.hear(Ended(act, act != wrong, said, 10.012))
        display.hear(Wrote("Anna ", "Anna stood in the boat. " * 10))
    return display, display.finish(), out


@pytest.mark.parametrize("terminal", [True, False])
def test_the_report_fits_80_columns_and_its_exit_code_is_0(terminal):
    _, code, out = shown(terminal=terminal)
    assert code == 0
    report = out.getvalue().split("farstep demo")[-1]
    assert max(len(line.rstrip()) for line in report.splitlines()) <= 80
    assert "Anna stood in the boat." in report
    assert "12 ms later" in report
    assert report.endswith("Every result was checked, and right.\n")


@pytest.mark.parametrize("wrong", ["alone", "resume", "loss"])
def test_what_is_wrong_is_named_and_the_exit_code_is_1(wrong):
    _, code, out = shown(wrong=wrong, terminal=False)
    assert code == 1
    assert f"[WRONG] {ACTS[wrong]}" in out.getvalue()
    assert out.getvalue().endswith(f"wrong: {ACTS[wrong]}\n")


def test_the_curve_is_left_as_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    display, _, out = shown()
    show._leave(display, tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert "loss.png" in out.getvalue()


def test_without_matplotlib_it_says_how_to_get_the_png(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    display, _, out = shown()
    show._leave(display, tmp_path)
    assert "pip install matplotlib" in out.getvalue()
    assert not (tmp_path / "loss.png").exists()


# -- the curve as text


def test_a_line_that_falls():
    assert plot([3, 2, 1, 0], width=14, height=2) == [
        "3.00 ┤⠉⠓⠦⣄⡀⠀⠀⠀",
        "0.00 ┤⠀⠀⠀⠀⠉⠓⠦⣄",
        "     └────────",
        "      0 step 4",
    ]


def test_a_curve_that_has_not_come_far_leaves_room():
    top, *_ = plot([1.0, 1.0], width=26, height=3, count=20)
    assert top.endswith("⠀" * 10)


@pytest.mark.parametrize("values", [[], [1.5], [2.0] * 5, [math.nan, 1.0, math.inf, 2.0], [1e9, -1e9]])
def test_any_values_make_a_plot_of_the_size_that_was_asked_for(values):
    lines = plot(values, width=50, height=4)
    assert len(lines) == 6
    assert max(map(len, lines)) <= 50


def test_a_picture_that_cannot_be_written_is_said_and_counts(tmp_path):
    pytest.importorskip("matplotlib")
    display, _, out = shown()
    (tmp_path / show.PICTURE_FILE).mkdir()
    assert show._leave(display, tmp_path) == 1
    assert "cannot be written" in out.getvalue()


@pytest.mark.parametrize("width", [1, 5, 20])
def test_a_plot_in_a_terminal_that_is_too_narrow(width):
    assert plot([1.0, 2.0, 3.0], width=width)
