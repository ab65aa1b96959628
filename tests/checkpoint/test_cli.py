"""`farstep checkpoint`: what it prints, what it returns, and that nobody ever sees a traceback."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.spread_state import full_state
from farstep import checkpoint, rpc
from farstep.checkpoint.tools import reshard, verify
from farstep.cli import main
from farstep.launch import run_local

PATIENCE_S = 50.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if three ranks had saved it."""
    folder = tmp_path_factory.mktemp("cli")
    checkpoint.save(full_state(), folder / "alone")
    reshard(folder / "alone", folder / "ck", 3)
    return folder / "ck"


@pytest.fixture(scope="module")
def other(saved: Path) -> Path:
    state = full_state()
    state["model"]["layers.1.weight"][0, 0] += 0.5
    state["model"]["layers.2.bias"] = torch.zeros(7)
    state["model"]["new"] = torch.zeros(2)
    state["epoch"] = 8
    checkpoint.save(state, saved.parent / "other")
    return saved.parent / "other"


class Cli:
    """Runs it in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *args: object, code: int = 0) -> str:
        try:
            found = main(["checkpoint", *map(str, args)])
        except SystemExit as exc:  # argparse
            found = int(exc.code or 0)
        out, self.err = self._capsys.readouterr()
        assert found == code, (found, out, self.err)
        assert "Traceback" not in self.err
        return out


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def damage(path: Path) -> str:
    file = min(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file.name


def copy_of(path: Path, tmp_path: Path) -> Path:
    reshard(path, tmp_path / "copy", 3)
    return tmp_path / "copy"


# -- list -------------------------------------------------------------------------------------------------


def test_list_of_a_managers_directory(cli: Cli, tmp_path: Path) -> None:
    manager = checkpoint.CheckpointManager(tmp_path / "run")
    metrics = {5: 0.5, 10: 0.25, 15: 2.0, 20: 0.125, 25: None}
    for step, metric in metrics.items():
        manager.save({"w": torch.zeros(256)}, step, metric=metric)
    text = cli("list", tmp_path / "run")
    assert "5 checkpoints, 5.0 KiB\n" in text
    rows = {line.split()[0]: line for line in text.splitlines()[4:]}
    assert rows["20"].endswith("0.125  best")
    assert rows["25"].endswith("newest")
    os.utime(manager.path(5).path / "manifest.json", (0, 0))
    (manager.path(25).path / "manifest.json").unlink()
    min(manager.path(20).path.glob("*.safetensors")).write_bytes(b"")
    text = cli("list", tmp_path / "run", "--best", "max", code=1)
    rows = {line.split()[0]: line for line in text.splitlines()[4:]}
    assert "1 damaged, 1 unfinished" in text
    assert "is shorter than" in rows["20"]
    assert "unfinished" in rows["25"]
    assert rows["15"].endswith("2  newest, best")
    assert rows["5"].split()[2] == "d"
    damage(manager.path(10).path)  # a byte, which lengths do not tell
    found = json.loads(cli("list", tmp_path / "run", "--verify", "--json", code=1))
    assert [each["status"] for each in found["steps"]] == ["whole", "damaged", "whole", "damaged", "unfinished"]  # fmt: skip
    assert [each["step"] for each in found["steps"] if each["is_newest"]] == [15]


def test_list_of_what_is_none(cli: Cli, saved: Path, tmp_path: Path) -> None:
    cli("list", saved, code=2)
    assert "is itself a checkpoint" in cli.err
    cli("list", tmp_path, code=2)
    assert "step_000000100" in cli.err


# -- inspect ----------------------------------------------------------------------------------------------


def test_inspect_shows_a_tree_with_layers_as_one(cli: Cli, saved: Path) -> None:
    text = cli("inspect", saved)
    lines = text.splitlines()
    assert lines[0] == str(saved)
    assert "saved by 3 ranks" in text
    assert "[0-3]" in text
    assert "embed.weight" in text
    (row,) = [line for line in lines if "700x600" in line and "exp_avg" not in line]
    assert row.split()[-5:] == ["float32", "1.6", "MiB", "0-2", "3x1"]
    assert "epoch = 7" in text
    assert "note = 'a run'" in text
    assert "betas = (0.9, 0.999)" in text
    assert all(line == line.rstrip() for line in lines)
    assert cli.err == ""


def test_inspect_can_be_narrowed(cli: Cli, saved: Path) -> None:
    text = cli("inspect", saved, "--filter", "*.bias", "--no-fold")
    assert text.count("bias") == 4
    assert "embed" not in text
    text = cli("inspect", saved, "--depth", 1)
    assert "weight" not in text
    assert "model (10 tensors)" in text
    text = cli("inspect", saved, "--filter", "model.embed", "--boxes")
    assert text.count(".safetensors") == 3
    assert "[0:234, 0:600]" in text
    assert "nothing has such a name" in cli("inspect", saved, "--filter", "nobody")


def test_inspect_has_one_line_for_what_an_optimizer_keeps_for_a_parameter(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, n) for n in (8, 7, 6, 5)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    text = cli("inspect", tmp_path / "ck")
    (line,) = (line for line in text.splitlines() if "7x8" in line and ":" in line)
    assert line.replace("│", "").replace("├", "").split() == ["weight:", "step,", "exp_avg,", "exp_avg_sq", "7x8", "float32", "452", "B"]  # fmt: skip
    assert text.count("exp_avg_sq") == 8
    plain = cli("inspect", tmp_path / "ck", "--no-fold")
    assert len([line for line in plain.splitlines() if "exp_avg_sq " in line]) == 8
    assert len(plain.splitlines()) > len(text.splitlines()) + 20
    assert "exp_avg_sq" in cli("inspect", tmp_path / "ck", "--filter", "optim.state.0.weight.exp_avg_sq")


def rpc_saved(rank: int) -> None:
    if rank == 0:
        tables = [rpc.remote(name, torch.ones, args=(4, 4)) for name in ("store", "shelf")]
        path = os.environ["FARSTEP_TEST_PATH"]
        checkpoint.save({"tables": tables, "own": rpc.RRef(torch.ones(2)), "here": torch.ones(3)}, path)
        checkpoint.CheckpointManager(f"{path}_steps").save({"table": tables[0]}, 2)


def test_workers_of_rpc_have_names(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSTEP_TEST_PATH", str(tmp_path / "ck"))
    run_local(rpc_saved, 3, names=["boss", "store", "shelf"])
    text = cli("inspect", tmp_path / "ck")
    assert "saved by 3 workers (boss, store, shelf)" in text
    (header,) = (line for line in text.splitlines() if line.startswith("name"))
    assert header.split() == ["name", "shape", "dtype", "size", "workers", "cut"]
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["worker", "boss", "store", "shelf"]
    picture = cli("plot", tmp_path / "ck", "--text")
    assert "A boss   B store   C shelf" in picture
    cli("plot", tmp_path / "ck", "--out", tmp_path / "x.png")
    assert "which worker holds" in cli("plot", tmp_path / "ck", "--out", tmp_path / "x.png")
    cli("reshard", tmp_path / "ck", tmp_path / "again", "--ranks", 4)
    assert "saved by 4 ranks" in cli("inspect", tmp_path / "again")
    text = cli("inspect", tmp_path / "ck_steps" / "step_000000002")
    assert ", of which store wrote" in text.replace("\n", " ")
    assert "step 2" in text
    assert "metric" not in text


def test_inspect_json(cli: Cli, saved: Path) -> None:
    found = json.loads(cli("inspect", saved, "--json"))
    assert (found["path"], found["ranks"], len(found["files"])) == (str(saved), 3, 3)
    embed = next(each for each in found["tensors"] if each["name"] == "model.embed.weight")
    assert (embed["dtype"], embed["shape"]) == ("float32", [700, 600])
    assert [box["rank"] for box in embed["boxes"]] == [0, 1, 2]
    assert found["values"]["epoch"] == 7


def test_inspect_of_what_load_reads_too(cli: Cli, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "dcp", "--to", "dcp")
    assert "embed.weight" in cli("inspect", tmp_path / "dcp")
    assert "no difference" in cli("diff", saved, tmp_path / "dcp")
    cli("verify", tmp_path / "dcp", code=2)
    assert "has no checksums" in cli.err


# -- verify -----------------------------------------------------------------------------------------------


def test_verify_of_a_whole_one(cli: Cli, saved: Path) -> None:
    assert "is whole" in cli("verify", saved)
    assert json.loads(cli("verify", saved, "--json", "--threads", 2))["whole"] is True


def test_verify_of_a_damaged_one(cli: Cli, saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    name = damage(path)
    (found,) = verify(path)
    text = cli("verify", path, code=1)
    assert name in text
    assert str(found.tensor) in text
    assert "is damaged: 1 file, 1 tensor" in text
    told = json.loads(cli("verify", path, "--json", code=1))
    assert told["whole"] is False
    assert [(each["file"], each["tensor"]) for each in told["damages"]] == [(name, found.tensor)]
    os.unlink(path / name)
    text = cli("verify", path, code=1)
    assert "the file is missing: 20 boxes" in text
    assert "model.embed.weight[0:234, 0:600]" in text
    (path / "manifest.json").write_bytes(b"{}")
    assert "manifest.json" in cli("verify", path, code=1)


def test_verify_and_what_a_save_has_left(cli: Cli, saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    (path / "0123456789abcdef.0.safetensors").write_bytes(b"")
    assert "did not finish" in cli("verify", path)
    assert "did not finish" in cli("verify", path, "--strict", code=1)


# -- diff -------------------------------------------------------------------------------------------------


def test_diff(cli: Cli, saved: Path, other: Path) -> None:
    assert "no difference: 30 tensors and 5 values are equal" in cli("diff", saved, saved)
    text = cli("diff", saved, other, code=1)
    assert "1 tensor only in B\n  model.new  float32 2" in text
    assert "float32 40  →  float32 7" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  model.layers.1.weight")]
    assert row.split()[1:4] == ["1", "0.5", "0.5"]
    assert "epoch  7  →  8" in text
    assert "3 tensors and 1 value differ" in text
    assert "no difference" in cli("diff", saved, other, "--tolerance", 0.5, "--filter", "layers.1")
    cli("diff", saved, other, "--filter", "nobody", code=2)


def test_diff_json_and_limit(cli: Cli, saved: Path, other: Path) -> None:
    found = json.loads(cli("diff", saved, other, "--json", code=1))
    assert found["same"] is False
    assert {each["name"]: each["status"] for each in found["tensors"] if each["status"] != "equal"} == {
        "model.layers.1.weight": "different",
        "model.layers.2.bias": "shape",
        "model.new": "only_b",
    }
    assert found["values"] == [{"name": "epoch", "status": "different", "a": 7, "b": 8}]
    zeros = {"model": {name: torch.zeros_like(each) for name, each in full_state()["model"].items()}}
    checkpoint.save(zeros, saved.parent / "zeros")
    text = cli("diff", saved, saved.parent / "zeros", "--limit", 2, "--filter", "model.*", code=1)
    assert "and 8 more; --limit 0 shows all" in text


# -- convert, reshard, plot -------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "name"), [("torch", "x.pt"), ("dcp", "x")])
def test_convert_there_and_back(cli: Cli, saved: Path, tmp_path: Path, to: str, name: str) -> None:
    assert f"as {to}" in cli("convert", saved, tmp_path / name, "--to", to)
    cli("convert", tmp_path / name, tmp_path / "back", "--to", "farstep")
    assert "no difference" in cli("diff", saved, tmp_path / "back")
    cli("convert", saved, tmp_path / name, "--to", to, code=2)
    assert "--overwrite" in cli.err
    cli("convert", saved, tmp_path / name, "--to", to, "--overwrite")


def test_convert_goes_by_the_targets_name(cli: Cli, saved: Path, tmp_path: Path) -> None:
    assert "as torch" in cli("convert", saved, tmp_path / "x.pt")
    assert "as safetensors" in cli("convert", saved, tmp_path / "x.safetensors", "--leave-out")
    assert "has no place for it" in cli.err
    assert "safetensors has no place" in cli.err
    assert "as farstep" in cli("convert", tmp_path / "x.pt", tmp_path / "x")


def test_convert_of_a_part(cli: Cli, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "x", "--to", "safetensors", code=2)
    assert "--select" in cli.err
    cli("convert", saved, tmp_path / "x", "--to", "safetensors", "--select", "model")
    assert "embed.weight" in cli("inspect", tmp_path / "x")
    cli("convert", saved, tmp_path / "y", "--to", "safetensors", "--leave-out")
    assert "left out" in cli.err
    assert "epoch" in cli.err


def test_convert_and_reshard_for_programs(cli: Cli, saved: Path, tmp_path: Path) -> None:
    found = json.loads(cli("convert", saved, tmp_path / "x", "--to", "safetensors", "--leave-out", "--json"))
    assert (found["source"], found["target"]) == (str(saved), str(tmp_path / "x"))
    assert (found["source_format"], found["format"]) == ("farstep", "safetensors")
    assert "epoch" in found["left_out"]
    assert (found["tensors"] > 10, found["nbytes"] > 1 << 20, cli.err) == (True, True, "")
    found = json.loads(cli("reshard", saved, tmp_path / "y", "--ranks", 2, "--json"))
    assert (found["target"], found["ranks"], len(found["files"])) == (str(tmp_path / "y"), 2, 2)


def test_what_is_left_out_is_not_without_end(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(1), "v": list(range(100))}, tmp_path / "x")
    cli("convert", tmp_path / "x", tmp_path / "y", "--to", "safetensors", "--leave-out")
    assert cli.err.count("\n") == 21
    assert "80 more" in cli.err


def test_a_managers_step_and_metric_are_shown(cli: Cli, tmp_path: Path) -> None:
    manager = checkpoint.CheckpointManager(tmp_path)
    manager.save({"w": torch.ones(1)}, 100, metric=0.25)
    assert "step 100, metric 0.25" in cli("inspect", manager.path(100))
    found = json.loads(cli("inspect", manager.path(100), "--json"))
    assert found["info"] == {"step": 100, "metric": 0.25}


def test_a_terminal_is_given_nothing_that_it_would_obey(cli: Cli, tmp_path: Path) -> None:
    evil, w = "evil\x1b]0;owned\x07\x1b[2J\u202e", torch.ones(2)
    state = {evil: w, f"{evil}2": w, "v\x1b[31m": "x\x1b[5m", "\ud800": torch.ones(3)}
    checkpoint.save(state, tmp_path / "a")
    checkpoint.save({evil: torch.zeros(2), f"{evil}3": torch.ones(1), "v\x1b[31m": 3}, tmp_path / "b")
    damaged = damage(tmp_path / "b")
    shown = [
        cli("inspect", tmp_path / "a"),
        cli("inspect", tmp_path / "a", "--boxes"),
        cli("plot", tmp_path / "a", "--text"),
        cli("verify", tmp_path / "b", code=1),
    ]
    assert damaged in shown[-1]
    data = bytearray((tmp_path / "b" / damaged).read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / damaged).write_bytes(data)
    shown.append(cli("diff", tmp_path / "a", tmp_path / "b", code=1))
    for to in ("dcp", "safetensors"):
        try:
            shown.append(cli("convert", tmp_path / "a", tmp_path / to, "--to", to, "--leave-out"))
        finally:
            shown.append(cli.err)
    cli("plot", tmp_path / "a", "--out", tmp_path / "x.png")
    for text in shown:
        assert all(letter.isprintable() or letter == "\n" for letter in text), text
    assert all(r"\x1b]0;owned\x07\x1b[2J\u202e" in text for text in shown[:5])
    assert r"\ud800" in shown[0]


def test_a_name_with_dollars_is_no_formula(cli: Cli, tmp_path: Path) -> None:
    checkpoint.save({"$\\frac$": torch.ones(2)}, tmp_path / "a")
    cli("plot", tmp_path / "a", "--out", tmp_path / "x.png")


def test_reshard(cli: Cli, saved: Path, tmp_path: Path) -> None:
    text = cli("reshard", saved, tmp_path / "new", "--ranks", 5)
    assert "as if saved by 5 ranks, in 5 files" in text
    assert "no difference" in cli("diff", saved, tmp_path / "new")
    cli("reshard", saved, tmp_path / "new", "--ranks", 2, code=2)
    assert "--overwrite" in cli.err
    cli("reshard", saved, tmp_path / "new", "--ranks", 2, "--overwrite")
    assert json.loads(cli("inspect", tmp_path / "new", "--json"))["ranks"] == 2


def test_plot(cli: Cli, saved: Path, tmp_path: Path) -> None:
    picture = tmp_path / "x.png"
    assert str(picture) in cli("plot", saved, "--out", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = cli("plot", saved, "--text")
    assert "embed.weight" in text
    assert "█" in text
    cli("plot", saved.parent / "alone", "--out", tmp_path / "one.png")
    cli("plot", saved, "--out", tmp_path / "x.nonsense", code=2)
    cli("plot", saved, "--filter", "nobody", "--out", tmp_path / "y.png", code=2)
    assert "no tensor has such a name" in cli.err
    assert not (tmp_path / "y.png").exists()
    cli("plot", saved, "--out", tmp_path / "no" / "x.png", code=2)


def test_the_legend_of_a_picture_without_colours(cli: Cli, saved: Path) -> None:
    legend = cli("plot", saved, "--text").splitlines()[-1]
    marks = [part.split()[0] for part in legend.split("   ") if part]
    assert len(marks) > 2
    assert len(set(marks)) == len(marks)


def test_plot_without_matplotlib(
    cli: Cli, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    cli("plot", saved, "--out", tmp_path / "x.png", code=2)
    assert "farstep[plot]" in cli.err
    assert "--text" in cli.err
    assert not (tmp_path / "x.png").exists()


# -- what goes wrong --------------------------------------------------------------------------------------


def test_a_mistake_is_one_line(cli: Cli, saved: Path, tmp_path: Path) -> None:
    for args in (
        ("inspect", tmp_path / "none"),
        ("verify", tmp_path),
        ("diff", saved, tmp_path),
        ("reshard", tmp_path, tmp_path / "x", "--ranks", 2),
        ("convert", tmp_path, tmp_path / "x", "--to", "dcp"),
        ("plot", saved / "manifest.json"),
        ("inspect", "nosuch://bucket/x"),
        ("inspect", "memory://nothing/here"),
        ("reshard", saved, saved / "manifest.json" / "x", "--ranks", 2),
    ):
        out = cli(*args, code=2)
        assert out == ""
        assert cli.err.count("\n") == 1, cli.err
        assert cli.err.startswith("farstep checkpoint: ")
    cli("inspect", saved.parent, code=2)
    assert "below it" in cli.err  # where there are some
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    cli("inspect", tmp_path / "x.pt", code=2)
    assert "farstep checkpoint convert SOURCE TARGET makes" in cli.err
    cli("reshard", saved, tmp_path / "x", "--ranks", 10**9, code=2)
    assert cli.err.count("\n") == 1


def test_damage_that_is_met_on_the_way_is_one_line_and_a_code_of_its_own(
    cli: Cli, saved: Path, tmp_path: Path
) -> None:
    path = copy_of(saved, tmp_path)
    name = damage(path)
    for args in (("diff", path, saved), ("reshard", path, tmp_path / "x", "--ranks", 2)):
        cli(*args, code=1)
        assert cli.err.count("\n") == 1
        assert name in cli.err
    (path / "manifest.json").write_bytes(b"nonsense")
    cli("inspect", path, code=1)
    assert "manifest.json" in cli.err


@pytest.mark.parametrize(
    "args",
    [
        ("inspect",),
        ("inspect", "x", "--depth", "0"),
        ("reshard", "x", "y"),
        ("reshard", "x", "y", "--ranks", "none"),
        ("diff", "x", "y", "--tolerance", "-1"),
        ("convert", "x", "y", "--to", "zip"),
        ("inspect", "x", "--storage-option", "anon"),
        ("nonsense",),
    ],
)
def test_wrong_usage(cli: Cli, args: tuple[str, ...]) -> None:
    cli(*args, code=2)
    assert "usage" in cli.err


def test_help_tells_of_all_commands_and_codes(cli: Cli) -> None:
    text = cli()
    for word in ("inspect", "verify", "diff", "convert", "reshard", "plot", "exit codes"):
        assert word in text
    assert "exit codes" in cli("verify", "--help")


def test_a_url(cli: Cli, saved: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.put(f"{saved}/", "/looked-at/", recursive=True)
    try:
        assert "embed.weight" in cli(
            "inspect", "memory://looked-at", "--storage-option", "skip_instance_cache=true"
        )
        assert "is whole" in cli("verify", "memory://looked-at")
    finally:
        files.rm("/looked-at", recursive=True)


# -- as a process -----------------------------------------------------------------------------------------


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "farstep", "checkpoint", *map(str, args)]


@pytest.mark.slow
def test_a_reader_that_goes_away(saved: Path, tmp_path: Path) -> None:
    checkpoint.save({f"x{i}{'abc'[i % 3]}": torch.zeros(i % 7) for i in range(3000)}, tmp_path)
    process = subprocess.Popen(
        command("inspect", tmp_path, "--no-fold"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.slow
def test_where_there_is_no_terminal_there_is_no_bar(saved: Path, tmp_path: Path) -> None:
    done = subprocess.run(command("verify", saved), capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    done = subprocess.run(command("verify", tmp_path), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def _until(fd: int, wanted: bytes) -> bytes:
    """What a terminal shows until it shows this."""
    found, deadline = b"", time.monotonic() + PATIENCE_S
    while wanted not in found:
        ready, _, _ = select.select([fd], [], [], deadline - time.monotonic())
        assert ready, found
        found += os.read(fd, 65536)
    return found


SLOW = """
import sys, time
from farstep.checkpoint import local_disk
from farstep.cli import main
from farstep.launch import run_local
read_into = local_disk.DiskFile.read_into
def slowly(self, offset, buffer):
    time.sleep(0.05)
    return read_into(self, offset, buffer)
local_disk.DiskFile.read_into = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_bar_on_a_terminal_and_ctrl_c(tmp_path: Path) -> None:
    checkpoint.save({f"w{i}": torch.zeros(1 << 20) for i in range(60)}, tmp_path / "ck")
    ours, theirs = pty.openpty()
    args: list[Any] = ["checkpoint", "reshard", str(tmp_path / "ck"), str(tmp_path / "new"), "--ranks", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *args],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    try:
        assert b"0 B of 0 B" not in _until(ours, b"MiB of 240 MiB")
        process.send_signal(signal.SIGINT)
        shown = _until(ours, b"interrupted")
        assert process.wait(PATIENCE_S) == 130
        assert b"Traceback" not in shown
        assert os.listdir(tmp_path / "new") == []
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        process.stdout.close()  # type: ignore[union-attr]
