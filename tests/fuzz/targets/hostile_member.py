"""A member of a group sends frames that were whole over its own connection. The worker it sends them to, and a third one, go on."""

from __future__ import annotations

import contextlib
import pickle
import random
from typing import Any

from hypothesis import strategies as st

from farstep import rpc
from farstep.errors import RpcError
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.bundle import bundle
from farstep.rpc.wire import Kind, frame_bytes
from fuzz.mutate import mutated, odd_value, odd_values, replaced
from fuzz.targets.messages import MESSAGES, PATIENCE_S, len_of

NAME = "hostile_member"
INPUTS_PER_CASE = 5
SHARE = 0.01

strategy = st.tuples(odd_values, st.integers(0, 2**32))


class _Trio:
    def __init__(self, trusted: tuple[str, ...]) -> None:
        self._trusted = trusted
        self._stack = contextlib.ExitStack()
        self.agents: list[Agent] = []

    def begin(self) -> list[Agent]:
        """Three workers, each with connections to the others."""
        if not self.agents or not self._is_whole():
            self._stack.close()
            self.agents = self._stack.enter_context(rpc.local_agents(3, RpcOptions(trusted=self._trusted)))
            for agent in self.agents:
                for other in self.agents:
                    call(agent, other.info.name)
        return self.agents

    def _is_whole(self) -> bool:
        return all(len(agent.get_worker_infos()) == 3 for agent in self.agents)

    def close(self) -> None:
        self._stack.close()


def call(agent: Agent, to: str) -> None:
    assert agent.call_sync(to, len_of, ("abc",), {}, PATIENCE_S) == 3


_TRIO = _Trio(("fuzz.targets.messages", "operator"))
stop = _TRIO.close


def check(case: tuple[Any, int]) -> None:
    value, seed = case
    rng = random.Random(seed)
    victim, witness, liar = _TRIO.begin()
    connection = liar.peer("worker0").sender
    assert connection is not None
    for _ in range(INPUTS_PER_CASE):
        with contextlib.suppress(OSError):  # it has been hung up on
            connection.sock.sendall(_frame(value, rng))
    with contextlib.suppress(RpcError):  # it is lost, or the frame that it began waits for its end
        liar.call_sync("worker0", len_of, ("abc",), {}, 0.2)
    call(victim, "worker1")
    call(witness, "worker0")
    assert {info.name for info in victim.get_worker_infos()} >= {"worker0", "worker1"}
    assert {info.name for info in witness.get_worker_infos()} >= {"worker0", "worker1"}
    _TRIO.agents = [] if rng.random() < 0.02 else _TRIO.agents


def _frame(value: Any, rng: random.Random) -> bytes:
    kind, meta = rng.choice(MESSAGES)
    content = meta
    if rng.random() < 0.5:
        content = replaced(meta, rng, odd_value(rng, value))
    buffers = [bytes(8)] * (len(content[3]) if type(content) is tuple and content == meta else 0)
    data = pickle.dumps(content, 5)
    number = (1 << 40) + rng.randrange(1000)
    frame = frame_bytes(kind, number, data, [len(b) for b in buffers], depth=1) + b"".join(buffers)
    if rng.random() < 0.2:
        frame = bundle([(int(Kind.CALL), number, 1, ("operator", "neg"), ([5], None))] * 3, 1 << 20)[0]
    return mutated(frame, rng) if rng.random() < 0.6 else frame
