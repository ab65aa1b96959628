"""What goes through a call comes out as it would from a local one: tensors, objects, errors."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.workers import Group, eventually

from farstep import rpc
from farstep.errors import PayloadError, RemoteError, RemoteTraceback
from farstep.rpc import Agent, RpcOptions

Call = Callable[..., Any]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Agent]]:
    with rpc.local_agents(2) as agents:
        yield agents


@pytest.fixture(scope="module", params=["to a peer", "to itself", "by socket only"])
def call(request: pytest.FixtureRequest) -> Iterator[Call]:
    """`call(function, *args, **kwargs)` runs it on a worker."""
    options = RpcOptions(shared_memory_bytes=0) if request.param == "by socket only" else RpcOptions()
    with rpc.local_agents(2, options) as agents:
        to = agents[0 if request.param == "to itself" else 1].info

        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return agents[0].call_sync(to, function, args, kwargs, 20.0)

        yield run


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert type(got) is type(wanted)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.layout == wanted.layout
    assert got.requires_grad == wanted.requires_grad
    got, wanted = got.detach(), wanted.detach()
    if wanted.layout is torch.sparse_coo:
        assert got.is_coalesced() == wanted.is_coalesced()
        got, wanted = got.to_dense(), wanted.to_dense()
    elif wanted.layout is not torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    got, wanted = got.resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg()
    if wanted.numel():
        assert torch.equal(
            got.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
        )


def echo(value: Any) -> Any:
    return value


def seen_there(value: torch.Tensor) -> tuple[str, float]:
    """What the callee sees of a tensor, as plain values."""
    dense = value.to_dense() if value.layout is not torch.strided else value
    total = dense.detach().to(torch.complex128).sum().real
    return f"{value.dtype} {tuple(value.shape)} {value.requires_grad} {type(value).__name__}", float(total)


# -- tensors


def creatable_dtypes() -> list[torch.dtype]:
    dtypes = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    usable = []
    for dtype in sorted(dtypes - quantized, key=str):
        try:
            torch.zeros(24, dtype=torch.uint8).view(dtype)
        except RuntimeError:
            continue
        usable.append(dtype)
    return usable


@pytest.mark.parametrize("dtype", creatable_dtypes(), ids=str)
def test_every_dtype(call: Call, dtype: torch.dtype) -> None:
    tensor = torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype)
    assert_same(call(echo, tensor), tensor)
    assert_same(call(echo, [tensor])[0], tensor)


def plain_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).view(3, 4, 5)
    return {
        "0-d": torch.tensor(3.5),
        "0-d int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty with a shape": torch.empty(3, 0, 4),
        "a matrix": base[0],
        "transposed": base[0].t(),
        "permuted": base.permute(2, 0, 1),
        "a slice": base[:, 1:3, ::2],
        "a thin slice": torch.arange(10_000.0).view(100, 100)[:, 3],
        "a column step": base[..., 1],
        "with an offset": base[1:],
        "expanded": torch.arange(3.0).expand(4, 3),
        "expanded 0-d": torch.tensor(1.0).expand(1000),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (2, 1)),
        "conj": torch.randn(3, dtype=torch.cfloat).conj(),
        "neg": torch.randn(3, dtype=torch.cfloat).conj().imag,
        "conj transposed": torch.randn(2, 3, dtype=torch.cdouble).mH,
        "a real view": torch.view_as_real(torch.randn(3, dtype=torch.cfloat)),
        "a parameter": torch.nn.Parameter(torch.randn(3)),
        "a frozen parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "requires grad": torch.randn(3, requires_grad=True),
        "not a leaf": torch.randn(3, requires_grad=True) * 2,
        "under no_grad": torch.randn(3, 3).t().requires_grad_(),
        "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
        "16 KiB": torch.randn(4096),
        "64 KiB and a bit": torch.randn(16_385),
        "half a megabyte": torch.randn(131_072),
        "large, transposed": torch.randn(300, 500).t(),
        "large, a slice": torch.randn(600, 600)[:, 50:550],
        "large, bools": torch.rand(300_000) > 0.5,
        "5 MB": torch.randn(1_250_000),
    }


@pytest.mark.parametrize("name", plain_tensors())
def test_every_shape_of_tensor(call: Call, name: str) -> None:
    tensor = plain_tensors()[name]
    assert_same(call(echo, tensor), tensor)
    assert_same(call(echo, value=tensor), tensor)
    assert_same(call(echo, {"deep": [tensor]})["deep"][0], tensor)
    what, total = call(seen_there, tensor)
    assert what == seen_there(tensor)[0]
    assert total == pytest.approx(seen_there(tensor)[1], nan_ok=True)


@torch.sparse.check_sparse_tensor_invariants(enable=True)  # said explicitly, or torch warns
def sparse_tensors() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    return {
        "coo": dense.to_sparse(),
        "coo, not coalesced": torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2.0, 3.0], (2, 4)),
        "coo, hybrid": torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3), (4, 3)),
        "coo, empty": torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), [], (3, 3)),
        "coo, requires grad": dense.to_sparse().requires_grad_(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((1, 2)),
        "coo, large": torch.eye(500).repeat(1, 40).to_sparse(),
    }


@pytest.mark.parametrize("name", sparse_tensors())
def test_sparse_tensors(call: Call, name: str) -> None:
    tensor = sparse_tensors()[name]
    assert_same(call(echo, tensor), tensor)
    assert_same(call(echo, [tensor])[0], tensor)
    assert call(seen_there, tensor) == seen_there(tensor)


def test_quantized_tensors(call: Call) -> None:
    tensor = torch.quantize_per_tensor(torch.randn(5), 0.1, 3, torch.qint8)
    got = call(echo, tensor)
    assert torch.equal(got.int_repr(), tensor.int_repr())
    assert got.q_scale() == tensor.q_scale()


def write_into(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)


@pytest.mark.parametrize("numel", [1, 100, 20_000, 200_000])
def test_received_tensors_can_be_written_and_are_copies(call: Call, numel: int) -> None:
    tensor = torch.zeros(numel)
    got = call(write_into, tensor)
    assert torch.equal(tensor, torch.zeros(numel))
    assert torch.equal(got, torch.ones(numel))
    got.mul_(3)
    assert torch.equal(call(echo, tensor), torch.zeros(numel))


def test_the_caller_may_change_a_tensor_once_the_call_is_made(pair: list[Agent]) -> None:
    for numel in (10, 20_000, 200_000):
        tensor = torch.ones(numel)
        future = pair[0].call_async("worker1", echo, (tensor,), {}, 20.0)
        tensor.zero_()
        assert torch.equal(future.wait(), torch.ones(numel))


kept: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    kept.append(tensor)


@pytest.mark.parametrize("numel", [10, 200_000])
def test_a_kept_tensor_is_not_overwritten_by_later_calls(call: Call, numel: int) -> None:
    try:
        for i in range(5):
            call(keep, torch.full((numel,), float(i)))
        assert [float(t.min()) for t in kept] == [float(t.max()) for t in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]
    finally:
        kept.clear()


def test_a_slice_of_a_received_tensor_keeps_its_memory(call: Call) -> None:
    part = call(echo, torch.arange(300_000.0))[1000:1010]
    gc.collect()
    for _ in range(3):
        call(echo, torch.zeros(300_000))
    assert torch.equal(part, torch.arange(1000.0, 1010.0))


def add_to_first(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a.add_(1)
    return a, b


def first_is_second(pair: list[Any]) -> bool:
    return pair[0] is pair[1]


def test_the_same_tensor_twice_stays_one(call: Call) -> None:
    tensor = torch.zeros(3)
    assert call(first_is_second, [tensor, tensor])
    got = call(echo, [tensor, tensor])
    assert got[0] is got[1]


def test_the_same_tensor_as_two_arguments_stays_one(call: Call) -> None:
    a, b = call(add_to_first, *[torch.zeros(3)] * 2)
    assert torch.equal(a, torch.ones(3))
    assert torch.equal(b, torch.ones(3))


@pytest.mark.parametrize("count", [300, 40_000])
def test_many_tensors_in_one_call(count: int) -> None:
    with rpc.local_agents(2) as agents:
        got = agents[0].call_sync("worker1", echo, ([torch.tensor([i]) for i in range(count)],), {}, 20.0)
        assert [int(t) for t in got] == list(range(count))
        assert agents[0].call_sync("worker1", echo, (5,), {}, 20.0) == 5


def test_many_large_tensors_in_one_call(call: Call) -> None:
    got = call(echo, [torch.full((40_000,), float(i)) for i in range(260)])
    assert [float(t[-1]) for t in got] == [float(i) for i in range(260)]


def test_shared_memory_beyond_its_bound_goes_by_socket() -> None:
    with rpc.local_agents(2, RpcOptions(shared_memory_bytes=1 << 20)) as agents:
        tensors = [torch.full((100_000,), float(i)) for i in range(8)]
        for _ in range(3):
            got = agents[0].call_sync("worker1", echo, (tensors,), {}, 20.0)
            assert all(torch.equal(g, t) for g, t in zip(got, tensors, strict=True))


def test_a_message_over_the_limit_is_an_error_for_the_caller_and_nobody_else() -> None:
    with rpc.local_agents(2, RpcOptions(max_frame_bytes=1 << 20, shared_memory_bytes=0)) as agents:
        with pytest.raises(PayloadError, match="max_frame_bytes"):
            agents[0].call_sync("worker1", echo, (torch.zeros(1 << 20),), {}, 20.0)
        with pytest.raises(PayloadError, match="max_frame_bytes"):
            agents[0].call_sync("worker1", torch.zeros, (1 << 20,), {}, 20.0)
        assert agents[0].call_sync("worker1", echo, (5,), {}, 20.0) == 5


# -- objects


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    data: Any


class Color(enum.Enum):
    RED = 1


class Holder:
    instances = 0

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def method(self, other: int) -> int:
        return self.value + other

    @classmethod
    def of_class(cls, value: int) -> str:
        return f"{cls.__name__} {value}"

    @staticmethod
    def static(value: int) -> int:
        return value + 100

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


OBJECTS: list[Any] = [
    None,
    True,
    -1,
    2**200,
    1.5,
    1j,
    "text ☃",
    b"bytes",
    bytearray(b"more"),
    (),
    (1, (2, (3,))),
    [1, [2]],
    {"a": {"b": 1}},
    {1, 2},
    frozenset({3}),
    range(3),
    slice(1, 2),
    Ellipsis,
    NotImplemented,
    Point(1, 2),
    Record("r", [1]),
    Color.RED,
    Holder(5),
    torch.Size([1, 2]),
    torch.float16,
    torch.device("cpu"),
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    int,
    Holder,
    echo,
    torch.add,
    "x" * 1_000_000,
    list(range(50_000)),
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda v: f"{type(v).__name__}")
def test_objects_come_back_equal(call: Call, value: Any) -> None:
    got = call(echo, value)
    assert type(got) is type(value)
    assert got == value


def test_containers_of_tensors(call: Call) -> None:
    value = {
        "point": Point(torch.ones(2), [torch.zeros(1)]),
        "record": Record("r", torch.arange(3)),
        "ordered": collections.OrderedDict(w=torch.nn.Parameter(torch.ones(1))),
    }
    got = call(echo, value)
    assert type(got["point"]) is Point
    assert torch.equal(got["point"].x, torch.ones(2))
    assert torch.equal(got["point"].y[0], torch.zeros(1))
    assert torch.equal(got["record"].data, torch.arange(3))
    assert type(got["ordered"]["w"]) is torch.nn.Parameter


def test_tensors_as_keys(call: Call) -> None:
    key = torch.ones(2)
    got = call(echo, {key: "here", torch.zeros(1): "there"})
    assert sorted(got.values()) == ["here", "there"]
    assert sorted(len(k) for k in got) == [1, 2]


def test_a_module_with_its_parameters(call: Call) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    got = call(copy.deepcopy, module)
    for (name, ours), (other, theirs) in zip(
        module.state_dict().items(), got.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)
    assert all(type(p) is torch.nn.Parameter for p in got.parameters())


def test_a_container_that_holds_itself(call: Call) -> None:
    value: list[Any] = [1]
    value.append(value)
    got = call(echo, value)
    assert got[1] is got


# -- what can be called


def default_and_keyword(a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> Any:
    return a, b, rest, c, more


def test_arguments_arrive_where_they_belong(call: Call) -> None:
    assert call(default_and_keyword, 1) == (1, 2, (), 3, {})
    assert call(default_and_keyword, 1, 5, 6, c=7, d=8) == (1, 5, (6,), 7, {"d": 8})
    assert call(default_and_keyword, a=1, b=torch.tensor(4))[1] == 4


def test_kinds_of_callables(call: Call) -> None:
    assert torch.equal(call(torch.add, torch.ones(2), 1), torch.full((2,), 2.0))
    assert torch.equal(call(torch.add, torch.ones(2), 1, alpha=3), torch.full((2,), 4.0))
    assert torch.equal(call(torch.nn.functional.relu, torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert torch.equal(call(torch.Tensor.add, torch.ones(1), 1), torch.tensor([2.0]))
    assert call(Holder, 3) == Holder(3)
    assert call(Holder(3).method, 4) == 7
    assert call(Holder.of_class, 4) == "Holder 4"
    assert call(Holder.static, 4) == 104
    assert call(len, [1, 2]) == 2
    assert call(torch.ones(3).sum) == 3
    assert call(sum, [1, 2]) == 3
    assert call(dict, a=1) == {"a": 1}


# -- what cannot be sent


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class UnpicklesNot:
    """Can be packed, and fails where it arrives."""

    def __reduce__(self) -> Any:
        return _fail_to_unpickle, ()


def _fail_to_unpickle() -> Any:
    raise ValueError("cannot be rebuilt")


def make_unpicklable() -> Any:
    return Unpicklable()


def make_lock() -> Any:
    return threading.Lock()


def make_one_that_unpickles_not() -> Any:
    return UnpicklesNot()


def test_an_unpicklable_argument_is_named_and_the_worker_goes_on(call: Call) -> None:
    for bad in (Unpicklable(), threading.Lock(), [threading.Lock()], (x for x in ()), sys):
        with pytest.raises(PayloadError, match="echo"):
            call(echo, bad)
    assert call(echo, 1) == 1


def test_a_lambda_or_inner_function_is_refused_with_advice(call: Call) -> None:
    def inner() -> None: ...

    for function in (lambda: 1, inner):
        with pytest.raises(PayloadError, match="module level"):
            call(function)
    with pytest.raises(PayloadError):
        call(echo, lambda: 1)
    assert call(echo, 1) == 1


def test_an_unpicklable_result_is_an_error_for_the_caller(call: Call) -> None:
    for function in (make_unpicklable, make_lock):
        with pytest.raises(PayloadError, match="result"):
            call(function)
    assert call(echo, 1) == 1


def test_what_cannot_be_rebuilt_is_an_error_for_the_caller(call: Call) -> None:
    with pytest.raises((PayloadError, ValueError), match="cannot be rebuilt"):
        call(echo, UnpicklesNot())
    with pytest.raises((PayloadError, ValueError), match="cannot be rebuilt"):
        call(make_one_that_unpickles_not)
    assert call(echo, 1) == 1


def test_what_cannot_be_sent_does_not_stay_alive(pair: list[Agent]) -> None:
    tensor = torch.zeros(10)
    gone = weakref.ref(tensor)
    with pytest.raises(PayloadError):
        pair[0].call_sync("worker1", echo, ([tensor, threading.Lock()],), {}, 20.0)
    del tensor
    eventually(lambda: gc.collect() >= 0 and gone() is None, "the tensor's end")


# -- errors


class Custom(Exception):
    pass


class WithState(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class NeedsMore(Exception):
    """Pickles, and cannot be rebuilt from its args: a common mistake."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def fail(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


def fail_with_cause() -> None:
    try:
        raise KeyError("first")
    except KeyError as exc:
        raise ValueError("second") from exc


def fail_with_a_class_of_its_own() -> None:
    class Inner(Exception):
        pass

    raise Inner("from inside")


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (ValueError, ("wrong",)),
        (KeyError, ("k",)),
        (RuntimeError, ("☃",)),
        (StopIteration, (3,)),
        (OSError, ("plain",)),
        (PermissionError, (13, "not yours", "f")),
        (FileNotFoundError, (2, "gone")),
        (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "bad")),
        (torch.OutOfMemoryError, ("oom",)),
        (Custom, ("mine", 3)),
        (WithState, (5, "detail")),
        (rpc.WorkerLost, ("elsewhere", "said so")),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_an_exception_arrives_as_its_own_class_with_its_traceback(
    call: Call, kind: type[Exception], args: tuple[Any, ...]
) -> None:
    with pytest.raises(kind) as caught:
        call(fail, kind, *args)
    error: Any = caught.value
    assert type(error) is kind
    assert error.args == kind(*args).args
    assert vars(error).get("code") == vars(kind(*args)).get("code")
    assert error.remote_worker in ("worker0", "worker1")
    assert "in fail\n" in error.remote_traceback
    assert "raise kind(*args)" in error.remote_traceback
    assert isinstance(error.__cause__, RemoteTraceback)
    assert error.remote_traceback in str(error.__cause__)


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        (NeedsMore, (1, 2), "1 and 2"),
        (HoldsALock, (), "holds a lock"),
        (SystemExit, (3,), "3"),
        (KeyboardInterrupt, (), ""),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_an_exception_that_cannot_be_rebuilt_arrives_as_remote_error(
    call: Call, kind: type[BaseException], args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        call(fail, kind, *args)
    error = caught.value
    assert error.type_name == kind.__name__
    assert error.worker in ("worker0", "worker1")
    assert message in str(error)
    assert "in fail\n" in error.remote_traceback  # type: ignore[attr-defined]
    assert call(echo, 1) == 1


def test_an_exception_class_that_is_not_importable_arrives_as_remote_error(call: Call) -> None:
    with pytest.raises(RemoteError, match="from inside"):
        call(fail_with_a_class_of_its_own)


def test_the_remote_traceback_shows_the_chain(call: Call) -> None:
    with pytest.raises(ValueError, match="second") as caught:
        call(fail_with_cause)
    assert "KeyError: 'first'" in caught.value.remote_traceback  # type: ignore[attr-defined]


def test_an_error_of_a_torch_operator(call: Call) -> None:
    with pytest.raises(RuntimeError, match="size"):
        call(torch.add, torch.zeros(2), torch.zeros(3))


def test_wrong_arguments_are_a_type_error(call: Call) -> None:
    with pytest.raises(TypeError, match="argument"):
        call(echo)


def fail_through(to: str) -> None:
    rpc.rpc_sync(to, fail, args=(Custom, "deep"))


def test_an_error_through_two_workers_names_where_it_was_raised(pair: list[Agent]) -> None:
    with pytest.raises(Custom) as caught:
        pair[0].call_sync("worker1", fail_through, ("worker0",), {}, 20.0)
    error: Any = caught.value
    assert error.remote_worker in ("worker0", "worker1")
    assert "in fail\n" in error.remote_traceback
    assert "in fail_through\n" in error.remote_traceback


def test_a_caught_error_can_be_pickled_and_raised_again(pair: list[Agent]) -> None:
    with pytest.raises(Custom) as caught:
        pair[0].call_sync("worker1", fail, (Custom, "once"), {}, 20.0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is Custom
    assert again.args == ("once",)


# -- what only the caller has


def define_here(name: str) -> None:
    """Make a function, and a class, that exist in this process only."""
    module = sys.modules[__name__]
    exec(compile(f"def {name}(): return 1\nclass {name}Class: pass", __file__, "exec"), vars(module))


def call_what_only_we_have(name: str) -> str:
    define_here(name)
    messages = []
    for function, args in ((globals()[name], ()), (echo, (globals()[name + "Class"](),))):
        with pytest.raises((rpc.RpcError, AttributeError)) as caught:
            rpc.rpc_sync("worker1", function, args=args)
        messages.append(str(caught.value))
    assert rpc.rpc_sync("worker1", echo, args=(1,)) == 1
    return "\n".join(messages)


def return_what_only_we_have(name: str) -> Any:
    define_here(name)
    return globals()[name + "Class"]()


def get_what_only_they_have(name: str) -> None:
    with pytest.raises((rpc.RpcError, AttributeError), match=name):
        rpc.rpc_sync("worker1", return_what_only_we_have, args=(name,))
    assert rpc.rpc_sync("worker1", echo, args=(1,)) == 1


def test_a_function_that_the_callee_does_not_have(workers: Callable[..., Group]) -> None:
    group = workers(2)
    message = group[0].run(call_what_only_we_have, "only_on_the_caller")
    assert "only_on_the_caller" in message
    assert "importable" in message
    group[0].run(get_what_only_they_have, "only_on_the_callee")
