"""A checkpoint that is not as it was saved is never loaded: the error names the file and the tensor. Neither is one that was never saved by anybody."""

import base64
import json

import pytest
import torch
import xxhash

from farstep import checkpoint
from farstep.checkpoint.manifest import MANIFEST, Manifest
from farstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, NoCheckpoint


def state():
    torch.manual_seed(0)
    return {
        "big": torch.randn(700, 500),
        "small": torch.arange(10),
        "deep": {"x": torch.ones(3), "n": 5},
        "s": "text",
    }


def blank():
    return {"big": torch.zeros(700, 500), "small": torch.zeros(10, dtype=torch.int64), "deep": {"x": torch.zeros(3), "n": 0}, "s": ""}  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(state(), tmp_path)
    return tmp_path


def the_data(path):
    (file,) = path.glob("*.safetensors")
    return file


def tensor_at(path, at):
    """The tensor that has this byte of the data file, by the manifest."""
    manifest = Manifest.decode((path / MANIFEST).read_bytes(), "")
    for row in range(len(manifest.boxes)):
        begin = int(manifest.boxes.at[row])
        if begin <= at < begin + int(manifest.box_bytes[row]):
            return manifest.names[int(manifest.boxes.tensor[row])]
    return None


def test_every_region_of_the_data_flipped(saved):
    file = the_data(saved)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = {header, header + 1, len(whole) - 1, *range(header, len(whole), 9973)}
    for at in sorted(places):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=f"{file.name}.*{tensor_at(saved, at)!r}"):
            checkpoint.load(blank(), saved)
    file.write_bytes(whole)
    checkpoint.load(blank(), saved)


@pytest.mark.parametrize("nbytes", [0, 7, 500, 1_000_000, -1])
def test_the_data_cut_off(saved, nbytes):
    file = the_data(saved)
    file.write_bytes(file.read_bytes()[:nbytes])
    with pytest.raises(
        DamagedCheckpoint, match=f"{file.name}.*'big'|{file.name}.*'small'|{file.name}.*'deep.x'"
    ):
        checkpoint.load(blank(), saved)


def test_the_numbers_of_what_is_wrong(tmp_path):
    checkpoint.save({"big": torch.zeros(600_000), "tiny": torch.arange(1)}, tmp_path)
    file = the_data(tmp_path)
    whole = file.read_bytes()
    state = {"big": torch.zeros(600_000), "tiny": torch.zeros(1, dtype=torch.int64)}
    manifest = Manifest.decode((tmp_path / MANIFEST).read_bytes(), "")
    at = int(manifest.boxes.at[manifest.rows_of(manifest.names.index("tiny"))[0]])
    file.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(
        DamagedCheckpoint, match=f"'tiny', has been changed within its bytes {at:,} to {at + 8:,}"
    ):
        checkpoint.load(state, tmp_path)
    for length in (100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint, match=f"is {length:,} bytes long, of {len(whole):,} that were"):
            checkpoint.load(state, tmp_path)


def test_no_memory_is_taken_for_a_tensor_whose_file_is_short(tmp_path):
    """It is said to be of 4 TB, and the manifest agrees with itself."""
    checkpoint.save({"a": torch.zeros(4, dtype=torch.uint8)}, tmp_path)
    manifest = manifest_in(tmp_path)
    size = 1 << 32
    begin = manifest["boxes"]["at"][0]
    manifest["tensors"]["shapes"] = [[size]]
    manifest["boxes"]["sizes"] = [size]
    manifest["files"]["nbytes"] = [begin + size]
    manifest["checksums"] = base64.b64encode(bytes(8 * (size >> 20))).decode()
    put(tmp_path, manifest)
    for load in (lambda: checkpoint.read(tmp_path), lambda: checkpoint.load({"a": None}, tmp_path)):
        with pytest.raises(DamagedCheckpoint, match=f"which has 'a', ends before byte {begin + size:,}"):
            load()


def test_blocks_swapped(saved):
    file = the_data(saved)
    data = bytearray(file.read_bytes())
    begin = len(data) - 1_400_000 + 8
    data[begin : begin + 4096], data[begin + 40960 : begin + 45056] = data[begin + 40960 : begin + 45056], data[begin : begin + 4096]  # fmt: skip
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=f"{file.name}.*'big'"):
        checkpoint.load(blank(), saved)


def test_the_data_of_another_save(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    checkpoint.save({**state(), "big": torch.zeros(700, 500)}, other)
    the_data(saved).write_bytes(the_data(other).read_bytes())
    with pytest.raises(DamagedCheckpoint, match="'big'"):
        checkpoint.load(blank(), saved)


def test_the_data_gone(saved):
    name = the_data(saved).name
    the_data(saved).unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{name}.*'small' and \d others.*missing"):
        checkpoint.load(blank(), saved)


def test_every_byte_of_the_manifest_flipped(saved):
    file = saved / MANIFEST
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamagedCheckpoint, match=MANIFEST):
            checkpoint.load(blank(), saved)
    for end in range(0, len(whole), 37):
        file.write_bytes(whole[:end])
        with pytest.raises(DamagedCheckpoint, match=MANIFEST):
            checkpoint.load(blank(), saved)
    file.unlink()
    with pytest.raises(NoCheckpoint):
        checkpoint.load(blank(), saved)


def test_unchecked_if_asked(saved):
    file = the_data(saved)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    checkpoint.load(blank(), saved, verify=False)


def test_only_what_is_read_is_checked(saved):
    """A part of a checkpoint loads though another is damaged."""
    file = the_data(saved)
    data = bytearray(file.read_bytes())
    at = next(at for at in range(len(data) - 1, 0, -1) if tensor_at(saved, at) == "big")
    data[at] ^= 1
    file.write_bytes(data)
    found = {"small": torch.zeros(10, dtype=torch.int64)}
    checkpoint.load(found, saved)
    assert torch.equal(found["small"], torch.arange(10))


# -- manifests that somebody made -------------------------------------------------------------------------


def put(path, manifest) -> None:
    """With a checksum that is right, as one who means harm would."""
    body = json.dumps(manifest, separators=(",", ":")).encode()
    (path / MANIFEST).write_bytes(
        b'{"xxh3_128": "%s", "manifest": %s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body)
    )


def manifest_in(path):
    return json.loads((path / MANIFEST).read_bytes())["manifest"]


def set_at(*keys):
    *path, last, value = keys

    def change(manifest):
        at = manifest
        for key in path:
            at = at[key]
        at[last] = value

    return change


def big(manifest, column, value):
    manifest["boxes"][column][0] = value


HOSTILE = {
    "a path out of the directory": set_at("files", "names", 0, "../../etc/passwd"),
    "an absolute path": set_at("files", "names", 0, "/etc/passwd"),
    "a file of another save": set_at("files", "names", 0, "0123456789abcdef.0.safetensors"),
    "a file's size": set_at("files", "nbytes", 0, -1),
    "a huge file": set_at("files", "nbytes", 0, 1 << 62),
    "a huge shape": set_at("tensors", "shapes", 0, [1 << 40, 1 << 40]),
    "a huge shape without elements": set_at("tensors", "shapes", 0, [1 << 40, 1 << 40, 0]),
    "a negative shape": set_at("tensors", "shapes", 0, [-1, 5]),
    "a shape of text": set_at("tensors", "shapes", 0, ["700", 500]),
    "a shape of truth": set_at("tensors", "shapes", 0, [True, 500]),
    "many dimensions": set_at("tensors", "shapes", 0, [1] * 1000),
    "another shape": set_at("tensors", "shapes", 0, [500, 500]),
    "no dtype": set_at("tensors", "dtypes", 0, "evil"),
    "a dtype of torch that is none": set_at("tensors", "dtypes", 0, "load"),
    "a larger dtype": set_at("tensors", "dtypes", 0, "float64"),
    "two of one name": set_at("tensors", "names", 1, "big"),
    "a name that is none": set_at("tensors", "names", 1, None),
    "a box of no tensor": set_at("boxes", "tensor", 0, 99),
    "a box of a negative tensor": set_at("boxes", "tensor", 0, -1),
    "a box in no file": set_at("boxes", "file", 0, 5),
    "a box beyond its file": set_at("boxes", "at", 0, 1 << 40),
    "a box beyond all numbers": set_at("boxes", "at", 0, (1 << 63) - 1),
    "a number too large": set_at("boxes", "at", 0, 1 << 80),
    "boxes over one another": lambda m: m["boxes"]["at"].__setitem__(1, m["boxes"]["at"][0] + 8),
    "a box beyond its tensor": set_at("boxes", "offsets", 0, 1),
    "a box too small": set_at("boxes", "sizes", 0, 699),
    "sizes left out": lambda m: m["boxes"]["sizes"].pop(),
    "a box twice": lambda m: [m["boxes"][c].append(m["boxes"][c][0]) for c in ("tensor", "file", "at")],
    "floats": set_at("boxes", "at", 0, 1.5),
    "no checksums": set_at("checksums", ""),
    "checksums of text": set_at("checksums", "%%%"),
    "a checksum more": lambda m: m.__setitem__(
        "checksums", base64.b64encode(base64.b64decode(m["checksums"]) + bytes(8)).decode()
    ),
    "blocks of nothing": set_at("block_bytes", 0),
    "blocks of more than there is memory": set_at("block_bytes", 1 << 60),
    "blocks of nearly as much": set_at("block_bytes", (1 << 20) + 1),
    "blocks of a fraction": set_at("block_bytes", 1048576.0),
    "ranks without end": set_at("ranks", 1 << 40),
    "a file of a rank that there is not": lambda m: m["files"]["ranks"].__setitem__(0, m["ranks"]),
    "a value that says it is not to be read": set_at("tree", "dict", "s", {"unreadable": "x"}),
    "a newer version": set_at("version", 2),
    "another format": set_at("format", "other"),
    "another key": set_at("code", "import os"),
    "no ranks": set_at("ranks", 0),
    "a save that is a path": set_at("save", "../../../../x"),
    "columns that are none": set_at("boxes", {}),
    "a list": lambda m: m.__setitem__("tensors", []),
    "a tree of nonsense": set_at("tree", {"dict": {"big": {"evil": 1}}}),
    "a tree of two kinds": set_at("tree", {"dict": {}, "list": []}),
    "a list in the tree that is none": set_at("tree", {"list": 5}),
    "a tensor that is not there": set_at("tree", "dict", "big", {"tensor": "nowhere"}),
    "a tensor without a name": set_at("tree", "dict", "big", {"tensor": 5}),
    "bytes that are none": set_at("tree", "dict", "s", {"bytes": "*"}),
    "a device that is none": set_at("tree", "dict", "s", {"device": "x" * 1000}),
    "a dtype that is a function": set_at("tree", "dict", "s", {"dtype": "load"}),
    "a float that is none": set_at("tree", "dict", "s", {"float": "1e5"}),
    "a size beyond all numbers": set_at("tree", "dict", "s", {"size": [1 << 70]}),
    "a size below nothing": set_at("tree", "dict", "s", {"size": [-1]}),
    "a key that cannot be one": set_at("tree", {"pairs": [[{"list": []}, 1]]}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(saved, what):
    manifest = manifest_in(saved)
    HOSTILE[what](manifest)
    put(saved, manifest)
    for act in (lambda: checkpoint.load(blank(), saved), lambda: checkpoint.read(saved)):
        with pytest.raises((DamagedCheckpoint, CheckpointMismatch)) as caught:
            act()
        assert str(saved) in str(caught.value) or "manifest" in str(caught.value)


def test_deep_nesting_is_refused(saved):
    manifest = manifest_in(saved)
    for depth in (200, 5_000):
        node: object = 1
        for _ in range(depth):
            node = {"list": [node]}
        manifest["tree"] = {"dict": {"s": node}}
        if depth == 200:
            put(saved, manifest)
        else:
            text = json.dumps({**manifest, "tree": "TREE"}).replace(
                '"TREE"', '{"list":[' * 100_000 + "]}" * 100_000
            )
            body = text.encode()
            (saved / MANIFEST).write_bytes(b'{"xxh3_128": "%s", "manifest": %s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body))  # fmt: skip
            manifest["tree"] = None
        with pytest.raises(CheckpointError):
            checkpoint.read(saved)
        manifest["tree"] = None


def test_a_save_replaces_a_checkpoint_that_is_not_to_be_read(saved):
    manifest = manifest_in(saved)
    manifest["tree"]["dict"]["s"] = {"unreadable": "x"}
    put(saved, manifest)
    with pytest.raises(DamagedCheckpoint, match="'s' cannot be read"):
        checkpoint.read(saved)
    checkpoint.save({"a": 1}, saved)
    assert checkpoint.read(saved) == {"a": 1}


def test_a_hostile_manifest_does_not_lead_a_save_astray(tmp_path, tmp_path_factory):
    """What it names elsewhere is not removed by the save that takes its place."""
    precious = tmp_path_factory.mktemp("elsewhere") / "precious"
    precious.write_text("keep")
    checkpoint.save(state(), tmp_path)
    manifest = manifest_in(tmp_path)
    manifest["files"]["names"][0] = str(precious)
    put(tmp_path, manifest)
    checkpoint.save({"a": 1}, tmp_path)
    assert precious.read_text() == "keep"
    assert checkpoint.read(tmp_path) == {"a": 1}


def test_no_memory_is_taken_for_what_is_not_there(saved):
    """A tensor that is said to be of 4 TB, in boxes of a file that is not."""
    manifest = manifest_in(saved)
    size = 1 << 40
    manifest["tensors"]["shapes"][0] = [size]
    manifest["boxes"]["offsets"] = [0, *manifest["boxes"]["offsets"][2:]]
    manifest["boxes"]["sizes"] = [size, *manifest["boxes"]["sizes"][2:]]
    manifest["files"]["nbytes"][0] = 1 << 50
    manifest["checksums"] = ""
    put(saved, manifest)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.read(saved)
