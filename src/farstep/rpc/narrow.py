"""The bodies of messages, where `trusted` is narrowed: pickles that may name what is trusted, and nothing else.

Beside the plain values of `plain.py` a body has sets, any key that a dict may have, and objects: it names classes and functions,
which `Trust` finds or refuses, calls them, and sets the state of what they made. What keeps that harmless, and of the order of
the message's size:

* what any message may name, such as `list` or `range`, is called only as Python's own pickler calls it (narrow_calls.py);
* the state of a tensor, a class or a function is not set, nor that of anything whose class is not trusted;
* tuples and the like are nested at most MAX_NESTING deep, and written out they have a bounded number of values, so that they can be
  hashed, compared and printed (see [Note: checked before use]); keys are held to a stricter measure, before they are hashed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch

from farstep.errors import Untrusted
from farstep.rpc.keys import Keys
from farstep.rpc.memory import Bytes
from farstep.rpc.narrow_calls import check_call, is_own, is_plain_class
from farstep.rpc.plain import Malformed, PlainReader, Step
from farstep.rpc.schema import ATOMS, is_text
from farstep.rpc.trust import Trust

__all__ = ["NarrowReader"]

MAX_NESTING: Final = 1000
"""Python's own pickler goes no deeper."""
MIN_SPREAD: Final = 1 << 22
SPREAD_PER_BYTE: Final = 16
"""How many values may stand in containers, counted each time that they stand there: MIN_SPREAD, or so many for a byte of the body."""

_MUTABLE: Final = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
_CONTAINERS: Final = _MUTABLE | {tuple, frozenset}
_STRINGS: Final = frozenset({str, bytes})
_DICTS: Final = frozenset({dict, OrderedDict, defaultdict})
_LISTS: Final = frozenset({list, deque})
_STATELESS: Final = (
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.Generator),
)
"""What a message may not set the state of, whatever is trusted. A tensor's reaches beyond its memory."""
_LONG: Final = struct.Struct("<Q")


class NarrowReader(PlainReader):
    """One body."""

    def __init__(
        self,
        data: Bytes,
        trust: Trust,
        *,
        finders: Collection[Callable[..., Any]] = (),
        without_state: Collection[type] = (),
    ) -> None:
        """`finders` are functions that look at `trust` and return something that may be called; `without_state` are classes
        whose state no message may set, beside tensors and the like."""
        super().__init__(data)
        self._trust = trust
        self._finders = finders
        self._without_state = without_state
        self._named: dict[int, Any] = {}
        """What this body has named, by identity: only that may be called."""
        self._measures: dict[int, tuple[int, int]] = {}
        """Of each container, by identity: how deep it goes, and how many values it has, written out."""
        self._inside: set[int] = set()
        self._is_recursive = False
        self._most = max(MIN_SPREAD, SPREAD_PER_BYTE * len(data))
        self._keys = Keys(len(data))

    def result(self) -> Any:
        value = super().result()
        if self._is_recursive:
            self._measure_whole(value)
        return value

    # -- containers -----------------------------------------------------------------------------------

    def _measure(self, values: Iterable[Any], of: Any = None) -> tuple[int, int]:
        """How deep a container of these values goes and how many it has. Malformed where it is too much."""
        depth, count = self._measures.get(id(of), (1, 1)) if of is not None else (1, 1)
        if id(of) in self._inside:  # it stands in something that has been measured: measure all at the end
            self._is_recursive = True
        for value in values:
            count += 1
            if type(value) in _CONTAINERS:
                its_depth, its_count = self._measures.get(id(value), (1, 1))
                depth = max(depth, its_depth + 1)
                count += its_count
                if type(value) in _MUTABLE:
                    self._inside.add(id(value))
        self._check_measure(depth, count)
        return depth, count

    def _check_measure(self, depth: int, count: int) -> None:
        if depth > MAX_NESTING:
            raise Malformed(f"it has values nested more than {MAX_NESTING} deep")
        if count > self._most:
            raise Malformed("it is small and stands for far too many values")

    def _made(self, container: Any, values: list[Any] | tuple[Any, ...]) -> None:
        """A container has these values from now on, beside those that it had."""
        if not ATOMS.issuperset(map(type, values)):
            self._measures[id(container)] = self._measure(values, container)
        else:
            depth, count = self._measures.get(id(container), (1, 1))
            self._measures[id(container)] = depth, count + len(values)
            if id(container) in self._inside:
                self._is_recursive = True

    def _new(self, container: Any) -> None:
        self._measures[id(container)] = (1, 1)
        self._inside.discard(id(container))  # the number may have been another's
        self.stack.append(container)

    def _measure_whole(self, value: Any) -> None:
        """Measure what has been filled after it was put somewhere: what refers to itself, or was made to mislead."""
        measures: dict[int, tuple[int, int]] = {}
        open_: set[int] = set()
        waiting = [value]
        while waiting:
            container = waiting[-1]
            inner = [c for c in _values_in(container) if type(c) in _CONTAINERS]
            if id(container) not in open_:
                open_.add(id(container))
                waiting += [c for c in inner if id(c) not in open_]
                continue
            waiting.pop()
            if id(container) in measures:
                continue
            parts = [measures[id(c)] for c in inner if id(c) in measures]
            depth = 1 + max((depth for depth, _ in parts), default=0)
            count = 1 + len(_values_in(container)) + sum(count for _, count in parts)
            self._check_measure(depth, count)
            measures[id(container)] = depth, count

    def add_tuple(self, values: tuple[Any, ...]) -> None:
        self._new(values)
        self._made(values, values)

    def empty_list(self) -> None:
        self._new([])

    def empty_dict(self) -> None:
        self._new({})

    def empty_set(self) -> None:
        self._new(set())

    def extend_list(self, values: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) not in _LISTS and not (isinstance(into, list | deque) and self._is_trusted(type(into))):
            raise Malformed(f"it appends to a {type(into).__name__}")
        self._made(into, values)
        into.extend(values)

    def fill_dict(self, items: list[Any]) -> None:
        into, keys, values = self.stack[-1], items[::2], items[1::2]
        if len(keys) != len(values):
            raise Malformed("it has a key without a value")
        self._made(into, items)
        if not _STRINGS.issuperset(map(type, keys)):
            self._keys.check(keys, into)
        if type(into) in _DICTS:
            into.update(zip(keys, values, strict=True))
        elif isinstance(into, dict) and self._is_trusted(type(into)):
            for key, value in zip(keys, values, strict=True):
                into[key] = value
        else:
            raise Malformed(f"it sets items of a {type(into).__name__}")

    def add_items(self) -> None:
        values = self.since_mark()
        into = self.stack[-1]
        if type(into) is not set:
            raise Malformed(f"it adds to a {type(into).__name__}")
        self._made(into, values)
        self._keys.check(values, into)
        into.update(values)

    def frozen_set(self) -> None:
        values = self.since_mark()
        self._keys.check(values, None)
        container = frozenset(values)
        self._new(container)
        self._made(container, values)

    def byte_array(self) -> None:
        self.stack.append(bytearray(self.take(self.unpacked(_LONG))))

    def drop(self) -> None:
        self.stack.pop()

    def drop_since_mark(self) -> None:
        self.since_mark()

    # -- objects --------------------------------------------------------------------------------------

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not is_text(name) or not is_text(module):
            raise Malformed("it names something by what is no name")
        self._allow(self._trust.find(module, name))

    def _allow(self, found: Any) -> None:
        self._named[id(found)] = found
        self.stack.append(found)

    def _is_trusted(self, kind: type) -> bool:
        """Whether `trusted` covers this class: where it comes from, or by the name that it had in this body."""
        return self._trust.is_at_home(kind) or (
            self._named.get(id(kind)) is kind and not is_plain_class(kind) and not is_own(kind)
        )

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self._check_call(function, args)
        if isinstance(function, type) and issubclass(function, BaseException):
            self._measure(args)
        made = function(*args)
        if type(function) is FunctionType and function in self._finders:
            self._allow(made)
        elif type(made) in _CONTAINERS and id(made) not in self._measures:
            self._new(made)
        else:
            self.stack.append(made)

    def _check_call(self, function: Any, args: Any, *, new: bool = False) -> None:
        if self._named.get(id(function)) is not function or type(args) is not tuple:
            raise Malformed("it calls what it has not named, or with something else than arguments")
        if isinstance(function, type) and issubclass(function, _STATELESS):
            raise Untrusted(f"a message makes a {function.__name__} by itself")
        check_call(function, args, new=new, is_named=lambda found: self._named.get(id(found)) is found)

    def new(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        self._make_new(kind, args, {})

    def new_with_names(self) -> None:
        kwargs, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if type(kwargs) is not dict or not {str}.issuperset(map(type, kwargs)):
            raise Malformed("it calls something with names that are none")
        self._make_new(kind, args, kwargs)

    def _make_new(self, kind: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._check_call(kind, args, new=True)
        if not isinstance(kind, type):
            raise Malformed("it makes an object of what is no class")
        self.stack.append(kind.__new__(kind, *args, **kwargs))

    def set_state(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        kind = type(target)
        if isinstance(target, _STATELESS) or kind in self._without_state:
            raise Untrusted(f"a message sets the state of a {kind.__name__}")
        if self._is_trusted(kind):
            _set_state(target, state)
        elif kind is OrderedDict or (issubclass(kind, Exception) and is_plain_class(kind)):
            _set_attributes(target, state)
        else:
            raise Untrusted(f"a message sets the state of a {kind.__name__}")


def _values_in(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container) if type(container) in _CONTAINERS else []


def _set_attributes(target: Any, state: Any) -> None:
    """What Python's own classes have beside their content: a dict of attributes."""
    if type(state) is not dict:
        raise Malformed("it sets a state that is no dict of attributes")
    for name, value in state.items():
        if type(name) is not str or (name.startswith("__") and name != "__notes__"):
            raise Malformed("it sets an attribute that is not the sender's to set")
        setattr(target, name, value)


def _set_state(target: Any, state: Any) -> None:
    """As Python's own unpickler does."""
    own = getattr(type(target), "__setstate__", None)
    if own is not None and own is not BaseException.__setstate__:
        own(target, state)
        return
    if own is not None:
        _set_attributes(target, state)
        return
    attributes, in_slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes is not None:
        if type(attributes) is not dict or not {str}.issuperset(map(type, attributes)):
            raise Malformed("it sets a state that is no dict of attributes")
        target.__dict__.update(attributes)
    if in_slots is not None:
        _set_attributes(target, in_slots)


_MORE: dict[int, Any] = {
    0x8F: NarrowReader.empty_set,
    0x90: NarrowReader.add_items,
    0x91: NarrowReader.frozen_set,
    0x96: NarrowReader.byte_array,
    ord("0"): NarrowReader.drop,
    ord("1"): NarrowReader.drop_since_mark,
    0x93: NarrowReader.name,
    ord("R"): NarrowReader.call,
    0x81: NarrowReader.new,
    0x92: NarrowReader.new_with_names,
    ord("b"): NarrowReader.set_state,
}
_OVERRIDDEN: dict[int, Any] = {ord("]"): NarrowReader.empty_list, ord("}"): NarrowReader.empty_dict}
_steps: dict[int, Step] = {**PlainReader.steps, **_OVERRIDDEN, **_MORE}
NarrowReader.steps = _steps
