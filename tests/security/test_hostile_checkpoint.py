"""A checkpoint, or a directory to save into, that somebody else has prepared: it makes us neither write nor read anything elsewhere.

Links, pipes and sockets in the place of files, names that lead out of a directory, files that change while they are read, and paths that a peer chooses.
"""

import json
import os
import pickle
import socket
import stat
import struct
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from support.workers import speaking_for

from farstep import checkpoint, rpc
from farstep.checkpoint import CheckpointManager, LocalDisk, rpc_calls
from farstep.checkpoint.manifest import MANIFEST
from farstep.checkpoint.storage import storage_of
from farstep.checkpoint.tools import diff, reshard, verify
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, StorageFailed, Untrusted

pytestmark = [pytest.mark.filterwarnings("ignore")]


def one(value: float) -> dict:
    return {"w": torch.full((3,), value)}


def contents(path: Path) -> dict[str, object]:
    """Everything below a directory: of files what is in them, of links where they lead to."""
    found: dict[str, object] = {}
    for each in sorted(path.rglob("*")):
        name = str(each.relative_to(path))
        if each.is_symlink():
            found[name] = ("link", os.readlink(each))
        else:
            found[name] = each.read_bytes() if each.is_file() else "directory"
    return found


# -- a link where a checkpoint is to be written -----------------------------------------------------------


def _source(target: Path) -> Path:
    source = target.parent.parent / "source"
    if not source.exists():
        checkpoint.save(one(9), source)
    return source


def _by_manager(target: Path, how: str) -> None:
    os.rename(target, target.with_name("step_000000007"))
    try:
        manager = CheckpointManager(target.parent)
        if how == "save":
            manager.save(one(9), 7)
        else:
            manager.async_save(one(9), 7).wait()
    finally:
        os.rename(target.with_name("step_000000007"), target)


WRITERS = {
    "save": lambda target: checkpoint.save(one(9), target),
    "async_save": lambda target: checkpoint.async_save(one(9), target).wait(),
    "save_dcp": lambda target: checkpoint.save_dcp(one(9), target, overwrite=True),
    "manager": lambda target: _by_manager(target, "save"),
    "manager, async": lambda target: _by_manager(target, "async_save"),
    "reshard": lambda target: reshard(_source(target), target, 2, overwrite=True),
    **{
        f"convert to {kind}": lambda target, kind=kind: checkpoint.convert(
            _source(target), target, to=kind, overwrite=True
        )
        for kind in ("farstep", "dcp", "torch", "safetensors")
    },
}


@pytest.mark.parametrize("leads_to", ["checkpoint", "empty", "nothing", "file"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path, writer, leads_to):
    """`latest` is such a link. What it leads to is another checkpoint, which nobody has asked to replace."""
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "runs" / "latest"
    target.parent.mkdir()
    if leads_to == "checkpoint":
        checkpoint.save(one(1), elsewhere)
    elif leads_to == "empty":
        elsewhere.mkdir()
    elif leads_to == "file":
        elsewhere.write_text("mine")
    target.symlink_to(elsewhere)
    _source(target)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"symbolic link.*give the path that it leads to"):
        WRITERS[writer](target)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_on_the_way_is_followed(tmp_path, writer):
    real = tmp_path / "disk"
    real.mkdir()
    (tmp_path / "runs").symlink_to(real)
    if "manager" in writer:
        CheckpointManager(tmp_path / "runs").save(one(9), 7)
    else:
        WRITERS[writer](tmp_path / "runs" / "x")
    assert os.listdir(real) == ["step_000000007" if "manager" in writer else "x"]
    assert (tmp_path / "runs").is_symlink()


def test_a_directory_that_becomes_a_link_while_it_is_saved_into(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Swapped(LocalDisk):
        def create(self, name, nbytes):
            if not self.path.is_symlink():
                os.rename(self.path, tmp_path / "gone")
                self.path.symlink_to(elsewhere)
            return super().create(name, nbytes)

    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.save(one(9), Swapped(tmp_path / "x"))
    assert os.listdir(elsewhere) == []


def test_links_under_the_names_that_a_save_uses(tmp_path, monkeypatch):
    """A save that could be foretold does not write through what is planted there, nor over it."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    target = tmp_path / "x"
    target.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda nbytes=16: "a" * (2 * nbytes))
    for make in (os.symlink, os.link):
        for name in (MANIFEST, f"{MANIFEST}.tmp", f"{MANIFEST}.{'a' * 16}.tmp", f"{'a' * 16}.0.safetensors"):
            make(mine, target / name)
            checkpoint.save(one(9), target)
            assert checkpoint.read(target)["w"][0] == 9
            assert not (target / MANIFEST).is_symlink()
            assert mine.read_text() == "mine"
            for each in list(target.iterdir()):
                each.unlink()

    class Late(LocalDisk):  # after what is left of other saves has been removed
        plant = staticmethod(os.symlink)

        def create(self, name, nbytes):
            self.plant(mine, self.path / name)
            return super().create(name, nbytes)

    for make in (os.symlink, os.link):
        Late.plant = staticmethod(make)
        with pytest.raises(StorageFailed, match="exists"):
            checkpoint.save(one(9), Late(target))
        assert mine.read_text() == "mine"


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "torch"])
def test_links_under_the_names_that_a_conversion_uses(tmp_path, monkeypatch, kind):
    checkpoint.save(one(1), tmp_path / "source")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda nbytes=16: "a" * (2 * nbytes))
    planted = tmp_path / f".x.{'a' * 16}.tmp"
    planted.symlink_to(elsewhere / "file" if kind == "torch" else elsewhere)
    with pytest.raises((OSError, CheckpointError)):
        checkpoint.convert(tmp_path / "source", tmp_path / "x", to=kind)
    assert contents(elsewhere) == {"file": b"mine"}
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_what_is_no_file_is_not_removed_with_a_checkpoint(tmp_path, kind):
    checkpoint.save(one(1), tmp_path / "source")
    checkpoint.convert(tmp_path / "source", tmp_path / "x", to=kind)
    for make in (os.mkfifo, lambda path: os.symlink("nowhere", path)):
        make(tmp_path / "x" / "odd")
        with pytest.raises(CheckpointError, match="something else in it, 'odd'"):
            checkpoint.convert(tmp_path / "source", tmp_path / "x", to=kind, overwrite=True)
        (tmp_path / "x" / "odd").unlink()


def test_a_manager_does_not_remove_what_a_link_leads_to(tmp_path):
    manager = CheckpointManager(tmp_path / "runs", keep_last=1)
    checkpoint.save(one(1), tmp_path / "elsewhere")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "0123456789abcdef.0.safetensors").write_text("mine")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step_000000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "step_000000002").symlink_to(unfinished)
    state = one(0)
    assert manager.resume(state) == 1  # the user may have put it there
    assert state["w"][0] == 1
    before = contents(tmp_path / "elsewhere"), contents(unfinished)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.save(one(3), 3)
        manager.save(one(4), 4)
    with pytest.raises(CheckpointError, match="symbolic link"):
        manager.delete(1)
    assert (contents(tmp_path / "elsewhere"), contents(unfinished)) == before
    assert manager.steps() == [1, 4]


# -- what is read -----------------------------------------------------------------------------------------


def _made(kind: str, path: Path, value: float) -> None:
    if kind == "farstep":
        checkpoint.save(one(value), path)
    elif kind == "dcp":
        dcp.save(one(value), checkpoint_id=path, no_dist=True)
    elif kind == "dcp of ours":
        checkpoint.save_dcp(one(value), path)
    elif kind == "safetensors":
        checkpoint.save(one(value), path.with_name("of"))
        checkpoint.convert(path.with_name("of"), path, to="safetensors")
    else:
        checkpoint.save({"v": torch.zeros(3), **one(value)}, path.with_name("of"))
        checkpoint.convert(path.with_name("of"), path, to="safetensors", max_shard_bytes=12)


KINDS = ["farstep", "dcp", "dcp of ours", "safetensors", "safetensors with an index"]
READERS = {
    "load": lambda path: checkpoint.load(one(0), path),
    "read": checkpoint.read,
    "diff": lambda path: diff(path, path).is_same,
    "convert": lambda path: checkpoint.convert(path, path.with_name("converted")),
    "reshard": lambda path: reshard(path, path.with_name("resharded"), 2),
}


def _replaced(path: Path, how: str) -> None:
    """A file by something else, with the same bytes where that can be."""
    away = path.parent.parent / "private"
    os.rename(path, away)
    if how == "link out":
        path.symlink_to(away)
    elif how == "relative link out":
        path.symlink_to("../private")
    elif how == "link within":
        os.rename(away, path.with_name("other"))
        path.symlink_to("other")
    elif how == "link to a device":
        path.symlink_to("/dev/zero")
    elif how == "link to itself":
        path.symlink_to(path.name)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    else:
        listener = socket.socket(socket.AF_UNIX)
        at = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(at)
            listener.close()
        assert stat.S_ISSOCK(path.lstat().st_mode)


ODD = ["link out", "relative link out", "link within", "link to a device", "link to itself", "pipe", "directory", "socket"]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_follows_a_link_or_reads_what_is_no_file(tmp_path, kind, odd):
    """Whoever gave us the checkpoint would choose by it what else of ours is read, and saved again, and given away."""
    whole = tmp_path / "whole" / "x"
    whole.parent.mkdir()
    _made(kind, whole, 1)
    for number, name in enumerate(sorted(os.listdir(whole))):
        path = tmp_path / f"{number}" / "x"
        path.parent.mkdir()
        path.mkdir()
        for each in whole.iterdir():
            os.link(each, path / each.name)
        _replaced(path / name, odd)
        if name.endswith("index.json") and odd == "directory":
            continue  # there is no index then, and each file says what it has
        for reader, read in READERS.items():
            if reader == "reshard" and kind != "farstep":
                continue
            with pytest.raises((DamagedCheckpoint, NoCheckpoint)):
                read(path)
        if kind == "farstep":
            assert verify(path)
        for name in ("converted", "resharded"):
            assert not list(path.with_name(name).rglob("*"))


def test_the_path_itself_may_be_a_link(tmp_path):
    """`latest`, or a file that Hugging Face's functions give: the user has chosen it."""
    for kind in KINDS:
        path = tmp_path / kind / "x"
        path.parent.mkdir()
        _made(kind, path, 1)
        (tmp_path / kind / "latest").symlink_to("x")
        assert checkpoint.read(tmp_path / kind / "latest")["w"][0] == 1
        (tmp_path / kind / "alias").symlink_to(tmp_path / kind)
        assert checkpoint.read(tmp_path / kind / "alias" / "x")["w"][0] == 1
    (tmp_path / "file.safetensors").symlink_to("safetensors/x/model.safetensors")
    assert checkpoint.read(tmp_path / "file.safetensors")["w"][0] == 1
    torch.save(one(2), tmp_path / "of.pt")
    (tmp_path / "file.pt").symlink_to("of.pt")
    checkpoint.convert(tmp_path / "file.pt", tmp_path / "converted")
    assert checkpoint.read(tmp_path / "converted")["w"][0] == 2


# -- Hugging Face's cache, which has nothing but links


def _cached(tmp_path: Path, kind: str, inside: str = "") -> tuple[Path, Path]:
    """A checkpoint as huggingface_hub keeps it, and the cache's top."""
    _made(kind, tmp_path / "made" / "x", 1)
    top = tmp_path / "hub" / "models--some--model"
    snapshot = top / "snapshots" / "0123abcd" / inside
    snapshot.mkdir(parents=True)
    (top / "blobs").mkdir()
    up = "../../" + "../" * bool(inside)
    for number, each in enumerate(sorted((tmp_path / "made" / "x").iterdir())):
        blob = f"{number:064x}" if number % 2 else f"{number:040x}"
        os.rename(each, top / "blobs" / blob)
        (snapshot / each.name).symlink_to(f"{up}blobs/{blob}")
    return snapshot, top


@pytest.mark.parametrize("inside", ["", "unet"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_hugging_face(tmp_path, kind, inside):
    (tmp_path / "made").mkdir()
    snapshot, _ = _cached(tmp_path, kind, inside)
    assert checkpoint.read(snapshot)["w"][0] == 1
    state = one(0)
    checkpoint.load(state, snapshot, strict=False)
    assert state["w"][0] == 1
    if kind == "safetensors":
        assert checkpoint.read(snapshot / "model.safetensors")["w"][0] == 1
    (tmp_path / "refs").symlink_to(snapshot)
    assert checkpoint.read(tmp_path / "refs")["w"][0] == 1


def _blobs_elsewhere(top: Path) -> None:
    os.rename(top / "blobs", top.parent.parent / "private")
    (top / "blobs").symlink_to(top.parent.parent / "private")


def _blob_elsewhere(top: Path) -> None:
    for blob in list((top / "blobs").iterdir()):
        os.rename(blob, top.parent.parent / blob.name)
        blob.symlink_to(top.parent.parent / blob.name)


def _other_name(top: Path) -> None:
    """As if the directory above a checkpoint were a cache."""
    os.rename(top / "snapshots", top / "other")


def _absolute(top: Path) -> None:
    for link in list((top / "snapshots" / "0123abcd").iterdir()):
        target = link.resolve()
        link.unlink()
        link.symlink_to(target)


def _pipes(top: Path) -> None:
    for blob in list((top / "blobs").iterdir()):
        blob.unlink()
        os.mkfifo(blob)


@pytest.mark.parametrize("spoil", [_blobs_elsewhere, _blob_elsewhere, _other_name, _absolute, _pipes])
def test_what_only_looks_like_a_cache(tmp_path, spoil):
    (tmp_path / "made").mkdir()
    snapshot, top = _cached(tmp_path, "farstep")
    spoil(top)
    path = snapshot if snapshot.exists() else top / "other" / "0123abcd"
    with pytest.raises(DamagedCheckpoint):
        checkpoint.read(path)


def test_a_cache_that_has_lost_a_file(tmp_path):
    (tmp_path / "made").mkdir()
    snapshot, top = _cached(tmp_path, "farstep")
    for blob in (top / "blobs").iterdir():
        if b"xxh3" not in blob.read_bytes():
            blob.unlink()
    with pytest.raises(DamagedCheckpoint, match="missing"):
        checkpoint.read(snapshot)


# -- names in manifests, indices and metadata


OUTSIDE = ["../private", "/etc/passwd", "..", ".", "", "a/b", "x\0y", "a" * 5000, "\ud800", "~", "x\n"]


def _private(tmp_path: Path) -> Path:
    """A checkpoint's data beside the one that is read."""
    _made("safetensors", tmp_path / "whole", 1)
    os.rename(tmp_path / "whole" / "model.safetensors", tmp_path / "private")
    path = tmp_path / "x"
    path.mkdir()
    return path


def _sealed(found: dict) -> bytes:
    """A manifest with a checksum that is right, as whoever writes a hostile one would."""
    text = json.dumps(found).encode()
    return b'{"xxh3_128": "%s", "manifest": ' % xxhash.xxh3_128_hexdigest(text).encode() + text + b"}\n"


def _manifest_in(path: Path) -> dict:
    return json.loads((path / MANIFEST).read_bytes())["manifest"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(tmp_path, number):
    """What is accepted can be written again."""
    checkpoint.save({**one(1), "x": 0.125}, tmp_path)
    data = (
        _sealed(_manifest_in(tmp_path)).partition(b'"manifest": ')[2][:-2].replace(b"0.125", number.encode())
    )
    assert number.encode() in data
    seal = xxhash.xxh3_128_hexdigest(data).encode()
    (tmp_path / MANIFEST).write_bytes(b'{"xxh3_128": "%s", "manifest": ' % seal + data + b"}\n")
    with pytest.raises(DamagedCheckpoint, match="no JSON"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out(tmp_path, name):
    path = _private(tmp_path)
    checkpoint.save(one(1), tmp_path / "saved")
    found = _manifest_in(tmp_path / "saved")
    found["files"]["names"] = [name]
    (path / MANIFEST).write_bytes(_sealed(found))
    with pytest.raises(DamagedCheckpoint, match="names the file"):
        checkpoint.read(path)
    assert verify(path)
    (path / MANIFEST).unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(DamagedCheckpoint, match="no file beside it"):
        checkpoint.read(path)
    (path / "model.safetensors.index.json").unlink()
    checkpoint.save_dcp(one(1), tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata) if "\ud800" not in name else b"\x80\x04\x95\xff")
    with pytest.raises(DamagedCheckpoint, match="refused"):
        checkpoint.read(path)


@pytest.mark.parametrize("name", ["../private", "a/b", "/etc/passwd", "..", ""])
def test_a_storage_has_files_of_its_own_alone(tmp_path, name):
    storage = LocalDisk(tmp_path / "x")
    storage.prepare()
    (tmp_path / "private").write_text("mine")
    for act in (
        lambda: storage.read(name),
        lambda: storage.open(name),
        lambda: storage.create(name, 5),
        lambda: storage.replace(name, b"theirs"),
        lambda: storage.delete([name]),
    ):
        with pytest.raises(ValueError, match="not the name of a file"):
            act()
    assert contents(tmp_path) == {"private": b"mine", "x": "directory"}


# -- files that change while they are read


class _Changing(LocalDisk):
    """Files are cut, or grow, after they have been opened."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path)
        self.nbytes = nbytes

    def _opened(self, name: str) -> int:
        file = super()._opened(name)
        if name.endswith((".safetensors", ".distcp")):
            os.truncate(self.path / name, max(0, os.fstat(file).st_size + self.nbytes))
        return file


@pytest.mark.parametrize("nbytes", [-1, -8, -(1 << 40), 1 << 30])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_change_their_size(tmp_path, kind, nbytes):
    _made(kind, tmp_path / "x", 1)
    storage = _Changing(tmp_path / "x", nbytes)
    if nbytes > 0:
        assert checkpoint.read(storage)["w"][0] == 1
        return
    with pytest.raises(DamagedCheckpoint):
        checkpoint.read(storage)


def test_a_file_that_is_replaced_after_it_has_been_checked(tmp_path, monkeypatch):
    """What was looked at is what torch loads."""
    path = tmp_path / "x.pt"
    torch.save(one(1), path)
    real = checkpoint.content.check_archive

    def check(source):
        real(source)
        torch.save(one(2), tmp_path / "other.pt")
        os.replace(tmp_path / "other.pt", path)

    monkeypatch.setattr(checkpoint.content, "check_archive", check)
    checkpoint.convert(path, tmp_path / "converted")
    assert checkpoint.read(tmp_path / "converted")["w"][0] == 1


def test_a_header_that_promises_more_than_there_is(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in (1 << 63, (1 << 64) - 1, 99_999_999):
        path.write_bytes(struct.pack("<Q", length) + b'{"w":{}}')
        with pytest.raises(DamagedCheckpoint):
            checkpoint.read(path)


# -- paths that a peer gives to an owner ------------------------------------------------------------------


def tensor_of(value: float) -> torch.Tensor:
    return torch.full((4,), value)


def agents(*trusted: str):
    return rpc.local_agents(2, rpc.RpcOptions(rpc_timeout=10, trusted=("torch.add", f"{__name__}.tensor_of", *trusted)))  # fmt: skip


def _args(name: str, path: Path, table) -> tuple:
    target, save = (str(path), {}), "0123456789abcdef"
    return {
        "Look": (),
        "look": (None, [("t", table)]),
        "stop_steps": (table, "worker0", 5.0, True),
        "resume": (table,),
        "write": (target, save, 1, 2, [("t", table)], None, 5.0),
        "stage": ([("t", table)], set(), None, 5.0),
        "write_staged": (target, save, 1, 2, table, 5.0),
        "prepare": (target, save, [("t", table)], True, False, None, True, 5.0),
        "fill": (table, 5.0),
        "commit": (table,),
        "abandon": (table,),
        "read_states": (target, save, {}, True, 5.0),
        "Staged": ({"t": torch.ones(1)}, set(), None),
    }[name]


def _remote_names() -> list[str]:
    return [name for name in rpc_calls.__all__ if name != "Written"]


@pytest.mark.parametrize("name", _remote_names())
def test_an_owner_that_trusts_some_names_does_nothing_for_a_checkpoint(tmp_path, name):
    inside = tmp_path / "inside"
    checkpoint.save(one(1), inside)
    before = contents(tmp_path)
    with agents() as group, speaking_for(group[0]):
        table = rpc.remote("worker1", tensor_of, args=(1.0,))
        with pytest.raises(Untrusted, match=f"rpc_calls.{name}"):
            rpc.rpc_sync("worker1", getattr(rpc_calls, name), args=_args(name, inside, table))
        assert torch.equal(table.to_here(), tensor_of(1.0))
    assert contents(tmp_path) == before


def _write(path: Path | str, table, save: str = "0123456789abcdef", number: int = 1):
    args = ((str(path), {}), save, number, 2, [("t", table)], None, 5.0)
    return rpc.rpc_sync("worker1", rpc_calls.write, args=args)


def test_an_owner_writes_new_files_alone(tmp_path):
    """A peer that may save knows what the files of another checkpoint are called, and cannot write over them."""
    checkpoint.save(one(1), tmp_path / "precious")
    (file,) = (tmp_path / "precious").glob("*.safetensors")
    save, number, _ = file.name.split(".")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    before = contents(tmp_path)
    with agents("farstep.checkpoint.rpc_calls") as group, speaking_for(group[0]):
        table = rpc.remote("worker1", tensor_of, args=(1.0,))
        with pytest.raises(StorageFailed, match="exists"):
            _write(tmp_path / "precious", table, save, int(number))
        with pytest.raises(CheckpointError, match="symbolic link"):
            _write(tmp_path / "link", table)
        with pytest.raises(StorageFailed):
            _write(tmp_path / "new" / "directory", table)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::file:///etc",
        "reference://x",
        "filecache::http://localhost/x",
        "zip://x::file:///etc/x.zip",
        "github://a:b@c/",
        "dir::file:///etc",
        "unheard-of://x",
    ],
)
def test_an_owner_opens_no_url_that_is_made_of_others(tmp_path, url):
    with agents("farstep.checkpoint.rpc_calls") as group, speaking_for(group[0]):
        table = rpc.remote("worker1", tensor_of, args=(1.0,))
        with pytest.raises(CheckpointError, match="trusts some names alone, and does not open"):
            _write(url, table)
        args = ((url, {}), "0123456789abcdef", {}, True, 5.0)
        with pytest.raises(CheckpointError, match="trusts some names alone, and does not open"):
            rpc.rpc_sync("worker1", rpc_calls.read_states, args=args)


def test_a_copy_is_not_given_back_twice():
    """Its memory would then be the next copy's too, which may be of another worker's values."""
    with agents("farstep.checkpoint.rpc_calls") as group, speaking_for(group[0]):
        table = rpc.remote("worker1", tensor_of, args=(1.0,))
        staged = rpc.rpc_sync("worker1", rpc_calls.stage, args=([("t", table)], set(), None, 5.0))
        for name in ("end", "taken", "_end", "_taken"):
            with pytest.raises((Untrusted, AttributeError)):
                getattr(staged.rpc_sync(), name)()


def test_an_owner_reads_no_link_for_a_peer(tmp_path):
    """One that shares a directory with the owner plants a link there to what it may not read itself."""
    path, private = tmp_path / "shared", tmp_path / "private"
    checkpoint.save({"t": tensor_of(5.0)}, path)
    (file,) = path.glob("*.safetensors")
    os.rename(file, private)
    file.symlink_to(private)
    save = checkpoint.manifest.Manifest.of(storage_of(path)).save
    with agents("farstep.checkpoint.rpc_calls") as group, speaking_for(group[0]):
        table = rpc.remote("worker1", tensor_of, args=(1.0,))
        args = ((str(path), {}), save, [("t", table)], True, False, None, True, 5.0)
        load, _, _ = rpc.rpc_sync("worker1", rpc_calls.prepare, args=args)
        with pytest.raises(DamagedCheckpoint, match="symbolic link"):
            rpc.rpc_sync("worker1", rpc_calls.fill, args=(load, 5.0))
        assert torch.equal(table.to_here(), tensor_of(1.0))
