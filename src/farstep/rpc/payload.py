"""Python objects <-> bytes, with tensors and references beside them instead of inside.

Top-level tensors are swapped for nothing and remembered by position, so that the usual call
(tensors and plain values) is one plain `pickle.dumps`. Anything deeper goes through a pickler
whose `reducer_override` takes tensors and registered classes out wherever they stand.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodType
from typing import Any, Final

import torch

from farstep.errors import PayloadError
from farstep.rpc.narrow import NarrowReader
from farstep.rpc.plain import Malformed
from farstep.rpc.schema import ATOMS, MAX_DIMENSIONS
from farstep.rpc.tensors import is_plain
from farstep.rpc.trust import Trust

__all__ = ["Packed", "name_of", "pack", "register_reducer", "unpack"]

PROTOCOL: Final = 5
_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})

Reduction = tuple[Callable[..., Any], tuple[Any, ...]]
_reducers: dict[type, Callable[[Packer, Any], Reduction]] = {}


def register_reducer(kind: type, reducer: Callable[[Packer, Any], Reduction]) -> None:
    """Say how objects of exactly this class are sent. For classes that hold references."""
    _reducers[kind] = reducer


class Packed:
    """Objects taken apart: a picklable body, and the tensors and references that go beside it.

    `body` is either the plain values themselves, with `slots` saying where tensors belong, or the
    bytes of a pickle that finds its tensors and references by number. `odd` are the tensors inside that pickle
    which require a gradient and are not plain, in their order.
    """

    __slots__ = ("body", "odd", "refs", "slots", "tensors")

    def __init__(
        self,
        body: Any,
        slots: Sequence[int | str],
        tensors: list[torch.Tensor],
        refs: list[Any],
        odd: Sequence[torch.Tensor] = (),
    ) -> None:
        self.body = body
        self.slots = slots
        self.tensors = tensors
        self.refs = refs
        self.odd = odd


NOTHING: Final = Packed(([], None), (), [], [])
"""No arguments. Shared: nobody changes what is packed."""


def pack(args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, function: Any = None) -> Packed:
    """Take a call (or, with neither function nor kwargs, a result) apart. PayloadError where it cannot be."""
    if not args and not kwargs and function is None:
        return NOTHING
    if not kwargs and function is None and type(args[-1]) in ATOMS and ATOMS.issuperset(map(type, args)):
        return Packed((list(args), None), (), [], [])
    tensors: list[torch.Tensor] = []
    slots: list[int | str] = []
    if function is None and _is_simple(args, kwargs):
        plain_args: list[Any] = list(args)
        for i, value in enumerate(args):
            if type(value) in _TENSORS:
                plain_args[i] = None
                slots.append(i)
                tensors.append(value)
        plain_kwargs = kwargs or None
        if kwargs:
            plain_kwargs = dict(kwargs)
            for key, value in kwargs.items():
                if type(value) in _TENSORS:
                    plain_kwargs[key] = None
                    slots.append(key)
                    tensors.append(value)
        if len(tensors) < 2 or len({id(t) for t in tensors}) == len(tensors):
            return Packed((plain_args, plain_kwargs), slots, tensors, [])
    # One tensor given twice must arrive as one: the pickler's memo sees to that.
    out = io.BytesIO()
    packer = Packer(out)
    try:
        packer.dump((function, args, kwargs))
    except Exception as exc:
        raise PayloadError(f"cannot be pickled to be sent: {type(exc).__name__}: {exc}") from exc
    return Packed(out.getvalue(), (), packer.tensors, packer.refs, packer.odd)


def _is_simple(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    for value in args:
        kind = type(value)
        if kind not in ATOMS and not (kind in _TENSORS and is_plain(value)):
            return False
    return not kwargs or _is_simple(tuple(kwargs.values()), None)


def unpack(
    body: Any,
    slots: Sequence[int | str],
    tensors: Sequence[torch.Tensor],
    refs: Sequence[Any],
    trust: Trust,
    odd: list[torch.Tensor] | None = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function (or None), the arguments and the keyword arguments of `pack`.

    Where `odd` is given, the tensors of `Packed.odd` are put there instead of being made to require a gradient.
    """
    if not isinstance(body, bytes):
        args, kwargs = body
        kwargs = kwargs or {}
        for slot, tensor in zip(slots, tensors, strict=True):
            if isinstance(slot, int):
                args[slot] = tensor
            else:
                kwargs[slot] = tensor
        return None, tuple(args), kwargs
    outer = _loading.message
    _loading.message = (tensors, refs, trust, odd)
    try:
        if trust.is_open:
            content = pickle.loads(body)
        else:
            content = NarrowReader(body, trust, finders=_FINDERS, without_state=_reducers).read()
    except (AttributeError, ImportError) as exc:
        raise type(exc)(f"{exc}. {NOT_FOUND_HELP}") from exc
    finally:
        _loading.message = outer
    return _checked_content(content)


def _checked_content(content: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if type(content) is not tuple or len(content) != 3:
        raise Malformed("it is no call and no result")
    function, args, kwargs = content
    if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
        raise Malformed("its arguments are none")
    if kwargs and not {str}.issuperset(map(type, kwargs)):
        raise Malformed("its arguments have names that are none")
    return function, args, kwargs or {}


NOT_FOUND_HELP: Final = (
    "A call carries a function's name: the RPC pickler does not serialize its code, "
    "so the module that defines it must be importable, and the same, on caller and callee"
)


class Packer(pickle.Pickler):
    """A pickler that puts tensors and references aside. `tensors` and `refs` hold them afterwards."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.refs: list[Any] = []
        self.odd: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _TENSORS:
            return self.reduce_tensor(obj)
        if kind is MethodType:
            return _method, (obj.__self__, obj.__name__)
        if kind is BuiltinFunctionType:  # torch.add and its like: plain pickle would go through getattr
            name = name_of(obj)
            return NotImplemented if name is None else (_named, name)
        reducer = _reducers.get(kind)
        return NotImplemented if reducer is None else reducer(self, obj)

    def reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if is_plain(tensor):
            self.tensors.append(tensor)
            return _tensor, (len(self.tensors) - 1,)
        grad = tensor.requires_grad
        if grad:
            self.odd.append(tensor)
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values(), tuple(tensor.shape), tensor.is_coalesced())
            return _sparse_coo, (*parts, grad)
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts3 = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            return _sparse_compressed, (*parts3, tuple(tensor.shape), str(tensor.layout), grad)
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts3 = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            return _sparse_compressed, (*parts3, tuple(tensor.shape), str(tensor.layout), grad)
        if tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg()):
            return _with_grad, (tensor.resolve_conj().resolve_neg(), grad)
        if grad:
            self.odd.pop()
        return NotImplemented

    def add_ref(self, ref: Any) -> int:
        """Put a reference aside; its number finds it again on the other side, through `ref_slot`."""
        self.refs.append(ref)
        return len(self.refs) - 1


class _Loading(threading.local):
    message: Any = None
    """(tensors, references, trust, odd tensors) of the message that this thread unpacks."""


_loading = _Loading()


def _tensor(index: int) -> torch.Tensor:
    tensor: torch.Tensor = _loading.message[0][_checked_index(index)]
    return tensor


class Refused:
    """In place of a reference that its sender does not hold. Whoever unpacks the message gets the error."""

    _awaited = None

    def __init__(self, error: Exception) -> None:
        self.error = error


def ref_slot(index: int) -> Any:
    """The reference that `Packer.add_ref` numbered so. Only while a message is being unpacked."""
    ref = _loading.message[1][_checked_index(index)]
    if type(ref) is Refused:
        raise ref.error
    return ref


def _checked_index(index: Any) -> int:
    if type(index) is not int or index < 0:
        raise Malformed("it has the number of a tensor or a reference that is none")
    return index


def _method(owner: Any, name: str) -> Any:
    if type(name) is not str:
        raise Malformed("it names a method by what is no name")
    _loading.message[2].check_method(owner, name)
    return getattr(owner, name)


def _named(module: str, qualname: str) -> Any:
    if type(module) is not str or type(qualname) is not str:
        raise Malformed("it names a function by what is no name")
    return _loading.message[2].find(module, qualname)


_FINDERS: Final = (_method, _named)


def _with_grad(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or type(requires_grad) is not bool:
        raise Malformed("it has a tensor that is none")
    odd = _loading.message[3]
    if requires_grad and odd is not None:
        odd.append(tensor)
        return tensor
    return tensor.requires_grad_(requires_grad)


def _sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool, grad: bool
) -> torch.Tensor:
    _check_sparse((indices, values), shape)
    tensor = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    return _with_grad(tensor, grad)


def _sparse_compressed(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    grad: bool,
) -> torch.Tensor:
    _check_sparse((outer, inner, values), shape)
    if type(layout) is not str:
        raise Malformed("it has a sparse tensor of a layout that is none")
    kind = {str(x): x for x in _COMPRESSED}[layout]
    tensor = torch.sparse_compressed_tensor(outer, inner, values, shape, layout=kind, check_invariants=True)
    return _with_grad(tensor, grad)


def _check_sparse(parts: tuple[Any, ...], shape: Any) -> None:
    """The rest torch checks: that indices are within the shape, in order, and as many as there are values."""
    if not all(type(part) is torch.Tensor and part.layout is torch.strided for part in parts):
        raise Malformed("it has a sparse tensor of something else than tensors")
    if type(shape) is not tuple or not {int}.issuperset(map(type, shape)) or len(shape) > MAX_DIMENSIONS:
        raise Malformed("it has a sparse tensor of a shape that is none")


def name_of(function: Any) -> tuple[str, str] | None:
    """(module, qualified name) where that finds this very object again; None where it does not."""
    module_name = getattr(function, "__module__", None)
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(qualname, str):
        return None
    module = sys.modules.get(module_name)
    found = module
    for part in qualname.split(".") if "." in qualname else (qualname,):
        found = getattr(found, part, None)
    if found is function:
        return module_name, qualname
    name = getattr(function, "__name__", "")
    if getattr(module, name, None) is function:  # torch.add and its like carry another class's qualified name
        return module_name, name
    return None
