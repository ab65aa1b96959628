"""A store writer: can write whatever they like into the rendezvous store. They can keep a group from starting, with an error that says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from farstep.errors import (
    AuthenticationError,
    DuplicateName,
    InitTimeout,
    ProtocolError,
    RpcError,
    UnknownWorker,
)
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.group import join_group
from security.attackers import PATIENCE_S, InBetween, call, card, increment, tcp_options

Change = Callable[[bytes], bytes]


class WrittenStore:
    """A store in which somebody else has written: who reads one of these keys gets what `changes` makes of its value."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.changes: dict[str, Change] = {}

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        return self.changes[key](value) if key in self.changes else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def come_together(
    store: Any, count: int, options: Callable[[int], RpcOptions]
) -> tuple[list[Agent], list[BaseException]]:
    agents: list[Agent] = []
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            agents.append(join_group(store, f"worker{rank}", rank, count, options(rank)))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return sorted(agents, key=lambda agent: agent.info.id), errors


def changed(**fields: Any) -> Change:
    return lambda value: json.dumps({**json.loads(value), **fields}).encode()


@pytest.mark.parametrize("transport", ["tcp", "unix"])
@pytest.mark.parametrize(
    "fields",
    [
        {"certificate": "0" * 64},
        {"incarnation": "another"},
        {"name": "mallory"},
        {"host": "elsewhere"},
        {"id": 0},
        {"tcp": ["127.0.0.1", 9]},
        {"unix": "/nonexistent/socket"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_changed_card_is_refused_with_an_error(transport: str, fields: dict[str, Any]) -> None:
    store = WrittenStore()
    store.changes["worker/1"] = changed(**fields)
    options = tcp_options(transport=transport, init_timeout_s=3)
    agents, errors = come_together(store, 2, lambda rank: options)
    for agent in agents:
        agent.close()
    assert not agents
    assert errors
    assert all(isinstance(error, RpcError) for error in errors), errors


def test_an_address_that_leads_through_somebody_else_is_refused() -> None:
    """They pass the bytes on, TLS and all, and read nothing; the address in the card is still not the one that answered."""
    store = WrittenStore()
    relays: list[InBetween] = []

    def lead_astray(value: bytes) -> bytes:
        real = json.loads(value)
        relays.append(InBetween(tuple(real["tcp"])))
        return json.dumps({**real, "tcp": relays[-1].address}).encode()

    store.changes = {"worker/0": lead_astray, "worker/1": lead_astray}
    agents, errors = come_together(store, 2, lambda rank: tcp_options(init_timeout_s=5))
    for relay in relays:
        relay.close()
    assert not agents
    assert any(isinstance(error, AuthenticationError) for error in errors), errors
    assert all(isinstance(error, RpcError) for error in errors)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a": ' * 3000,
        b"9" * 8000,
        json.dumps(card(name="worker1", id=1, tcp="x")).encode(),
        b"x" * (4 << 20),
    ],
    ids=["empty", "text", "bytes", "deep", "deep objects", "a long number", "a wrong address", "4 MiB"],
)
def test_a_card_that_is_none_is_an_error_that_says_where_it_came_from(value: bytes) -> None:
    store = WrittenStore()
    store.changes["worker/1"] = lambda _: value
    agents, errors = come_together(store, 2, lambda rank: tcp_options(init_timeout_s=3))
    assert not agents
    assert any(isinstance(e, ProtocolError) and "card" in str(e) for e in errors), errors
    assert all(len(str(error)) < 3000 for error in errors)


def test_a_word_of_failure_is_told_as_it_is_and_bounded() -> None:
    store = dist.HashStore()
    store.set("failed", "x" * 1_000_000)
    with pytest.raises(RpcError) as caught:
        join_group(store, "worker0", 0, 2, tcp_options(init_timeout_s=3))
    assert len(str(caught.value)) < 5000


# -- groups that workers join and leave


@pytest.fixture(params=["hash", "tcp"])
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[Agent]]]:
    store: Any = dist.HashStore()
    if request.param == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [
        join_group(store, f"worker{rank}", rank, None, tcp_options(init_timeout_s=10)) for rank in range(2)
    ]
    yield store, agents
    for agent in agents:
        agent.close()


def test_a_list_of_members_that_are_not_there_does_not_hold_a_call(opened: tuple[Any, list[Agent]]) -> None:
    store, (one, other) = opened
    store.add("members", 100_000)
    with pytest.raises(UnknownWorker, match="nobody"):  # it would take a day
        one.call_sync("nobody", increment, (1,), {}, 2.0)
    assert call(one, "worker1") == call(other, "worker0") == 2
    newcomer = join_group(store, "worker2", 2, None, tcp_options(init_timeout_s=10))
    try:
        assert call(newcomer, "worker0") == 2
        assert call(one, "worker2") == 2  # it introduced itself
    finally:
        newcomer.close()


@pytest.mark.parametrize("value", [b"many", b"", b"9" * 30, b"-5"])
def test_a_count_of_members_that_is_no_number(opened: tuple[Any, list[Agent]], value: bytes) -> None:
    store, (one, other) = opened
    store.set("members", value)
    with pytest.raises(RpcError, match=r"rendezvous store|could not find"):
        one.call_sync("nobody", increment, (1,), {}, 2.0)
    assert call(one, "worker1") == call(other, "worker0") == 2


@pytest.mark.parametrize("value", [b"x", b"[" * 100_000, json.dumps(card(id=-1)).encode()])
def test_cards_in_the_list_that_are_none(opened: tuple[Any, list[Agent]], value: bytes) -> None:
    store, (one, other) = opened
    for _ in range(5):
        store.set(f"card/{store.add('members', 1)}", value)
    with pytest.raises(UnknownWorker):
        one.call_sync("nobody", increment, (1,), {}, 5.0)
    assert call(one, "worker1") == call(other, "worker0") == 2
    newcomer = join_group(store, "worker2", 2, None, tcp_options(init_timeout_s=10))
    assert call(newcomer, "worker1") == 2
    newcomer.close()


def test_a_forged_card_of_a_worker_that_is_there_changes_nothing_for_those_who_know_it(
    opened: tuple[Any, list[Agent]],
) -> None:
    store, (one, other) = opened
    forged = {**other.links.me.card.to_json(), "tcp": ["127.0.0.1", 9], "certificate": "0" * 64}
    store.set(f"card/{store.add('members', 1)}", json.dumps(forged))
    with pytest.raises(UnknownWorker):
        one.call_sync("nobody", increment, (1,), {}, 5.0)
    assert call(one, "worker1") == call(other, "worker0") == 2


def test_a_name_can_be_kept_from_a_worker_and_that_is_an_error(opened: tuple[Any, list[Agent]]) -> None:
    store, _ = opened
    store.set("name/worker2", "somebody else's")
    with pytest.raises(DuplicateName, match="worker2"):
        join_group(store, "worker2", 2, None, tcp_options(init_timeout_s=3))


def test_a_store_that_says_all_is_ready_does_not_make_a_worker_go_on_without_the_others() -> None:
    store = dist.HashStore()
    for key in ("all-ready", "all-collected"):
        store.set(key, "1")
    with pytest.raises(InitTimeout, match="missing: rank 1"):
        join_group(store, "worker0", 0, 2, tcp_options(init_timeout_s=1))
