"""From every format to every other, by what reads those formats itself; and what is refused."""

import json
import os
import pickle
import struct
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint import save as save_by_dcp

from checkpoint.states import everything, same
from farstep import checkpoint
from farstep.checkpoint import archives as of_archives
from farstep.checkpoint import convert, load, read, save
from farstep.checkpoint import writing as of_writing
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, NoCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = {"farstep": "x", "dcp": "x", "torch": "x.pt", "safetensors": "x.safetensors"}


def by_itself(path, kind):
    """Without any of our code, where there is other code that reads it."""
    if kind == "torch":
        return torch.load(path, weights_only=True, mmap=True)
    return load_file(path) if kind == "safetensors" else read(path)


@pytest.mark.parametrize("first", ["farstep", "dcp", "torch"])
@pytest.mark.parametrize("second", ["farstep", "dcp", "torch"])
def test_everything_there_and_back(tmp_path, first, second):
    state = everything()
    save(state, tmp_path / "ours")
    one, two = tmp_path / "1" / TARGETS[first], tmp_path / "2" / TARGETS[second]
    done = convert(tmp_path / "ours", one, to=first)
    assert (done.source_format, done.format, done.left_out) == ("farstep", first, [])
    done = convert(one, two, to=second)
    assert (done.source_format, done.format, done.left_out) == (first, second, [])
    found = by_itself(two, second)
    same(found, state)
    assert found["model"]["tied"].data_ptr() == found["model"]["tied_too"].data_ptr()
    convert(two, tmp_path / "back")
    found = read(tmp_path / "back")
    same(found, state)
    assert found["model"]["tied"] is found["model"]["tied_too"]


@pytest.mark.parametrize("kind", ["farstep", "dcp", "torch"])
def test_tensors_to_safetensors_and_back(tmp_path, kind):
    state = everything()["model"]
    save({"model": state, "step": 3}, tmp_path / "ours")
    source = tmp_path / "from" / TARGETS[kind]
    convert(tmp_path / "ours", source, to=kind)
    convert(source, tmp_path / "m.safetensors", select="model")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == state.keys() - {"tied_too"}  # it is in the file's metadata
    same(found, {key: state[key] for key in found})
    convert(tmp_path / "m.safetensors", tmp_path / "to" / TARGETS[kind], to=kind)
    convert(tmp_path / "to" / TARGETS[kind], tmp_path / "back")
    back = read(tmp_path / "back")
    assert back["tied"] is back["tied_too"]
    same({key: back[key] for key in state}, state)


def test_several_files_with_an_index_as_hugging_face_has_them(tmp_path):
    state = {f"layers.{i}.weight": torch.randn(10, 10) for i in range(5)} | {"large": torch.randn(30, 30)}
    save({"model": state}, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", to="safetensors", select="model", max_shard_bytes=1000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert index["weight_map"].keys() == state.keys()
    files = sorted(name for name in os.listdir(tmp_path / "hf") if name.endswith(".safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    found = {}
    for file in files:
        tensors = load_file(tmp_path / "hf" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 1000 or len(tensors) == 1
        found |= tensors
    same({key: found[key] for key in state}, state)
    assert dict.fromkeys(read(tmp_path / "hf")).keys() == state.keys()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    load(into, tmp_path / "hf")
    same(into, state)
    convert(tmp_path / "hf", tmp_path / "back")
    back = read(tmp_path / "back")
    same({key: back[key] for key in state}, state)


def test_a_model_is_loaded_from_safetensors_and_by_safetensors(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

    model = Tied()
    save_model(model, tmp_path / "theirs.safetensors")
    other = Tied()
    load(other, tmp_path / "theirs.safetensors")
    same(dict(other.state_dict()), dict(model.state_dict()))
    save({"model": model}, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "m.safetensors", select="model")
    third = Tied()
    load_model(third, tmp_path / "m.safetensors")
    same(dict(third.state_dict()), dict(model.state_dict()))


def test_what_dcp_writes_for_hugging_face(tmp_path):
    warnings.simplefilter("ignore")
    state = {"a": torch.randn(4, 3), "b": torch.randn(5)}
    for distributed in (False, True):
        path = tmp_path / str(distributed)
        save_by_dcp(
            state,
            storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=distributed),
            no_dist=True,
        )
        found = read(path)
        same({key: found[key] for key in state}, state)


def test_shards_in_safetensors_are_put_together(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    for number, begin in enumerate((0, 2)):
        said = json.dumps({"w": {"saved_offsets": [begin, 0]}})
        part = whole[begin : (2, 6)[number]].contiguous()
        save_file(
            {"w": part}, tmp_path / f"shard-0000{number}-model.safetensors", {"DCP_SHARDING_INFO": said}
        )
    same(read(tmp_path), {"w": whole})
    (tmp_path / "shard-00000-model.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match="'w'"):
        read(tmp_path)


def test_files_in_a_zip_that_may_be_large(tmp_path, monkeypatch):
    monkeypatch.setattr(of_archives, "_LARGE_BYTES", 0)
    state = everything()
    save(state, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "x.pt")
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    found = torch.load(tmp_path / "x.pt", mmap=True)
    same(found, state)
    same(read(tmp_path / "dcp"), state)
    assert all(t.untyped_storage().data_ptr() % 64 == 0 for t in found["model"].values() if t.numel())


def test_a_file_of_the_old_torch_save(tmp_path):
    state = {"w": torch.randn(3, 4), "half": torch.ones(2, dtype=torch.bfloat16), "n": [1, 2]}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "old.pt", tmp_path / "x")
    same(read(tmp_path / "x"), state)


# -- what is not done -------------------------------------------------------------------------------------


def test_nothing_is_overwritten_unless_it_is_said(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "one")
    save({"w": torch.zeros(3)}, tmp_path / "other")
    for kind, name in TARGETS.items():
        target = tmp_path / kind / name
        convert(tmp_path / "one", target, to=kind)
        with pytest.raises(CheckpointError, match="overwrite=True"):
            convert(tmp_path / "other", target, to=kind)
        assert torch.equal(by_itself(target, kind)["w"], torch.ones(3))
        convert(tmp_path / "other", target, to=kind, overwrite=True)
        assert torch.equal(by_itself(target, kind)["w"], torch.zeros(3))
        assert os.listdir(target.parent) == [target.name]
    with pytest.raises(CheckpointError, match="that is to be converted"):
        convert(tmp_path / "one", tmp_path / "." / "one", overwrite=True)
    with pytest.raises(CheckpointError, match="something else in it"):
        convert(tmp_path / "one", tmp_path / "dcp" / "x", to="farstep", overwrite=True)
    with pytest.raises(CheckpointError, match="is a directory"):
        convert(tmp_path / "one", tmp_path / "dcp" / "x", to="torch", overwrite=True)
    with pytest.raises(CheckpointError, match="no format 'zip'"):
        convert(tmp_path / "one", tmp_path / "y", to="zip")


@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_failure_leaves_nothing_and_what_was_there(tmp_path, kind):
    save({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "one")
    target = tmp_path / "to" / TARGETS[kind]

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        convert(tmp_path / "one", target, to=kind, progress=stop)
    left = [name for _, _, files in os.walk(tmp_path / "to") for name in files]
    assert left == []
    convert(tmp_path / "one", target, to=kind)
    with pytest.raises(Stop):
        convert(tmp_path / "one", target, to=kind, overwrite=True, progress=stop)
    same(dict(by_itself(target, kind)), {"a": torch.ones(1000), "b": torch.ones(1000)})
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_few_bytes_at_a_time_and_progress(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(of_writing, "_STAGED_BYTES", 4096)
    largest = 0
    original = torch.empty

    def counted(*args, **options):
        nonlocal largest
        made = original(*args, **options)
        largest = max(largest, made.nbytes if made.device.type != "meta" else 0)
        return made

    state = {"big": torch.randn(100, 500), "wide": torch.randn(3, 5000)}
    save(state, tmp_path / "one")
    monkeypatch.setattr(torch, "empty", counted)
    seen = []
    convert(tmp_path / "one", tmp_path / "to" / TARGETS[kind], to=kind, progress=lambda *at: seen.append(at))
    monkeypatch.undo()
    assert 0 < largest <= 4096
    total = sum(t.nbytes for t in state.values())
    assert seen[-1] == (total, total)
    assert sorted(seen) == seen
    same({key: by_itself(tmp_path / "to" / TARGETS[kind], kind)[key] for key in state}, state)


def test_a_part_is_selected_by_its_name(tmp_path):
    save({"app": {"model": {"w": torch.ones(2)}, "n": 3}, "step": 1}, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "x", select="app.model")
    same(read(tmp_path / "x"), {"w": torch.ones(2)})
    with pytest.raises(CheckpointMismatch, match="no 'model': at its top the state has 'app', 'step'"):
        convert(tmp_path / "one", tmp_path / "y", select="model")
    with pytest.raises(CheckpointMismatch, match=r"'app\.n' is no part"):
        convert(tmp_path / "one", tmp_path / "y", select="app.n")
    assert not (tmp_path / "y").exists()


def test_what_a_format_has_no_place_for(tmp_path):
    save({"w": torch.ones(2), "n": 3, "more": [1, 2]}, tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"no place for 'n', 'more\.0'"):
        convert(tmp_path / "one", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    done = convert(tmp_path / "one", tmp_path / "x.safetensors", strict=False)
    assert done.left_out == ["n", "more.0", "more.1"]
    same(load_file(tmp_path / "x.safetensors"), {"w": torch.ones(2)})
    save({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"'z' is torch\.complex128, which safetensors"):
        convert(tmp_path / "two", tmp_path / "y.safetensors")
    save({"r": checkpoint.PerRank(torch.ones(2))}, tmp_path / "three")
    convert(tmp_path / "three", tmp_path / "y.pt")
    same(torch.load(tmp_path / "y.pt"), {"r": torch.ones(2)})
    save(
        {"w": torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,)).to_dense()}, tmp_path / "four"
    )
    torch.save({"s": torch.ones(3).to_sparse()}, tmp_path / "s.pt")
    with pytest.raises(CheckpointError, match="'s'"):
        convert(tmp_path / "s.pt", tmp_path / "s")


# -- hostile files ----------------------------------------------------------------------------------------


class Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_files_of_torch_save_run_nothing(tmp_path):
    mark = tmp_path / "was here"
    for zipped in (True, False):
        torch.save(
            {"w": torch.ones(2), "x": Calls(f"touch '{mark}'")},
            tmp_path / "x.pt",
            _use_new_zipfile_serialization=zipped,
        )
        with pytest.raises(CheckpointError, match=r"x\.pt is refused: .*system"):
            convert(tmp_path / "x.pt", tmp_path / "y")
    (tmp_path / "z.pt").write_bytes(pickle.dumps(Calls(f"touch '{mark}'")))
    with pytest.raises(CheckpointError, match=r"z\.pt is refused"):
        convert(tmp_path / "z.pt", tmp_path / "y")
    value = [1]
    for _ in range(60):
        value = [value, value]
    torch.save({"v": value}, tmp_path / "v.pt")
    with pytest.raises(CheckpointError, match="larger or deeper"):
        convert(tmp_path / "v.pt", tmp_path / "y")
    torch.save([torch.ones(2)], tmp_path / "l.pt")
    with pytest.raises(CheckpointError, match="has a list, and no dict"):
        convert(tmp_path / "l.pt", tmp_path / "y")
    assert not mark.exists()
    assert not (tmp_path / "y").exists()
    with pytest.raises(CheckpointError, match="convert makes a checkpoint of it"):
        read(tmp_path / "l.pt")


def safetensors_file(path, header, data=b"\0" * 64, length=None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"{" * 100_000,
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}},
        {"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}},
        {"w": {"dtype": "F32", "shape": [1 << 30], "data_offsets": [0, 1 << 32]}},
        {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}},
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}},
        {"w": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}},
        {"w": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
        {"w": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}},
        {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"w": 3},
        {"w": {"dtype": "F32", "shape": [1 << 61, 1 << 61, 0], "data_offsets": [0, 0]}},
        {"__metadata__": {"a": 3}},
        {
            "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "v": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        },
        {
            "__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [-3]}}'},
            "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        },
    ],
)
def test_headers_of_safetensors_that_lie(tmp_path, header):
    safetensors_file(tmp_path / "model.safetensors", header)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors is refused"):
        read(tmp_path)


def test_places_of_shards_that_cannot_be(tmp_path):
    said = json.dumps({"w": {"saved_offsets": [1 << 61, 1 << 61]}})
    save_file({"w": torch.ones(1, 1)}, tmp_path / "model.safetensors", {"DCP_SHARDING_INFO": said})
    with pytest.raises(DamagedCheckpoint, match="more bytes than there can be"):
        read(tmp_path)


def test_the_word_format_is_no_tensor(tmp_path):
    save_file({"pt": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt"})
    assert read(tmp_path / "x.safetensors").keys() == {"pt"}
    w = torch.ones(2)
    save({"a": w, "format": w}, tmp_path / "tied")
    with pytest.raises(CheckpointError, match="keeps that word for itself"):
        convert(tmp_path / "tied", tmp_path / "y.safetensors")


def test_an_error_names_the_file_that_was_given(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(2)}, file)
    with pytest.raises(CheckpointMismatch, match=r"x\.safetensors"):
        load({"w": torch.ones(2, dtype=torch.float64)}, file)
    with pytest.raises(CheckpointMismatch, match=r"x\.safetensors"):
        load({"v": torch.ones(2)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"x\.safetensors is refused"):
        read(file)


def test_files_of_safetensors_that_are_cut_off(tmp_path):
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for size in range(0, len(data), 5):
        (tmp_path / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors is refused"):
            read(tmp_path)
    safetensors_file(tmp_path / "model.safetensors", b"{}", length=1 << 50)
    with pytest.raises(DamagedCheckpoint, match="more bytes than any has"):
        read(tmp_path)


def test_indices_that_lie(tmp_path):
    save_file({"w": torch.ones(8)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, said in (
        ({"w": "../a.safetensors"}, "no file beside it"),
        ({"w": "/etc/passwd"}, "no file beside it"),
        ({"w": 3}, "no file beside it"),
        ({"w": "b.safetensors"}, r"b\.safetensors.*missing"),
        ({"v": "a.safetensors"}, r"a\.safetensors does not have 'v'"),
        ({}, "no JSON object with a weight_map"),
        ([], "no JSON object with a weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DamagedCheckpoint, match=said):
            read(tmp_path)
    index.write_text("{")
    with pytest.raises(DamagedCheckpoint, match="no JSON object"):
        read(tmp_path)


def test_two_files_that_have_nothing_to_do_with_each_other(tmp_path):
    for name in "ab":
        save_file({"e.weight": torch.ones(2, 3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"both a\.safetensors and b\.safetensors have 'e\.weight'"):
        read(tmp_path)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpoint, match="nothing of that name"):
        convert(tmp_path / "none", tmp_path / "x")
    (tmp_path / "text").write_text("some text")
    with pytest.raises(NoCheckpoint, match=r"neither of torch\.save nor of safetensors"):
        convert(tmp_path / "text", tmp_path / "x")
    folder = tmp_path / "unfinished"
    folder.mkdir()
    save_file({"w": torch.ones(8)}, folder / f"{'0' * 16}.0.safetensors")  # of a save that was killed
    with pytest.raises(NoCheckpoint):
        read(folder)


def test_the_metadata_of_a_file_we_write(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_to_and_from_what_fsspec_reaches(tmp_path):
    state = {"w": torch.randn(3, 4), "n": 3}
    save(state, tmp_path / "one")
    convert(tmp_path / "one", "memory://converted/ours")
    convert("memory://converted/ours", "memory://converted/dcp", to="dcp")
    same(read("memory://converted/dcp"), state)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        convert("memory://converted/ours", "memory://converted/dcp", to="dcp")
    convert("memory://converted/dcp", tmp_path / "back.pt")
    same(torch.load(tmp_path / "back.pt"), state)
