"""Streams of frames, changed here and there and cut anywhere: frames come out, or ProtocolError."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from farstep.errors import ProtocolError
from farstep.rpc.wire import Frame, FrameReader, Kind, frame_bytes
from fuzz.mutate import check_brief, mutated

NAME = "frames"
INPUTS_PER_CASE = 20
SHARE = 0.3
MAX_FRAME_BYTES = 1 << 20

_frames = st.tuples(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=60) | st.integers(0, 70_000).map(bytes),
    st.lists(st.binary(max_size=20) | st.sampled_from([bytes(33_000), bytes(100)]), max_size=4),
    st.integers(0, 2**16 - 1),
)
strategy = st.tuples(st.lists(_frames, min_size=1, max_size=4), st.integers(0, 2**32))


def check(case: tuple[list[tuple[Kind, int, bytes, list[bytes], int]], int]) -> None:
    frames, seed = case
    rng = random.Random(seed)
    stream = b"".join(
        frame_bytes(kind, call_id, meta, [len(b) for b in buffers], depth=depth) + b"".join(buffers)
        for kind, call_id, meta, buffers, depth in frames
    )
    assert [frame.meta for frame in read(stream, rng)] == [meta for _, _, meta, _, _ in frames]
    for _ in range(INPUTS_PER_CASE):
        try:
            received = read(mutated(stream, rng), rng)
        except ProtocolError as exc:
            check_brief(exc)
            continue
        assert all(frame.size <= MAX_FRAME_BYTES + (9 << 20) for frame in received)


def read(stream: bytes, rng: random.Random) -> list[Frame]:
    """All frames of a stream that comes in pieces, with pauses, and ends."""
    left = memoryview(stream)
    pieces = rng.choice(((1, 7, 40), (100, 3000), (70_000, 300_000)))

    def recv_into(view: memoryview) -> int | None:
        nonlocal left
        if rng.random() < 0.1:
            return None
        count = min(len(left), len(view), rng.choice(pieces))
        view[:count] = left[:count]
        left = left[count:]
        return count

    reader = FrameReader(recv_into, MAX_FRAME_BYTES)
    frames: list[Frame] = []
    while True:
        try:
            frames += reader.read()
        except EOFError:
            return frames
