"""A peer with the secret, where `trusted` is narrowed: it runs what is trusted, and nothing else."""

from __future__ import annotations

import builtins
import os
import pickle
import struct
import subprocess
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.workers import eventually

from farstep import rpc
from farstep.errors import RpcError, Untrusted, WorkerLost
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.group import join_group
from farstep.rpc.payload import pack, unpack
from farstep.rpc.trust import Trust
from farstep.rpc.wire import Kind, frame_bytes
from security.members import PATIENCE_S, inject


def op_string(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def op_global(module: str, name: str) -> bytes:
    """STACK_GLOBAL: push what find_class finds."""
    return op_string(module) + op_string(name) + b"\x93"


def op_call(function: bytes, *args: bytes) -> bytes:
    """REDUCE: call what is on the stack."""
    return function + b"(" + b"".join(args) + b"tR"


def body(value: bytes) -> bytes:
    """A pickle of (function, args, kwargs) whose argument is `value`."""
    return b"\x80\x05(N(" + value + b"t}t."


def unpack_with(trusted: tuple[str, ...], data: bytes) -> Any:
    return unpack(data, (), [], [], Trust(trusted))


INDICES = op_call(op_global("farstep.rpc.payload", "_tensor"), b"K\x01")
EXECUTE = op_string("__import__('os').environ.__setitem__('FARSTEP_TEST_ESCAPED', '1')")
HERE = __name__
TRUSTED = (HERE,)


def allowed_function(x: Any) -> Any:
    return x


class Allowed:
    """A class of a trusted module."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def method(self) -> int:
        return self.value

    def _private(self) -> int:
        return self.value


os_by_another_name = os
system_by_another_name = os.system

HAND_MADE = {
    "os.system": op_call(op_global("os", "system"), op_string("true")),
    "posix.system": op_call(op_global("posix", "system"), op_string("true")),
    "builtins.eval": op_call(op_global("builtins", "eval"), EXECUTE),
    "builtins.exec": op_call(op_global("builtins", "exec"), EXECUTE),
    "builtins.getattr": op_call(op_global("builtins", "getattr"), op_string("x"), op_string("upper")),
    "builtins.__import__": op_call(op_global("builtins", "__import__"), op_string("os")),
    "builtins.open": op_call(op_global("builtins", "open"), op_string("/dev/null")),
    "builtins.type": op_global("builtins", "type"),
    "a module of the trusted module": op_global(HERE, "os"),
    "a function of a module of the trusted module": op_call(op_global(HERE, "os.system"), op_string("true")),
    "the same by another name": op_call(op_global(HERE, "os_by_another_name.system"), op_string("true")),
    "a function imported by another name": op_call(
        op_global(HERE, "system_by_another_name"), op_string("true")
    ),
    "the built-ins of a trusted module": op_global(HERE, "__builtins__"),
    "eval by a trusted function's globals": op_call(
        op_call(op_global(HERE, "allowed_function.__builtins__.get"), op_string("eval")), EXECUTE
    ),
    "globals of a trusted function": op_call(
        op_global(HERE, "allowed_function.__globals__.get"), op_string("os")
    ),
    "a class's way up": op_global(HERE, "Allowed.__init__.__globals__"),
    "all subclasses of object": op_call(op_global(HERE, "Allowed.__base__.__subclasses__")),
    "a mutable of a trusted module": op_call(op_global(HERE, "TRUSTED.__add__"), b"(t"),
    "eval by farstep's own functions": op_call(
        op_call(op_global("farstep.rpc.payload", "name_of.__builtins__.get"), op_string("eval")), EXECUTE
    ),
    "modules by farstep's own imports": op_call(
        op_global("farstep.rpc.payload", "sys.modules.get"), op_string("os")
    ),
    "pickle by farstep's own imports": op_global("farstep.rpc.payload", "pickle.loads"),
    "torch by farstep's own imports": op_global("farstep.rpc.payload", "torch.load"),
    "partial by farstep's own imports": op_global("farstep.rpc.rref", "partial"),
    "farstep's own unpickling, with a trust of one's own": op_call(
        op_global("farstep.rpc.payload", "unpack"),
        b"B"
        + struct.pack("<I", len(body(op_call(op_global("os", "getpid")))))
        + body(op_call(op_global("os", "getpid"))),
        b"(t]]"
        + op_call(op_global("farstep.errors", "FarstepError"))
        + b"}"
        + op_string("is_open")
        + b"\x88sb",
    ),
    "farstep's own registry": op_call(
        op_global("farstep.rpc.payload", "register_reducer"), op_global("builtins", "int"), b"N"
    ),
    "farstep's own agents": op_global("farstep.rpc.group", "join_group"),
    "a method by farstep's own helper": op_call(
        op_global("farstep.rpc.payload", "_method"), op_string("text"), op_string("upper")
    ),
    "a private method": op_call(
        op_global("farstep.rpc.payload", "_method"),
        op_call(op_global(HERE, "Allowed")),
        op_string("_private"),
    ),
    "a name by farstep's own helper": op_call(
        op_global("farstep.rpc.payload", "_named"), op_string("os"), op_string("system")
    ),
    "torch.load": op_global("torch", "load"),
    "torch.hub.load": op_global("torch.hub", "load"),
    "torch._C": op_global("torch", "_C"),
    "operator.attrgetter": op_global("operator", "attrgetter"),
    "functools.partial": op_global("functools", "partial"),
    "a module whose name begins alike": op_global(HERE + "_not", "anything"),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_hand_made_pickles_do_not_get_past_trusted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("FARSTEP_TEST_ESCAPED", raising=False)
    executed: list[str] = []
    monkeypatch.setattr(os, "system", executed.append)
    monkeypatch.setitem(globals(), "system_by_another_name", builtins.print)
    with pytest.raises((Untrusted, ImportError)):
        unpack_with(TRUSTED, body(HAND_MADE[name]))
    assert executed == []
    assert "FARSTEP_TEST_ESCAPED" not in os.environ


def test_trusted_allows_what_it_should() -> None:
    for value in (
        op_global(HERE, "allowed_function"),
        op_global(HERE, "Allowed"),
        op_call(op_global(HERE, "Allowed"), b"K\x05"),
        op_global(HERE, "Allowed.method"),
        op_global("builtins", "ValueError"),
        b"\x8f",
        op_call(op_global("collections", "OrderedDict")),
        op_call(op_global("torch", "Size"), b"(K\x05t"),
    ):
        unpack_with(TRUSTED, body(value))


@pytest.fixture(scope="module")
def narrow() -> Iterator[list[Agent]]:
    with rpc.local_agents(3, RpcOptions(trusted=(HERE, "torch.add"))) as agents:
        yield agents


def fail(message: str) -> None:
    raise KeyError(message)


def make_allowed(value: int) -> Allowed:
    return Allowed(value)


def look(rref: Any) -> int:
    return int(rref.to_here().value)


def test_narrowed_agents_do_everything_that_is_allowed(narrow: list[Agent]) -> None:
    agent = narrow[0]
    x = torch.randn(100_000, requires_grad=True)

    def run(function: Any, *args: Any) -> Any:
        return agent.call_sync("worker1", function, args, {}, PATIENCE_S)

    assert torch.equal(run(torch.add, x, 1), x + 1)
    assert run(allowed_function, {"a": [1, (2.0, "x"), {3}, None, torch.float16]}) == {
        "a": [1, (2.0, "x"), {3}, None, torch.float16]
    }
    assert run(Allowed, 4).value == 4
    assert run(allowed_function, 1j) == 1j
    assert run(Allowed(6).method) == 6
    assert torch.equal(run(allowed_function, [x.detach().to_sparse()])[0].to_dense(), x.detach())
    assert type(run(allowed_function, torch.nn.Parameter(x.detach()))) is torch.nn.Parameter
    with pytest.raises(KeyError, match="mine"):
        run(fail, "mine")
    rref = agent.remote("worker1", make_allowed, (8,), {}, PATIENCE_S)
    assert rref.to_here().value == 8
    assert rref.rpc_sync().method() == 8
    assert agent.call_sync("worker2", look, (rref,), {}, PATIENCE_S) == 8
    assert run(allowed_function, agent.info) == agent.info


def test_narrowed_agents_refuse_the_rest_and_say_how_to_allow_it(narrow: list[Agent]) -> None:
    agent = narrow[0]
    for function, args in (
        (os.getpid, ()),
        (len, ([1],)),
        (torch.neg, (torch.ones(1),)),
        (print, ()),
        (eval, ("1",)),
    ):
        with pytest.raises(Untrusted, match=r"RpcOptions\.trusted"):
            agent.call_sync("worker1", function, args, {}, PATIENCE_S)
    with pytest.raises(Untrusted, match="Path"):
        agent.call_sync("worker1", allowed_function, (Path("x"),), {}, PATIENCE_S)
    rref = agent.remote("worker1", make_allowed, (8,), {}, PATIENCE_S)
    with pytest.raises((Untrusted, AttributeError)):
        rref.rpc_sync()._private()
    assert agent.call_sync("worker1", allowed_function, (1,), {}, PATIENCE_S) == 1


@pytest.mark.parametrize(
    "meta_that_names_something",
    [
        frame_bytes(Kind.CALL, 1, pickle.dumps((Path("/"), [], (), (), (), None)), depth=1),
        frame_bytes(Kind.BUNDLE, 0, pickle.dumps([(int(Kind.CALL), 1, 1, Path("/"), ([], None))])),
    ],
    ids=["a call", "a bundle"],
)
def test_a_narrowed_caller_does_not_unpickle_what_it_does_not_trust(meta_that_names_something: bytes) -> None:
    store = dist.HashStore()
    open_agent = join_group(store, "open", 0, None, RpcOptions())
    narrow_agent = join_group(store, "narrow", 1, None, RpcOptions(trusted=(HERE,)))
    try:
        with pytest.raises(RpcError, match="Path"):
            narrow_agent.call_sync("open", Path, ("x",), {}, PATIENCE_S)
        assert narrow_agent.call_sync("open", allowed_function, (1,), {}, PATIENCE_S) == 1
        inject(open_agent, "narrow", meta_that_names_something)
        eventually(lambda: len(narrow_agent.get_worker_infos()) == 1, "the peer being dropped")
    finally:
        narrow_agent.close()
        open_agent.close()


def test_an_error_that_is_not_trusted_arrives_as_remote_error(narrow: list[Agent]) -> None:
    with pytest.raises(rpc.RemoteError, match="TimeoutExpired") as caught:
        narrow[0].call_sync("worker1", raise_foreign, (), {}, PATIENCE_S)
    assert caught.value.type_name == "TimeoutExpired"


def raise_foreign() -> None:
    raise subprocess.TimeoutExpired("cmd", 3)


# -- small pickles, large costs


BILLIONS = op_call(
    op_global("builtins", "range"), b"K\x00", b"J" + struct.pack("<i", 2_000_000_000), b"K\x01"
)
TWO_GB = b"\x8a\x05" + (2**31).to_bytes(5, "little")
DEEP = b")" + b"\x85" * 300_000
DOUBLED = b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(60))


class Bytes(bytes):
    """A subclass of a trusted module."""


class List(list[Any]):
    """Another."""


class MyTensor(torch.Tensor):
    """Another."""


class Frozen(NamedTuple):
    inside: Any


COSTLY = {
    "a list of billions": op_call(op_global("builtins", "list"), BILLIONS),
    "a tuple of billions": op_call(op_global("builtins", "tuple"), BILLIONS),
    "a set of billions": op_call(op_global("builtins", "set"), BILLIONS),
    "a frozenset of billions": op_call(op_global("builtins", "frozenset"), BILLIONS),
    "a deque of billions": op_call(op_global("collections", "deque"), BILLIONS),
    "an OrderedDict of billions": op_call(op_global("collections", "OrderedDict"), BILLIONS),
    "a defaultdict of billions": op_call(op_global("collections", "defaultdict"), b"N", BILLIONS),
    "a Size of billions": op_call(op_global("torch", "Size"), BILLIONS),
    "a bytearray of gigabytes": op_call(op_global("builtins", "bytearray"), TWO_GB),
    "bytes of gigabytes": op_call(op_global("builtins", "bytes"), TWO_GB),
    "bytes of a trusted class": op_call(op_global(HERE, "Bytes"), TWO_GB),
    "bytes of a trusted class, by __new__": op_global(HERE, "Bytes") + TWO_GB + b"\x85\x81",
    "a list of a trusted class": op_call(op_global(HERE, "List"), BILLIONS),
    "the text of billions": op_call(
        op_global("builtins", "str"), op_call(op_global("builtins", "list"), BILLIONS)
    ),
    "a number of a long text": op_call(op_global("builtins", "int"), op_string("9" * 4000)),
    "a list by __new__": op_global("builtins", "bytearray") + TWO_GB + b"\x85\x81",
    "a place in the memo": b"Nr" + struct.pack("<I", 2**31),
    "a bytearray that is not there": b"\x96" + struct.pack("<Q", 2**40),
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 2**40),
    "a text that is not there": b"\x8d" + struct.pack("<Q", 2**40),
    "a deep key": b"}" + DEEP + b"Ns",
    "a deep member of a set": b"\x8f(" + DEEP + b"\x90",
    "a deep member of a frozenset": b"(" + DEEP + b"\x91",
    "a deep key inside a trusted class": b"}" + op_call(op_global(HERE, "Frozen"), DEEP) + b"Ns",
    "a doubled key": b"}" + DOUBLED + b"Ns",
    "a doubled key inside a trusted class": b"}" + op_call(op_global(HERE, "Frozen"), DOUBLED) + b"Ns",
    "something deep": DEEP,
    "something doubled": DOUBLED,
    "doubled lists": b"]" + b"".join(b"\x94](h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60)),
    "keys of one hash": b"}("
    + b"".join(b"\x8a\x0b" + (i * (2**61 - 1)).to_bytes(11, "little") + b"N" for i in range(5000))
    + b"u",
    "arguments that are deep": op_call(op_global(HERE, "allowed_function"), DEEP),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_small_message_has_no_large_cost(name: str) -> None:
    with pytest.raises((Untrusted, ValueError)) as caught:
        unpack_with(TRUSTED, body(COSTLY[name]))
    assert len(str(caught.value)) < 1000


def test_what_is_filled_after_it_was_put_somewhere_is_measured_too() -> None:
    """Lists that are put into one another from the outside in: each was shallow when it was put there."""
    lists = b"".join(b"]\x940" for _ in range(200))
    chain = b"".join(
        b"h" + bytes([i]) + b"(h" + bytes([i + 1]) + b"h" + bytes([i + 1]) + b"e0" for i in range(199)
    )
    with pytest.raises(ValueError, match="stands for far too many"):
        unpack_with(TRUSTED, body(lists + chain + b"h\x00"))


@pytest.mark.parametrize("args", [(range(2_000_000_000),), (2**31,)], ids=["range", "number"])
@pytest.mark.parametrize("kind", [list, bytearray, bytes, tuple, set, torch.Size])
def test_what_any_message_may_name_is_not_called_by_name(
    narrow: list[Agent], kind: Any, args: tuple[Any, ...]
) -> None:
    with pytest.raises(Untrusted, match=r"RpcOptions\.trusted"):
        narrow[0].call_sync("worker1", kind, args, {}, PATIENCE_S)
    rref = narrow[0].remote("worker1", kind, args, {}, PATIENCE_S)
    with pytest.raises(Untrusted, match=r"RpcOptions\.trusted"):
        rref.to_here()


# -- memory


def with_tensor(*opcodes: bytes) -> bytes:
    return op_call(op_global("farstep.rpc.payload", "_tensor"), b"K\x00") + b"".join(opcodes)


BEYOND = {
    "the state of a tensor": with_tensor(
        b"(" + op_call(op_global("farstep.rpc.payload", "_tensor"), b"K\x00"), b"K\x00(M\x00\x10t(K\x01ttb"
    ),
    "attributes of a tensor": with_tensor(b"}" + op_string("requires_grad") + b"\x88sb"),
    "a tensor by its class": op_call(op_global(HERE, "MyTensor"), b"M\x00\x10"),
    "a tensor by __new__ of its class": op_global(HERE, "MyTensor") + b"M\x00\x10\x85\x81",
    "a tensor beyond those that came": op_call(op_global("farstep.rpc.payload", "_tensor"), b"K\x05"),
    "a tensor before those that came": op_call(op_global("farstep.rpc.payload", "_tensor"), b"J\xff\xff\xff\xff"),
    "a method of a tensor": op_call(
        op_call(op_global("farstep.rpc.payload", "_method"), with_tensor(), op_string("resize_")), b"M\x00\x10"
    ),
    "a sparse tensor of lists": op_call(
        op_global("farstep.rpc.payload", "_sparse_coo"), b"]", b"]", b"(K\x05t", b"\x89", b"\x89"
    ),
    "a sparse tensor with indices beyond its shape": op_call(
        op_global("farstep.rpc.payload", "_sparse_coo"), with_tensor(b"0" + INDICES), with_tensor(), b"(K\x01t", b"\x89", b"\x89"
    ),
    "a compressed tensor of a deep layout": op_call(
        op_global("farstep.rpc.payload", "_sparse_compressed"), *[with_tensor()] * 3, b"(K\x01K\x01t", DEEP, b"\x89"
    ),
}  # fmt: skip


@pytest.mark.parametrize("trusted", [TRUSTED, (HERE, "torch")], ids=["narrow", "all of torch"])
@pytest.mark.parametrize("name", BEYOND)
def test_no_message_reaches_memory_beyond_what_it_brought(name: str, trusted: tuple[str, ...]) -> None:
    if trusted != TRUSTED and "method" in name:
        pytest.skip("who trusts all of torch trusts its methods")
    tensors = [torch.ones(4), torch.full((1, 4), 1 << 40, dtype=torch.int64)]
    with pytest.raises((Untrusted, ValueError, IndexError, RuntimeError)):
        unpack(body(BEYOND[name]), (), tensors, [], Trust(trusted))
    assert torch.equal(tensors[0], torch.ones(4))
    assert not tensors[0].requires_grad


@pytest.mark.parametrize(
    "target",
    [
        op_global("builtins", "ValueError"),
        op_global(HERE, "Allowed"),
        op_global(HERE, "allowed_function"),
        b"]",
        op_call(op_global("farstep.rpc.membership", "WorkerInfo"), op_string("x"), b"K\x00"),
    ],
    ids=["a built-in class", "a trusted class", "a trusted function", "a list", "a worker's info"],
)
def test_no_state_but_that_of_trusted_objects_is_set(target: bytes) -> None:
    with pytest.raises((Untrusted, ValueError)):
        unpack_with(TRUSTED, body(target + b"}" + op_string("value") + b"K\x07sb"))
    assert not hasattr(Allowed, "value")


# -- what does arrive


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Place:
    at: tuple[int, ...]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and (self.a, self.b) == (other.a, other.b)

    __hash__ = None  # type: ignore[assignment]


def ring() -> list[Any]:
    made: list[Any] = list(range(2500))
    made.insert(0, (made,))
    return made


def noted() -> Exception:
    error = KeyError("x", 5)
    error.add_note("a note")
    return error


HONEST = {
    "atoms": (0, -1, 2**600, 1.5, float("inf"), True, None, "ä\udc80", "x" * 300, b"y" * 300, bytearray(b"z" * 9), 1j),
    "containers": ([1, [2]], (), (1,), (1, 2, 3, 4), {"a": {1: {None: (2,)}}}, {3, "x"}, frozenset({(1, 2), "y"})),
    "collections": (
        OrderedDict(a=1, b=[2]), defaultdict(list, {1: [2]}), deque([1, 2], maxlen=5), deque([3]),
        timedelta(1, 2, 3), range(0, 10**12, 7), slice(1, None, 2),
    ),
    "torch": (torch.Size([1, 2]), torch.device("cpu"), torch.float16, {torch.float32: 1, torch.Size([3]): 2}),
    "keys": {(1, (2, "x")): 1, Color.RED: 2, Place((1, 2)): 3, frozenset({1}): 4, 2.5: 5, b"z": 6, None: 7, int: 8},
    "many keys": {(i, str(i)): i for i in range(3000)} | {i * 0.5: i for i in range(3000)},
    "many members": set(range(5000)),
    "classes": (int, Allowed, ValueError, allowed_function, Color.RED, Place((5,)), Slotted(), Frozen([1])),
    "subclasses": (Bytes(b"abc"), List([1, 2, [3]])),
    "shared": [[1] * 100] * 1000,
}  # fmt: skip


def nested(levels: int) -> Any:
    made: Any = ()
    for _ in range(levels):
        made = [(made,)]
    return made


@pytest.mark.parametrize("name", HONEST)
def test_what_python_s_pickler_writes_arrives(name: str) -> None:
    packed = pack((HONEST[name], nested(40)))
    assert unpack(packed.body, (), packed.tensors, [], Trust(TRUSTED))[1] == (HONEST[name], nested(40))


def test_what_refers_to_itself_arrives() -> None:
    packed = pack((ring(),))
    (made,) = unpack(packed.body, (), [], [], Trust(TRUSTED))[1]
    assert made[0][0] is made
    assert made[1:] == ring()[1:]


def test_exceptions_arrive_with_their_notes() -> None:
    packed = pack((noted(), OSError(2, "no", "file"), ExceptionGroup("two", [ValueError(1), noted()])))
    key, os_error, group = unpack(packed.body, (), [], [], Trust(TRUSTED))[1]
    assert (key.args, key.__notes__) == (("x", 5), ["a note"])
    assert (os_error.errno, os_error.filename) == (2, "file")
    assert [type(e) for e in group.exceptions] == [ValueError, KeyError]


# -- exceptions as a way in


def reply_with(narrow: list[Agent], head: Any, content: bytes) -> BaseException:
    """What a caller gets for a call that its callee answers with this."""
    caller, callee = narrow[0], narrow[1]
    answered = threading.Event()
    service = callee.service
    callee.call_sync("worker0", allowed_function, (1,), {}, PATIENCE_S)  # so that it has a connection

    def lie(message: Any, *_: Any) -> None:
        if not answered.is_set():
            answered.set()
            meta = pickle.dumps((head, content, (), (), (), None), 5)
            inject(callee, "worker0", frame_bytes(Kind.ERROR, message.call_id, meta))
            callee.tally.serve()

    before = service._conclude
    service._conclude = lie  # type: ignore[method-assign]
    try:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            caller.call_sync("worker1", allowed_function, (1,), {}, PATIENCE_S)
    finally:
        service._conclude = before  # type: ignore[method-assign]
    return caught.value


def leave() -> None:
    raise SystemExit(3)


WAYS_IN = {
    "SystemExit": op_call(op_global("builtins", "SystemExit"), b"K\x03"),
    "KeyboardInterrupt": op_call(op_global("builtins", "KeyboardInterrupt")),
    "a call of a trusted function that ends the process": op_call(op_global(HERE, "leave")),
    "a call of what is not trusted": op_call(op_global("os", "_exit"), b"K\x03"),
    "a call of farstep's own": op_call(op_global("farstep.rpc.gather", "_missing_here"), op_string("x"), b"K\x00"),
    "another class by its state": op_call(op_global("builtins", "ValueError"))
    + b"}" + op_string("__class__") + op_global("builtins", "KeyError") + b"sb",
    "a cause by its state": op_call(op_global("builtins", "ValueError"))
    + b"}" + op_string("__cause__") + op_call(op_global("builtins", "KeyError")) + b"sb",
    "no exception": op_string("text"),
    "something deep": DEEP,
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS_IN)
def test_an_exception_is_no_way_in(name: str) -> None:
    with rpc.local_agents(2, RpcOptions(trusted=TRUSTED)) as agents:
        error = reply_with(agents, ("Oops", "text", "worker1", "trace"), body(WAYS_IN[name]))
        assert type(error) is rpc.RemoteError
        assert "Oops" in str(error)
        assert agents[0].call_sync("worker1", allowed_function, (1,), {}, PATIENCE_S) == 1


@pytest.mark.parametrize(
    "head",
    [None, ("a", "b", "c"), ("a", 5, "c", "d"), ("a", "b", "c", "d" * ((1 << 20) + 1)), ["a", "b", "c", "d"]],
    ids=["nothing", "three", "a number", "a huge traceback", "a list"],
)
def test_an_error_of_the_wrong_shape_costs_its_sender(head: Any) -> None:
    with rpc.local_agents(3, RpcOptions(trusted=TRUSTED)) as agents:
        assert agents[0].call_sync("worker2", allowed_function, (1,), {}, PATIENCE_S) == 1
        error = reply_with(agents, head, body(op_call(op_global("builtins", "ValueError"))))
        assert isinstance(error, WorkerLost)
        assert error.worker == "worker1"
        assert agents[0].call_sync("worker2", allowed_function, (1,), {}, PATIENCE_S) == 1


def raise_at_length() -> None:
    raise ValueError("x" * 5_000_000 + "the end")


def test_a_long_exception_is_cut_by_its_sender(narrow: list[Agent]) -> None:
    with pytest.raises(ValueError, match="the end") as caught:
        narrow[0].call_sync("worker1", raise_at_length, (), {}, PATIENCE_S)
    assert len(caught.value.remote_traceback) <= 1 << 20  # type: ignore[attr-defined]
    assert narrow[0].call_sync("worker1", allowed_function, (1,), {}, PATIENCE_S) == 1
