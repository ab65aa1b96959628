"""`.metadata` of a DCP checkpoint with other bytes, and with other values in its fields; then all that it names is read."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from farstep import checkpoint
from farstep.checkpoint.dcp_metadata import METADATA
from farstep.checkpoint.sources import source_of
from farstep.checkpoint.stored_values import read_values
from farstep.checkpoint.tree import decode
from farstep.errors import CheckpointError
from fuzz.support import Bound, Choices, InMemory, cases, edited

NAME = "dcp_metadata"
SECONDS_PER_INPUT_LIMIT = 5.0
strategy = cases
_bound = Bound()


@cache
def _whole() -> list[dict[str, bytes]]:
    """Files of real checkpoints."""
    import torch.distributed.checkpoint as dcp

    state = {
        "m": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)},
        "n": 5,
        "l": [1, "a"],
        "t": (torch.ones(1), 2),
    }
    found = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs, ours = Path(folder, "torch"), Path(folder, "ours")
        dcp.save(state, checkpoint_id=torchs, no_dist=True)
        checkpoint.save_dcp(state, ours)
        for path in (torchs, ours):
            found.append({each.name: each.read_bytes() for each in path.iterdir()})
    return found


def _wrong(choices: Choices) -> Any:
    plain = [None, True, 0, 1, -1, 3, 7, 1 << 31, 1 << 61, 1 << 62, 1 << 63, 1 << 70, 0.5, "", "m", "m.w", "n", "../x", "/etc/passwd", "__0_0.distcp", ".metadata", b"x", "\x00", "x" * 300]  # fmt: skip
    nested = [[], (), {}, (1,), (0, 0), ("m", "w"), ("m", 0), [None], torch.Size([]), torch.Size([2, 3]), torch.Size([1 << 40, 1 << 30]), torch.Size([1] * 70), torch.float64, torch.bool]  # fmt: skip
    return choices.one_of(plain + nested)


def _spoil(metadata: Any, choices: Choices) -> Any:
    """Some field of some object in it. `metadata` is changed."""
    for _ in range(1 + choices.number(3)):
        part = choices.number(4)
        wrong = _wrong(choices)
        if part == 0:
            name = choices.one_of(
                ["state_dict_metadata", "planner_data", "storage_data", "version", "storage_meta"]
            )
            object.__setattr__(metadata, name, wrong)
            continue
        name = ("state_dict_metadata", "planner_data", "storage_data")[part - 1]
        entries = getattr(metadata, name)
        if type(entries) is not dict or not entries:
            continue
        key, entry = choices.one_of(list(entries.items()))  # a key that was changed is not found any more
        how = choices.number(4)
        if how == 0:
            entries.pop(key, None)
        elif how == 1:
            entries[key] = wrong
        else:
            _set_field(entry if how == 2 or part < 3 else key, choices, wrong)
    return metadata


def _set_field(found: Any, choices: Choices, wrong: Any) -> None:
    """Of an object, or of one within it."""
    while True:
        fields = sorted(getattr(found, "__dict__", ()))
        if type(found) is list and found:
            found = choices.one_of(found)
            continue
        if not fields:
            return
        name = choices.one_of(fields)
        inner = found.__dict__[name]
        if choices.number(2) and (type(inner) is list or hasattr(inner, "__dict__")):
            found = inner
            continue
        object.__setattr__(found, name, wrong)
        return


def check(case: bytes) -> None:
    choices = Choices(case)
    files = choices.one_of(_whole())
    if choices.number(3):
        try:
            data = pickle.dumps(
                _spoil(pickle.loads(files[METADATA]), choices), protocol=choices.one_of([2, 3, 4, 5])
            )
        except (TypeError, AttributeError, ValueError, RuntimeError):
            return  # what cannot be pickled is no input
    else:
        data = edited(files[METADATA], choices)
    _use(InMemory({**files, METADATA: data}))
    _bound.check()


def _use(storage: InMemory) -> None:
    """As `checkpoint.read` does."""
    try:
        items, manifest = source_of(storage)
        manifest.layout()
        read_values(items, manifest, decode(manifest.tree))
    except CheckpointError:
        pass
