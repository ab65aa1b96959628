"""Who is in the group, where they listen, and how they find each other.

Every worker writes a card (its name, rank, addresses) into the rendezvous store and reads the others'. A group of
known size waits until all cards are there. A group that workers join and leave is a growing list of cards:
whoever joins reads the list and introduces itself to all on it, so nobody needs to watch the store.

The store is torch's own and holds no secrets. What it says is only parsed as JSON, and an address in it is
believed only once the peer there has passed the handshake.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlparse

from farstep.errors import DuplicateName, InitTimeout, ProtocolError, RpcError
from farstep.rpc.stores import FileStore, Store, TCPStore

__all__ = ["Card", "Roster", "WorkerInfo", "create_store", "host_key"]

_NAME: Final = re.compile(r"[A-Za-z0-9_:\-]+")
MAX_NAME_CHARS: Final = 128
LOOK_S: Final = 0.5
FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.02


class WorkerInfo:
    """A worker's name and rank. What torch calls `id` is the rank."""

    __slots__ = ("id", "name")
    name: str
    id: int

    def __init__(self, name: str, id: int) -> None:
        if not _NAME.fullmatch(name) or len(name) >= MAX_NAME_CHARS:
            raise RpcError(
                f"Worker name must match [A-Za-z0-9-_:]*, and must be non-empty and shorter than "
                f"{MAX_NAME_CHARS} chars, but got {name!r}"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "id", int(id))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"WorkerInfo is read-only: cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerInfo) and (self.id, self.name) == (other.id, other.name)

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self.name, self.id)


@dataclass(frozen=True)
class Card:
    """What a worker tells the others about itself. `incarnation` is new each time a worker starts."""

    name: str
    id: int
    incarnation: str
    host: str
    unix: str | None
    tcp: tuple[str, int] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> Card:
        try:
            tcp = raw["tcp"]
            return cls(
                name=WorkerInfo(str(raw["name"]), int(raw["id"])).name,
                id=int(raw["id"]),
                incarnation=str(raw["incarnation"]),
                host=str(raw["host"]),
                unix=None if raw["unix"] is None else str(raw["unix"]),
                tcp=None if tcp is None else (str(tcp[0]), int(tcp[1])),
            )
        except (KeyError, TypeError, ValueError, IndexError) as exc:
            raise ProtocolError(f"a worker's card is malformed: {exc!r}") from exc


def host_key() -> str:
    """Equal for two processes exactly when a unix socket of the one can be opened by the other."""
    parts = [str(os.getuid())]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [os.readlink(f"/proc/self/ns/{space}") for space in ("mnt", "net")]
    except OSError:  # no /proc: be on the safe side, and share a host with nobody but oneself
        parts.append(f"{os.getpid()}-{time.time_ns()}")
    return "/".join(parts)


def create_store(init_method: str, rank: int, world_size: int | None, timeout_s: float) -> Store:
    """The store that `init_method` names. Rank 0 serves it, where it needs a server."""
    url = urlparse(init_method)
    if url.scheme == "file" and url.path:
        return FileStore(url.path, world_size or -1)
    if url.scheme == "tcp" and url.hostname and url.port:
        host, port = url.hostname, url.port
    elif url.scheme == "env":
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as exc:
            raise ValueError(f"init method env:// needs the environment variable {exc.args[0]}") from None
    else:
        raise ValueError(f"init_method must be env://, tcp://host:port or file:///path, not {init_method!r}")
    serves = (
        rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )  # torchrun serves it itself
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store = TCPStore(
            host, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as exc:
        reason = str(exc).splitlines()[0]
        if serves:
            raise DuplicateName(
                f"rank 0 cannot serve the rendezvous at {host}:{port}, perhaps because another worker with rank 0, or "
                f"another job, does already ({reason})"
            ) from None
        raise InitTimeout(
            f"rank {rank} cannot reach the rendezvous at {host}:{port} within {timeout_s:g} s; rank 0 serves it, so see "
            f"that rank 0 has started and that this address is right ({reason})"
        ) from None
    store.set_timeout(timeout)
    return store


class Roster:
    """One worker's use of the store."""

    def __init__(self, store: Store, card: Card, world_size: int | None) -> None:
        self._store = store
        self._card = card
        self._world_size = world_size
        self._read = 0

    def join(self, timeout_s: float) -> list[Card]:
        """Announce this worker and return the cards of all (a group of known size) or of those before it."""
        if self._world_size:
            return self._meet(self._world_size, time.monotonic() + timeout_s)
        return self._enter(timeout_s)

    # -- a group of known size

    def _meet(self, world_size: int, deadline: float) -> list[Card]:
        me = self._card
        key = f"worker/{me.id}"
        claimed = self._store.compare_set(f"claim/{me.id}", "", me.incarnation).decode()
        if claimed != me.incarnation:
            raise DuplicateName(
                f"rank {me.id} is not unique: another worker has it already, {me.name!r} wants it too"
            )
        self._store.set(key, json.dumps(me.to_json()))
        keys = [f"worker/{rank}" for rank in range(world_size)]
        while True:
            try:
                self._wait(keys, min(deadline, time.monotonic() + LOOK_S))
                break
            except (RuntimeError, OSError):
                if time.monotonic() >= deadline:
                    raise InitTimeout(self._who_is_missing(keys)) from None
                self._check_failures(float("inf"), lambda: None)
        cards = [Card.from_json(json.loads(self._store.get(k))) for k in keys]
        # Rank 0 may serve the store: it stays until all have read it, also when it is about to raise.
        if self._store.add("collected", 1) == world_size:
            self._store.set("all-collected", "1")
        if me.id == 0:
            try:
                self._wait(["all-collected"], max(deadline, time.monotonic() + 1.0))
            except (RuntimeError, OSError):
                pass
        names = [c.name for c in cards]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            ranks = {n: [c.id for c in cards if c.name == n] for n in twice}
            raise DuplicateName(f"worker name {twice[0]!r} is not unique: ranks {ranks[twice[0]]} have it")
        return cards

    def settle(self, deadline: float, who_is_lost: Callable[[], str | None]) -> None:
        """In a group of known size, nobody goes on before everyone has got through to its neighbour."""
        if not self._world_size:
            return
        if self._store.add("ready", 1) == self._world_size:
            self._store.set("all-ready", "1")
        while True:
            try:
                self._wait(["all-ready"], min(deadline, time.monotonic() + LOOK_S))
                return
            except (RuntimeError, OSError):
                self._check_failures(deadline, who_is_lost)

    def _check_failures(self, deadline: float, who_is_lost: Callable[[], str | None]) -> None:
        try:
            failed = self._store.get("failed").decode() if self._store.check(["failed"]) else None
        except (RuntimeError, OSError):
            failed = "the rendezvous store, which rank 0 serves, is gone"
        failed = failed or who_is_lost()
        if failed:
            raise RpcError(f"worker {self._card.name!r} cannot finish init_rpc: {failed}")
        if time.monotonic() >= deadline:
            raise InitTimeout(
                f"worker {self._card.name!r} has met all the others, but not all of them got through to each other"
            )

    def fail(self, error: BaseException) -> None:
        """Tell the others of a group of known size why this worker does not come."""
        if self._world_size:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set("failed", f"{self._card.name!r} gave up: {error}")

    def _wait(self, keys: list[str], deadline: float) -> None:
        """TimeoutError where not all are there in time. Torch's own wait writes warnings whenever it is cut short."""
        pause_s = FIRST_PAUSE_S
        while not self._store.check(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _who_is_missing(self, keys: list[str]) -> str:
        here, missing = [], []
        for rank, key in enumerate(keys):
            try:
                present = self._store.check([key])
            except RuntimeError:
                return f"worker {self._card.name!r} lost the rendezvous store (rank 0 serves it) before all had arrived"
            if present:
                here.append(Card.from_json(json.loads(self._store.get(key))).name)
            else:
                missing.append(rank)
        return (
            f"worker {self._card.name!r} waited at init_rpc: {len(here)} of {len(keys)} have arrived "
            f"({', '.join(here)}); missing: rank {', '.join(map(str, missing))}"
        )

    # -- a group that workers join and leave

    def _enter(self, timeout_s: float) -> list[Card]:
        me = self._card
        self._claim(f"name/{me.name}", f"worker name {me.name!r}")
        self._claim(f"rank/{me.id}", f"rank {me.id}")
        place = self._store.add("members", 1)
        self._store.set(f"card/{place}", json.dumps(me.to_json()))
        return [card for card in self.new_cards(min(timeout_s, 5.0)) if card.incarnation != me.incarnation]

    def _claim(self, key: str, what: str) -> None:
        """Take a key, also from a worker that is gone."""
        mine = self._card.incarnation
        holder = self._store.compare_set(key, "", mine).decode()
        if holder != mine and self._is_gone(holder):
            holder = self._store.compare_set(key, holder, mine).decode()
        if holder != mine:
            raise DuplicateName(f"{what} is not unique: a worker of the group has it already")

    def new_cards(self, patience_s: float = 1.0) -> list[Card]:
        """Cards written since the last look. For groups that workers join and leave."""
        cards = []
        last = self._store.add("members", 0)
        for place in range(self._read + 1, last + 1):
            try:
                self._wait([f"card/{place}"], time.monotonic() + patience_s)
                card = Card.from_json(json.loads(self._store.get(f"card/{place}")))
            except (RuntimeError, OSError, ValueError):
                continue  # it took a place and died before it wrote its card
            if not self._is_gone(card.incarnation):
                cards.append(card)
        self._read = max(self._read, last)
        return cards

    def _is_gone(self, incarnation: str) -> bool:
        return bool(self._store.check([f"gone/{incarnation}"]))

    def mark_gone(self, incarnation: str) -> None:
        """A worker left or was lost: its name and rank may be taken again. Best effort."""
        if self._world_size is None:
            try:
                self._store.set(f"gone/{incarnation}", "1")
            except (RuntimeError, OSError):
                pass
