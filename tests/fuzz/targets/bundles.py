"""Bundles with something in them that has no place there: messages come out, or ProtocolError."""

from __future__ import annotations

import pickle
import random
from typing import Any

from hypothesis import strategies as st

from farstep.errors import ProtocolError
from farstep.rpc.bundle import unbundle
from farstep.rpc.schema import ATOMS
from farstep.rpc.wire import Frame, Kind
from fuzz.mutate import check_brief, mutated, odd_value, odd_values, replaced

NAME = "bundles"
INPUTS_PER_CASE = 30

_RIDERS: list[Any] = [
    (int(Kind.CALL), 5, 1, ("operator", "add"), ([1, "x", None], None)),
    (int(Kind.CALL), 6, 1, None, b"a pickle"),
    (int(Kind.CALL), 7, 1, ("operator", "add"), ([], {"a": 1})),
    (int(Kind.REPLY), 8, 1, None, ([5], None)),
    (int(Kind.REPLY), 9, 1, None, b"a pickle"),
    (int(Kind.ERROR), 10, 1, ("E", "text", "worker", "trace"), ([], None)),
]
strategy = st.tuples(odd_values, st.integers(0, 2**32))


def check(case: tuple[Any, int]) -> None:
    value, seed = case
    rng = random.Random(seed)
    for number in range(INPUTS_PER_CASE):
        riders: Any = rng.sample(_RIDERS, rng.randrange(1, len(_RIDERS)))
        for _ in range(rng.choice((0, 1, 1, 2))):
            riders = replaced(riders, rng, odd_value(rng, value))
        meta = pickle.dumps(riders, 5)
        open_trust = number % 2 == 0
        if not open_trust and rng.random() < 0.5:  # Python's own unpickler would do what the bytes say
            meta = mutated(meta, rng)
        frame = Frame(Kind.BUNDLE, 0, 0, 0)
        frame.meta = meta
        try:
            received = unbundle(frame, open_trust)
        except ProtocolError as exc:
            check_brief(exc)
            continue
        for kind, call_id, depth, head, body in received:
            assert kind in (Kind.CALL, Kind.REPLY, Kind.ERROR)
            assert 0 <= call_id < 1 << 64 and 0 <= depth < 1 << 16  # noqa: PT018
            assert head is None or all(type(part) is str for part in head)
            assert type(body) is bytes or all(type(part) in ATOMS for part in body[0])
