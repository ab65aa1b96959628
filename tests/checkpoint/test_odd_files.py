"""Things in a checkpoint's directory that are no files, and file systems in which a file can be seen half written."""

import os

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from support.workers import Worker

from farstep import checkpoint
from farstep.checkpoint import LocalDisk, RemoteStorage
from farstep.checkpoint.manifest import MANIFEST
from farstep.errors import DamagedCheckpoint, StorageFailed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def saved(tmp_path):
    checkpoint.save({"a": torch.ones(3)}, tmp_path)
    return tmp_path


def the_data(path):
    (file,) = path.glob("*.safetensors")
    return file


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def _directory(path):
    path.unlink()
    path.mkdir()


def _endless(path):
    os.truncate(path, 4 << 40)  # nearly all of which is not on the disk


@pytest.mark.parametrize("spoil", [_pipe, _device, _directory])
def test_data_that_is_no_file(saved, spoil):
    spoil(the_data(saved))
    with pytest.raises(DamagedCheckpoint, match="symbolic link" if spoil is _device else "not a file"):
        checkpoint.read(saved)


@pytest.mark.parametrize("spoil", [_pipe, _device, _endless])
def test_a_manifest_that_is_no_file(saved, spoil):
    spoil(saved / MANIFEST)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.read(saved)
    checkpoint.save({"a": torch.zeros(3)}, saved)  # which puts it right
    assert torch.equal(checkpoint.read(saved)["a"], torch.zeros(3))


@pytest.mark.parametrize("make", [LocalDisk, lambda path: RemoteStorage(f"local://{path}")])
def test_a_file_of_more_than_is_wanted(tmp_path, make):
    (tmp_path / "x").write_bytes(b"12345")
    storage = make(tmp_path)
    assert storage.read("x", 5) == storage.read("x") == b"12345"
    with pytest.raises(DamagedCheckpoint, match="x has 5 bytes, and no more than 4"):
        storage.read("x", 4)
    with pytest.raises(FileNotFoundError):
        storage.read("y", 4)


def test_a_link_where_the_manifest_is_written(saved, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine"
    (saved / f"{MANIFEST}.tmp").symlink_to(elsewhere)
    checkpoint.save({"a": torch.zeros(3)}, saved)
    assert not elsewhere.exists()
    assert not (saved / MANIFEST).is_symlink()


# -- a file system that shows what is half written


def _killed_in_the_manifest(path):
    write = LocalFileOpener.write

    def part(self, data, *args):
        if MANIFEST in self.path:
            write(self, data[:50])
            self.f.flush()
            os.kill(os.getpid(), 9)
        return write(self, data, *args)

    LocalFileOpener.write = part
    checkpoint.save({"a": torch.zeros(3)}, RemoteStorage(f"local://{path}"))


def test_a_file_system_with_directories(tmp_path):
    path = tmp_path / "saved"
    storage = RemoteStorage(f"local://{path}")
    checkpoint.save({"a": torch.full((3,), 2.0)}, storage)
    checkpoint.save({"a": torch.ones(3)}, storage)
    worker = Worker("killed", tmp_path / "log")
    try:
        with pytest.raises(AssertionError, match="died"):
            worker.run(_killed_in_the_manifest, str(path))
    finally:
        worker.close()
    assert torch.equal(checkpoint.read(storage)["a"], torch.ones(3))
    checkpoint.save({"a": torch.zeros(3)}, storage)
    assert len(list(path.iterdir())) == 2  # and nothing of the one that was killed


def test_a_file_system_that_does_not_rename(tmp_path, monkeypatch):
    """As HDFS, where there is such a file already."""
    storage = RemoteStorage(f"local://{tmp_path}/saved")
    checkpoint.save({"a": torch.ones(3)}, storage)
    monkeypatch.setattr(LocalFileSystem, "mv", lambda *_: None)
    with pytest.raises(StorageFailed, match="save into a new directory"):
        checkpoint.save({"a": torch.zeros(3)}, storage)
    assert torch.equal(checkpoint.read(storage)["a"], torch.ones(3))
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_a_url_of_this_disk(tmp_path):
    for protocol in ("file", "local"):
        checkpoint.save({"a": torch.ones(3)}, f"{protocol}://{tmp_path}/{protocol}")
        assert (tmp_path / protocol / MANIFEST).exists()
        assert isinstance(checkpoint.storage.storage_of(f"{protocol}://{tmp_path}"), LocalDisk)
