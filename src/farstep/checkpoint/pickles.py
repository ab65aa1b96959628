"""Pickles, read without doing what they say.

A pickle is a program: its instructions push values, name things to import and call them. This reader knows the instructions that plain values need. A name
means what the caller's table says it means, never what Python would import, and a name that is not in the table is refused. So a pickle
can build strings, numbers, lists, tuples, dicts and what the table makes, and nothing else happens.

Against pickles that are small and stand for much: nothing here copies, hashes or walks what is nested. Dict keys are numbers, strings or objects that
hash by identity; a number has at most 255 bytes; a value's place in the memo is a key and no index. So what is built is of the order of the pickle's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

__all__ = ["Call", "Kind", "Record", "Refused", "unpickled"]


class Refused(Exception):
    """The pickle has what is not allowed, or is none."""


class Kind:
    """In the table of names: a class, of which the pickle may make a `Record`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """An object of a kind, with the state that the pickle gave it. Compared by identity."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind.name
        self.state: Any = None


class Call:
    """In the table of names: what the pickle may call; `make` is what is called. It raises Refused for arguments that it does not take."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


Names = Callable[[str, str], Any]
"""Module and name -> a Kind, a Call or a value. Raises Refused."""


def unpickled(data: bytes, names: Names, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What the pickle stands for. Raises Refused. `persistent` gives what a persistent id stands for."""
    try:
        return _Machine(data, names, persistent).run()
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, TypeError, ValueError, OverflowError) as exc:  # fmt: skip
        raise Refused(f"it is cut off, or no pickle: {type(exc).__name__}") from None


_MARK = object()
_MOST_WAITING = 1_000_000
"""Values that are not in their place yet. A pickler puts them there a thousand at a time."""


class _Machine:
    def __init__(self, data: bytes, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self._data, self._at = data, 0
        self._names, self._persistent = names, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._known: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        data, steps = self._data, _STEPS
        while True:
            if self._at >= len(data):
                raise Refused("it is cut off")
            code = data[self._at]
            self._at += 1
            if code == 0x2E:  # STOP
                if len(self._stack) != 1 or self._marks:
                    raise Refused("it leaves something over")
                return self._stack[0]
            step = steps.get(code)
            if step is None:
                raise Refused(f"it has the instruction {bytes([code])!r}, which no plain value needs")
            step(self)
            if len(self._stack) > _MOST_WAITING:
                raise Refused("it has more values at once than a pickle needs")

    # -- what is read from the pickle ---------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise Refused("it is cut off")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return found

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found

    def _since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        found = self._stack[begin:]
        del self._stack[begin:]
        return found

    # -- instructions -------------------------------------------------------------------------------------

    def proto(self) -> None:
        if self._number("<B") > 5:
            raise Refused("its protocol is not known")

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def text(self, form: str) -> None:
        self._stack.append(self._take(self._number(form)).decode())

    def whole(self, form: str) -> None:
        self._stack.append(self._number(form))

    def long(self) -> None:
        size = self._number("<B")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def constant(self, value: Any) -> None:
        self._stack.append(value)

    def empty(self, kind: type) -> None:
        self._stack.append(kind())

    def pair(self, count: int) -> None:
        found = tuple(self._stack[-count:])
        if len(found) != count:
            raise Refused("it takes what is not there")
        del self._stack[-count:]
        self._stack.append(found)

    def several(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self) -> None:
        value = self._stack.pop()
        self._a(list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._a(list).extend(values)

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._put([key, value])

    def setitems(self) -> None:
        self._put(self._since_mark())

    def _put(self, items: list[Any]) -> None:
        into = self._a(dict)
        if len(items) % 2:
            raise Refused("it has a key without a value")
        for at in range(0, len(items), 2):
            key = items[at]
            if type(key) not in (str, int, float, bool, type(None), Record):
                raise Refused(f"it has a {type(key).__name__} as a key")
            into[key] = items[at + 1]

    def _a(self, kind: type) -> Any:
        found = self._stack[-1]
        if type(found) is not kind:
            raise Refused(f"it treats a {type(found).__name__} as a {kind.__name__}")
        return found

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, form: str) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def get(self, form: str) -> None:
        self._stack.append(self._memo[self._number(form)])

    def named(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def named_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("it names something by what is no string")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        if (module, name) not in self._known:
            self._known[module, name] = self._names(module, name)
        self._stack.append(self._known[module, name])

    def new(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not Kind or type(args) is not tuple or args:
            raise Refused("it makes an object of what is no known class, or with arguments")
        self._stack.append(Record(kind))

    def call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if type(function) is not Call or type(args) is not tuple:
            raise Refused("it calls what is not to be called")
        self._stack.append(function.make(*args))

    def build(self) -> None:
        state = self._stack.pop()
        record = self._stack[-1]
        if type(record) is dict and type(state) is dict:
            return  # attributes of an OrderedDict, such as the versions in a module's state_dict: of no use here
        if type(record) is not Record or record.state is not None or type(state) not in (dict, tuple):
            raise Refused("it sets the state of something that has none")
        record.state = state

    def persistent(self) -> None:
        if self._persistent is None:
            raise Refused("it has a persistent id")
        self._stack.append(self._persistent(self._stack.pop()))


_STEPS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.proto,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("J"): lambda m: m.whole("<i"),
    ord("K"): lambda m: m.whole("<B"),
    ord("M"): lambda m: m.whole("<H"),
    ord("G"): lambda m: m.whole(">d"),
    0x8A: _Machine.long,
    ord("N"): lambda m: m.constant(None),
    0x88: lambda m: m.constant(True),
    0x89: lambda m: m.constant(False),
    ord("}"): lambda m: m.empty(dict),
    ord("]"): lambda m: m.empty(list),
    ord(")"): lambda m: m.constant(()),
    0x85: lambda m: m.pair(1),
    0x86: lambda m: m.pair(2),
    0x87: lambda m: m.pair(3),
    ord("t"): _Machine.several,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    0x94: _Machine.memoize,
    ord("q"): lambda m: m.put("<B"),
    ord("r"): lambda m: m.put("<I"),
    ord("h"): lambda m: m.get("<B"),
    ord("j"): lambda m: m.get("<I"),
    ord("c"): _Machine.named,
    0x93: _Machine.named_by_stack,
    0x81: _Machine.new,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
