"""Manifests with any field replaced, and bytes that are none: read, and what they name too."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from farstep import checkpoint
from farstep.checkpoint.manifest import MANIFEST, Manifest
from farstep.checkpoint.tools import reshard
from farstep.checkpoint.tools.contents import contents_of, value_of
from farstep.errors import CheckpointError
from fuzz.support import Bound, Choices, InMemory, cases, deep_text, edited, paths_in, spoiled

NAME = "manifest"
SECONDS_PER_INPUT_LIMIT = 5.0

strategy = cases
_bound = Bound()


@cache
def _whole() -> list[tuple[dict[str, bytes], str, list[Any]]]:
    """Real checkpoints: their files, the manifest's JSON, and the places in it."""
    state = {
        "w": torch.arange(12.0).reshape(4, 3),
        "scalar": torch.tensor(5),
        "none": torch.zeros(0, 3),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "deep": {"list": [1, 2.5, float("nan"), b"x", None, "s"], 5: (True, 1j), "d": torch.float32},
        "rng": checkpoint.PerRank({"a": torch.ones(2), "n": 3}),
    }
    state["tied"] = state["w"]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        one, three = Path(folder, "one"), Path(folder, "three")
        checkpoint.save(state, one)
        reshard(one, three, 3)
        for path in (one, three):
            files = {each.name: each.read_bytes() for each in path.iterdir()}
            text = files[MANIFEST].partition(b'"manifest": ')[2][:-2].decode()
            found.append((files, text, paths_in(json.loads(text))))
    return found


def _sealed(body: bytes) -> bytes:
    """With its checksum, as whoever writes a hostile one would."""
    return b'{"xxh3_128": "%s", "manifest": ' % xxhash.xxh3_128_hexdigest(body).encode() + body + b"}\n"


def check(case: bytes) -> None:
    choices = Choices(case)
    how = choices.number(8)
    files, text, paths = choices.one_of(_whole())
    if how < 5:
        body = json.dumps(spoiled(json.loads(text), paths, choices)).encode()
        data = _sealed(deep_text(body))
    elif how < 7:
        data = _sealed(edited(text.encode(), choices))
    else:
        data = choices.some_bytes(30)
        data = data if choices.number(2) else _sealed(data)
    try:
        manifest = Manifest.decode(data, "here")
    except CheckpointError:
        _bound.check()
        return
    _use(manifest, InMemory({**files, MANIFEST: data}))
    _bound.check()


def _use(manifest: Manifest, storage: InMemory) -> None:
    """What has been accepted can be used, or fails as damage does."""
    assert Manifest.decode(manifest.encode(), "here").encode() == manifest.encode()
    try:
        contents = contents_of(manifest)
        for node in contents.values.values():
            value_of(node)
        manifest.layout()
        checkpoint.read(storage)
    except CheckpointError:
        pass
