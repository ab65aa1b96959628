"""Pickles of plain values, read without Python's own unpickler, which does whatever a pickle says.

Where `trusted` is narrowed, a frame's meta is read by this. It knows the instructions that Python's pickler writes (protocol 5)
for numbers, strings, bytes, tuples, lists, and dicts with strings as keys, and no others. So a meta names nothing, hashes
nothing but strings, and what it makes is of the order of its own size. `narrow.py` adds what the bodies of messages need.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from farstep.rpc.memory import Bytes

__all__ = ["Malformed", "PlainReader", "Step", "read_plain"]

MAX_PROTOCOL: Final = 5
_STOP: Final = 0x2E
_FLOAT: Final = struct.Struct(">d")
_INT: Final = struct.Struct("<i")
_SHORT: Final = struct.Struct("<H")
_UINT: Final = struct.Struct("<I")
_LONG: Final = struct.Struct("<Q")


class Malformed(ValueError):
    """A pickle that is cut off, is none, or does what it may not."""


def read_plain(data: bytes | memoryview) -> Any:
    """What a pickle of plain values stands for. Malformed where it is none.

    The same as `PlainReader.read`, with the instructions that most messages consist of in one loop: three times as fast.
    """
    data = bytes(data)
    reader = PlainReader(data)
    steps, stack, memo = reader.steps, reader.stack, reader.memo
    at = 0
    try:
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                if end > len(data):
                    raise Malformed("it is cut off")
                stack.append(data[at + 1 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x4E:  # NONE
                stack.append(None)
            elif code == 0x28:  # MARK
                reader.marks.append(len(stack))
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code == 0x74:  # TUPLE
                begin = reader.marks.pop()
                stack[begin:] = [tuple(stack[begin:])]
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif code == 0x2E:  # STOP
                break
            else:
                step = steps.get(code)
                if step is None:
                    raise Malformed(f"it has the instruction {code:#04x}, which no plain value needs")
                reader.at = at
                step(reader)
                at = reader.at
    except (IndexError, struct.error, UnicodeDecodeError) as exc:
        raise Malformed(f"it is cut off, or no pickle ({type(exc).__name__})") from None
    return reader.result()


Step = Callable[["PlainReader"], None]


class PlainReader:
    """One pickle. Each method is an instruction."""

    steps: dict[int, Step]

    def __init__(self, data: Bytes) -> None:
        self.data = memoryview(data)
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def read(self) -> Any:
        data, steps = self.data, self.steps
        try:
            while True:
                code = data[self.at]
                self.at += 1
                step = steps.get(code)
                if step is not None:
                    step(self)
                elif code == _STOP:
                    break
                else:
                    raise Malformed(
                        f"it has the instruction {code:#04x}, which nothing that may be sent needs"
                    )
        except (IndexError, struct.error, UnicodeDecodeError) as exc:
            raise Malformed(f"it is cut off, or no pickle ({type(exc).__name__})") from None
        return self.result()

    def result(self) -> Any:
        if len(self.stack) != 1 or self.marks:
            raise Malformed("it leaves something over")
        return self.stack[0]

    # -- from the pickle ------------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise Malformed("it is cut off")
        return self.data[begin : self.at]

    def unpacked(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        values = self.stack[begin:]
        del self.stack[begin:]
        return values

    # -- instructions ---------------------------------------------------------------------------------

    def proto(self) -> None:
        if self.take(1)[0] > MAX_PROTOCOL:
            raise Malformed("its protocol is not known")

    def frame(self) -> None:
        self.take(8)

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int_1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int_2(self) -> None:
        self.stack.append(self.unpacked(_SHORT))

    def int_4(self) -> None:
        self.stack.append(self.unpacked(_INT))

    def long_1(self) -> None:
        self._long(self.take(1)[0])

    def long_4(self) -> None:
        self._long(self.unpacked(_UINT))

    def _long(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def float_8(self) -> None:
        self.stack.append(self.unpacked(_FLOAT))

    def text_1(self) -> None:
        self.stack.append(str(self.take(self.take(1)[0]), "utf-8", "surrogatepass"))

    def text_4(self) -> None:
        self.stack.append(str(self.take(self.unpacked(_UINT)), "utf-8", "surrogatepass"))

    def text_8(self) -> None:
        self.stack.append(str(self.take(self.unpacked(_LONG)), "utf-8", "surrogatepass"))

    def bytes_1(self) -> None:
        self.stack.append(bytes(self.take(self.take(1)[0])))

    def bytes_4(self) -> None:
        self.stack.append(bytes(self.take(self.unpacked(_UINT))))

    def bytes_8(self) -> None:
        self.stack.append(bytes(self.take(self.unpacked(_LONG))))

    def empty_tuple(self) -> None:
        self.stack.append(())

    def tuple_1(self) -> None:
        self.add_tuple((self.stack.pop(),))

    def tuple_2(self) -> None:
        second = self.stack.pop()
        self.add_tuple((self.stack.pop(), second))

    def tuple_3(self) -> None:
        third, second = self.stack.pop(), self.stack.pop()
        self.add_tuple((self.stack.pop(), second, third))

    def tuple_n(self) -> None:
        self.add_tuple(tuple(self.since_mark()))

    def add_tuple(self, values: tuple[Any, ...]) -> None:
        self.stack.append(values)

    def empty_list(self) -> None:
        self.stack.append([])

    def append(self) -> None:
        self.extend_list([self.stack.pop()])

    def appends(self) -> None:
        self.extend_list(self.since_mark())

    def extend_list(self, values: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not list:
            raise Malformed(f"it appends to a {type(into).__name__}")
        into.extend(values)

    def empty_dict(self) -> None:
        self.stack.append({})

    def set_item(self) -> None:
        value = self.stack.pop()
        self.fill_dict([self.stack.pop(), value])

    def set_items(self) -> None:
        self.fill_dict(self.since_mark())

    def fill_dict(self, items: list[Any]) -> None:
        into, keys, values = self.stack[-1], items[::2], items[1::2]
        if type(into) is not dict or len(keys) != len(values):
            raise Malformed(f"it sets items of a {type(into).__name__}, or a key without a value")
        for key in keys:
            if type(key) is not str:
                raise Malformed(f"it has a {type(key).__name__} as a key")
        into.update(zip(keys, values, strict=True))

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def get_1(self) -> None:
        self.stack.append(self.memo[self.take(1)[0]])

    def get_4(self) -> None:
        self.stack.append(self.memo[self.unpacked(_UINT)])


PlainReader.steps = {
    0x80: PlainReader.proto,
    0x95: PlainReader.frame,
    ord("("): PlainReader.mark,
    ord("N"): PlainReader.none,
    0x88: PlainReader.true,
    0x89: PlainReader.false,
    ord("K"): PlainReader.int_1,
    ord("M"): PlainReader.int_2,
    ord("J"): PlainReader.int_4,
    0x8A: PlainReader.long_1,
    0x8B: PlainReader.long_4,
    ord("G"): PlainReader.float_8,
    0x8C: PlainReader.text_1,
    ord("X"): PlainReader.text_4,
    0x8D: PlainReader.text_8,
    ord("C"): PlainReader.bytes_1,
    ord("B"): PlainReader.bytes_4,
    0x8E: PlainReader.bytes_8,
    ord(")"): PlainReader.empty_tuple,
    0x85: PlainReader.tuple_1,
    0x86: PlainReader.tuple_2,
    0x87: PlainReader.tuple_3,
    ord("t"): PlainReader.tuple_n,
    ord("]"): PlainReader.empty_list,
    ord("a"): PlainReader.append,
    ord("e"): PlainReader.appends,
    ord("}"): PlainReader.empty_dict,
    ord("s"): PlainReader.set_item,
    ord("u"): PlainReader.set_items,
    0x94: PlainReader.memoize,
    ord("h"): PlainReader.get_1,
    ord("j"): PlainReader.get_4,
}
