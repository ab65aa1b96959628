"""Any bytes in, in any pieces: messages or an error; never a crash, a hang, or memory for what is not there."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farstep.errors import ProtocolError
from farstep.rpc.bundle import MAX_RIDERS, Rider, bundle, unbundle, weight
from farstep.rpc.memory import bytes_of
from farstep.rpc.payload import pack
from farstep.rpc.schema import MAX_CALL_DEPTH
from farstep.rpc.wire import (
    HEADER,
    MAGIC,
    OWN_MEMORY_BYTES,
    RECEIVE_BYTES,
    VERSION,
    Frame,
    FrameReader,
    Kind,
    frame_bytes,
)

MAX_FRAME_BYTES = 1 << 20
SIZES = [
    0,
    1,
    7,
    8,
    24,
    100,
    OWN_MEMORY_BYTES - 1,
    OWN_MEMORY_BYTES,
    OWN_MEMORY_BYTES + 1,
    RECEIVE_BYTES - 24,
    RECEIVE_BYTES,
]

usual = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
pieces = st.lists(
    st.sampled_from([0, 1, 2, 3, 7, 23, 24, 25, 100, 4096, 32768, 70_000, 300_000]), min_size=1, max_size=8
).filter(any)
"""How many bytes each read gives, in turn; 0 stands for a read that would block."""


class Stream:
    """A stream that hands out its bytes in given pieces, and fails the test if it is read for ever."""

    def __init__(self, data: bytes, counts: Iterable[int]) -> None:
        self._data = memoryview(data)
        self._counts = list(counts)
        self._turn = 0
        self.at_end = False

    def recv_into(self, view: memoryview) -> int | None:
        assert len(view), "asked for no bytes: that looks like the end of the stream"
        assert not self.at_end, "read on after the end"
        count = self._counts[self._turn % len(self._counts)]
        self._turn += 1
        if count == 0:
            return None
        count = min(count, len(view), len(self._data))
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        self.at_end = count == 0
        return count


def read_all(
    data: bytes, counts: Iterable[int], *, limit: int = MAX_FRAME_BYTES, drain: bool = False
) -> tuple[list[Frame], Exception]:
    stream = Stream(data, counts)
    reader = FrameReader(stream.recv_into, limit, SimpleNamespace(has_more=True) if drain else None)
    frames: list[Frame] = []
    for _ in range(len(data) * 10 + 100):
        try:
            frames += reader.read()
        except (ProtocolError, EOFError) as exc:
            return frames, exc
        stream.at_end = False  # the reader handed frames out before it said that the stream has ended
    raise AssertionError("the reader does not get on")


def raw(buffer: object) -> bytes:
    return bytes(bytes_of(buffer)) if isinstance(buffer, torch.Tensor) else bytes(buffer)  # type: ignore[call-overload]


def content(seed: int, size: int) -> bytes:
    return (seed.to_bytes(3, "little") * (size // 3 + 1))[:size]


sent_frame = st.tuples(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
    st.sampled_from(SIZES),
    st.lists(st.sampled_from(SIZES), max_size=4),
)


@settings(usual, max_examples=50)
@given(st.lists(sent_frame, max_size=5), pieces, st.booleans())
def test_frames_come_out_as_they_went_in(
    sent: list[tuple[Kind, int, int, int, list[int]]], counts: list[int], drain: bool
) -> None:
    data = b""
    for kind, call_id, depth, meta_size, sizes in sent:
        data += frame_bytes(kind, call_id, content(1, meta_size), sizes, depth=depth)
        data += b"".join(content(i + 2, size) for i, size in enumerate(sizes))
    frames, end = read_all(data, counts, drain=drain, limit=1 << 30)
    assert isinstance(end, EOFError)
    assert "inside" not in str(end)
    assert len(frames) == len(sent)
    for frame, (kind, call_id, depth, meta_size, sizes) in zip(frames, sent, strict=True):
        assert (frame.kind, frame.call_id, frame.depth) == (kind, call_id, depth)
        assert bytes(frame.meta) == content(1, meta_size)
        assert [raw(b) for b in frame.buffers] == [content(i + 2, size) for i, size in enumerate(sizes)]


@usual
@given(st.binary(max_size=400), pieces, st.booleans())
def test_any_bytes_are_an_error_or_frames(data: bytes, counts: list[int], drain: bool) -> None:
    read_all(data, counts, drain=drain)


headers = st.builds(
    HEADER.pack,
    st.just(MAGIC) | st.integers(0, 2**16 - 1),
    st.just(VERSION) | st.integers(0, 255),
    st.sampled_from([int(k) for k in Kind]) | st.integers(0, 255),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 300) | st.integers(0, 2**32 - 1),
    st.integers(0, 4) | st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)
lengths = st.lists(st.integers(0, 100) | st.integers(0, 2**64 - 1), max_size=4).map(
    lambda n: struct.pack(f"<{len(n)}Q", *n)
)


@settings(usual, max_examples=400)
@given(st.lists(st.tuples(headers, lengths, st.binary(max_size=300)), max_size=4), pieces, st.booleans())
def test_bytes_that_look_like_frames_are_an_error_or_frames(
    parts: list[tuple[bytes, bytes, bytes]], counts: list[int], drain: bool
) -> None:
    frames, _ = read_all(b"".join(b"".join(p) for p in parts), counts, drain=drain)
    for frame in frames:
        assert len(frame.meta) + sum(len(raw(b)) for b in frame.buffers) <= MAX_FRAME_BYTES


@usual
@given(st.sampled_from(SIZES), st.lists(st.sampled_from(SIZES), max_size=3), pieces, st.data())
def test_a_stream_that_ends_inside_a_frame_says_so(
    meta_size: int, sizes: list[int], counts: list[int], data: st.DataObject
) -> None:
    whole = frame_bytes(Kind.CALL, 7, content(1, meta_size), sizes) + b"".join(
        content(2, size) for size in sizes
    )
    cut = data.draw(st.integers(1, len(whole) - 1))
    frames, end = read_all(whole + whole[:cut], counts, limit=1 << 30)
    assert len(frames) == 1
    assert isinstance(end, EOFError)
    assert "inside a frame" in str(end)


@pytest.mark.parametrize("lengths", [[1 << 40], [1 << 20] * 1000, [2**64 - 1], [1 << 63, 1 << 63]])
def test_a_frame_beyond_the_limit_is_refused_before_memory_is_taken(lengths: list[int]) -> None:
    head = frame_bytes(Kind.CALL, 1, b"", lengths)
    tracemalloc.start()
    try:
        frames, end = read_all(head, [24, 100_000], limit=16 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert frames == []
    assert isinstance(end, ProtocolError)
    assert str(sum(lengths)) in str(end)
    assert peak < 4 << 20


def test_meta_counts_towards_the_limit() -> None:
    head = HEADER.pack(MAGIC, VERSION, Kind.CALL, 0, 0, 2**32 - 1, 0, 1)
    _, end = read_all(head, [100])
    assert isinstance(end, ProtocolError)


@pytest.mark.parametrize("count", [(1 << 20) + 1, 1 << 21, 2**32 - 1])
def test_a_frame_that_claims_absurdly_many_buffers_is_refused(count: int) -> None:
    _, end = read_all(HEADER.pack(MAGIC, VERSION, Kind.CALL, 0, 0, 0, count, 1), [100])
    assert isinstance(end, ProtocolError)
    assert str(count) in str(end)


def test_a_frame_of_another_version_says_which() -> None:
    _, end = read_all(HEADER.pack(MAGIC, VERSION + 1, Kind.CALL, 0, 0, 0, 0, 1), [100])
    assert isinstance(end, ProtocolError)
    assert f"version {VERSION + 1}" in str(end)


def test_large_buffers_arrive_in_memory_that_a_tensor_can_own() -> None:
    size = 5 << 20
    data = frame_bytes(Kind.REPLY, 1, b"meta", [size]) + content(9, size)
    frames, _ = read_all(data, [65_536], limit=1 << 30)
    (buffer,) = frames[0].buffers
    assert isinstance(buffer, torch.Tensor)
    buffer.add_(1)  # it is writable


# -- bundles


atoms: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**700), 2**700)
    | st.floats(allow_nan=False)
    | st.text(max_size=50)
    | st.binary(max_size=50)
)
bodies = st.one_of(
    st.binary(max_size=300),
    st.tuples(
        st.lists(atoms, max_size=4), st.none() | st.dictionaries(st.text(max_size=9), atoms, max_size=3)
    ),
)
names = st.tuples(st.text(max_size=40), st.text(max_size=40))
texts = st.tuples(*[st.text()] * 4)
heads = st.none() | names | texts
numbers_beside = st.integers(0, 2**64 - 1), st.integers(1, MAX_CALL_DEPTH + 1)
riders = st.one_of(
    st.tuples(st.just(int(Kind.CALL)), *numbers_beside, names, bodies),
    st.tuples(st.just(int(Kind.CALL)), *numbers_beside, st.none(), st.binary(max_size=300)),
    st.tuples(st.just(int(Kind.REPLY)), *numbers_beside, st.none(), bodies),
    st.tuples(st.just(int(Kind.ERROR)), *numbers_beside, texts, bodies),
)


def a_bundle(meta: bytes) -> Frame:
    ((frame,), _) = read_all(frame_bytes(Kind.BUNDLE, 0, meta), [70_000])
    return frame


@usual
@given(
    st.lists(riders, max_size=3 * MAX_RIDERS),
    st.sampled_from([0, 1000, 5000, 1 << 20]),
    st.booleans(),
    pieces,
)
def test_riders_come_out_of_bundles_as_they_went_in(
    sent: list[Rider], limit: int, open_trust: bool, counts: list[int]
) -> None:
    parts = bundle(sent, limit)
    frames, end = read_all(b"".join(parts), counts)
    assert isinstance(end, EOFError)
    assert {frame.kind for frame in frames} <= {Kind.BUNDLE}
    together = [unbundle(frame, open_trust) for frame in frames]
    assert all(len(frame.meta) <= limit or len(m) == 1 for frame, m in zip(frames, together, strict=True))
    assert [rider for some in together for rider in some] == sent


@usual
@given(riders)
def test_a_rider_takes_no_more_bytes_than_it_weighs(rider: Rider) -> None:
    ((frame,), _) = read_all(b"".join(bundle([rider], 0)), [70_000])
    assert len(frame.meta) <= weight(rider[3], rider[4])


class Lazy:
    def __reduce__(self) -> Any:
        raise AssertionError("pickled to be weighed")


@pytest.mark.parametrize(
    "value", [1j, torch.float32, Lazy(), [], (1,)], ids=["complex", "dtype", "object", "list", "tuple"]
)
def test_what_is_not_plain_is_too_heavy_to_ride(value: Any) -> None:
    assert weight(None, ([1, value], None)) > 1 << 40
    assert weight(None, ([], {"a": value})) > 1 << 40
    assert weight(("a", value), ([], None)) > 1 << 40


def test_what_rides_is_not_what_the_caller_may_still_change() -> None:
    kwargs = {"a": 1}
    body = pack((1, "x"), kwargs).body
    kwargs["a"] = 2
    assert body == ([1, "x"], {"a": 1})


@settings(usual, max_examples=400)
@given(st.binary(max_size=100))
def test_any_bytes_in_a_bundle_are_an_error_or_messages(data: bytes) -> None:
    for meta in (data, b"\x80\x05" + data + b"."):
        try:
            unbundle(a_bundle(meta), False)
        except ProtocolError:
            pass


numbers = (
    st.integers() | st.just(float("nan")) | st.none() | st.text(max_size=2) | st.lists(st.none(), max_size=1)
)


@settings(usual, max_examples=400)
@given(
    st.lists(
        st.tuples(st.sampled_from([int(k) for k in Kind]) | numbers, numbers, numbers, heads, bodies)
        | atoms
        | st.lists(atoms, max_size=6)
        | st.lists(atoms, max_size=6).map(tuple),
        max_size=4,
    )
    | atoms
    | st.tuples(riders)
)
def test_what_looks_like_a_bundle_is_an_error_or_messages(content: Any) -> None:
    try:
        received = unbundle(a_bundle(pickle.dumps(content, 5)), True)
    except ProtocolError:
        return
    for kind, call_id, depth, _, _ in received:
        assert kind in (Kind.CALL, Kind.REPLY, Kind.ERROR)
        frame_bytes(kind, call_id, b"", depth=depth)  # it can be answered


@pytest.mark.parametrize("kind", [k for k in Kind if k not in (Kind.CALL, Kind.REPLY, Kind.ERROR)], ids=str)
def test_other_kinds_do_not_ride(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=f"kind {int(kind)}"):
        unbundle(a_bundle(pickle.dumps([(int(kind), 1, 0, None, ([], None))])), True)


def test_a_bundle_holds_messages_only_and_not_too_many() -> None:
    rider = (int(Kind.CALL), 1, 0, None, ([], None))
    with pytest.raises(ProtocolError, match="too long"):
        unbundle(a_bundle(pickle.dumps([rider] * (MAX_RIDERS + 1))), True)
    ((with_buffer,), _) = read_all(frame_bytes(Kind.BUNDLE, 0, pickle.dumps([rider]), [3]) + b"abc", [100])
    with pytest.raises(ProtocolError):
        unbundle(with_buffer, True)
