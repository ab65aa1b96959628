"""Checkpoints of torch's DCP: read whoever wrote them, refused if they are hostile, and written so that DCP reads them."""

import io
import os
import pickle
import struct
import tracemalloc
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.states import everything, same
from farstep import checkpoint
from farstep.checkpoint import convert, load, read, save_dcp
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def by_torch(state, path, **options) -> str:
    warnings.simplefilter("ignore")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
    return str(path)


# -- what DCP writes --------------------------------------------------------------------------------------


def test_everything_that_dcp_keeps_is_read(tmp_path):
    state = everything()
    same(read(by_torch(state, tmp_path / "x")), state)
    same(read(by_torch(state, tmp_path / "y", single_file_per_rank=False)), state)
    same(read(by_torch(state, tmp_path / "z", thread_count=3)), state)


def test_safetensors_within_dcp_are_read(tmp_path):
    state = everything()
    del state["model"]["tied_too"]  # safetensors' own save refuses it
    for key in ("turned", "strided", "channels_last", "conjugate", "expanded"):
        state["model"][key] = state["model"][key].clone(memory_format=torch.contiguous_format).resolve_conj()
    path = by_torch(state, tmp_path / "x", serialization_format=SerializationFormat.SAFETENSORS)
    same(read(path), state)


def test_a_state_that_was_not_nested_is_read(tmp_path):
    warnings.simplefilter("ignore")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a.b": torch.ones(2), "n": 3}, checkpoint_id=tmp_path / "x", planner=planner, no_dist=True)
    same(read(tmp_path / "x"), {"a.b": torch.ones(2), "n": 3})


def test_parts_are_loaded_by_name(tmp_path):
    state = everything()
    path = by_torch(state, tmp_path / "x")
    into = {
        "model": {key: torch.zeros_like(value) for key, value in state["model"].items()},
        "more": {"step": 0, "lr": 0},
    }
    report = load(into, path, strict=False)
    assert report.missing == []
    assert "more.name" in report.unexpected
    same(into["model"], state["model"])
    assert into["more"] == {"step": 7, "lr": 0.5}


def test_a_model_and_an_optimizer_of_plain_state_dicts(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = by_torch({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x")
    other = torch.nn.Linear(3, 2)
    steps = torch.optim.AdamW(other.parameters())
    load({"optim": steps}, path)  # by numbers, as it has them itself
    same(steps.state_dict(), optimizer.state_dict())
    load({"model": other}, path)
    same(dict(other.state_dict()), dict(model.state_dict()))


# -- what DCP reads ---------------------------------------------------------------------------------------


def test_dcp_reads_what_we_export(tmp_path):
    state = everything()
    checkpoint.save(state, tmp_path / "ours")
    assert convert(tmp_path / "ours", tmp_path / "dcp", to="dcp").left_out == []
    for path in (tmp_path / "dcp", tmp_path / "direct"):
        if path.name == "direct":
            save_dcp(state, path)
        into = everything()
        for key, value in into["model"].items():
            into["model"][key] = torch.zeros(value.shape, dtype=value.dtype)
        into["more"] = dict.fromkeys(into["more"])
        into["mixed"] = [torch.zeros(3, dtype=torch.int64), {"inner": torch.zeros(2), "n": 0}]
        dcp.load(into, checkpoint_id=path, no_dist=True)
        same(into, state)
        back = read(path)
        same(back, state)
        assert back["model"]["tied"] is back["model"]["tied_too"]


def test_dcp_resumes_a_training_of_ours(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    model, optimizer = made(0)
    step(model, optimizer)
    checkpoint.save({"model": model, "optim": optimizer}, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    other, theirs = made(1)
    step(other, theirs)
    model_state, state = get_state_dict(other, theirs)
    dcp.load({"model": model_state, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, theirs, model_state_dict=model_state, optim_state_dict=state)
    step(model, optimizer)
    step(other, theirs)
    same(dict(other.state_dict()), dict(model.state_dict()))


# -- damage -----------------------------------------------------------------------------------------------


def test_a_changed_byte_is_found_which_dcp_itself_does_not_notice(tmp_path):
    path = by_torch({"w": torch.full((50, 1000), 3.0)}, tmp_path / "x")
    data = bytearray((tmp_path / "x" / "__0_0.distcp").read_bytes())
    at = data.index(struct.pack("<f", 3.0) * 100) + 70_000
    data[at] ^= 1
    (tmp_path / "x" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp, which has 'w', has been changed"):
        read(path)
    assert read(path, verify=False)["w"].shape == (50, 1000)


def test_files_without_checksums_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = by_torch(everything(), tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    same(read(path), everything())


def test_files_that_are_cut_off_or_missing(tmp_path):
    path = by_torch({"w": torch.ones(1000), "v": 3}, tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    data = file.read_bytes()
    for size in (0, 10, 700, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp.*cut off"):
            read(path)
    file.unlink()
    with pytest.raises(DamagedCheckpoint, match=r"__0_0\.distcp.*missing"):
        read(path)
    metadata = (tmp_path / "x" / ".metadata").read_bytes()
    file.write_bytes(data)
    for size in range(0, len(metadata), 7):
        (tmp_path / "x" / ".metadata").write_bytes(metadata[:size])
        with pytest.raises(DamagedCheckpoint, match=r"\.metadata is refused"):
            read(path)
    (tmp_path / "x" / ".metadata").unlink()
    with pytest.raises(NoCheckpoint):
        read(path)


def test_every_flipped_byte_of_the_metadata_is_refused_or_harmless(tmp_path):
    path = by_torch({"w": torch.ones(4), "v": 3}, tmp_path / "x")
    metadata = (tmp_path / "x" / ".metadata").read_bytes()
    refused = 0
    for at in range(len(metadata)):
        changed = bytearray(metadata)
        changed[at] ^= 1 << (at % 8)
        (tmp_path / "x" / ".metadata").write_bytes(changed)
        try:
            read(path)
        except CheckpointError:
            refused += 1
    assert refused > len(metadata) // 2


# -- hostile metadata -------------------------------------------------------------------------------------


class Calls:
    def __init__(self, function, *args) -> None:
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def metadata_of(path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def put(path, data) -> None:
    (path / ".metadata").write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))


@pytest.fixture
def made(tmp_path):
    by_torch({"w": torch.ones(4, 4), "v": 3}, tmp_path / "x")
    return tmp_path / "x"


def test_metadata_that_would_fill_the_memory(made):
    put(made, b"\x80\x04(" + b"]" * (8 << 20) + b"t.")
    with pytest.raises(DamagedCheckpoint, match="more values at once than a pickle needs"):
        read(made)


def test_nothing_in_the_metadata_is_called(made, tmp_path):
    mark = tmp_path / "was here"
    command = f"touch '{mark}'"
    write = f"open({str(mark)!r}, 'w')"
    calls = [
        Calls(os.system, command),
        Calls(eval, write),
        Calls(exec, write),
        Calls(open, str(mark), "w"),
        Calls(getattr, os, "system"),
        Calls(__import__, "os"),
        Calls(torch.load, str(mark)),
        Calls(type("x", (), {}).__class__, "name", (), {}),
    ][:-1]
    for call in calls:
        for where in ("root", "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "chunk"):
            metadata = metadata_of(made)
            if where == "root":
                metadata = call
            elif where == "chunk":
                metadata.state_dict_metadata["w"].chunks.append(call)
            elif where == "storage_meta":
                metadata.storage_meta.checkpoint_id = call
            else:
                getattr(metadata, where)["evil"] = call
            try:
                data = pickle.dumps(metadata)
            except (pickle.PicklingError, TypeError):
                continue  # getattr of a module
            original = (made / ".metadata").read_bytes()
            put(made, data)
            with pytest.raises(DamagedCheckpoint, match="refused: it names"):
                read(made)
            assert not mark.exists()
            put(made, original)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02ls\x85R.",
        b"cos\nsystem\n(S'ls'\ntR.",
        b"(S'ls'\nios\nsystem\n.",
        b"(cos\nsystem\nS'ls'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x04\x8c\x05torch\x8c\x0dos.path.Size\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x2btorch.distributed.checkpoint.metadata.os.sy\x8c\x06system\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.",
        b"\x80\x04\x8c\x06copyreg\x8c\x0e_reconstructor\x93.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93K\x01\x85R.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93K\x01\x85\x81.",
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93X\x01\x00\x00\x00a\x85R.",
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)\x81.",
        b"\x80\x04}\x93.",
        b"\x80\x04NQ.",
        b"",
        b".",
        b"\x80\x04",
        b"\x80\x09N.",
        b"PK\x03\x04",
    ],
)
def test_pickles_by_hand_are_refused(made, data):
    put(made, data)
    with pytest.raises(DamagedCheckpoint, match="refused"):
        read(made)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".",
        b"\x80\x04)" + b"\x85" * 500_000 + b".",
        b"\x80\x04})" + b"\x85" * 500_000 + b"K\x01s.",  # as a key, which Python would hash to its depths
        b"\x80\x04]r\xff\xff\xff\xff.",  # Python's own unpickler would take 32 GB for that memo
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"x.",
        b"\x80\x04(" + b"(" * 500_000 + b"t.",
    ],
)
def test_pickles_that_are_small_and_stand_for_much(made, data):
    put(made, data)
    with pytest.raises(DamagedCheckpoint, match="refused"):
        read(made)


def test_one_list_of_chunks_for_many_tensors(made):
    metadata = metadata_of(made)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    shared = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([1]), [chunk] * 100_000)
    metadata.state_dict_metadata |= {f"t{i}": shared for i in range(100_000)}  # ten thousand million chunks
    put(made, metadata)
    with pytest.raises(DamagedCheckpoint, match="more than are stored"):
        read(made)


def changed(made, change):
    metadata = metadata_of(made)
    entry = metadata.state_dict_metadata["w"]
    index = next(each for each in metadata.storage_data if each.fqn == "w")
    change(metadata, entry, index)
    put(made, metadata)


def resized(shape, chunk=None):
    def change(metadata, entry, index):
        entry.size = torch.Size(shape)
        entry.chunks[0].sizes = torch.Size(shape if chunk is None else chunk)

    return change


def file_called(name):
    return lambda metadata, entry, index: setattr(metadata.storage_data[index], "relative_path", name)


def stored_at(**places):
    def change(metadata, entry, index):
        for key, value in places.items():
            setattr(metadata.storage_data[index], key, value)

    return change


def another_chunk(metadata, entry, index):
    entry.chunks.append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 4])))
    metadata.storage_data[MetadataIndex("w", [2, 0])] = metadata.storage_data[index]


def overlapping_bytes(metadata, entry, index):
    info = metadata.storage_data[index]
    metadata.state_dict_metadata["u"] = entry
    metadata.planner_data["u"] = ("u",)
    metadata.storage_data[MetadataIndex("u", [0, 0])] = _StorageInfo(
        info.relative_path, info.offset + 1, info.length - 1
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (resized([1 << 40, 1 << 40]), "more bytes than there can be"),
        (resized([1 << 30, 4]), "is said to be stored in"),
        (resized([4, 4], [4, 5]), "not within"),
        (resized([4, 4], [3, 4]), "bytes, and it has"),
        (resized([4, 4], [4]), "dimensions"),
        (resized([2, 8]), r"'w' \[0:2, 0:8\] at byte .* shape \(4, 4\)"),
        (lambda m, e, i: setattr(e.properties, "dtype", torch.int32), "'w' .*float32"),
        (lambda m, e, i: setattr(e, "size", (4, -4)), "no tuple of counts"),
        (lambda m, e, i: setattr(e, "size", [4] * 100), "no tuple of counts"),
        (lambda m, e, i: setattr(e, "size", "44"), "no tuple of counts"),
        (lambda m, e, i: e.chunks.clear(), "no box of 'w'|bytes, and it has"),
        (lambda m, e, i: m.storage_data.pop(i), "does not say where 'w'"),
        (another_chunk, "share bytes"),
        (overlapping_bytes, "share bytes"),
        (file_called("../x/__0_0.distcp"), "no file beside"),
        (file_called("/etc/passwd"), "no file beside"),
        (file_called("a/../../b"), "no file beside"),
        (file_called(".metadata"), "no file beside"),
        (file_called("a\x00b"), "no file beside"),
        (file_called("..\\b"), "no file beside"),
        (file_called(3), "no file"),
        (stored_at(offset=1 << 61), "no place|cut off"),
        (stored_at(offset=-5), "no place"),
        (stored_at(length=1 << 40), "cut off"),
        (stored_at(offset="0"), "no place"),
        (stored_at(transform_descriptors=["zstd"]), "extension 'zstd'"),
        (lambda m, e, i: m.planner_data.update(w=("elsewhere",)), "leads elsewhere"),
        (lambda m, e, i: m.planner_data.update(w=("w",) * 1000), "bad path"),
        (lambda m, e, i: m.planner_data.update(w=(0,)), "bad path"),
        (lambda m, e, i: setattr(m, "planner_data", [1]), "planner_data is no dict"),
        (lambda m, e, i: setattr(m, "storage_data", None), "storage_data is no dict"),
        (lambda m, e, i: m.state_dict_metadata.update({5: e}), "as the name"),
        (lambda m, e, i: m.state_dict_metadata.update(w=m), "Metadata where"),
    ],
)  # fmt: skip
def test_metadata_that_lies_is_refused(made, change, said):
    changed(made, change)
    with pytest.raises(DamagedCheckpoint, match=said):
        read(made)


def test_a_path_that_leads_through_a_value(made):
    metadata = metadata_of(made)
    metadata.state_dict_metadata["v.in"] = metadata.state_dict_metadata["w"]
    metadata.planner_data["v.in"] = ("v", "in")
    index = next(each for each in metadata.storage_data if each.fqn == "w")
    metadata.storage_data[MetadataIndex("v.in", [0, 0])] = metadata.storage_data[index]
    put(made, metadata)
    with pytest.raises(DamagedCheckpoint, match=r"within 'v\.in'|as a value"):
        read(made)


# -- hostile data -----------------------------------------------------------------------------------------


def replaced(made, name: str, archive: bytes) -> None:
    """Another item in the place of one, in a file of its own."""
    metadata = metadata_of(made)
    index = next(each for each in metadata.storage_data if each.fqn == name)
    metadata.storage_data[index] = _StorageInfo("other.distcp", 0, len(archive))
    (made / "other.distcp").write_bytes(archive)
    put(made, metadata)


def archived(pickled: bytes, **more: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", b"3\n")
        for name, each in more.items():
            file.writestr(f"archive/data/{name[1:]}", each)
    return data.getvalue()


def test_a_value_that_would_call_something_is_not_loaded_and_others_are(made, tmp_path):
    mark = tmp_path / "was here"
    replaced(made, "v", archived(pickle.dumps(Calls(os.system, f"touch '{mark}'"), protocol=2)))
    into = {"w": torch.zeros(4, 4)}
    load(into, made)
    assert torch.equal(into["w"], torch.ones(4, 4))
    with pytest.raises(CheckpointError, match=r"'v' cannot be read: .*other\.distcp.*system"):
        read(made)
    with pytest.raises(CheckpointError, match=r"'v' cannot be read"):
        load({"w": torch.zeros(4, 4), "v": 0}, made)
    with pytest.raises(CheckpointError, match="no place for 'v"):
        convert(made, tmp_path / "ours")
    assert convert(made, tmp_path / "ours", strict=False).left_out[0].startswith("v: ")
    same(read(tmp_path / "ours"), {"w": torch.ones(4, 4)})
    assert not mark.exists()


def test_a_tensor_that_would_call_something(made, tmp_path):
    mark = tmp_path / "was here"
    call = pickle.dumps(Calls(os.system, f"touch '{mark}'"), protocol=2)
    replaced(made, "w", archived(call + b" " * 200))
    with pytest.raises(DamagedCheckpoint, match=r"other\.distcp does not have 'w'"):
        read(made)
    assert not mark.exists()


def test_values_that_never_end_when_they_are_walked(made):
    value: list = [1]
    for _ in range(60):
        value = [value, value]
    replaced(made, "v", archived(pickle.dumps(value, protocol=2)))
    with pytest.raises(CheckpointError, match="larger or deeper"):
        read(made)


def test_values_that_are_small_and_stand_for_much(made, tmp_path):
    most = 256 << 20
    text = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    expanded = pickle.dumps(Calls(torch._utils._rebuild_device_tensor_from_cpu_tensor, 1, 2, 3, 4), 2)
    hashed = b"\x80\x02)" + b"q\x01h\x01\x86" * 64 + b"q\x02}h\x02K\x01s."
    for pickled, said in (
        (b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", most) + b"\x85R.", "no text"),
        (b"\x80\x02c__builtin__\nbytearray\nJ" + struct.pack("<i", most) + b"\x85R.", "no text"),
        (b"\x80\x02](" + text + b"q\x01" + b"h\x01" * 300 + b"e.", "larger or deeper"),
        (b"\x80\x02](c_codecs\nencode\n" + text + b"X\x06\x00\x00\x00latin1\x86Rq\x01" + b"h\x01" * 300 + b"e.", "larger or deeper"),
        (b"\x80\x02]" + b"(" + text + b"q\x01" + b"}h\x01K\x01s" * 300 + b"e.", "larger or deeper"),
        (expanded, "_rebuild_device_tensor_from_cpu_tensor"),
        (hashed, "a tuple as a key"),
    ):  # fmt: skip
        replaced(made, "v", archived(pickled))
        into = {"w": torch.zeros(4, 4)}
        tracemalloc.start()
        try:
            load(into, made)
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
            with pytest.raises(CheckpointError, match=f"'v' cannot be read: .*{said}"):
                read(made)
            (tmp_path / "x.pt").write_bytes(archived(pickled))
            with pytest.raises(CheckpointError, match=said):
                convert(tmp_path / "x.pt", tmp_path / "y")
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
        finally:
            tracemalloc.stop()
        assert torch.equal(into["w"], torch.ones(4, 4))


def test_an_archive_that_is_another_for_another_reader(made, tmp_path):
    """Python's zipfile takes the last of two files of one name, and torch may take the first."""
    data = io.BytesIO(archived(pickle.dumps((1, torch.Size([2])), 2)))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(data, "a") as file:
        file.writestr("archive/data.pkl", pickle.dumps((2, torch.Size([2])), 2))
    replaced(made, "v", data.getvalue())
    with pytest.raises(CheckpointError, match="two files of one name"):
        read(made)


def test_values_that_plain_pickles_may_have(tmp_path):
    model = torch.nn.BatchNorm1d(3)
    marked = torch.ones(2)
    marked.of = "a tensor with an attribute"
    state = {
        "w": torch.ones(4),
        "v": (
            torch.ones(2),
            b"bytes",
            2j,
            torch.Size([2, 3]),
            torch.device("cpu"),
            torch.float8_e4m3fn,
            {"seed": 1 << 127},
            model.state_dict(),
            torch.nn.Parameter(torch.ones(2)),
            torch.ones(4, 2).t(),
            "x" * 100,
        ),
    }
    path = by_torch(state, tmp_path / "dcp")
    same(read(path), {**state, "v": (*state["v"][:7], dict(state["v"][7]), *state["v"][8:])})
    torch.save({"w": marked, "b": bytearray(b"abc"), "e": bytearray()}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "x")
    same(read(tmp_path / "x"), {"w": torch.ones(2), "b": b"abc", "e": b""})


def test_one_odd_value_does_not_keep_the_rest_from_being_loaded(tmp_path):
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "meta": torch.ones(3, device="meta"),
        "key": {(1, 2): 3},
        "names": {"a": {"b": 3}, "a.b": 2},
        "number": 10**5000,
        "set": {1, 2},
    }
    for name, value in odd.items():
        path = by_torch({"w": torch.ones(4), "x": (value, 1)}, tmp_path / name)
        into = {"w": torch.zeros(4)}
        load(into, path)
        assert torch.equal(into["w"], torch.ones(4)), name
        with pytest.raises(CheckpointError, match="'x' cannot be read"):
            read(path)
        torch.save({"w": torch.ones(4), "x": value}, tmp_path / f"{name}.pt")
        with pytest.raises(CheckpointError):
            convert(tmp_path / f"{name}.pt", tmp_path / f"{name}-ours")


def test_archives_that_lie(made):
    tensor = io.BytesIO()
    torch.save(torch.ones(4, 4), tensor)
    whole = tensor.getvalue()
    replaced(made, "w", whole)
    assert torch.equal(read(made)["w"], torch.ones(4, 4))
    deflated = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(whole)) as old,
        zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
    expanded = io.BytesIO()
    torch.save(torch.ones(1).expand(4, 4), expanded)
    short = archived(zipfile.ZipFile(io.BytesIO(whole)).read("archive/data.pkl"), _0=b"\0" * 60)
    other = io.BytesIO()
    torch.save(torch.ones(16), other)
    for data in (deflated.getvalue(), short, other.getvalue(), whole[:30] + bytes(len(whole) - 30)):
        replaced(made, "w", data)
        with pytest.raises(DamagedCheckpoint, match=r"other\.distcp does not have 'w'"):
            read(made)
    replaced(made, "w", expanded.getvalue())  # DCP does not write it so, but it is what it says
    assert torch.equal(read(made)["w"], torch.ones(4, 4))


def test_ranks_that_saved_each_for_itself_are_told_of(made):
    (made / ".metadata").rename(made / "__0.metadata")
    with pytest.raises(NoCheckpoint, match="each for itself"):
        read(made)
