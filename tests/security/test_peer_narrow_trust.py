"""A peer with the secret, where `trusted` is narrowed: it runs what is trusted, and nothing else."""

from __future__ import annotations

import builtins
import os
import pickle
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.workers import eventually

from farstep import rpc
from farstep.errors import RpcError, Untrusted
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.group import join_group
from farstep.rpc.payload import unpack
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
        frame_bytes(Kind.CALL, 1, pickle.dumps((Path("/"), [], (), (), (), None))),
        frame_bytes(Kind.BUNDLE, 0, pickle.dumps([(int(Kind.CALL), 1, 0, Path("/"), ([], None))])),
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
