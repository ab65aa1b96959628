"""States with everything that a checkpoint keeps, and how to compare two."""

from __future__ import annotations

import torch

__all__ = ["everything", "same"]

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip


def everything() -> dict:
    """Tensors of every dtype and of awkward shapes and strides, and values."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2, (4, 6), generator=generator)
    tied = torch.randn(3, 5, generator=generator)
    tensors = {name: random.to(getattr(torch, name)) for name in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "one": torch.tensor([7]),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(5, 4, generator=generator).t(),
        "strided": torch.randn(8, 8, generator=generator)[::2, 1:7:3],
        "channels_last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1, generator=generator).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        "tied": tied,
        "tied_too": tied,
    }
    values = {"step": 7, "lr": 0.5, "name": "run", "none": None, "flag": True, "betas": (0.9, 0.95), "list": [1, 2, "x"]}  # fmt: skip
    return {
        "model": tensors,
        "more": values,
        "mixed": [torch.arange(3), {"inner": torch.arange(2.0), "n": 1}],
    }


def same(found: object, wanted: object, name: str = "") -> None:
    """Raises AssertionError, which names the first place where they differ."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor), name
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
        ours, theirs = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted))
        assert torch.equal(ours, theirs), name
    elif isinstance(wanted, dict):
        assert isinstance(found, dict), name
        assert list(found) == list(wanted), name
        for key, value in wanted.items():
            same(found[key], value, f"{name}.{key}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted), name
        assert len(found) == len(wanted), name
        for i, value in enumerate(wanted):
            same(found[i], value, f"{name}.{i}")
    else:
        assert (type(found), found) == (type(wanted), wanted), name
