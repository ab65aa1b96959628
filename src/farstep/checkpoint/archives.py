"""Files of `torch.save`, as they lie in a checkpoint: where a tensor's bytes are in one, and how to write one without having its tensors in memory.

Such a file is a zip of files that are not compressed: `data.pkl`, a pickle of the value in which tensors refer to storages, and `data/0`, `data/1`, ...,
the bytes of those. So a tensor that lies there row by row can be read from its place, as from any other file.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from farstep.checkpoint.dtypes import dtype_named
from farstep.checkpoint.pickles import Call, Refused, unpickled
from farstep.checkpoint.storage import Buffer, StoredFile

__all__ = ["Handle", "Place", "Range", "check_archive", "loaded", "place_of", "plain_value", "write_archive"]

_MOST_PICKLE_BYTES = 64 << 20
_ALIGNMENT = 64
_LARGE_BYTES = 1 << 30
"""From here on the sizes of a file in a zip are written with 8 bytes."""


class Range(io.RawIOBase):
    """Some bytes of a stored file, as a file."""

    def __init__(self, file: StoredFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self._length - self._at))
        done = self._file.read_into(self._begin + self._at, view[:count]) if count else 0
        self._at += done
        return done


class Place(NamedTuple):
    """Where a tensor's bytes lie, row by row."""

    begin: int
    """In the file."""
    crc: int | None
    """Their CRC-32; None if they are not all of their storage, or have none."""


# -- reading ----------------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def place_of(source: Range, base: int, shape: Sequence[int], dtype: torch.dtype) -> Place | None:
    """Where the elements of the one tensor in an archive are, if it is such a tensor, and they lie row by row; `base` is where the archive begins.

    None for others, which torch is to load. Raises Refused for what is no archive.
    """
    archive = _Archive(source)
    pickled = archive.read("data.pkl")
    try:
        found = unpickled(pickled, _tensor_names, _storage_of)
    except Refused:
        return None  # perhaps a tensor of another class
    if type(found) is not _Tensor or not archive.is_little_endian:
        return None
    if found.shape != tuple(shape) or found.dtype != dtype:
        raise Refused(
            f"it has a tensor of {found.dtype} and shape {found.shape}, and not of {dtype} and {tuple(shape)}"
        )
    if not _is_row_by_row(found.shape, found.stride):
        return None
    begin, size, crc = archive.at(f"data/{found.storage.key}")
    nbytes = dtype.itemsize
    for side in shape:
        nbytes *= side
    first = found.offset * dtype.itemsize
    if first + nbytes > size:
        raise Refused(f"it has {size} bytes for a tensor of {nbytes}")
    return Place(base + begin + first, crc if nbytes == size else None)


def plain_value(source: Range) -> Any:
    """A value without tensors. Raises Refused if it is not."""
    return unpickled(_Archive(source).read("data.pkl"), _value_names)


def loaded(source: BinaryIO | Path, **options: Any) -> Any:
    """By torch, which builds tensors and plain values alone. Raises Refused, which says what it would not build."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except Exception as exc:
        found = re.search(r"([^\n]*(?:GLOBAL |WeightsUnpickler error)[^\n]*)", str(exc)) or re.search(
            r"([^\n]+)", str(exc)
        )
        said = found[1][:300] if found else type(exc).__name__
        raise Refused(
            f"torch.load(weights_only=True), which builds tensors and plain values alone, says: {said}"
        ) from None


def check_archive(source: Range) -> None:
    """That torch may load it: nothing in it is compressed, and its pickle makes tensors of what is stored, and plain values, alone. Raises Refused.

    torch.load(weights_only=True) runs nothing that is not known, but some of what it knows makes much of little: bytearray(1 << 40), or a tensor of one
    element that is expanded and then copied; and to hash a tuple of tuples of tuples may never end.
    """
    archive = _Archive(source)
    archive.check()
    unpickled(archive.read("data.pkl", source._length), _checked_names, lambda _: _OPAQUE)


class _Archive:
    def __init__(self, source: Range) -> None:
        try:
            self._zip = zipfile.ZipFile(source)
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError):
            raise Refused("it is no file of torch.save") from None
        self._source = source
        head = next((i.filename for i in self._zip.infolist() if i.filename.endswith("/data.pkl")), None)
        if head is None:
            raise Refused("it is no file of torch.save")
        self._prefix = head.removesuffix("data.pkl")

    def check(self) -> None:
        names = [info.filename for info in self._zip.infolist()]
        if len(set(names)) != len(names) or not all(name.startswith(self._prefix) for name in names):
            raise Refused("it has two files of one name, or files of something else")
        for info in self._zip.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise Refused(f"its {info.filename[:100]!r} is compressed, which torch.save does not do")

    @property
    def is_little_endian(self) -> bool:
        name = f"{self._prefix}byteorder"
        return name not in self._zip.NameToInfo or self.read("byteorder") == b"little"

    def _info(self, name: str) -> zipfile.ZipInfo:
        info = self._zip.NameToInfo.get(self._prefix + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise Refused(f"its {name} is missing, or not stored as it is")
        return info

    def read(self, name: str, most: int = _MOST_PICKLE_BYTES) -> bytes:
        info = self._info(name)
        if info.file_size > most:
            raise Refused(f"its {name} has {info.file_size} bytes")
        begin, size, crc = self.at(name)
        self._source.seek(begin)
        data = self._source.read(size) or b""
        if len(data) != size or crc not in (None, zlib.crc32(data)):
            raise Refused(f"its {name} cannot be read, or has been changed")
        return data

    def at(self, name: str) -> tuple[int, int, int | None]:
        """Where it begins, how long it is, and its CRC, which is 0 where torch was told to compute none (set_crc32_options)."""
        info = self._info(name)
        self._source.seek(info.header_offset)
        head = self._source.read(30) or b""
        if len(head) != 30 or head[:4] != b"PK\x03\x04" or info.file_size != info.compress_size:
            raise Refused(f"its {name} is not where it says")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
        if begin + info.file_size > self._source._length:
            raise Refused(f"its {name} ends after it does")
        return begin, info.file_size, info.CRC or None


def _is_row_by_row(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for side, step in zip(reversed(shape), reversed(stride), strict=True):
        if side != 1 and step != expected:
            return False
        expected *= side
    return True


def _storage_of(found: Any) -> _Storage:
    if type(found) is not tuple or len(found) != 5 or found[0] != "storage":
        raise Refused("it has a persistent id that is no storage")
    _, dtype, key, _, _ = found
    if type(dtype) is _Typed and type(key) is str and key.isdigit():
        return _Storage(dtype.dtype, key)
    raise Refused("it has a storage of no known type")


class _Typed:
    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    """(requires_grad, hooks[, metadata]), or with a dtype after the hooks for a storage that has none."""
    counts = (offset, *shape, *stride)
    if type(storage) is not _Storage or len(shape) != len(stride):
        raise Refused("it has a tensor without a storage")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in counts):
        raise Refused("it has a tensor of no shape that there can be")
    dtype, rest = (storage.dtype, rest[2:]) if storage.dtype is not None else (rest[2], rest[3:])
    if not isinstance(dtype, torch.dtype) or any(rest):  # more is said of it: that it is conjugated, say
        raise Refused("it has a tensor that is not plain")
    return _Tensor(storage, dtype, offset, tuple(shape), tuple(stride))


_LEGACY = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_TYPES = {dtype: name for name, dtype in _LEGACY.items()}


def _tensor_names(module: str, name: str) -> Any:
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return Call(_rebuilt)
    if module == "torch" and name in _LEGACY:
        return _Typed(dtype_named(_LEGACY[name]))
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return _Typed(None)
    if module == "torch":
        try:
            return dtype_named(name)
        except ValueError:
            pass
    return _value_names(module, name)


def _value_names(module: str, name: str) -> Any:
    if (module, name) == ("collections", "OrderedDict"):
        return Call(lambda: {})
    raise Refused(f"it names {module[:100]}.{name[:100]}")


class _Opaque:
    """Something that torch will make, and that is not looked into here."""


_OPAQUE, _BYTES = _Opaque(), _Opaque()
_REBUILDING = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_sparse_tensor")  # fmt: skip


def _opaque(*_: Any) -> Any:
    return _OPAQUE


def _bytes(*args: Any) -> Any:
    """Of text, as pickles of before Python 3 have them, or of bytes; a number would be how many there are to be."""
    if any(type(each) is not str and each is not _BYTES for each in args):
        raise Refused("it makes bytes of what is no text")
    return _BYTES


def _typed(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes."""
    if function is not _REBUILD or kind is not _OPAQUE:
        raise Refused("it has a tensor of a class of its own")
    return _OPAQUE


_REBUILD = Call(_opaque)
_CHECKED = {
    **{("torch._utils", name): _REBUILD for name in _REBUILDING},
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_typed),
    ("torch.nn.parameter", "Parameter"): _OPAQUE,
    ("torch", "Tensor"): _OPAQUE,
    ("torch.storage", "UntypedStorage"): _OPAQUE,
    ("torch.storage", "TypedStorage"): _OPAQUE,
    ("torch", "Size"): Call(_opaque),
    ("torch", "device"): Call(_opaque),
    ("torch.serialization", "_get_layout"): Call(_opaque),
    ("builtins", "complex"): Call(_opaque),
    ("builtins", "bytearray"): Call(_bytes),
    ("_codecs", "encode"): Call(_bytes),
}


def _checked_names(module: str, name: str) -> Any:
    """What a value that a checkpoint keeps may need of torch."""
    module = "builtins" if module == "__builtin__" else module
    if (module, name) in _CHECKED:
        return _CHECKED[module, name]
    if module == "torch" and (
        name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
    ):
        return _OPAQUE
    try:
        return _value_names(module, name)
    except Refused as exc:
        raise Refused(f"{exc}, which neither tensors nor plain values need") from None


# -- writing ----------------------------------------------------------------------------------------------


class Handle:
    """A tensor in a value that is to be written: what it is, and who gives its bytes."""

    __slots__ = ("blocks", "dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, blocks: Callable[[], Iterable[Buffer]]) -> None:  # fmt: skip
        self.shape, self.dtype, self.blocks = tuple(shape), dtype, blocks

    @property
    def numel(self) -> int:
        found = 1
        for side in self.shape:
            found *= side
        return found


def write_archive(write: Callable[[Sequence[Buffer]], None], value: Any) -> int:
    """A file that `torch.load(weights_only=True)` reads, of any value with handles in it. Each tensor's bytes are asked for when it is their turn.

    Returns how many bytes have been written.
    """
    stream = _Stream(write)
    handles: list[Handle] = []
    body = io.BytesIO()
    _Pickler(body, handles).dump(value)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, stream, "data.pkl", len(body.getbuffer()), [body.getbuffer()])
        _add(archive, stream, "byteorder", 6, [memoryview(b"little")])
        for number, each in enumerate(handles):
            _add(archive, stream, f"data/{number}", each.numel * each.dtype.itemsize, each.blocks())
        _add(archive, stream, "version", 2, [memoryview(b"3\n")])
    return stream.written


def _add(archive: zipfile.ZipFile, stream: _Stream, name: str, nbytes: int, blocks: Iterable[Buffer]) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    info.file_size = nbytes
    is_large = nbytes >= _LARGE_BYTES
    head = 30 + len(info.filename) + 20 * is_large + 4
    info.extra = b"FB" + struct.pack("<H", pad := -(stream.written + head) % _ALIGNMENT) + b"Z" * pad
    with archive.open(info, "w", force_zip64=is_large) as file:
        for block in blocks:
            file.write(block)


class _Stream(io.RawIOBase):
    """Written once, from its beginning to its end."""

    def __init__(self, write: Callable[[Sequence[Buffer]], None]) -> None:
        self._write, self.written = write, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._write([view])
        self.written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")


class _Untyped:
    def __init__(self, kind: Any, key: str, numel: int) -> None:
        self.kind, self.key, self.numel = kind, key, numel


class _Pickler(pickle.Pickler):
    def __init__(self, body: io.BytesIO, handles: list[Handle]) -> None:
        super().__init__(body, protocol=2)
        self._handles = handles

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Untyped):
            return "storage", value.kind, value.key, "cpu", value.numel
        return None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Handle):
            return NotImplemented
        key = str(len(self._handles))
        self._handles.append(value)
        stride = torch.empty(value.shape, dtype=torch.uint8, device="meta").stride()
        typed = _TYPES.get(str(value.dtype).removeprefix("torch."))
        common: tuple[Any, ...] = (0, value.shape, stride, False, OrderedDict())
        if typed is not None:
            storage = _Untyped(getattr(torch, typed), key, value.numel)
            return torch._utils._rebuild_tensor_v2, (storage, *common)
        storage = _Untyped(torch.UntypedStorage, key, value.numel * value.dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *common, value.dtype)
