"""Who is in the group, where they listen, and how they find each other.

Every worker writes a card (its name, rank, addresses) into the rendezvous store and reads the others'. A group of
known size waits until all cards are there. A group that workers join and leave is a growing list of cards:
whoever joins reads the list and introduces itself to all on it, so nobody needs to watch the store.

The store is torch's own, holds no secrets and authenticates nobody: whoever reaches it can write what they like. So what it says is
bounded and parsed as JSON, no wait for it is without a deadline, and a card is believed only once the worker that answers at its address has
proved in the handshake that it is its own. Somebody who writes there can keep a group from starting, with an error, and no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlparse

from farstep.errors import AuthenticationError, DuplicateName, InitTimeout, ProtocolError, RpcError
from farstep.rpc.stores import FileStore, Store, TCPStore

__all__ = ["Card", "Roster", "WorkerInfo", "create_store", "host_key"]

_NAME: Final = re.compile(r"[A-Za-z0-9_:\-]+")
MAX_NAME_CHARS: Final = 128
MAX_CARD_BYTES: Final = 8 << 10
MAX_TEXT_CHARS: Final = 1024
MAX_REASON_CHARS: Final = 2000
LOOK_S: Final = 0.5
PATIENCE_S: Final = 1.0
"""For how long a look at the list of an open group may take in all."""

CARD_PATIENCE_S: Final = 0.2
"""Between taking a place in the list and writing the card there a worker does nothing else."""

MAX_EMPTY_PLACES: Final = 1024
"""So many places of the list are looked at again that had no card before: their workers may have been about to write it, or died."""
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
    certificate: str | None
    """Fingerprint of the certificate with which it listens on TCP; None where it does not encrypt."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Any) -> Card:
        """ProtocolError where it is not a card."""
        try:
            if set(raw) != _CARD_FIELDS:
                raise ValueError(f"it has the fields {sorted(map(str, raw))[:20]}")
            tcp = raw["tcp"]
            return cls(
                name=WorkerInfo(_text(raw["name"]), _number(raw["id"])).name,
                id=_number(raw["id"]),
                incarnation=_text(raw["incarnation"]),
                host=_text(raw["host"]),
                unix=None if raw["unix"] is None else _text(raw["unix"]),
                tcp=None if tcp is None else (_text(tcp[0]), _number(tcp[1])),
                certificate=None if raw["certificate"] is None else _text(raw["certificate"]),
            )
        except (KeyError, TypeError, ValueError, IndexError, RpcError) as exc:
            raise ProtocolError(f"a worker's card is malformed: {exc}") from exc

    @classmethod
    def parse(cls, data: bytes) -> Card:
        """The same, from what the store holds."""
        if len(data) > MAX_CARD_BYTES:
            raise ProtocolError(f"a worker's card in the rendezvous store has {len(data)} bytes")
        try:
            return cls.from_json(json.loads(data))
        except (ValueError, RecursionError) as exc:
            raise ProtocolError("a worker's card in the rendezvous store is not JSON") from exc


_CARD_FIELDS: Final = {field.name for field in fields(Card)}


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT_CHARS:
        raise TypeError(f"a {type(value).__name__} where a short text belongs")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise TypeError(f"a {type(value).__name__} where a number from 0 to 2^31 belongs")
    return value


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


class _Asked:
    """The store; what goes wrong with it is an RpcError that says so."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._ask(self._store.get, key))

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        held = self._ask(self._store.compare_set, key, expected, desired)
        return str(held.decode(errors="replace")) if isinstance(held, bytes) else str(held)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (RuntimeError, OSError, ValueError, LookupError) as exc:
            reason = (str(exc).splitlines() or [type(exc).__name__])[0][:MAX_REASON_CHARS]
            raise RpcError(
                f"worker {self._worker!r} cannot use the rendezvous store ({function.__name__} of {str(args[0])[:80]!r}): {reason}. "
                f"Either the store is gone, or something that is not a worker of this group writes there"
            ) from exc


class Roster:
    """One worker's use of the store."""

    def __init__(self, store: Store, card: Card, world_size: int | None) -> None:
        self._store = _Asked(store, card.name)
        self._card = card
        self._world_size = world_size
        self._read = 0
        self._empty: deque[int] = deque(maxlen=MAX_EMPTY_PLACES)

    def join(self, timeout_s: float) -> list[Card]:
        """Announce this worker and return the cards of all (a group of known size) or of those before it."""
        if self._world_size:
            return self._meet(self._world_size, time.monotonic() + timeout_s)
        return self._enter(timeout_s)

    # -- a group of known size

    def _meet(self, world_size: int, deadline: float) -> list[Card]:
        me = self._card
        key = f"worker/{me.id}"
        claimed = self._store.compare_set(f"claim/{me.id}", "", me.incarnation)
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
        cards = [Card.parse(self._store.get(k)) for k in keys]
        # Rank 0 may serve the store: it stays until all have read it, also when it is about to raise.
        if self._store.add("collected", 1) == world_size:
            self._store.set("all-collected", "1")
        if me.id == 0:
            try:
                self._wait(["all-collected"], max(deadline, time.monotonic() + 1.0))
            except (RuntimeError, OSError):
                pass
        for rank, card in enumerate(cards):
            if card.id != rank or (rank == me.id and card != me):
                raise AuthenticationError(
                    f"worker {me.name!r} finds a card for rank {rank} in the rendezvous store that this rank did not write: "
                    f"somebody else writes there. Give the group a store of its own, on a network that only it can reach"
                )
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
            failed = self._read_failure()
        except (RuntimeError, OSError):
            failed = "the rendezvous store, which rank 0 serves, is gone"
        failed = failed or who_is_lost()
        if failed:
            raise RpcError(f"worker {self._card.name!r} cannot finish init_rpc: {failed}")
        if time.monotonic() >= deadline:
            raise InitTimeout(
                f"worker {self._card.name!r} has met all the others, but not all of them got through to each other"
            )

    def first_failure(self) -> str | None:
        """Why another worker does not come, where one has said so."""
        try:
            return self._read_failure()
        except RpcError:
            return None

    def _read_failure(self) -> str | None:
        if not self._store.check(["failed"]):
            return None
        return self._store.get("failed").decode(errors="replace")[:MAX_REASON_CHARS]

    def fail(self, error: BaseException) -> None:
        """Tell the others of a group of known size why this worker does not come."""
        if self._world_size:
            with contextlib.suppress(RuntimeError, OSError):
                told = f"{self._card.name!r} gave up: {error}"
                self._store.compare_set("failed", "", told[:MAX_REASON_CHARS])  # the first cause stays

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
                here.append(Card.parse(self._store.get(key)).name)
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
        holder = self._store.compare_set(key, "", mine)
        if holder != mine and self._is_gone(holder):
            holder = self._store.compare_set(key, holder, mine)
        if holder != mine:
            raise DuplicateName(f"{what} is not unique: a worker of the group has it already")

    def new_cards(self, patience_s: float = PATIENCE_S) -> list[Card]:
        """Cards written since the last look, which takes at most about `patience_s` in all. For groups that workers join and leave."""
        deadline = time.monotonic() + patience_s
        last = self._store.add("members", 0)
        cards = []
        for _ in range(len(self._empty)):
            cards += self._card_at(self._empty.popleft(), 0.0)
        while self._read < last and time.monotonic() < deadline:
            self._read += 1
            cards += self._card_at(self._read, min(CARD_PATIENCE_S, deadline - time.monotonic()))
        return cards

    def _card_at(self, place: int, patience_s: float) -> list[Card]:
        """The card at a place of the list. Where there is none yet its worker is about to write it, or has died."""
        key = f"card/{place}"
        try:
            self._wait([key], time.monotonic() + patience_s)
            card = Card.parse(self._store.get(key))
        except TimeoutError:
            self._empty.append(place)
            return []
        except (RuntimeError, OSError):
            return []
        return [] if self._is_gone(card.incarnation) else [card]

    def _is_gone(self, incarnation: str) -> bool:
        return bool(self._store.check([f"gone/{incarnation}"]))

    def mark_gone(self, incarnation: str) -> None:
        """A worker left or was lost: its name and rank may be taken again. Best effort."""
        if self._world_size is None:
            try:
                self._store.set(f"gone/{incarnation}", "1")
            except (RuntimeError, OSError):
                pass
