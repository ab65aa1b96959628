"""A tensor <-> a short description and raw bytes.

Any strided tensor that is not a wrapper travels this way: its memory is sent as it lies, with its
strides, unless it is a thin slice of something much larger. Other tensors (sparse, quantized,
subclasses) are taken apart by `payload.py` into tensors of this kind or pickled as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from farstep.errors import PayloadError
from farstep.rpc.memory import Bytes

__all__ = ["Description", "Outgoing", "build", "describe", "is_plain"]

REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
MAX_ELEMENTS: Final = 1 << 58
"""Torch's own numbers must not overflow: of an expanded tensor few bytes are sent, and any number of elements."""
SLICE_WASTE: Final = 2
SLICE_BYTES: Final = 16 << 10
"""A view is sent with the gaps between its elements while that is at most SLICE_WASTE times its own size, or little."""

_QUANTIZED: Final = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NAME_OF: Final = {
    x: str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)
}
for _dtype in _QUANTIZED:
    del _NAME_OF[_dtype]
_DTYPE_OF: Final = {name: dtype for dtype, name in _NAME_OF.items()}
_CPU: Final = torch.device("cpu")

Place = tuple[int, int] | None
"""None: the frame's next buffer. (segment, offset): in shared memory."""

Description = tuple[str, int, tuple[int, ...], tuple[int, ...] | None, str | None, int, Place]
"""dtype, flags, shape, strides (None: contiguous), device (None: CPU), length in bytes, place."""


class Outgoing(NamedTuple):
    """A tensor ready to be sent: dense in memory from its first element on."""

    tensor: torch.Tensor
    dtype: str
    flags: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: str | None
    nbytes: int

    def description(self, place: Place) -> Description:
        return self.dtype, self.flags, self.shape, self.strides, self.device, self.nbytes, place


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `describe` can send this tensor."""
    kind = type(tensor)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in _NAME_OF
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def describe(
    tensor: torch.Tensor, device_map: Mapping[torch.device, torch.device] | None, callee: str
) -> Outgoing:
    """Get a plain tensor ready. Copies only what is not in CPU memory or is a thin slice."""
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    device = None
    if device_map or tensor.device != _CPU:
        device = _mapped_device(tensor, device_map, callee)
        if tensor.device != _CPU:
            tensor = tensor.detach().cpu()
    shape = tuple(tensor.shape)
    name = _NAME_OF[tensor.dtype]
    if tensor.is_contiguous():
        return Outgoing(tensor, name, flags, shape, None, device, tensor.nbytes)
    strides = tensor.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    nbytes = span * tensor.itemsize
    if nbytes > max(SLICE_BYTES, SLICE_WASTE * tensor.nbytes):
        tensor = tensor.detach().contiguous()
        return Outgoing(tensor, name, flags, shape, None, device, tensor.nbytes)
    return Outgoing(tensor, name, flags, shape, strides, device, nbytes)


def _mapped_device(
    tensor: torch.Tensor, device_map: Mapping[torch.device, torch.device] | None, callee: str
) -> str | None:
    target = (device_map or {}).get(tensor.device)
    if target is None:
        if tensor.device == _CPU:
            return None
        raise PayloadError(
            f"a tensor on {tensor.device} is to be sent to worker {callee!r} and no device map says where it goes: "
            f"give device_maps={{{callee!r}: {{'{tensor.device}': ...}}}} in the options, or move it to the CPU first"
        )
    return None if target == _CPU else str(target)


def build(description: Description, source: Bytes | torch.Tensor, *, bare: bool = False) -> torch.Tensor:
    """The tensor of a description; `source` is its bytes, or memory that becomes the tensor's own.

    `bare` leaves it without a gradient, for whoever makes it the output of a node.
    """
    name, flags, shape, strides, device, nbytes, _ = description
    dtype = _DTYPE_OF.get(name)
    if dtype is None:
        raise PayloadError(
            f"a tensor of dtype {name!r}, which this torch ({torch.__version__}) does not have"
        )
    try:
        tensor = _in_memory(dtype, shape, strides, nbytes, source).detach()  # torch treats views differently
        if device is not None:
            tensor = tensor.to(torch.device(device))
        if bare:
            return tensor
        if flags & PARAMETER:
            return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
        return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
    except PayloadError:
        raise
    except (RuntimeError, TypeError, ValueError, OverflowError, AssertionError) as exc:
        where = f" on {device!r}" if device is not None else ""
        raise PayloadError(f"a {name} tensor{where} that torch does not make here: {exc}") from exc


def _in_memory(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None, nbytes: int, source: Any
) -> torch.Tensor:
    """A tensor on exactly the memory that came. See [Note: checked before use]: the types have been checked, in schema.py."""
    length = source.nbytes if isinstance(source, torch.Tensor) else len(source)
    span = _span(shape, strides)
    if length != nbytes or span * dtype.itemsize != nbytes or math.prod(shape) > MAX_ELEMENTS:
        raise PayloadError(
            f"a tensor that takes {span * dtype.itemsize} bytes was announced with {nbytes} and came with {length} bytes of data"
        )
    if not nbytes:
        return torch.zeros(
            shape, dtype=dtype
        )  # nothing is in it; a shape that torch does not take is an error
    flat = source.view(dtype) if isinstance(source, torch.Tensor) else torch.frombuffer(source, dtype=dtype)
    if strides is not None:
        return flat.as_strided(shape, strides)
    return flat if len(shape) == 1 else flat.view(shape)


def _span(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    """How many elements lie between the first and the last one of such a tensor, with these."""
    if strides is None:
        return math.prod(shape)
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
