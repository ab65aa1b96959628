"""Files of `torch.save` with other bytes, and with other pickles inside; what passes the checks is loaded by torch."""

from __future__ import annotations

import io
import warnings
import zipfile
from functools import cache
from typing import Any

import torch

from farstep.checkpoint.archives import Range, check_archive, loaded, place_of, plain_value
from farstep.checkpoint.dcp import check_extent, collected_values
from farstep.checkpoint.memory import bytes_of
from farstep.checkpoint.pickles import Refused
from farstep.errors import CheckpointError
from fuzz.support import Bound, Choices, InMemory, cases, edited

NAME = "torch_archive"
SECONDS_PER_INPUT_LIMIT = 5.0
strategy = cases
_bound = Bound()


@cache
def _whole() -> list[tuple[bytes, dict[str, bytes]]]:
    """Real files, and what is in each."""
    values: list[Any] = [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        {
            "w": torch.nn.Parameter(torch.ones(2)),
            "n": [1, 2.5, None, "text", (True, 1j)],
            "b": bytearray(b"xyz"),
        },
        {"a": 1, "b": [2, 3]},
        torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=True),
    ]
    found = []
    for value in values:
        file = io.BytesIO()
        torch.save(value, file)
        with zipfile.ZipFile(file) as archive:
            found.append((file.getvalue(), {name: archive.read(name) for name in archive.namelist()}))
    return found


def _spoiled(choices: Choices) -> bytes:
    data, files = choices.one_of(_whole())
    how = choices.number(4)
    if how == 0:
        return edited(data, choices)
    made = io.BytesIO()
    target = "archive/data.pkl" if how < 3 else choices.one_of(sorted(files))
    with zipfile.ZipFile(
        made, "w", zipfile.ZIP_DEFLATED if choices.number(9) == 8 else zipfile.ZIP_STORED
    ) as archive:
        for name, body in files.items():
            archive.writestr(name, edited(body, choices) if name == target else body)
    return made.getvalue()


def check(case: bytes) -> None:
    data = _spoiled(Choices(case))
    file = InMemory({"x": data}).open("x")
    for read in (
        lambda source: place_of(source, 0, (2, 3), torch.float32),
        plain_value,
        lambda source: _load(source, data),
    ):
        try:
            read(Range(file, 0, len(data)))
        except (Refused, CheckpointError):
            pass
    _bound.check()


def _load(source: Range, data: bytes) -> None:
    """As a value of a DCP checkpoint, or a file that is converted, is."""
    check_archive(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = loaded(io.BytesIO(data))
    check_extent(value, len(data))
    for shards in collected_values({"x": value}).tensors.values():
        for tensor in shards.tensors:
            assert bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous()).nbytes == tensor.nbytes
