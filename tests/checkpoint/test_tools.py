"""The tools for checkpoints as functions: what verify finds, what diff tells, what reshard makes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from support.ranks import Ranks

from checkpoint.spread_state import full_state, save_spread
from farstep import checkpoint
from farstep.checkpoint import LocalDisk
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.storage import NewFile, StoredFile
from farstep.checkpoint.tools import diff, reshard, verify
from farstep.checkpoint.tools import streaming as streaming_module
from farstep.checkpoint.tools.contents import contents_of, matcher, opened
from farstep.checkpoint.tools.inspecting import as_json, folded, tree_of
from farstep.checkpoint.tools.layers import layers_of
from farstep.checkpoint.tools.units import count, ranges, short, size
from farstep.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "ck"
    with Ranks(3) as ranks:
        ranks.run(save_spread, str(path))
    return path


@pytest.fixture
def spread(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "ck"))


def manifest_at(path: Path) -> Manifest:
    return opened(path)[1]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


# -- verify -----------------------------------------------------------------------------------------------


def test_a_whole_one_has_no_damage_and_all_of_it_is_looked_at(spread: Path) -> None:
    told: list[tuple[int, int]] = []
    assert verify(spread, strict=True, progress=lambda *done: told.append(done)) == []
    nbytes = manifest_at(spread).nbytes
    assert told[-1] == (nbytes, nbytes)


def test_one_flipped_bit_is_found_wherever_it_is(spread: Path) -> None:
    manifest = manifest_at(spread)
    for number, file in enumerate(manifest.files):
        rows = [row for row in range(len(manifest.boxes)) if manifest.boxes.file[row] == number]
        for row in rows[:: max(1, len(rows) // 6)]:
            at = int(manifest.boxes.at[row] + manifest.box_bytes[row] - 1)
            flip(spread / file.name, at)
            (found,) = verify(spread)
            assert (found.kind, found.file) == ("changed", file.name)
            assert found.tensor == manifest.names[int(manifest.boxes.tensor[row])]
            assert any(begin <= at < end for begin, end in found.spans)
            flip(spread / file.name, at)
    assert verify(spread) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_all_damages_are_found_and_not_only_the_first(spread: Path, threads: int) -> None:
    manifest = manifest_at(spread)
    hit = set()
    for row in range(0, len(manifest.boxes), 2):
        file = manifest.files[int(manifest.boxes.file[row])].name
        flip(spread / file, int(manifest.boxes.at[row]))
        hit.add((file, manifest.names[int(manifest.boxes.tensor[row])]))
    found = verify(spread, threads=threads)
    assert {(each.file, each.tensor) for each in found} == hit
    assert len(found) == len(range(0, len(manifest.boxes), 2))


def test_damages_far_apart_in_one_box_are_told_as_spans(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.zeros(5 << 18)}, tmp_path)  # five blocks
    (file,) = tmp_path.glob("*.safetensors")
    at = int(manifest_at(tmp_path).boxes.at[0])
    for block in (0, 1, 3):
        flip(file, at + (block << 20) + 17)
    (found,) = verify(tmp_path)
    assert found.spans == ((at, at + (2 << 20)), (at + (3 << 20), at + (4 << 20)))
    assert "'w'" in str(found)


def test_every_byte_of_a_header_counts(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.ones(3, 2), "b": torch.arange(4, dtype=torch.int16)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    begin = int(manifest_at(tmp_path).boxes.at.min())
    for at in range(begin):
        flip(file, at)
        assert {each.kind for each in verify(tmp_path)} == {"header"}, at
        flip(file, at)
    assert verify(tmp_path) == []


@pytest.mark.parametrize("left", [0, 5, 100, 2000, -1, -5000])
def test_a_file_that_has_been_cut_off(spread: Path, left: int) -> None:
    manifest = manifest_at(spread)
    file = manifest.files[1]
    end = left if left >= 0 else file.nbytes + left
    os.truncate(spread / file.name, end)
    found = verify(spread)
    assert {each.file for each in found} == {file.name}
    assert f"ends at byte {end:,} of {file.nbytes:,}" in {each.what for each in found if each.tensor is None}
    ends = manifest.boxes.at + manifest.box_bytes
    lost = {
        manifest.names[int(manifest.boxes.tensor[row])]
        for row in range(len(manifest.boxes))
        if manifest.boxes.file[row] == 1 and ends[row] > end
    }
    assert {each.tensor for each in found if each.kind == "short" and each.tensor} == lost


def test_a_file_that_goes_on(spread: Path) -> None:
    file = manifest_at(spread).files[0].name
    with open(spread / file, "ab") as more:
        more.write(b"x")
    (found,) = verify(spread)
    assert (found.kind, found.file, found.tensor) == ("long", file, None)


def test_a_file_that_is_gone_takes_all_its_tensors_with_it(spread: Path) -> None:
    manifest = manifest_at(spread)
    os.unlink(spread / manifest.files[2].name)
    found = verify(spread)
    there = {manifest.names[t] for t in manifest.boxes.tensor[manifest.boxes.file == 2]}
    assert {each.kind for each in found} == {"missing"}
    assert {each.tensor for each in found} == there


def test_two_files_in_each_others_place(spread: Path) -> None:
    one, other = (spread / file.name for file in manifest_at(spread).files[:2])
    os.rename(one, spread / "aside")
    os.rename(other, one)
    os.rename(spread / "aside", other)
    found = verify(spread)
    assert {each.file for each in found} == {one.name, other.name}
    assert {"header", "changed"} <= {each.kind for each in found}


def test_two_blocks_in_each_others_place(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.arange(4 << 18)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    at = int(manifest_at(tmp_path).boxes.at[0])
    data = bytearray(file.read_bytes())
    first, third = slice(at, at + (1 << 20)), slice(at + (2 << 20), at + (3 << 20))
    data[first], data[third] = data[third], data[first]
    file.write_bytes(data)
    (found,) = verify(tmp_path)
    assert [begin - at for begin, _ in found.spans] == [0, 2 << 20]


def test_a_file_of_an_unfinished_save_is_told_of_only_if_that_is_asked_for(spread: Path) -> None:
    (spread / "0123456789abcdef.0.safetensors").write_bytes(b"half")
    (spread / "notes.txt").write_text("mine")
    assert verify(spread) == []
    (found,) = verify(spread, strict=True)
    assert (found.kind, found.file) == ("extra", "0123456789abcdef.0.safetensors")


def test_a_damaged_manifest_is_a_damage_and_none_at_all_is_no_checkpoint(spread: Path) -> None:
    manifest = spread / "manifest.json"
    whole = manifest.read_bytes()
    for at in range(0, len(whole), len(whole) // 25):
        flip(manifest, at)
        (found,) = verify(spread)
        assert (found.kind, found.file) == ("manifest", "manifest.json")
        flip(manifest, at)
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        manifest.write_bytes(whole[:end])
        assert [each.kind for each in verify(spread)] == ["manifest"]
    manifest.unlink()
    with pytest.raises(NoCheckpoint):
        verify(spread)


def test_a_header_that_tells_safetensors_something_else(tmp_path: Path) -> None:
    """All checksums are right, and yet another program would read something else."""
    checkpoint.save({"one": torch.zeros(6), "two": torch.ones(6)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"one"', b'"tmp"').replace(b'"two"', b'"one"').replace(b'"tmp"', b'"two"'))
    assert load_file(file)["one"].sum() == 6
    found = verify(tmp_path)
    assert {each.kind for each in found} == {"header"}
    assert {each.tensor for each in found} == {"one", "two"}


class _Failing(LocalDisk):
    """A disk with a bad sector."""

    bad_at = 0

    def open(self, name: str) -> StoredFile:
        file = super().open(name)
        read_into = file.read_into

        def failing(offset: int, buffer: memoryview) -> int:
            if offset <= self.bad_at < offset + buffer.nbytes:
                raise OSError(5, "Input/output error")
            return read_into(offset, buffer)

        file.read_into = failing  # type: ignore[method-assign]
        return file


def test_a_sector_that_cannot_be_read_is_told_as_that_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.zeros(1 << 18), "b": torch.zeros(1 << 18), "c": torch.zeros(9)}, tmp_path)
    disk, manifest = _Failing(tmp_path), manifest_at(tmp_path)
    row = manifest.boxes.tensor.tolist().index(manifest.names.index("b"))
    disk.bad_at = int(manifest.boxes.at[row]) + 1000
    (found,) = verify(disk)
    assert (found.kind, found.tensor) == ("unreadable", "b")
    assert "Input/output error" in found.what


def test_a_checkpoint_on_other_storage(original: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.put(f"{original}/", "/verified/", recursive=True)
    try:
        assert verify("memory://verified") == []
        name = manifest_at(original).files[0].name
        data = bytearray(files.cat_file(f"/verified/{name}"))
        data[-1] ^= 1
        files.pipe_file(f"/verified/{name}", bytes(data))
        (found,) = verify("memory://verified")
        assert (found.kind, found.file) == ("changed", name)
    finally:
        files.rm("/verified", recursive=True)
    with pytest.raises(CheckpointError, match="cannot be reached"):
        verify("nosuch://place")


# -- diff -------------------------------------------------------------------------------------------------


def saved(path: Path, state: Any) -> Path:
    checkpoint.save(state, path)
    return path


def test_the_same_state_cut_otherwise_is_the_same(original: Path, tmp_path: Path) -> None:
    found = diff(original, saved(tmp_path / "full", full_state()))
    assert not [each for each in found.tensors if each.status not in ("equal", "only_a")]
    assert {each.name for each in found.tensors if each.status == "only_a"} == {f"random.rank{i}" for i in range(3)}  # fmt: skip
    assert not found.values
    assert not diff(original, original)


DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"]  # fmt: skip


def test_known_differences_of_every_dtype(tmp_path: Path) -> None:
    before, after = {}, {}
    for name in DTYPES:
        before[name] = torch.tensor([1, 0, 1, 0, 1]).to(getattr(torch, name))
        after[name] = torch.tensor([1, 1, 1, 0, 0]).to(getattr(torch, name))
    found = diff(saved(tmp_path / "a", before), saved(tmp_path / "b", after))
    assert [each.name for each in found.tensors] == DTYPES
    for each in found.tensors:
        assert (each.status, each.sums.different, each.sums.largest, each.sums.nan) == ("different", 2, 1, 0)
        assert each.sums.norm_a == each.sums.norm_b == pytest.approx(3**0.5)
        assert each.sums.norm_difference == pytest.approx(2**0.5)
        assert each.sums.elements == 5


def test_norms_against_torch_over_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_module, "BATCH_BYTES", 10_000)
    rng = torch.Generator().manual_seed(1)
    a = {"w": torch.randn(300, 70, generator=rng), "v": torch.randn(9000, generator=rng), "s": torch.ones(())}
    b = {name: each + 0.01 * torch.randn(each.shape, generator=rng) for name, each in a.items()}
    b["w"][:200] = a["w"][:200]
    found = {
        each.name: each.sums for each in diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b)).tensors
    }
    for name in a:
        x, y = a[name].double(), b[name].double()
        assert found[name].elements == x.numel()
        assert found[name].different == int((x != y).sum())
        assert found[name].largest == float((x - y).abs().max())
        assert found[name].norm_a == pytest.approx(float(x.norm()))
        assert found[name].norm_b == pytest.approx(float(y.norm()))
        assert found[name].norm_difference == pytest.approx(float((x - y).norm()))


def test_nan_and_inf(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    a = {
        "same": torch.tensor([nan, inf, -inf, 0.0]),
        "nan": torch.tensor([nan, 1.0, 2.0]),
        "inf": torch.tensor([inf, 1.0]),
        "sign": torch.tensor([inf, 1.0]),
        "large": torch.tensor([1e200, -1e200], dtype=torch.float64),
        "complex": torch.tensor([complex(nan, 0), 1j]),
    }
    b = {
        "same": torch.tensor([nan, inf, -inf, -0.0]),
        "nan": torch.tensor([nan, nan, 2.5]),
        "inf": torch.tensor([5.0, 1.0]),
        "sign": torch.tensor([-inf, 1.0]),
        "large": torch.tensor([1e200, 1e200], dtype=torch.float64),
        "complex": torch.tensor([complex(nan, 0), 2j]),
    }
    result = diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    found = {each.name: each for each in result.tensors}
    assert found["same"].status == "equal"
    sums = found["nan"].sums
    assert (sums.different, sums.nan, sums.largest) == (2, 1, 0.5)
    assert sums.norm_difference != sums.norm_difference
    assert found["inf"].sums.largest == found["sign"].sums.largest == inf
    assert found["large"].sums.norm_a == pytest.approx(2**0.5 * 1e200)
    assert (found["complex"].sums.different, found["complex"].sums.largest) == (1, 1.0)
    told = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert {each["name"]: each.get("norm_difference") for each in told["tensors"]}["nan"] == "nan"


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    top = 2**63 - 1
    a = {"i": torch.tensor([top, -top - 1, top]), "u": torch.tensor([2**64 - 1, 0], dtype=torch.uint64)}
    b = {"i": torch.tensor([top - 1, top, top]), "u": torch.tensor([2**64 - 2, 0], dtype=torch.uint64)}
    found = {
        each.name: each.sums for each in diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b)).tensors
    }
    assert (found["i"].largest, found["i"].different) == (2**64 - 1, 2)
    assert (found["u"].largest, found["u"].different) == (1, 1)


def test_the_tolerance(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"x": torch.tensor([1.0, 2.0]), "n": torch.tensor([5]), "lr": 0.1})
    b = saved(tmp_path / "b", {"x": torch.tensor([1.0, 2.25]), "n": torch.tensor([6]), "lr": 0.2})
    assert {each.status for each in diff(a, b).tensors} == {"different"}
    close = diff(a, b, tolerance=0.25)
    assert {each.name: each.status for each in close.tensors} == {"x": "close", "n": "different"}
    assert not close.values
    assert not diff(a, b, tolerance=1)


def test_names_shapes_dtypes_and_values(tmp_path: Path) -> None:
    a = {"t": {"gone": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(4)}, "v": [1, 2.5, None], "k": (1,), "x": 3, "flag": True, "nan": float("nan")}  # fmt: skip
    b = {"t": {"new": torch.ones(2), "shape": torch.ones(3, 2), "dtype": torch.ones(4).half()}, "v": [1, 2.0, None], "k": [1], "y": b"z", "flag": 1, "nan": float("nan")}  # fmt: skip
    found = diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    assert {each.name: each.status for each in found.tensors} == {"t.gone": "only_a", "t.shape": "shape", "t.dtype": "dtype", "t.new": "only_b"}  # fmt: skip
    assert next(each.sums for each in found.tensors if each.name == "t.dtype") is None  # the same numbers
    values = {each.name: (each.status, each.a, each.b) for each in found.values}
    assert values.keys() == {"v.1", "k", "x", "y", "flag"}
    assert values["v.1"] == ("different", 2.5, 2.0)
    assert values["x"] == ("only_a", 3, None)
    assert values["y"] == ("only_b", None, b"z")
    assert values["flag"] == ("different", True, 1)
    assert found
    assert not diff(tmp_path / "a", tmp_path / "b", names=lambda name: name in ("v.0", "v.2"))


def test_tied_tensors_are_compared_by_each_name(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    a = saved(tmp_path / "a", {"x": shared, "y": shared})
    b = saved(tmp_path / "b", {"x": shared.clone(), "y": shared + 1})
    assert {each.name: each.status for each in diff(a, b).tensors} == {"x": "equal", "y": "different"}
    assert [each.name for each in diff(a, a).tensors] == ["x"]


def test_a_damage_met_by_diff_or_reshard_is_raised(spread: Path, tmp_path: Path) -> None:
    file = manifest_at(spread).files[0]
    flip(spread / file.name, file.nbytes - 1)
    with pytest.raises(DamagedCheckpoint, match=file.name):
        diff(spread, spread)
    with pytest.raises(DamagedCheckpoint, match=file.name):
        reshard(spread, tmp_path / "new", 2)
    assert os.listdir(tmp_path / "new") == []


# -- reshard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_a_resharded_one_is_the_original(original: Path, tmp_path: Path, ranks: int) -> None:
    target = tmp_path / "new"
    reshard(original, target, ranks)
    assert verify(target, strict=True) == []
    assert not diff(original, target)
    read, random = checkpoint.read(target), torch.zeros(5)
    assert same({key: each for key, each in read.items() if key != "random"}, full_state())
    assert torch.equal(read["random"], random)
    manifest = manifest_at(target)
    assert manifest.ranks == ranks
    assert [file.rank for file in manifest.files] == list(range(ranks))
    for name, info in manifest.tensors.items():
        spread = manifest.spread(manifest.names.index(name))
        whole = torch.empty(info.shape)
        cut = [list(whole.shape)] if name.startswith("random") or not info.shape else [list(c.shape) for c in whole.chunk(ranks)]  # fmt: skip
        assert spread.sizes.tolist() == cut
    for file in manifest.files:
        load_file(target / file.name)


def test_boxes_that_come_in_pieces(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of tensors that are larger than what is in memory at a time."""
    monkeypatch.setattr(streaming_module, "BATCH_BYTES", 9000)
    reshard(original, tmp_path / "new", 2)
    monkeypatch.undo()
    assert verify(tmp_path / "new") == []
    assert not diff(original, tmp_path / "new")


def test_odd_tensors_are_kept(tmp_path: Path) -> None:
    shared = torch.arange(3)
    state = {"empty": torch.zeros(0, 4), "flat": torch.zeros(3, 0), "scalar": torch.tensor(2.5), "x": shared, "tied": shared, 5: {"y": torch.ones(2).to(torch.float8_e8m0fnu), "z": torch.ones(2, dtype=torch.complex128)}}  # fmt: skip
    reshard(saved(tmp_path / "a", state), tmp_path / "b", 2)
    assert verify(tmp_path / "b") == []
    assert not diff(tmp_path / "a", tmp_path / "b")
    assert contents_of(manifest_at(tmp_path / "b")).tied == {"tied": "x"}
    reshard(saved(tmp_path / "none", {"n": 1}), tmp_path / "none2", 4)
    assert checkpoint.read(tmp_path / "none2") == {"n": 1}


def test_what_is_there_is_replaced_only_if_that_is_allowed(spread: Path, tmp_path: Path) -> None:
    saved(tmp_path / "other", {"x": 1})
    with pytest.raises(CheckpointError, match="overwrite"):
        reshard(spread, tmp_path / "other", 2)
    assert checkpoint.read(tmp_path / "other") == {"x": 1}
    reshard(spread, tmp_path / "other", 2, overwrite=True)
    assert not diff(spread, tmp_path / "other")
    reshard(spread, spread, 2, overwrite=True)  # in its own place
    assert not diff(spread, tmp_path / "other")
    assert len(list(spread.glob("*.safetensors"))) == 2


class _Full(LocalDisk):
    """A disk that is full after the first file."""

    def create(self, name: str, nbytes: int) -> NewFile:
        if ".1." in name:
            raise OSError(28, "No space left on device")
        return super().create(name, nbytes)


def test_a_full_disk_leaves_what_was_there(spread: Path, tmp_path: Path) -> None:
    saved(tmp_path / "other", {"x": torch.ones(3)})
    before = sorted(os.listdir(tmp_path / "other"))
    with pytest.raises(OSError, match="No space"):
        reshard(spread, _Full(tmp_path / "other"), 3, overwrite=True)
    assert sorted(os.listdir(tmp_path / "other")) == before
    assert verify(tmp_path / "other", strict=True) == []


# -- what is told of one ----------------------------------------------------------------------------------


def test_layers_that_are_alike_are_one(original: Path) -> None:
    manifest = manifest_at(original)
    root = folded(tree_of(manifest))
    model = root.below["model"]
    layers = (
        model.below["layers.[0-3]"] if "layers.[0-3]" in model.below else model.below["layers"].below["[0-3]"]
    )
    assert layers.layers == 4
    assert layers.nbytes == 4 * (40 * 30 + 40) * 4
    assert layers.below["weight"].leaf.shape == (40, 30)
    assert root.nbytes == manifest.nbytes
    assert root.tensors == len(manifest.tensors)


def test_layers_that_differ_are_not(tmp_path: Path) -> None:
    state = {f"h.{i}.w": torch.zeros(2 if i % 2 else 3) for i in range(8)} | {
        "h.8.w": torch.zeros(2, dtype=torch.int8)
    }
    root = folded(tree_of(manifest_at(saved(tmp_path, state))))
    assert set(root.below["h"].below) == {"[0,2..6].w", "[1,3..7].w", "8.w"} or set(root.below["h"].below) == {"[0,2..6]", "[1,3..7]", "8.w"}  # fmt: skip
    assert sum(each.layers for each in root.below["h"].below.values()) == 9


def test_the_json_has_every_box(original: Path) -> None:
    manifest = manifest_at(original)
    told = json.loads(json.dumps(as_json(manifest, "here", matcher(["model.*"]))))
    assert {each["name"] for each in told["tensors"]} == {f"model.{name}" for name in full_state()["model"]}
    for each in told["tensors"]:
        assert sum(box["nbytes"] for box in each["boxes"]) == each["nbytes"]
    assert told["values"] == {}
    assert as_json(manifest, "here")["values"]["optimizer.param_groups.0.betas"] == {"tuple": [0.9, 0.999]}
    file = told["tensors"][0]["boxes"][0]
    with open(original / file["file"], "rb") as data:
        data.seek(file["at"])
        block = data.read(min(file["nbytes"], 1 << 20))
    assert xxhash.xxh3_64_intdigest(block) in manifest.checksums.tolist()


def test_a_picture_has_all_bytes_and_few_rows(original: Path, tmp_path: Path) -> None:
    manifest = manifest_at(original)
    layers = layers_of(manifest)
    assert sum(row.nbytes for row in layers.rows) == manifest.nbytes
    assert layers.ranks == ["0", "1", "2"]
    assert {"model", "exp_avg", "step"} <= set(layers.kinds)
    row = next(row for row in layers.rows if row.label.startswith("layers.0"))
    assert row.by_kind["exp_avg"] == row.by_kind["model"] > 0  # both belong to the layer
    many = saved(tmp_path / "many", {f"a.{i}.b{j}": torch.zeros(2) for i in range(500) for j in range(6)})
    found = layers_of(manifest_at(many))
    assert 5 < len(found.rows) <= 32
    assert sum(row.nbytes for row in found.rows) == 500 * 6 * 8
    odd = saved(tmp_path / "odd", {f"{'xyz'[i % 3]}{'abcdefgh'[i % 8]}{'klmnopq'[i % 7]}": torch.zeros(1) for i in range(168)})  # fmt: skip
    assert len(layers_of(manifest_at(odd)).rows) <= 32
    assert layers_of(manifest_at(saved(tmp_path / "none", {"x": 1}))).rows == []


def test_rows_of_a_picture_are_called_as_what_they_are(tmp_path: Path) -> None:
    state = {
        "model": {"h.0.weight": torch.ones(4), "h.0.mean": torch.ones(4)},
        "ema": {"h.0.weight": torch.ones(4)},
        "optim": {"state": {"h.0.weight": {"exp_avg": torch.ones(4)}}},
        "rng": checkpoint.PerRank(torch.ones(4)),
        "cuda": checkpoint.PerRank(torch.ones(4)),
        "nest": [1, 2, {"t": torch.ones(4)}],
        "numbered": {"state": {0: {"exp_avg": torch.ones(4)}}},
    }
    rows = {row.label: row for row in layers_of(manifest_at(saved(tmp_path / "x", state))).rows}
    others = {"rng.rank0", "cuda.rank0", "nest.2.t", "numbered.state.0.exp_avg"}
    assert rows.keys() == {"h.0.weight", "h.0.mean"} | others
    assert {kind for kind, nbytes in rows["h.0.weight"].by_kind.items() if nbytes} == {
        "model",
        "ema",
        "exp_avg",
    }
    alone = saved(tmp_path / "alone", {"model": {"a": torch.ones(4)}, "b": [torch.ones(4)]})
    assert {row.label for row in layers_of(manifest_at(alone)).rows} == {"model.a", "b.0"}


def test_numbers_for_people() -> None:
    assert ranges([0, 1, 2, 3, 8, 10, 11, 12]) == "0-3,8,10-12"
    assert ranges(range(0, 24, 2)) == "0,2..22"
    assert ranges([1, 5, 7, 20, 22, 90]) == "1,5,7,..90"
    assert [size(n) for n in (0, 999, 1000, 1 << 20, 3 << 30, 5 << 40)] == ["0 B", "999 B", "1.0 KiB", "1.0 MiB", "3.0 GiB", "5.00 TiB"]  # fmt: skip
    assert (count(1, "box", "boxes"), count(2000, "box", "boxes")) == ("1 box", "2,000 boxes")
    assert len(short("x" * 100, 20)) == 20
