"""Messages of every kind with something in every field that has no place there, for a real agent of a real peer.

They are handled or they are a ProtocolError, which would cost the peer its connection. Between them the two workers go on calling
each other.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from farstep import rpc
from farstep.errors import ProtocolError
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.inbox import _Arrivals
from farstep.rpc.message import read_message
from farstep.rpc.reactor import OWN
from farstep.rpc.wire import Frame, Kind
from fuzz.mutate import check_brief, mutated, odd_value, odd_values, replaced

NAME = "messages"
INPUTS_PER_CASE = 25
CASES_PER_GROUP = 200
PATIENCE_S = 20.0

_SETTINGS = ((1, 1), (1 << 48) + 1, False, False, "smart", 1)
_REPORT = (1, [5, "roots", ("wave", 1)], [(6, 0)], None, 1)
_TENSOR = ("float32", 0, (2,), None, None, 8, None)
_NOTE = (0, "worker0", (0, 1), None, 1, True)
_CALL = ("operator", "add")
_NOTHING: Any = ([], None)
MESSAGES: list[tuple[Kind, Any]] = [
    (Kind.CALL, (_CALL, ([1, 2], None), (), (), (), None)),
    (Kind.CALL, (_CALL, ([None], {"b": 2}), [0], [_TENSOR], (), None)),
    (Kind.CALL, (None, pickle.dumps((None, (1,), None), 5), (), (), [_NOTE], None)),
    (Kind.CALL, (_CALL, ([None], None), [0], [_TENSOR], (), ((0,), ((1 << 48) + 1, 5, True)))),
    (Kind.REMOTE, ((_CALL, (1, 9), (1, 10)), ([1, 2], None), (), (), (), None)),
    (Kind.REPLY, (None, ([5], None), (), (), (), None)),
    (Kind.REPLY, (None, ([None], None), [0], [_TENSOR], (), ((0,), ((1 << 48) + 1, 5, True)))),
    (Kind.ERROR, (("E", "text", "worker1", "trace"), _NOTHING, (), (), (), None)),
    (Kind.FETCH, ((1, 9), _NOTHING, (), (), (), None)),
    (Kind.RREF, (("add", [((0, 1), (1, 2), 1)]), _NOTHING, (), (), (), None)),
    (Kind.RREF, (("confirm", [((0, 1), (1, 2), 1)]), _NOTHING, (), (), (), None)),
    (Kind.RREF, (("delete", [((0, 1), (1, 2))]), _NOTHING, (), (), (), None)),
    (Kind.RREF, (("check", (1, [((0, 1), (1, 2))])), _NOTHING, (), (), (), None)),
    (Kind.RELEASE, (([1, 2], [3]), _NOTHING, (), (), (), None)),
    (Kind.GATHER, (("user/*", 0, "worker1", ["worker0", "worker1"], 0.01), ([5], None), (), (), (), None)),
    (Kind.LOST, (("worker9", "incarnation", "why"), _NOTHING, (), (), (), None)),
    (Kind.GOODBYE, (None, _NOTHING, (), (), (), None)),
    *(
        (Kind.EXTENSION, (head, _NOTHING, (), (), (), None))
        for head in (
            ("release", (1 << 48) + 1),
            ("joined", (1 << 48) + 1),
            ("grad", *_SETTINGS, [(5, [True, False])], False, _REPORT),
            ("wave", *_SETTINGS, ("mark", 1, 2), [5]),
            ("settle", *_SETTINGS, ("settle", 1), None),
            ("report", *_SETTINGS, _REPORT, ("BackwardError", ("worker1", 1, "text", "trace"))),
            ("abort", *_SETTINGS),
        )
    ),
]
"""One of each, as they should be."""

strategy = st.tuples(st.integers(0, len(MESSAGES) - 1), odd_values, st.integers(0, 2**32))


class Pair:
    """Two workers of one process, which are made anew now and then: what strangers begin and never end adds up."""

    def __init__(self, trusted: tuple[str, ...] | None) -> None:
        self._trusted = trusted
        self._stack = contextlib.ExitStack()
        self._cases = 0
        self.agents: list[Agent] = []

    def begin(self) -> tuple[Agent, Agent]:
        if self._cases % CASES_PER_GROUP == 0:
            self._stack.close()
            self.agents = self._stack.enter_context(rpc.local_agents(2, RpcOptions(trusted=self._trusted)))
            self.call()
        self._cases += 1
        return self.agents[0], self.agents[1]

    def call(self) -> None:
        for one, other in ((0, "worker1"), (1, "worker0")):
            answer = self.agents[one].call_sync(other, len_of, ("abc",), {}, PATIENCE_S)
            assert answer == 3

    def close(self) -> None:
        self._stack.close()


def len_of(text: str) -> int:
    return len(text)


_PAIRS = (Pair(None), Pair((__name__, "operator")))


def stop() -> None:
    for pair in _PAIRS:
        pair.close()


def check(case: tuple[int, Any, int]) -> None:
    which, value, seed = case
    rng = random.Random(seed)
    pair = _PAIRS[seed % 2]
    victim, _ = pair.begin()
    peer = victim.peer("worker1")
    for _ in range(INPUTS_PER_CASE):
        kind, meta = MESSAGES[which] if rng.random() < 0.7 else rng.choice(MESSAGES)
        content: Any = meta
        for _ in range(rng.choice((1, 1, 2, 3))):
            content = replaced(content, rng, odd_value(rng, value))
        data = pickle.dumps(content, 5)
        if not victim.trust.is_open and rng.random() < 0.2:
            data = mutated(data, rng)
        frame = Frame(kind, (1 << 40) + rng.randrange(1000), rng.choice((0, 1, 5, 60_001, 65_535)), 0)
        frame.meta = data
        frame.buffers = [bytearray(8)] if content == meta and meta[3] else []
        _deliver(victim, peer, frame)
    pair.call()


def _deliver(victim: Agent, peer: Any, frame: Frame) -> None:
    arrivals = _Arrivals(victim)
    try:
        if (
            frame.kind == Kind.GOODBYE
        ):  # a peer may say it; then it is gone, and the rest of the target with it
            read_message(frame, peer, victim.trust.is_open)
        else:
            victim.inbox._dispatch(peer, None, [frame], arrivals)
    except ProtocolError as exc:
        check_brief(exc)
        return
    _run([job for _, _, job in arrivals.take_jobs()], victim)


def _run(jobs: list[Callable[[], None]], victim: Agent) -> None:
    done = threading.Event()
    victim.submit_all([(0, OWN, job) for job in (*jobs, done.set)])
    assert done.wait(PATIENCE_S)
