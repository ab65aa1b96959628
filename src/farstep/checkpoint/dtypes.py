"""dtypes by name, and as what safetensors has of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["dtype_named", "name_of", "stored_as", "stored_names"]

_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_OTHERS = (
    "complex32",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_SAFETENSORS, *_OTHERS) if hasattr(torch, name)
}


def name_of(dtype: torch.dtype) -> str:
    """Raises ValueError for one whose elements are not whole bytes, or mean nothing without more than the dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"a checkpoint does not keep tensors of {dtype}")
    return name


def dtype_named(name: str) -> torch.dtype:
    """Raises ValueError."""
    found = _DTYPES.get(name)
    if found is None:
        raise ValueError(f"this torch has no dtype {name!r} that a checkpoint keeps")
    return found


def stored_as(dtype: torch.dtype) -> str | None:
    """safetensors' name for it; None if it has none, and the bytes are stored as such."""
    return _SAFETENSORS.get(name_of(dtype))


def stored_names() -> Mapping[str, str]:
    """safetensors' name -> torch's."""
    return _NAMES


_NAMES = {theirs: ours for ours, theirs in _SAFETENSORS.items()}
