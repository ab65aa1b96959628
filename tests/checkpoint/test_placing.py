"""What `convert` may replace, and that what it replaces is never gone before the new one is there."""

import os
import signal
import subprocess
import sys

import fsspec
import pytest
import torch

from farstep.checkpoint import CheckpointManager, convert, placing, read, save
from farstep.checkpoint.storage import storage_of
from farstep.checkpoint.tools import reshard
from farstep.errors import CheckpointError, DamagedCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def one(value: float) -> dict:
    return {"w": torch.full((3,), value)}


def damage(path) -> None:
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def memory(request):
    """The URL of a directory that is gone afterwards."""
    files = fsspec.filesystem("memory")
    name = f"/placing-{request.node.name.replace('[', '-').replace(']', '')}"
    yield f"memory:/{name}"
    if files.exists(name):
        files.rm(name, recursive=True)


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_a_directory_that_has_anything_else_is_not_replaced(tmp_path, kind):
    save(one(1), tmp_path / "run" / "step1")
    save(one(2), tmp_path / "run" / "step2")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"step1, which is to be converted, is within"):
        convert(tmp_path / "run" / "step1", tmp_path / "run", to=kind, overwrite=True)
    save(one(3), tmp_path / "source")
    for there in ("notes.txt", "step1"):
        with pytest.raises(CheckpointError, match=f"something else in it, '{there}'"):
            convert(tmp_path / "source", tmp_path / "run", to=kind, overwrite=True)
        (tmp_path / "run" / "notes.txt").unlink(missing_ok=True)
    assert read(tmp_path / "run" / "step1")["w"][0] == 1
    assert read(tmp_path / "run" / "step2")["w"][0] == 2
    target = tmp_path / "export"
    convert(tmp_path / "source", target, to=kind)
    (target / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"something else in it, 'config\.json'"):
        convert(tmp_path / "source", target, to=kind, overwrite=True)
    assert (target / "config.json").exists()


def test_a_checkpoint_of_another_format_is_replaced(tmp_path):
    save(one(1), tmp_path / "source")
    save(one(2), tmp_path / "x")
    for kind in ("dcp", "safetensors", "dcp"):
        convert(tmp_path / "source", tmp_path / "x", to=kind, overwrite=True)
        assert read(tmp_path / "x")["w"][0] == 1
        assert sorted(os.listdir(tmp_path)) == ["source", "x"]


def test_a_file_of_the_source_is_not_replaced(tmp_path):
    save(one(1), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="safetensors")
    with pytest.raises(CheckpointError, match="a file of the checkpoint that is to be converted"):
        convert(tmp_path / "hf", tmp_path / "hf" / "model.safetensors", overwrite=True)
    convert(tmp_path / "hf", tmp_path / "hf" / "copy.pt")


def test_the_same_place_is_found_out_however_it_is_given(tmp_path, memory):
    save(one(1), memory)
    save(one(1), tmp_path / "x")
    os.symlink(tmp_path / "x", tmp_path / "link")
    for source, target in (
        (storage_of(memory), memory),
        (memory, storage_of(memory)),
        (f"{memory}/", memory),
        (storage_of(tmp_path / "x"), tmp_path / "x"),
        (tmp_path / "x", tmp_path / "link"),
        (f"file://{tmp_path / 'x'}", tmp_path / "x"),
    ):
        with pytest.raises(CheckpointError, match="that is to be converted"):
            convert(source, target, to="dcp", overwrite=True)
    assert read(memory)["w"][0] == 1
    assert read(tmp_path / "x")["w"][0] == 1


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
@pytest.mark.parametrize("before", ["farstep", "dcp", "safetensors"])
def test_without_a_rename_the_old_one_stays_until_the_new_one_is_there(tmp_path, memory, before, kind):
    save(one(1), tmp_path / "old")
    save({"w": torch.full((3,), 2.0), "v": torch.ones(5)}, tmp_path / "new")
    save(one(3), tmp_path / "bad")
    damage(tmp_path / "bad")
    convert(tmp_path / "old", memory, to=before)
    names = sorted(storage_of(memory).names())
    with pytest.raises(DamagedCheckpoint):
        convert(tmp_path / "bad", memory, to=kind, overwrite=True)
    assert sorted(storage_of(memory).names()) == names
    assert read(memory)["w"][0] == 1

    seen = []
    files = type(fsspec.filesystem("memory"))
    original = files.rm_file

    def looked(self, path):
        """Before anything is removed, and after."""
        seen.append({key: float(value[0]) for key, value in read(memory).items()})
        original(self, path)
        seen.append({key: float(value[0]) for key, value in read(memory).items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "rm_file", looked)
        convert(tmp_path / "new", memory, to=kind, max_shard_bytes=15, overwrite=True)
    assert all(each in ({"w": 1.0}, {"w": 2.0, "v": 1.0}) for each in seen)
    assert seen[-1] == {"w": 2.0, "v": 1.0}
    assert convert(memory, tmp_path / "back").source_format == kind
    convert(tmp_path / "old", memory, to=kind, overwrite=True)
    assert read(memory).keys() == {"w"}
    assert len(storage_of(memory).names()) == 2  # no old file is left


def test_a_mark_that_is_in_place_for_all_that_an_error_says(tmp_path, memory):
    """The answer to the request that put it there was lost."""
    save(one(1), tmp_path / "old")
    save(one(2), tmp_path / "new")
    convert(tmp_path / "old", memory, to="dcp")
    storage = storage_of(memory)
    replace = storage.replace

    def lost(name, data):
        replace(name, data)
        raise TimeoutError("no answer")

    storage.replace = lost
    with pytest.raises(TimeoutError):
        convert(tmp_path / "new", storage, to="dcp", overwrite=True)
    assert read(memory)["w"][0] == 2


KILLED = """
import os, signal, sys
from farstep.checkpoint import convert, placing
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
placing.shutil.rmtree = kill  # what was there before is removed last
convert(sys.argv[1], sys.argv[2], to="dcp", overwrite=True)
"""


def test_one_that_is_killed_leaves_a_whole_one(tmp_path):
    save(one(1), tmp_path / "old")
    save(one(2), tmp_path / "new")
    convert(tmp_path / "old", tmp_path / "x", to="dcp")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        # Without two renames there is no moment between them.
        patch.setattr(placing.os, "rename", lambda *_: seen.append("rename"))
        convert(tmp_path / "old", tmp_path / "x", to="dcp", overwrite=True)
    assert seen == []
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "new", tmp_path / "x"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read(tmp_path / "x")["w"][0] == 2


def test_a_file_system_that_cannot_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "_exchanged", lambda *_: False)
    save(one(1), tmp_path / "old")
    save(one(2), tmp_path / "new")
    convert(tmp_path / "old", tmp_path / "x", to="dcp")
    convert(tmp_path / "new", tmp_path / "x", to="dcp", overwrite=True)
    assert read(tmp_path / "x")["w"][0] == 2
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "x"]


@pytest.mark.parametrize("how", ["reshard", "convert"])
def test_a_managers_step_and_metric_are_kept(tmp_path, how):
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, best="min")
    manager.save({"w": torch.ones(8)}, 1, metric=0.1)
    manager.save({"w": torch.ones(8)}, 2, metric=0.5)
    if how == "reshard":
        reshard(manager.path(1), manager.path(1), 2, overwrite=True)
    else:
        convert(manager.path(1), manager.path(9))
        manager.delete(1)
        assert (manager.metric(9), manager.best()) == (0.1, 9)
        return
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, best="min")
    assert (manager.metric(1), manager.best()) == (0.1, 1)
    manager.save({"w": torch.ones(8)}, 3, metric=0.6)
    assert manager.steps() == [1, 3]
