"""Who is in the group, where they listen, and how they find each other.

Every worker writes a card (its name, rank, addresses) into the rendezvous store and reads the others'. A group of
known size waits until all cards are there (rounds.py). A group that workers join and leave is a growing list of cards:
whoever joins reads the list and introduces itself to all on it, so nobody needs to watch the store.

What the store says is parsed as JSON, and a card is believed only once the worker that answers at its address has
proved in the handshake that it is its own. Somebody who writes there can keep a group from starting, with an error, and no more.

[Note: taking over] A name and a rank are claimed by an incarnation. The claim stays in the store when its holder dies, so whoever finds
one asks the holder, by a handshake. While it answers, the newcomer gets DuplicateName; when nobody does at its address, or another
worker, the newcomer takes over.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from farstep.errors import DuplicateName, ProtocolError, RpcError
from farstep.rpc.rendezvous import AskedStore

__all__ = ["Answers", "Card", "OpenRoster", "WorkerInfo", "host_key"]

_NAME: Final = re.compile(r"[A-Za-z0-9_:\-]+")
MAX_NAME_CHARS: Final = 128
MAX_CARD_BYTES: Final = 8 << 10
MAX_TEXT_CHARS: Final = 1024
PATIENCE_S: Final = 1.0
"""For how long a look at the list of an open group may take in all."""

CARD_PATIENCE_S: Final = 0.2
"""Between taking a place in the list and writing the card there a worker does nothing else."""

MAX_EMPTY_PLACES: Final = 1024
"""So many places of the list are looked at again that had no card before: their workers may have been about to write it, or died."""


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

    has_authority: bool
    """Whether it was given certificates (`tls_cert`), so that it accepts only those of its authority."""

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
                has_authority=_flag(raw["has_authority"]),
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


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"a {type(value).__name__} where true or false belongs")
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


Answers = Callable[[Card], bool]
"""Whether the worker of a card still answers. False only where it surely does not. See [Note: taking over]."""


class OpenRoster:
    """One worker's use of the store in a group that workers join and leave."""

    def __init__(self, store: AskedStore, card: Card, answers: Answers) -> None:
        self._store = store
        self._card = card
        self._answers = answers
        self._read = 0
        self._empty: deque[int] = deque(maxlen=MAX_EMPTY_PLACES)

    def join(self, timeout_s: float) -> list[Card]:
        """Announce this worker and return the cards of those before it."""
        me = self._card
        card = json.dumps(me.to_json())
        self._store.set(f"member/{me.incarnation}", card)  # before the claims: who finds one asks its holder
        self._claim(f"name/{me.name}", f"worker name {me.name!r}")
        self._claim(f"rank/{me.id}", f"rank {me.id}")
        self._store.set(f"card/{self._store.add('members', 1)}", card)
        return [card for card in self.new_cards(min(timeout_s, 5.0)) if card.incarnation != me.incarnation]

    def _claim(self, key: str, what: str) -> None:
        """Take a key, also from a worker that is gone. See [Note: taking over]."""
        mine = self._card.incarnation
        holder = self._store.compare_set(key, "", mine)
        who = "a worker of the group has it already"
        if holder != mine:
            card = self._card_of(holder)
            if card is not None:
                who = f"worker {card.name!r} (rank {card.id}) has it already, and is still there"
            if self.is_gone(holder) or (card is not None and not self._answers(card)):
                self.mark_gone(holder)
                holder = self._store.compare_set(key, holder, mine)
        if holder != mine:
            raise DuplicateName(f"{what} is not unique: {who}")

    def _card_of(self, incarnation: str) -> Card | None:
        """None where that is no worker's incarnation: somebody else has written the claim."""
        key = f"member/{incarnation[:MAX_TEXT_CHARS]}"
        try:
            card = Card.parse(self._store.get(key)) if self._store.check([key]) else None
        except ProtocolError:
            return None
        return card if card is not None and card.incarnation == incarnation else None

    def new_cards(self, patience_s: float = PATIENCE_S) -> list[Card]:
        """Cards written since the last look, which takes at most about `patience_s` in all."""
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
            self._store.wait([key], time.monotonic() + patience_s)
            card = Card.parse(self._store.get(key))
        except TimeoutError:
            self._empty.append(place)
            return []
        except (RuntimeError, OSError):
            return []
        return [] if self.is_gone(card.incarnation) else [card]

    def is_gone(self, incarnation: str) -> bool:
        return bool(self._store.check([f"gone/{incarnation}"]))

    def mark_gone(self, incarnation: str) -> None:
        """A worker left or was lost: its name and rank may be taken again. Best effort."""
        try:
            self._store.set(f"gone/{incarnation}", "1")
        except (RuntimeError, OSError):
            pass
